package nsenter

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/proc"
)

// bound is how long an entry may take: it is a handful of system calls.
const bound = 2 * time.Second

// What A and B can fail at. A's exit code says which: for setns(2) the errno,
// which no errno of Linux makes greater than 133; for the others these.
const (
	failedIdentity = 201 + iota
	failedFork
	failedSignal
)

func reason(code int) error {
	switch code {
	case failedIdentity:
		return errors.New("cannot take on the sandbox's uid")
	case failedFork:
		return errors.New("cannot fork")
	case failedSignal:
		return errors.New("kill(-1) was refused")
	}
	return fmt.Errorf("setns(2) on a pidfd (Linux 5.8): %w", syscall.Errno(code))
}

// Signal sends sig to every process of the sandbox but init, in one step of the
// kernel's (kill(2), pid -1), so that nothing can fork its way out of it. init
// must have been verified by the caller. cred is who bwrap runs as, if it is
// somebody else: the owner of a user namespace may enter it without the
// capabilities that root often lacks in a container (user_namespaces(7)). It
// blocks for as long as a fork takes.
func Signal(init *proc.Process, cred *proc.Cred, sig syscall.Signal) error {
	e := visit{init: uintptr(init.FD()), cred: cred, sig: uintptr(sig), pidfd: -1, argv: commandLine()}
	pid, errno := e.fork()
	if errno != 0 {
		return fmt.Errorf("enter sandbox of init %d: fork: %w", init.PID, errno)
	}
	a := proc.Adopt(int(pid), int(e.pidfd))
	defer a.Close()
	if err := a.Wait(time.Now().Add(bound)); err != nil {
		return fmt.Errorf("enter sandbox of init %d: %w", init.PID, err)
	}
	var ws unix.WaitStatus
	for {
		_, err := unix.Wait4(int(pid), &ws, 0, nil)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return fmt.Errorf("enter sandbox of init %d: wait: %w", init.PID, err)
		}
		break
	}
	if !ws.Exited() {
		return fmt.Errorf("enter sandbox of init %d: killed meanwhile", init.PID)
	}
	if code := ws.ExitStatus(); code != 0 {
		return fmt.Errorf("enter sandbox of init %d: %w", init.PID, reason(code))
	}
	return nil
}

// visit is what the forked processes need, laid out before the fork.
type visit struct {
	init   uintptr // pidfd
	cred   *proc.Cred
	sig    uintptr
	pidfd  int32
	argv   []byte
	status int32
}

// commandLine is the memory that /proc/PID/cmdline shows. B inherits a copy and
// is visible to the sandbox for a moment, so its copy is wiped: what sbxrun was
// called with is none of the payload's business.
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

//go:norace
//go:noinline
func (e *visit) fork() (pid uintptr, errno syscall.Errno) {
	syscall.ForkLock.Lock()
	pid, errno = proc.BareFork(0, &e.pidfd)
	if pid == 0 && errno == 0 {
		e.run()
	}
	syscall.ForkLock.Unlock()
	return pid, errno
}

// run is A, and B below it.
//
//go:nosplit
//go:norace
func (e *visit) run() {
	for i := range e.argv {
		e.argv[i] = 0
	}
	if e.cred != nil {
		_, _, e1 := syscall.RawSyscall(unix.SYS_SETGROUPS, 0, 0, 0)
		gid, uid := uintptr(e.cred.GID), uintptr(e.cred.UID)
		_, _, e2 := syscall.RawSyscall(unix.SYS_SETRESGID, gid, gid, gid)
		_, _, e3 := syscall.RawSyscall(unix.SYS_SETRESUID, uid, uid, uid)
		if e1 != 0 || e2 != 0 || e3 != 0 {
			proc.Exit(failedIdentity)
		}
	}
	_, _, errno := syscall.RawSyscall(unix.SYS_SETNS, e.init, unix.CLONE_NEWUSER|unix.CLONE_NEWPID, 0)
	if errno != 0 {
		proc.Exit(uintptr(errno))
	}
	b, _, errno := syscall.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	if errno != 0 {
		proc.Exit(failedFork)
	}
	if b == 0 {
		// -1: all but init and ourselves. ESRCH: there is nobody.
		all := -1
		_, _, errno = syscall.RawSyscall(unix.SYS_KILL, uintptr(all), e.sig, 0)
		if errno != 0 && errno != unix.ESRCH {
			proc.Exit(failedSignal)
		}
		proc.Exit(0)
	}
	for {
		_, _, errno = syscall.RawSyscall6(unix.SYS_WAIT4, b, uintptr(unsafe.Pointer(&e.status)), 0, 0, 0, 0)
		if errno != unix.EINTR {
			break
		}
	}
	// B killed, which only the sandbox's own end does, is as good as done.
	proc.Exit(uintptr(e.status>>8) & 0xff)
}
