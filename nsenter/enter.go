package nsenter

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/bwrap"
	"github.com/sbxrun/sbxrun/internal/proc"
)

// This file is what runs on the way into a sandbox, below the keeper, with the
// rules of [proc.BareFork]. Three processes, of which the first two are over at
// once, because a PID namespace can only be made by a process that is in its
// parent namespace, and no process ever changes its own (pid_namespaces(7)):
//
//	enters   joins the sandbox's namespaces by init's pidfd (setns(2), Linux 5.8)
//	inside   is born in the sandbox's PID namespace; if there is only a signal to be
//	         sent, sends it
//	init     is born in a new one, below that; forks the payload, which waits to be
//	         released, and reaps
//
// Each is made with CLONE_PARENT, so that the keeper is the parent of all: it
// alone kills and reaps them, and nothing of it is left to the sandbox's init.

// Descriptors on the way in, next to the payload's 0, 1 and 2.
const (
	entrySocket = 3 // to sbxrun
	entryGate   = 4 // what the payload waits for: a byte, or the end, which is none
	entryTarget = 5 // pidfd of the sandbox's init
)

// The steps that can fail, in their order.
const (
	stepHide = iota + 1
	stepSetns
	stepInside
	stepSignal
	stepInit
	stepParent
	stepIdentity
	stepMounts
	stepProc
	stepMeminfo
	stepFiles
	stepSignals
	stepPrivileges
	stepBounding
	stepCapabilities
	stepPayload
	stepSession
	stepTerminal
	stepWorkdir
	stepLimits
	stepFilter
	stepExec
)

var stepNames = [...]string{
	stepHide:         "make the entering process undumpable",
	stepSetns:        "setns(2) on the pidfd of the sandbox's init (Linux 5.8)",
	stepInside:       "fork into the sandbox",
	stepSignal:       "signal all of the sandbox",
	stepInit:         "make a PID namespace in the sandbox",
	stepParent:       "tie init to the keeper",
	stepIdentity:     "look at /proc/self/ns/pid",
	stepMounts:       "make mounts private",
	stepProc:         "mount /proc",
	stepMeminfo:      "show the sandbox's /proc/meminfo",
	stepFiles:        "close descriptors",
	stepSignals:      "set up signals",
	stepPrivileges:   "set no_new_privs",
	stepBounding:     "drop the capability bounding set",
	stepCapabilities: "drop capabilities",
	stepPayload:      "fork the payload",
	stepSession:      "make a session",
	stepTerminal:     "take the terminal",
	stepWorkdir:      "change to the working directory",
	stepLimits:       "set resource limits",
	stepFilter:       "load the filter for system calls",
	stepExec:         "exec",
}

// message is what comes out of the sandbox. A SOCK_SEQPACKET keeps each whole,
// and the kernel adds the sender's pid as seen from outside (SO_PASSCRED,
// unix(7)): the one way to learn it that no process inside can forge.
type message struct {
	kind   int64
	step   int64  // messageFailed
	value  int64  // messageFailed: errno; messageExited: wait status
	pidNS  uint64 // messageReady: inode of the new PID namespace
	inside int64  // messageReady: what getpid(2) says, 1
	alone  int64  // messageExited: 1 if nothing else is left
}

const (
	messageReady    = iota + 1 // init is there and waits for the release
	messageFailed              // a step failed; the process that says so is over
	messageExited              // the payload
	messageSignaled            // all of the sandbox
)

// order is what goes in: a signal.
type order struct {
	signal  int32
	payload int32 // 1: for the payload alone, 0: for all
}

// entry is all that the way in needs, laid out before the fork.
type entry struct {
	namespaces uintptr
	signal     uintptr // if not 0, to be sent to all of the sandbox; and that is all
	terminal   bool
	rlimits    []proc.Rlimit
	filter     *unix.SockFprog // nil for none
	workdir    *byte
	argv, envv **byte
	// candidates are the paths to try, as execvp(3) does; shell is argv for a
	// script without an interpreter line, with the place of its path second. It is
	// no list of pointers, because to store one the compiler may call the garbage
	// collector's write barrier, which a bare fork must not.
	candidates []*byte
	shell      []uintptr

	msg     message
	ord     order
	stat    unix.Stat_t
	limit   unix.Rlimit
	status  int32
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
	ownPIDNS  = [...]byte{'/', 'p', 'r', 'o', 'c', '/', 's', 'e', 'l', 'f', '/', 'n', 's', '/', 'p', 'i', 'd', 0}
	meminfo   = [...]byte{'/', 'p', 'r', 'o', 'c', '/', 'm', 'e', 'm', 'i', 'n', 'f', 'o', 0}
	shellPath = [...]byte{'/', 'b', 'i', 'n', '/', 's', 'h', 0}
)

