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

//go:linkname runtimeAfterForkInChild syscall.runtime_AfterForkInChild
func runtimeAfterForkInChild()

// BareFork clones the calling process without exec and returns twice: with the
// child's pid in the parent, with 0 in the child. The parent gets a pidfd of
// the child (close-on-exec) in *pidfd.
//
// The caller holds [syscall.ForkLock] in the parent. The child is a copy of a
// multi-threaded process in which only the calling thread exists, so whatever
// lock another thread held stays held for ever: the child may only call
// nosplit functions that make raw system calls, may neither allocate nor let
// its stack grow nor return out of the function that called BareFork, and must
// end in exec or exit_group. Close-on-exec does not act on it: it closes what
// it must not hold by itself (close_range(2), Linux 5.9).
//
// All signals are blocked across the clone, as they are for fork in package
// syscall; in the child, Go's handlers are gone and the mask is as it was.
//
//go:nosplit
//go:norace
func BareFork(flags uintptr, pidfd *int32) (pid uintptr, errno syscall.Errno) {
	runtimeBeforeFork()
	pid, _, errno = syscall.RawSyscall6(unix.SYS_CLONE, flags|unix.CLONE_PIDFD|uintptr(unix.SIGCHLD), 0, uintptr(unsafe.Pointer(pidfd)), 0, 0, 0)
	if errno != 0 || pid != 0 {
		runtimeAfterFork()
		return pid, errno
	}
	runtimeAfterForkInChild()
	return 0, 0
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

// commandLine is the memory that /proc/PID/cmdline shows. A bare fork inherits a
// copy, and may be visible to a sandbox, so it gives that up, or wipes it: what
// sbxrun was called with is none of the payload's business.
func commandLine() []byte {
	if len(os.Args) == 0 || len(os.Args[0]) == 0 {
		return nil
	}
	// The runtime's os.Args point into the memory the kernel made, one after
	// the other with a NUL between.
	size := 0
	for _, arg := range os.Args {
		size += len(arg) + 1
	}
	return unsafe.Slice(unsafe.StringData(os.Args[0]), size-1)
}
