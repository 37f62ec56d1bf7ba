package proc

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// This file is the keeper as it runs: after the fork, with the rules of
// [BareFork]. Everything is a method of the memory that was laid out for it.

// The steps that can fail after the fork. They are numbers there, because a
// bare fork cannot allocate.
const (
	stepForget = iota + 1
	stepSubreaper
	stepSession
	stepSignals
	stepChildren
	stepFork
	stepCgroup
	stepNice
	stepOOM
	stepFiles
	stepLimits
	stepStage
	stepGroups
	stepGID
	stepUID
	stepParent
	stepExec
)

var stepNames = [...]string{
	stepForget:    "give up sbxrun's memory",
	stepSubreaper: "become a subreaper",
	stepSession:   "make a session",
	stepSignals:   "set up signals",
	stepChildren:  "open /proc/thread-self/children (CONFIG_PROC_CHILDREN)",
	stepFork:      "fork",
	stepCgroup:    "join the cgroup",
	stepNice:      "set the niceness",
	stepOOM:       "set oom_score_adj",
	stepFiles:     "hand over descriptors",
	stepLimits:    "switch core dumps off",
	stepStage:     "bind what only root can reach",
	stepGroups:    "drop supplementary groups",
	stepGID:       "change group id",
	stepUID:       "change user id",
	stepParent:    "tie bwrap to the keeper",
	stepExec:      "exec bwrap",
}

// record is a message of the keeper's: one when a step failed, one when all is
// reaped. A SOCK_SEQPACKET keeps each whole (unix(7)).
type record struct {
	kind   int64 // recordFailed, recordEmpty
	step   int64 // recordFailed
	errno  int64 // recordFailed
	user   int64 // recordEmpty: µs
	system int64 // recordEmpty: µs
	maxrss int64 // recordEmpty: KiB
	// recordEmpty: wait statuses, of the command (bwrap's monitor) and of init, and
	// whether there is one of init.
	monitor, init, reapedInit int64
}

const (
	recordFailed = 1
	recordEmpty  = 2
)

// Descriptors of the keeper, once it has closed all others.
const (
	keeperSocket   = iota
	keeperChildren // /proc/thread-self/children
	keeperSignals  // signalfd for SIGCHLD
	keeperTerminal // the terminal to restore, if there is one
	keeperFiles    // how many there are
)

// keeperState is the keeper's memory, and everything it needs, laid out before
// the fork.
type keeperState struct {
	high     uintptr // above all that the keeper uses
	cmdline  []byte
	pidfd    int32 // of the keeper, for the parent
	pid      uintptr
	command  uintptr // pid of the Command: bwrap, or what enters a sandbox
	ended    bool    // sbxrun has said that it is over, or is dead
	orphaned bool    // sbxrun has closed its end, or is dead
	rec      record  // to be reported
	usage    unix.Rusage
	status   int32
	poll     [2]unix.PollFd
	sigs     uint64
	buf      [512]byte
	noAction [4]uintptr // struct kernel_sigaction: SIG_DFL
	core     unix.Rlimit
	name     [16]byte
	children [32]byte

	// Descriptors: sbxrun's numbers, which the fork inherits.
	socket   int
	files    []int
	stage    []staged
	terminal int   // -1 for none
	tasks    []int // to be joined: v1, and v2 where one cannot be born in it
	cgroup   int   // v2, to be born in; -1 for none

	path       *byte
	argv, envv **byte
	enter      func(unsafe.Pointer)
	arg        unsafe.Pointer
	cred       *Cred
	restore    unix.Termios
	birth      cloneArgs
	remove     []*byte
	pause      unix.Timespec
	nice       *int
	oom        []byte // the text; nil for none
	cpus       *unix.CPUSet
}

// staged is one bind of [Command.Stage].
type staged struct {
	source uintptr
	target *byte
	dir    bool
}

var (
	empty     [1]byte
	slash     = [...]byte{'/', 0}
	stageDir  = append([]byte(StageDir), 0)
	stageType = append([]byte("tmpfs"), 0)
	stageMode = append([]byte("mode=0755,size=1m"), 0)
)