// meminfoCopy is where a sandbox has what it shows as /proc/meminfo, if that is not
// the host's.
var meminfoCopy = append([]byte(bwrap.MeminfoCopy), 0)

// enter runs in the keeper's child; e is an *entry.
//
//go:nosplit
//go:norace
//go:nocheckptr
func enter(e unsafe.Pointer) { (*entry)(e).run() }

// run is the life of all three.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (e *entry) run() {
	// What we are a copy of may have secrets in its memory, and the sandbox's own
	// processes may have our uid: without this they could attach to us (ptrace(2)).
	// What sbxrun was called with does not even show in /proc: the keeper has given
	// it up.
	e.must(stepHide, unix.SYS_PRCTL, unix.PR_SET_DUMPABLE, 0, 0, 0, 0)
	e.must(stepSetns, unix.SYS_SETNS, entryTarget, e.namespaces, 0, 0, 0)
	if e.must(stepInside, unix.SYS_CLONE, uintptr(unix.SIGCHLD)|unix.CLONE_PARENT, 0, 0, 0, 0) != 0 {
		proc.Exit(0)
	}
	if e.signal != 0 {
		e.signalAll()
	}
	if e.must(stepInit, unix.SYS_CLONE, uintptr(unix.SIGCHLD)|unix.CLONE_PARENT|unix.CLONE_NEWPID|unix.CLONE_NEWNS, 0, 0, 0, 0) != 0 {
		proc.Exit(0)
	}
	// While sbxrun looks who we are, and before it lets go what waits at the gate,
	// there is time for the rest.
	e.present()
	e.setUp()
	e.payload = e.must(stepPayload, unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0)
	if e.payload == 0 {
		e.become()
	}
	// Whoever reads the payload's output shall see its end.
	syscall.RawSyscall(unix.SYS_CLOSE_RANGE, 0, entrySocket-1, 0)
	syscall.RawSyscall(unix.SYS_CLOSE, entryGate, 0, 0)
	e.sigs = 1 << (unix.SIGCHLD - 1)
	fd := e.must(stepSignals, unix.SYS_SIGNALFD4, ^uintptr(0), uintptr(unsafe.Pointer(&e.sigs)), 8, unix.SFD_NONBLOCK|unix.SFD_CLOEXEC, 0)
	e.poll[0] = unix.PollFd{Fd: int32(fd), Events: unix.POLLIN}
	e.poll[1] = unix.PollFd{Fd: entrySocket, Events: unix.POLLIN}
	for {
		e.reap()
		e.wait()
	}
}

// signalAll sends the signal to all of the sandbox but its init and ourselves.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (e *entry) signalAll() {
	// ESRCH: there is nobody.
	if _, _, errno := syscall.RawSyscall(unix.SYS_KILL, ^uintptr(0), e.signal, 0); errno != 0 && errno != unix.ESRCH {
		e.fail(stepSignal, errno)
	}
	e.msg.kind = messageSignaled
	e.say()
	proc.Exit(0)
}

// present says that init is there.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (e *entry) present() {
	// Should the keeper be killed: sbxrun would find us in its session, but sbxrun
	// may be dead as well. Had both died before this line, the payload finds the
	// gate closed, and we the socket.
	e.must(stepParent, unix.SYS_PRCTL, unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0)
	// The /proc that is here is the sandbox's, in which we are as well.
	e.must(stepIdentity, unix.SYS_NEWFSTATAT, uintptr(at), uintptr(unsafe.Pointer(&ownPIDNS)), uintptr(unsafe.Pointer(&e.stat)), 0, 0)
	pid, _, _ := syscall.RawSyscall(unix.SYS_GETPID, 0, 0, 0)
	e.msg = message{kind: messageReady, pidNS: e.stat.Ino, inside: int64(pid)}
	e.say()
}

