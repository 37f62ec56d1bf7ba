package nsenter

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/proc"
)

// This file is what runs on the way into a sandbox, below the keeper, with the
// rules of [proc.BareFork]. Three processes, of which the first two are over at
// once, because a PID namespace can only be made by a process that is in its
// parent namespace, and no process ever changes its own (pid_namespaces(7)):
//
//	enters   joins the sandbox's namespaces by init's pidfd (setns(2), Linux 5.8)
//	inside   is born in the sandbox's PID namespace
//	init     is born in a new one, below that; starts the payload and reaps
//
// Each is made with CLONE_PARENT, so that the keeper is the parent of all: it
// alone kills and reaps them, and nothing of it is left to the sandbox's init.

// Descriptors on the way in, next to the payload's 0, 1 and 2.
const (
	entrySocket = 3 // to sbxrun
	entryTarget = 4 // pidfd of the sandbox's init
)

// The steps that can fail, in their order.
const (
	stepHide = iota + 1
	stepSetns
	stepInside
	stepInit
	stepMounts
	stepProc
	stepFiles
	stepSignals
	stepPrivileges
	stepBounding
	stepCapabilities
	stepParent
	stepPayload
	stepSession
	stepTerminal
	stepWorkdir
	stepExec
)

var stepNames = [...]string{
	stepHide:         "make the entering process undumpable",
	stepSetns:        "setns(2) on the pidfd of the sandbox's init (Linux 5.8)",
	stepInside:       "fork into the sandbox",
	stepInit:         "make a PID namespace in the sandbox",
	stepParent:       "tie init to the keeper",
	stepMounts:       "make mounts private",
	stepProc:         "mount /proc",
	stepFiles:        "close descriptors",
	stepSignals:      "set up signals",
	stepPrivileges:   "set no_new_privs",
	stepBounding:     "drop the capability bounding set",
	stepCapabilities: "drop capabilities",
	stepPayload:      "fork the payload",
	stepSession:      "make a session",
	stepTerminal:     "take the terminal",
	stepWorkdir:      "change to the working directory",
	stepExec:         "exec",
}

// message is what comes out of the sandbox. A SOCK_SEQPACKET keeps each whole,
// and the kernel adds the sender's pid as seen from outside (SO_PASSCRED,
// unix(7)): the one way to learn it that no process inside can forge.
type message struct {
	kind   int64
	step   int64 // messageFailed
	value  int64 // messageFailed: errno; messageExited: wait status
	pidNS  uint64
	inside int64 // messageReady: what getpid(2) says, 1
}

const (
	messageReady  = iota + 1 // init is there and waits for the release
	messageFailed            // a step failed; the process that says so is over
	messageExited            // the payload
)

// order is what goes in: the release, which is all zero, or a signal.
type order struct {
	signal  int32
	payload int32 // 1: for the payload alone, 0: for all
}

// entry is all that the way in needs, laid out before the fork.
type entry struct {
	namespaces uintptr
	cmdline    []byte
	terminal   bool
	workdir    *byte
	argv, envv **byte
	// candidates are the paths to try, as execvp(3) does; shell is argv for a
	// script without an interpreter line, with the place of its path second.
	candidates []*byte
	shell      []*byte

	msg     message
	ord     order
	stat    unix.Stat_t
	status  int32
	init    uintptr
	payload uintptr
	sigs    uint64
	poll    [2]unix.PollFd
	buf     [128]byte
	header  unix.CapUserHeader
	none    [2]unix.CapUserData
}

var (
	slash     = [...]byte{'/', 0}
	procDir   = [...]byte{'/', 'p', 'r', 'o', 'c', 0}
	procType  = [...]byte{'p', 'r', 'o', 'c', 0}
	ownPIDNS  = append([]byte("/proc/self/ns/pid"), 0)
	shellPath = append([]byte("/bin/sh"), 0)
)

// enter runs in the keeper's child; e is an *entry.
//
//go:nosplit
//go:norace
//go:nocheckptr
func enter(e unsafe.Pointer) { (*entry)(e).run() }