// fork makes the keeper. The call of run comes after the child has come back
// from BareFork, within the same frame; it never returns.
//
//go:norace
//go:noinline
func (k *keeperState) fork() (pid uintptr, errno syscall.Errno) {
	syscall.ForkLock.Lock()
	pid, errno = BareFork(0, &k.pidfd)
	if pid == 0 && errno == 0 {
		k.run()
	}
	syscall.ForkLock.Unlock()
	return pid, errno
}

// run is the life of the keeper. All its parts are called from here, because
// together they have to fit into the stack that a nosplit function may use; the
// linker makes sure of that.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (k *keeperState) run() {
	k.setUp()
	k.command = k.forkCommand()
	if k.command == 0 {
		k.takeBounds()
		k.defaultSignals()
		k.bindStage()
		k.takeFiles()
		k.become()
		if k.enter != nil {
			// From here, because what it calls is added to what is on the stack now,
			// and of calls through pointers the linker does not know.
			k.enter(k.arg)
		}
		k.must(stepExec, unix.SYS_EXECVE, uintptr(unsafe.Pointer(k.path)), uintptr(unsafe.Pointer(k.argv)), uintptr(unsafe.Pointer(k.envv)), 0, 0)
	}
	k.dropFiles()
	for {
		k.reap()
		if k.ended {
			k.killChildren()
		}
		k.wait()
	}
}

// setUp makes the bare fork what a keeper is.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (k *keeperState) setUp() {
	k.pid, _, _ = syscall.RawSyscall(unix.SYS_GETPID, 0, 0, 0)
	k.forget()
	// Every signal is blocked for good: nobody but SIGKILL can end the keeper
	// before its work is done.
	k.sigs = ^uint64(0)
	k.must(stepSignals, unix.SYS_RT_SIGPROCMASK, sigSetmask, uintptr(unsafe.Pointer(&k.sigs)), 0, 8, 0)
	k.must(stepSubreaper, unix.SYS_PRCTL, unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
	// A session of its own: neither the caller's Ctrl-C nor its kill(0, …)
	// reaches the keeper, and its kill never reaches the caller's group.
	k.must(stepSession, unix.SYS_SETSID, 0, 0, 0, 0, 0)
}

// forget gives up the memory that only the Go runtime needs, and the arguments and
// environment that sbxrun was called with, which may be secrets: they are in
// nothing that the keeper forks, and that is copied and ended in half the time.
// With a C library only the arguments are wiped, because everybody may read them.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (k *keeperState) forget() {
	if withLibc {
		for i := range k.cmdline {
			k.cmdline[i] = 0
		}
		return
	}
	for i := range addressEnds {
		if addressEnds[i] <= k.high {
			continue
		}
		if _, _, errno := syscall.RawSyscall(unix.SYS_MUNMAP, k.high, addressEnds[i]-k.high, 0); errno == 0 {
			return
		}
	}
	k.fail(stepForget, unix.EINVAL)
}

// dropFiles leaves the keeper with nothing but its own descriptors: with others
// it would hold the caller's pipes open.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (k *keeperState) dropFiles() {
	k.must(stepSession, unix.SYS_PRCTL, unix.PR_SET_NAME, uintptr(unsafe.Pointer(&k.name)), 0, 0, 0) // for ps(1)
	// The thread's own list of children.
	children := k.must(stepChildren, unix.SYS_OPENAT, uintptr(at), uintptr(unsafe.Pointer(&k.children)), unix.O_RDONLY, 0, 0)
	k.sigs = 1 << (unix.SIGCHLD - 1)
	signals := k.must(stepSignals, unix.SYS_SIGNALFD4, ^uintptr(0), uintptr(unsafe.Pointer(&k.sigs)), 8, unix.SFD_NONBLOCK, 0)
	// First all up, out of the way, then down to their places.
	socket := k.must(stepFiles, unix.SYS_FCNTL, uintptr(k.socket), unix.F_DUPFD, keeperFiles, 0, 0)
	k.socket = int(socket)
	children = k.must(stepFiles, unix.SYS_FCNTL, children, unix.F_DUPFD, keeperFiles, 0, 0)
	signals = k.must(stepFiles, unix.SYS_FCNTL, signals, unix.F_DUPFD, keeperFiles, 0, 0)
	if k.terminal >= 0 {
		terminal := k.must(stepFiles, unix.SYS_FCNTL, uintptr(k.terminal), unix.F_DUPFD, keeperFiles, 0, 0)
		k.must(stepFiles, unix.SYS_DUP3, terminal, keeperTerminal, 0, 0, 0)
	} else {
		syscall.RawSyscall(unix.SYS_CLOSE, keeperTerminal, 0, 0) // whatever it was
	}
	k.must(stepFiles, unix.SYS_DUP3, socket, keeperSocket, 0, 0, 0)
	k.socket = keeperSocket
	k.must(stepFiles, unix.SYS_DUP3, children, keeperChildren, 0, 0, 0)
	k.must(stepFiles, unix.SYS_DUP3, signals, keeperSignals, 0, 0, 0)
	k.must(stepFiles, unix.SYS_CLOSE_RANGE, keeperFiles, maxFD, 0, 0, 0)
}