// setUp makes the new init what it has to be before there is a payload.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (e *entry) setUp() {
	e.must(stepMounts, unix.SYS_MOUNT, 0, uintptr(unsafe.Pointer(&slash)), 0, unix.MS_REC|unix.MS_PRIVATE, 0)
	e.must(stepProc, unix.SYS_MOUNT, uintptr(unsafe.Pointer(&procType)), uintptr(unsafe.Pointer(&procDir)), uintptr(unsafe.Pointer(&procType)),
		unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, 0)
	// What the sandbox shows in the place of /proc/meminfo is shown here as well.
	_, _, errno := syscall.RawSyscall6(unix.SYS_MOUNT, uintptr(unsafe.Pointer(&meminfoCopy[0])), uintptr(unsafe.Pointer(&meminfo)), 0, unix.MS_BIND, 0, 0)
	if errno != 0 && errno != unix.ENOENT && errno != unix.ENOTDIR {
		e.fail(stepMeminfo, errno)
	}
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
}

// become makes the payload of init's child.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (e *entry) become() {
	for {
		n, _, errno := syscall.RawSyscall(unix.SYS_READ, entryGate, uintptr(unsafe.Pointer(&e.buf)), 1)
		if errno == unix.EINTR {
			continue
		}
		if errno != 0 || n != 1 {
			proc.Exit(0) // sbxrun is dead, or has thought better of it
		}
		break
	}
	e.must(stepSession, unix.SYS_SETSID, 0, 0, 0, 0, 0)
	if e.terminal {
		e.must(stepTerminal, unix.SYS_IOCTL, 0, unix.TIOCSCTTY, 0, 0, 0)
	}
	e.must(stepWorkdir, unix.SYS_CHDIR, uintptr(unsafe.Pointer(e.workdir)), 0, 0, 0, 0)
	for i := range e.rlimits {
		e.limit = unix.Rlimit{Cur: e.rlimits[i].Value, Max: e.rlimits[i].Value}
		e.must(stepLimits, unix.SYS_PRLIMIT64, 0, uintptr(e.rlimits[i].Resource), uintptr(unsafe.Pointer(&e.limit)), 0, 0)
	}
	e.must(stepFiles, unix.SYS_FCNTL, entrySocket, unix.F_SETFD, unix.FD_CLOEXEC, 0, 0)
	e.must(stepFiles, unix.SYS_FCNTL, entryGate, unix.F_SETFD, unix.FD_CLOEXEC, 0, 0)
	e.sigs = 0
	e.must(stepSignals, unix.SYS_RT_SIGPROCMASK, sigSetmask, uintptr(unsafe.Pointer(&e.sigs)), 0, 8, 0)
	if e.filter != nil {
		e.must(stepFilter, unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(e.filter)), 0, 0)
	}
	// As execvp(3): what cannot be executed is remembered, what is not there is not.
	why := syscall.Errno(unix.ENOENT)
	for i := range e.candidates {
		path := uintptr(unsafe.Pointer(e.candidates[i]))
		_, _, errno := syscall.RawSyscall(unix.SYS_EXECVE, path, uintptr(unsafe.Pointer(e.argv)), uintptr(unsafe.Pointer(e.envv)))
		if errno == unix.ENOEXEC {
			e.shell[1] = path
			_, _, errno = syscall.RawSyscall(unix.SYS_EXECVE, uintptr(unsafe.Pointer(&shellPath)), uintptr(unsafe.Pointer(&e.shell[0])), uintptr(unsafe.Pointer(e.envv)))
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
		if errno == 0 && pid != 0 && pid == e.payload {
			e.payload = 0
			e.msg = message{kind: messageExited, value: int64(e.status)}
			continue
		}
		if errno == 0 && pid != 0 {
			continue
		}
		if errno == unix.ECHILD {
			e.msg.alone = 1
		}
		if e.msg.kind == messageExited {
			e.say()
			e.msg.kind = 0
		}
		if errno == unix.ECHILD {
			proc.Exit(0)
		}
		return
	}
}

// wait blocks until a child has ended or an order has come, and carries it out.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (e *entry) wait() {
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

// fail tells sbxrun which step failed, and ends the process.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (e *entry) fail(step int64, errno syscall.Errno) {
	e.msg = message{kind: messageFailed, step: step, value: int64(errno)}
	e.say()
	proc.Exit(125)
}

// say sends the message.
//
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