//go:nosplit
//go:norace
//go:nocheckptr
func (e *entry) run() {
	// What we are a copy of has secrets in its memory, and the sandbox's own
	// processes may have our uid: without this they could attach to us (ptrace(2)).
	e.must(stepHide, unix.SYS_PRCTL, unix.PR_SET_DUMPABLE, 0, 0, 0, 0)
	// And what sbxrun was called with shows in the sandbox's /proc.
	for i := range e.cmdline {
		e.cmdline[i] = 0
	}
	e.must(stepSetns, unix.SYS_SETNS, entryTarget, e.namespaces, 0, 0, 0)
	if e.must(stepInside, unix.SYS_CLONE, uintptr(unix.SIGCHLD)|unix.CLONE_PARENT, 0, 0, 0, 0) != 0 {
		proc.Exit(0)
	}
	if e.must(stepInit, unix.SYS_CLONE, uintptr(unix.SIGCHLD)|unix.CLONE_PARENT|unix.CLONE_NEWPID|unix.CLONE_NEWNS, 0, 0, 0, 0) != 0 {
		proc.Exit(0)
	}
	e.setUp()
	e.hold()
	e.payload = e.must(stepPayload, unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0)
	if e.payload == 0 {
		e.become()
	}
	// Whoever reads the payload's output shall see its end.
	syscall.RawSyscall(unix.SYS_CLOSE_RANGE, 0, entrySocket-1, 0)
	for {
		e.reap()
		e.wait()
	}
}

// setUp makes the new init what it has to be before anybody knows of it.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (e *entry) setUp() {
	e.must(stepMounts, unix.SYS_MOUNT, 0, uintptr(unsafe.Pointer(&slash)), 0, unix.MS_REC|unix.MS_PRIVATE, 0)
	e.must(stepProc, unix.SYS_MOUNT, uintptr(unsafe.Pointer(&procType)), uintptr(unsafe.Pointer(&procDir)), uintptr(unsafe.Pointer(&procType)),
		unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, 0)
	e.must(stepFiles, unix.SYS_CLOSE_RANGE, entryTarget, maxFD, 0, 0, 0)
	// All blocked, for good: what init must know comes by descriptors.
	e.sigs = ^uint64(0)
	e.must(stepSignals, unix.SYS_RT_SIGPROCMASK, sigSetmask, uintptr(unsafe.Pointer(&e.sigs)), 0, 8, 0)
	e.must(stepPrivileges, unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
	for c := uintptr(0); c < 64; c++ {
		// EINVAL: beyond the last one that this kernel has.
		if _, _, errno := syscall.RawSyscall6(unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, c, 0, 0, 0, 0); errno == unix.EINVAL && c > unix.CAP_AUDIT_READ {
			break
		} else if errno != 0 {
			e.fail(stepBounding, errno)
		}
	}
	e.must(stepCapabilities, unix.SYS_PRCTL, unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
	e.must(stepCapabilities, unix.SYS_CAPSET, uintptr(unsafe.Pointer(&e.header)), uintptr(unsafe.Pointer(&e.none)), 0, 0, 0)
	// Should the keeper be killed: sbxrun would find us in its session, but sbxrun
	// may be dead as well. Had both died before this line, hold finds the socket
	// closed.
	e.must(stepParent, unix.SYS_PRCTL, unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0)
	e.must(stepProc, unix.SYS_NEWFSTATAT, uintptr(at), uintptr(unsafe.Pointer(&ownPIDNS[0])), uintptr(unsafe.Pointer(&e.stat)), 0, 0)
	e.init, _, _ = syscall.RawSyscall(unix.SYS_GETPID, 0, 0, 0)
}

// hold says that init is there, and waits for the release. An end of file is
// none: then sbxrun is dead.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (e *entry) hold() {
	e.msg = message{kind: messageReady, pidNS: e.stat.Ino, inside: int64(e.init)}
	e.say()
	for {
		n, _, errno := syscall.RawSyscall(unix.SYS_READ, entrySocket, uintptr(unsafe.Pointer(&e.ord)), unsafe.Sizeof(e.ord))
		if errno == unix.EINTR {
			continue
		}
		if errno != 0 || n != unsafe.Sizeof(e.ord) {
			proc.Exit(0)
		}
		return
	}
}

// become makes the payload of init's child.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (e *entry) become() {
	e.must(stepSession, unix.SYS_SETSID, 0, 0, 0, 0, 0)
	if e.terminal {
		e.must(stepTerminal, unix.SYS_IOCTL, 0, unix.TIOCSCTTY, 0, 0, 0)
	}
	e.must(stepWorkdir, unix.SYS_CHDIR, uintptr(unsafe.Pointer(e.workdir)), 0, 0, 0, 0)
	e.must(stepFiles, unix.SYS_FCNTL, entrySocket, unix.F_SETFD, unix.FD_CLOEXEC, 0, 0)
	e.sigs = 0
	e.must(stepSignals, unix.SYS_RT_SIGPROCMASK, sigSetmask, uintptr(unsafe.Pointer(&e.sigs)), 0, 8, 0)
	// As execvp(3): what cannot be executed is remembered, what is not there is not.
	why := syscall.Errno(unix.ENOENT)
	for i := range e.candidates {
		path := uintptr(unsafe.Pointer(e.candidates[i]))
		_, _, errno := syscall.RawSyscall(unix.SYS_EXECVE, path, uintptr(unsafe.Pointer(e.argv)), uintptr(unsafe.Pointer(e.envv)))
		if errno == unix.ENOEXEC {
			e.shell[1] = e.candidates[i]
			_, _, errno = syscall.RawSyscall(unix.SYS_EXECVE, uintptr(unsafe.Pointer(&shellPath[0])), uintptr(unsafe.Pointer(&e.shell[0])), uintptr(unsafe.Pointer(e.envv)))
		}
		if errno != unix.ENOENT && errno != unix.ENOTDIR {
			why = errno
		}
		if errno != unix.ENOENT && errno != unix.ENOTDIR && errno != unix.EACCES {
			break
		}
	}
	e.fail(stepExec, why)
}