// reap collects whatever has ended; with nothing left at all it reports so and
// ends the keeper. In a loop, because SIGCHLD coalesces (signal(7)).
//
//go:nosplit
//go:norace
//go:nocheckptr
func (k *keeperState) reap() {
	for {
		pid, _, e := syscall.RawSyscall6(unix.SYS_WAIT4, ^uintptr(0), uintptr(unsafe.Pointer(&k.status)), unix.WNOHANG, uintptr(unsafe.Pointer(&k.usage)), 0, 0)
		if e == unix.EINTR {
			continue
		}
		if e == unix.ECHILD {
			k.rec.kind = recordEmpty
			k.report()
			k.keepOn()
			k.restoreTerminal()
			k.removeCgroups()
			Exit(0)
		}
		if e != 0 || pid == 0 {
			return
		}
		if pid == k.command {
			// bwrap's monitor, or what enters. Its usage counts only if it has reaped
			// init itself: until its exec it was a copy of sbxrun.
			k.rec.monitor = int64(k.status)
			if k.rec.reapedInit != 0 {
				continue
			}
		} else {
			if k.rec.reapedInit == 0 {
				k.rec.user, k.rec.system, k.rec.maxrss = 0, 0, 0 // the monitor's
			}
			k.rec.init, k.rec.reapedInit = int64(k.status), 1
		}
		k.rec.user += k.usage.Utime.Sec*1e6 + int64(k.usage.Utime.Usec)
		k.rec.system += k.usage.Stime.Sec*1e6 + int64(k.usage.Stime.Usec)
		if k.usage.Maxrss > k.rec.maxrss {
			k.rec.maxrss = k.usage.Maxrss
		}
	}
}

// wait blocks until a child has ended, or sbxrun's end of the socket was shut down or
// closed.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (k *keeperState) wait() {
	k.poll[0] = unix.PollFd{Fd: keeperSignals, Events: unix.POLLIN}
	k.poll[1] = unix.PollFd{Fd: keeperSocket, Events: unix.POLLIN}
	n := uintptr(2)
	if k.ended {
		k.poll[1].Events = 0 // it stays readable; POLLHUP needs no asking
	}
	if k.orphaned {
		n = 1
	}
	syscall.RawSyscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(&k.poll)), n, 0, 0, 0, 0)
	syscall.RawSyscall(unix.SYS_READ, keeperSignals, uintptr(unsafe.Pointer(&k.buf)), uintptr(len(k.buf)))
	if n < 2 || k.poll[1].Revents == 0 {
		return
	}
	k.ended = true // nothing is ever sent to the keeper
	// Shut down is not yet closed: then the sandbox still has something to say.
	k.orphaned = k.poll[1].Revents&unix.POLLHUP != 0
	if k.orphaned {
		k.restoreTerminal()
	}
}

// keepOn waits, where there is something left to do, until sbxrun has passed on the
// last output and put the terminal back, and has read what the cgroups have counted;
// or has been killed and cannot.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (k *keeperState) keepOn() {
	if k.terminal < 0 && len(k.remove) == 0 {
		return
	}
	k.poll[1] = unix.PollFd{Fd: keeperSocket} // POLLHUP needs no asking
	for !k.orphaned && k.poll[1].Revents == 0 {
		syscall.RawSyscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(&k.poll[1])), 1, 0, 0, 0, 0)
	}
}

