package proc

import (
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The runtime's fork hooks, as syscall.forkExec uses them. The Go linker allows linkname for them (gVisor depends on them).

//go:linkname runtimeBeforeFork syscall.runtime_BeforeFork
func runtimeBeforeFork()

//go:linkname runtimeAfterFork syscall.runtime_AfterFork
func runtimeAfterFork()

// cloneCall makes a cloning system call with these first five arguments, which must give the child a stack. In the child it
// calls fn, the code of a func(arg), and never returns. In the parent it returns the call's raw result.
//
//go:noescape
func cloneCall(call, a, b, c, d, e, fn uintptr, arg unsafe.Pointer) uintptr

// Code returns the address of a function's code, for [Clone]. f must be a declared function and not a closure.
func Code(f func(unsafe.Pointer)) uintptr { return **(**uintptr)(unsafe.Pointer(&f)) }

// Clone forks from a bare fork. The child shares the memory, which costs a tenth of copying the page tables, has its own stack
// and runs fn(arg). The same rules apply to it.
//
//go:nosplit
//go:norace
func Clone(flags, stack, fn uintptr, arg unsafe.Pointer) (pid uintptr, errno syscall.Errno) {
	return failed(cloneCall(unix.SYS_CLONE, flags|unix.CLONE_VM|uintptr(unix.SIGCHLD), stack, 0, 0, 0, fn, arg))
}

// failed splits a raw result into result and errno.
//
//go:nosplit
//go:norace
func failed(r uintptr) (uintptr, syscall.Errno) {
	if r > ^uintptr(4095) {
		return ^uintptr(0), syscall.Errno(-r)
	}
	return r, 0
}

// firstObject is in or near the first arena of Go's heap because it is allocated before main. The heap grows upwards from
// there.
var firstObject = new([64]byte)

// heap returns a range of addresses that only Go's heap uses, from the arena of its first object on. Parts of the heap outside
// the range are copied, which is slow but correct. The size is 0 if one of the other addresses is in the range. The heap
// starts at a random address (from Go 1.26), one time in 2^20 just below the program; a kernel with a small address space
// places it anywhere.
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

// bareFork clones the process without exec. The child has its own stack, runs fn(arg) and never returns. The parent gets the
// child's PID, and its pidfd in *pidfd.
//
// The child is a copy of a process with many threads, of which only the calling one exists, so locks held by other threads
// stay locked forever. fn may call only nosplit functions that make raw system calls. It must not allocate, grow its stack or
// store pointers (the garbage collector's write barrier), and it ends in exec or exit_group. A test checks this in the object
// code. The child must close descriptors itself, because close-on-exec has no effect without an exec.
//
// The copy excludes Go's heap (madvise(2), MADV_DONTFORK): the child needs only its [Block]. [syscall.ForkLock] prevents other
// forks at the same time. os/exec shares memory with its children until their exec, so MADV_DONTFORK does not affect them.
//
// All signals are blocked during the clone, and remain blocked in the child.
func bareFork(b *Block, pidfd *int32, fn uintptr, arg unsafe.Pointer) (pid uintptr, errno syscall.Errno) {
	// The other addresses: the block, the stack, the code and the data.
	base, size := heap(uintptr(unsafe.Pointer(firstObject)), uintptr(b.base), uintptr(firstWord), fn, uintptr(unsafe.Pointer(&firstWord)))
	stack, tls := b.Stack(), b.tls()
	if b.err != nil {
		return 0, unix.E2BIG
	}
	syscall.ForkLock.Lock()
	defer syscall.ForkLock.Unlock()
	// The call fails with ENOMEM because parts of the range are unmapped. Without the advice the heap would be copied.
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

// Exit exits a bare-forked child.
//
//go:nosplit
//go:norace
func Exit(code uintptr) {
	for {
		syscall.RawSyscall(unix.SYS_EXIT_GROUP, code, 0, 0)
	}
}

// firstWord is the start of the memory shown in /proc/PID/cmdline, read before the program could change os.Args.
var firstWord = func() unsafe.Pointer {
	if len(os.Args) == 0 {
		return nil
	}
	return unsafe.Pointer(unsafe.StringData(os.Args[0]))
}()

// words returns the memory of the process's arguments and environment, which ends at the program's name (getauxval(3),
// AT_EXECFN). /proc/PID/cmdline and environ of a fork show this memory, so the fork wipes its copy. The size is 0 if the
// address is unknown.
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