// reap collects what has ended, tells of the payload, and with nothing left at
// all ends init: then the namespace is empty.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (e *entry) reap() {
	for {
		pid, _, errno := syscall.RawSyscall6(unix.SYS_WAIT4, ^uintptr(0), uintptr(unsafe.Pointer(&e.status)), unix.WNOHANG, 0, 0, 0)
		if errno == unix.EINTR {
			continue
		}
		if errno == unix.ECHILD {
			proc.Exit(0)
		}
		if errno != 0 || pid == 0 {
			return
		}
		if pid == e.payload {
			e.payload = 0
			e.msg = message{kind: messageExited, value: int64(e.status)}
			e.say()
		}
	}
}

// wait blocks until a child has ended or an order has come, and carries it out.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (e *entry) wait() {
	if e.poll[0].Fd == 0 {
		e.sigs = 1 << (unix.SIGCHLD - 1)
		fd := e.must(stepSignals, unix.SYS_SIGNALFD4, ^uintptr(0), uintptr(unsafe.Pointer(&e.sigs)), 8, unix.SFD_NONBLOCK|unix.SFD_CLOEXEC, 0)
		// Not 0, which was free: the loop of descriptors begins behind the socket.
		fd = e.must(stepSignals, unix.SYS_FCNTL, fd, unix.F_DUPFD_CLOEXEC, entrySocket+1, 0, 0)
		e.poll[0] = unix.PollFd{Fd: int32(fd), Events: unix.POLLIN}
		e.poll[1] = unix.PollFd{Fd: entrySocket, Events: unix.POLLIN}
		return // what has ended before the signalfd was there, is asked for once more
	}
	syscall.RawSyscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(&e.poll)), uintptr(len(e.poll)), 0, 0, 0, 0)
	syscall.RawSyscall(unix.SYS_READ, uintptr(e.poll[0].Fd), uintptr(unsafe.Pointer(&e.buf)), uintptr(len(e.buf)))
	if e.poll[1].Revents == 0 {
		return
	}
	n, _, errno := syscall.RawSyscall6(unix.SYS_RECVFROM, entrySocket, uintptr(unsafe.Pointer(&e.ord)), unsafe.Sizeof(e.ord), unix.MSG_DONTWAIT, 0, 0)
	if errno == unix.EAGAIN || errno == unix.EINTR {
		return
	}
	if errno != 0 || n != unsafe.Sizeof(e.ord) {
		proc.Exit(0) // sbxrun is dead, or done with us
	}
	to := ^uintptr(0) // -1: everybody but init (kill(2))
	if e.ord.payload != 0 {
		to = e.payload
	}
	if to == 0 {
		return // it has ended
	}
	syscall.RawSyscall(unix.SYS_KILL, to, uintptr(e.ord.signal), 0)
}

// must makes a system call, and does not come back if it fails.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (e *entry) must(step int64, call, a, b, c, d, f uintptr) uintptr {
	r, _, errno := syscall.RawSyscall6(call, a, b, c, d, f, 0)
	if errno != 0 {
		e.fail(step, errno)
	}
	return r
}

//go:nosplit
//go:norace
//go:nocheckptr
func (e *entry) fail(step int64, errno syscall.Errno) {
	e.msg = message{kind: messageFailed, step: step, value: int64(errno)}
	e.say()
	proc.Exit(125)
}

//go:nosplit
//go:norace
//go:nocheckptr
func (e *entry) say() {
	// Nothing can be done about an error: sbxrun is dead.
	syscall.RawSyscall(unix.SYS_WRITE, entrySocket, uintptr(unsafe.Pointer(&e.msg)), unsafe.Sizeof(e.msg))
}

// sigSetmask is SIG_SETMASK of sigprocmask(2).
const sigSetmask = 2

// at is AT_FDCWD, as a variable: a constant could not become a uintptr.
var at = unix.AT_FDCWD

// maxFD is the greatest descriptor close_range(2) accepts.
const maxFD = 1<<32 - 1