// restoreTerminal puts the caller's terminal back, if it was made raw. sbxrun does
// so itself if it can; twice does no harm. TCSETS from outside the terminal's
// session is not stopped by job control: the keeper has no controlling terminal
// (tty_ioctl(4)).
//
//go:nosplit
//go:norace
//go:nocheckptr
func (k *keeperState) restoreTerminal() {
	if k.terminal >= 0 {
		syscall.RawSyscall(unix.SYS_IOCTL, keeperTerminal, unix.TCSETS, uintptr(unsafe.Pointer(&k.restore)))
	}
}

// killChildren sends SIGKILL to every child there is now. Those that are
// reparented here when they die are found by the next call.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (k *keeperState) killChildren() {
	n, _, e := syscall.RawSyscall6(unix.SYS_PREAD64, keeperChildren, uintptr(unsafe.Pointer(&k.buf)), uintptr(len(k.buf)), 0, 0, 0)
	if e != 0 {
		return
	}
	pid := uintptr(0)
	for i := uintptr(0); i < n && i < uintptr(len(k.buf)); i++ {
		if c := k.buf[i]; c >= '0' && c <= '9' {
			pid = pid*10 + uintptr(c-'0')
			continue
		}
		// Every number is followed by a blank, so one cut off by the end of
		// the buffer is never taken for a pid.
		if pid > 1 {
			syscall.RawSyscall(unix.SYS_KILL, pid, uintptr(unix.SIGKILL), 0)
		}
		pid = 0
	}
}

// What follows runs in the child that becomes bwrap, or enters a sandbox.

// defaultSignals: exec resets handlers to the default but lets SIG_IGN through,
// and a bwrap that ignores SIGCHLD hangs for ever (bubblewrap before 0.11.1).
//
//go:nosplit
//go:norace
//go:nocheckptr
func (k *keeperState) defaultSignals() {
	for sig := uintptr(1); sig <= 64; sig++ {
		if sig != uintptr(unix.SIGKILL) && sig != uintptr(unix.SIGSTOP) {
			syscall.RawSyscall6(unix.SYS_RT_SIGACTION, sig, uintptr(unsafe.Pointer(&k.noAction)), 0, 8, 0, 0)
		}
	}
}

// bindStage makes [Command.Stage] visible below StageDir. The new mount API
// (open_tree(2), move_mount(2), Linux 5.2) takes what a descriptor stands for:
// a path may have come to mean something else, and mount(2) refuses a
// descriptor that was opened in another mount namespace.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (k *keeperState) bindStage() {
	if len(k.stage) == 0 {
		return
	}
	here, none := uintptr(at), uintptr(unsafe.Pointer(&empty))
	for i := range k.stage {
		s := &k.stage[i]
		s.source = k.must(stepStage, unix.SYS_OPEN_TREE, s.source, none, unix.AT_EMPTY_PATH|unix.AT_RECURSIVE|unix.OPEN_TREE_CLONE, 0, 0)
	}
	k.must(stepStage, unix.SYS_UNSHARE, unix.CLONE_NEWNS, 0, 0, 0, 0)
	// Slave: nothing mounted here shows on the host (mount_namespaces(7)).
	k.must(stepStage, unix.SYS_MOUNT, 0, uintptr(unsafe.Pointer(&slash)), 0, unix.MS_SLAVE|unix.MS_REC, 0)
	k.must(stepStage, unix.SYS_MOUNT, uintptr(unsafe.Pointer(&stageType[0])), uintptr(unsafe.Pointer(&stageDir[0])), uintptr(unsafe.Pointer(&stageType[0])),
		unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, uintptr(unsafe.Pointer(&stageMode[0])))
	for i := range k.stage {
		s := &k.stage[i]
		if s.dir {
			k.must(stepStage, unix.SYS_MKDIRAT, here, uintptr(unsafe.Pointer(s.target)), 0o755, 0, 0)
		} else {
			k.must(stepStage, unix.SYS_MKNODAT, here, uintptr(unsafe.Pointer(s.target)), unix.S_IFREG|0o644, 0, 0)
		}
		k.must(stepStage, unix.SYS_MOVE_MOUNT, s.source, none, here, uintptr(unsafe.Pointer(s.target)), unix.MOVE_MOUNT_F_EMPTY_PATH)
	}
}

