package proc

import (
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The runtime's own fork hooks, the ones syscall.forkExec uses. They are among
// the few names the Go linker keeps open for such use (gVisor depends on them).

//go:linkname runtimeBeforeFork syscall.runtime_BeforeFork
func runtimeBeforeFork()

//go:linkname runtimeAfterFork syscall.runtime_AfterFork
func runtimeAfterFork()

// cloneCall makes a system call that clones, with its first five arguments. In the
// child, which must have been given a stack, it calls fn, the code of a func(arg),
// and never returns. In the parent it returns what the call did.
//
//go:noescape
func cloneCall(call, a, b, c, d, e, fn uintptr, arg unsafe.Pointer) uintptr

// Code is where the code of a function begins, for [Clone]. f must be a declared
// function, no closure.
func Code(f func(unsafe.Pointer)) uintptr { return **(**uintptr)(unsafe.Pointer(&f)) }

// Clone forks from within a bare fork: the child shares the memory, has a stack of
// its own, and runs fn(arg). To share costs a tenth of copying the page tables.
// The child is below the same rules.
//
//go:nosplit
//go:norace
func Clone(flags, stack, fn uintptr, arg unsafe.Pointer) (pid uintptr, errno syscall.Errno) {
	return failed(cloneCall(unix.SYS_CLONE, flags|unix.CLONE_VM|uintptr(unix.SIGCHLD), stack, 0, 0, 0, fn, arg))
}

// failed takes a raw result apart.
//
//go:nosplit
//go:norace
func failed(r uintptr) (uintptr, syscall.Errno) {
	if r > ^uintptr(4095) {
		return ^uintptr(0), syscall.Errno(-r)
	}
	return r, 0
}

// firstObject is in the first arena of Go's heap, or near it: it was allocated before
// the program began. The heap grows upwards from there.
var firstObject = new([64]byte)

// heap returns the part of the address space that belongs to Go's heap and to nothing
// else, from the arena of its first object on; what a heap has beyond is copied, which is
// slow and not wrong. The size is 0 where one of the others is in there too. The heap
// begins at a random place (since Go 1.26), one time in 2^20 just below the program; and a
// kernel with few bits for addresses gives it whatever place is free.
func heap(first uintptr, others ...uintptr) (base, size uintptr) {
	const arena, most = 64 << 20, 1 << 36
	base = first &^ (arena - 1)
	for _, p := range others {
		if p >= base && p-base < most {
			return base, 0
		}
	}
	return base, most
}

// bareFork clones the process without exec. The child has a stack of its own, runs
// fn(arg) and never returns; the parent gets its pid, and a pidfd in *pidfd.
//
// The child is a copy of a process with many threads in which only the calling one
// exists, so whatever lock another thread held stays held for ever. fn may call only
// nosplit functions that make raw system calls; it may neither allocate, nor let its
// stack grow, nor store a pointer (the garbage collector's write barrier), and it
// ends in exec or exit_group. A test over the object code sees to all of that.
// Close-on-exec does not act on the child: it closes what it must not hold.
//
// Go's heap is left out of the copy (madvise(2), MADV_DONTFORK): all that the child
// needs is in its [Block]. Nobody else forks meanwhile, because of
// [syscall.ForkLock]; and os/exec shares memory with its children until they
// execute, for which MADV_DONTFORK means nothing.
//
// All signals are blocked across the clone, and stay so in the child.
func bareFork(b *Block, pidfd *int32, fn uintptr, arg unsafe.Pointer) (pid uintptr, errno syscall.Errno) {
	// A mapping of ours, the stack, the code and the data.
	base, size := heap(uintptr(unsafe.Pointer(firstObject)), uintptr(b.base), uintptr(firstWord), fn, uintptr(unsafe.Pointer(&firstWord)))
	stack, tls := b.Stack(), b.tls()
	if b.err != nil {
		return 0, unix.E2BIG
	}
	syscall.ForkLock.Lock()
	defer syscall.ForkLock.Unlock()
	// ENOMEM says that not all of the range is mapped, which is so. Without the advice
	// the heap is copied.
	unix.RawSyscall(unix.SYS_MADVISE, base, size, unix.MADV_DONTFORK)
	pid, errno = forkNow(uintptr(unsafe.Pointer(pidfd)), stack, tls, fn, arg)
	unix.RawSyscall(unix.SYS_MADVISE, base, size, unix.MADV_DOFORK)
	return pid, errno
}

//go:nosplit
//go:norace
func forkNow(pidfd, stack, tls, fn uintptr, arg unsafe.Pointer) (uintptr, syscall.Errno) {
	runtimeBeforeFork()
	d, e := cloneTLS(tls)
	r := cloneCall(unix.SYS_CLONE, unix.CLONE_PIDFD|unix.CLONE_SETTLS|uintptr(unix.SIGCHLD), stack, pidfd, d, e, fn, arg)
	runtimeAfterFork()
	return failed(r)
}

// Exit ends a bare-forked child. exit_group(2) and not exit(2), so that it says
// what is meant, although there is one thread.
//
//go:nosplit
//go:norace
func Exit(code uintptr) {
	for {
		syscall.RawSyscall(unix.SYS_EXIT_GROUP, code, 0, 0)
	}
}

// firstWord is the memory that /proc/PID/cmdline begins with, from before anybody
// could have changed os.Args.
var firstWord = func() unsafe.Pointer {
	if len(os.Args) == 0 {
		return nil
	}
	return unsafe.Pointer(unsafe.StringData(os.Args[0]))
}()

// words is where the kernel has put what the process was called with: its arguments
// and, behind them, its environment, up to the name of the program (getauxval(3),
// AT_EXECFN). /proc/PID/cmdline and environ of a fork show them, so the fork wipes
// its copy. The size is 0 where that place is not known.
func words() (from unsafe.Pointer, size uintptr) {
	const atExecFn, most = 31, 16 << 20
	aux, err := unix.Auxv()
	if err != nil || firstWord == nil {
		return nil, 0
	}
	for _, a := range aux {
		if begin, end := uintptr(firstWord), a[1]; a[0] == atExecFn && end > begin && end-begin < most {
			return firstWord, end - begin
		}
	}
	return nil, 0
}