// takeFiles moves the command's descriptors to 0, 1, 2 …, the keeper's socket
// behind them, closed by a successful exec, and closes all others.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (k *keeperState) takeFiles() {
	n := len(k.files)
	// First all up, out of the way, then down to their places.
	free := uintptr(n + 1)
	k.socket = int(k.must(stepFiles, unix.SYS_FCNTL, uintptr(k.socket), unix.F_DUPFD_CLOEXEC, free, 0, 0))
	for i := range k.files {
		if uintptr(k.files[i]) < free { // in the way, or about to be overwritten
			k.files[i] = int(k.must(stepFiles, unix.SYS_FCNTL, uintptr(k.files[i]), unix.F_DUPFD_CLOEXEC, free, 0, 0))
		}
	}
	for i := range k.files {
		k.must(stepFiles, unix.SYS_DUP3, uintptr(k.files[i]), uintptr(i), 0, 0, 0)
	}
	k.must(stepFiles, unix.SYS_DUP3, uintptr(k.socket), uintptr(n), unix.O_CLOEXEC, 0, 0)
	k.socket = n
	k.must(stepFiles, unix.SYS_CLOSE_RANGE, free, maxFD, 0, 0, 0)
}

// become takes on the command's identity.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (k *keeperState) become() {
	k.must(stepLimits, unix.SYS_PRLIMIT64, 0, unix.RLIMIT_CORE, uintptr(unsafe.Pointer(&k.core)), 0, 0)
	if k.cred != nil {
		gid, uid := uintptr(k.cred.GID), uintptr(k.cred.UID)
		k.must(stepGroups, unix.SYS_SETGROUPS, 0, 0, 0, 0, 0)
		k.must(stepGID, unix.SYS_SETRESGID, gid, gid, gid, 0, 0)
		k.must(stepUID, unix.SYS_SETRESUID, uid, uid, uid, 0, 0)
	}
	// After the change of uid, which clears it (prctl(2)). The keeper is
	// single-threaded, so "the thread that forked" is the keeper itself.
	k.must(stepParent, unix.SYS_PRCTL, unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0)
	// The keeper may have died before the line above could notice.
	if k.must(stepParent, unix.SYS_GETPPID, 0, 0, 0, 0, 0) != k.pid {
		k.fail(stepParent, unix.ESRCH)
	}
	k.sigs = 0
	k.must(stepSignals, unix.SYS_RT_SIGPROCMASK, sigSetmask, uintptr(unsafe.Pointer(&k.sigs)), 0, 8, 0)
}

// must makes a system call, and does not come back if it fails.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (k *keeperState) must(step int64, call, a, b, c, d, e uintptr) uintptr {
	r, _, errno := syscall.RawSyscall6(call, a, b, c, d, e, 0)
	if errno != 0 {
		k.fail(step, errno)
	}
	return r
}

// fail reports the step that failed, and ends the process.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (k *keeperState) fail(step int64, errno syscall.Errno) {
	k.rec.kind, k.rec.step, k.rec.errno = recordFailed, step, int64(errno)
	k.report()
	Exit(125)
}

// report sends the record.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (k *keeperState) report() {
	// Nothing can be done about an error: sbxrun is dead.
	syscall.RawSyscall(unix.SYS_WRITE, uintptr(k.socket), uintptr(unsafe.Pointer(&k.rec)), unsafe.Sizeof(k.rec))
}

// sigSetmask is SIG_SETMASK of sigprocmask(2).
const sigSetmask = 2

// at is AT_FDCWD, as a variable: a constant could not become a uintptr.
var at = unix.AT_FDCWD

// addressEnds are where a process's addresses can end, with the stack just below,
// and somewhat below that what was mapped without asking for a place: on arm64, on
// amd64, and on arm64 with three levels of page tables. munmap(2) takes none that
// is too high.
var addressEnds = [...]uintptr{1 << 48, 1<<47 - 4096, 1 << 39}

// maxFD is the greatest descriptor close_range(2) accepts.
const maxFD = 1<<32 - 1
