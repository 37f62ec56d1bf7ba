package enter

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/proc"
)

// This file runs in the processes that enter a room, below the keeper and after a bare fork ([proc.Way]). The four
// processes share their memory, each with its own stack. The first two exit at once. They are needed because a process
// never changes its own PID namespace and a new one is always made below that (pid_namespaces(7)):
//
//	enters   receives a pidfd of the room's PID 1 and joins its namespaces (setns(2) on a pidfd, Linux 5.8). It
//	         first waits until bwrap has built a new room, and furnishes it ([Furnishing])
//	inside   is created in the room's PID namespace; sends a signal if that is the request
//	init     is created in a new PID namespace below that; forks the payload and reaps
//	payload  executes the launcher (launch.go), which waits for the release and executes the command
//
// inside and init are made with CLONE_PARENT. So the keeper is the parent of all and alone kills and reaps them, and the
// room's PID 1 never has to. The memory is the keeper's, or with limits a copy. The payload shares it until it executes
// the launcher.

// Descriptors of the entering processes, after the payload's 0, 1 and 2.
const (
	entrySocket = 3 // to sbxrun, which sends a pidfd of the room's PID 1
	entryGate   = 4 // a byte releases the payload; end-of-file makes it exit
	entryLaunch = 5 // the program of launch.go
	entryReady  = 6 // a byte reports that the room is built; end-of-file means that bwrap failed
	entryFiles  = 7 // the first of the files to copy into a new room
	// An init made ahead has this instead of entryReady: a timerfd that ends it.
	entryTimer = 6
)

// Steps that can fail, in order.
const (
	stepHide = iota + 1
	stepTarget
	stepOuter
	stepNetwork
	stepLoopback
	stepRoom
	stepUserns
	stepSetns
	stepTmpfs
	stepMount
	stepSource
	stepOverlay
	stepLayer
	stepXattr
	stepCopy
	stepReadOnly
	stepSocket
	stepListen
	stepInside
	stepSignal
	stepInit
	stepParent
	stepName
	stepIdentity
	stepIntroduce
	stepMounts
	stepProc
	stepMask
	stepMeminfo
	stepFresh
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
	stepTarget:       "receive a pidfd of the room",
	stepOuter:        "join the user namespace of the room's mounts",
	stepNetwork:      StepNetwork,
	stepLoopback:     "bring up the loopback device",
	stepRoom:         "wait for the room",
	stepUserns:       StepUserns,
	stepSetns:        "setns(2) on the pidfd of the room's PID 1 (Linux 5.8)",
	stepTmpfs:        "set the size and mode of a tmpfs",
	stepMount:        StepMount,
	stepSource:       StepSource,
	stepOverlay:      StepOverlay,
	stepLayer:        StepLayer,
	stepXattr:        StepXattr,
	stepCopy:         "copy a file into the room",
	stepReadOnly:     "make a mount read-only",
	stepSocket:       "make a socket in the room",
	stepListen:       "listen in the room",
	stepInside:       "fork into the room",
	stepSignal:       "signal all processes of the room",
	stepInit:         "make a PID namespace in the room",
	stepParent:       "tie init to the keeper",
	stepName:         "take a name",
	stepIdentity:     "stat /proc/self/ns/pid",
	stepIntroduce:    "send a pidfd, the mounts and the working directory",
	stepMounts:       "make mounts private",
	stepProc:         "mount /proc",
	stepMask:         "hide a file of /proc, or make one read-only",
	stepMeminfo:      "show the room's /proc/meminfo",
	stepFresh:        "mount a directory in memory",
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

// StepNetwork is the step of a [proc.StartError] if a network namespace cannot be made.
const StepNetwork = "make a network namespace"

// StepUserns is the step of a [proc.StartError] if user namespaces cannot be switched off.
const StepUserns = "switch off user namespaces (user.max_user_namespaces)"

// Steps of a [proc.StartError] about a [Mount].
const (
	StepMount   = "mount in the room"
	StepSource  = "compare a bind with its source"
	StepOverlay = "mount an overlay"
	StepLayer   = "attach a layer of an overlay"
	StepXattr   = "set an attribute in the new layer of an overlay"
)

// message is sent from inside the room. A SOCK_SEQPACKET keeps messages whole, and the kernel adds the sender's PID as
// seen from outside (SO_PASSCRED, unix(7)), which no process inside can forge.
type message struct {
	kind   int64
	step   int64  // messageFailed
	value  int64  // messageFailed: errno; messageExited: wait status
	pidNS  uint64 // messageReady: inode of the new PID namespace
	inside int64  // messageReady: result of getpid(2), 1
	alone  int64  // messageExited: 1 if no other process is left
	at     int64  // messageExited: time, CLOCK_MONOTONIC in ns
	mount  int64  // messageFailed: number of the [Mount] in its list, from 1; 0 for none
}

const (
	messageReady     = iota + 1 // init waits for the release
	messageFailed               // a step failed, and the sender exits
	messageExited               // the payload has exited
	messageSignaled             // the signal was sent
	messageFurnished            // the idle room is furnished
	messageLayer                // descriptor of the new layer of an overlay
	messageSockets              // descriptors of the requested sockets
)

// order is a signal, sent into the room.
type order struct {
	signal  int32
	payload int32 // 1 for the payload alone, 0 for all processes
}

// entry is the state of the entering processes, laid out before the fork.
type entry struct {
	teller             // of enters, inside and init, which run one after the other
	namespaces uintptr // of the room
	spaces     uintptr // new namespaces for the command, made with its init
	fresh      []fresh
	signal     uintptr    // if not 0, only send this signal to the whole room
	furnishing furnishing // of a new room
	idle       bool       // run no command
	sockets    *sockets   // if not nil, only make these sockets in the room

	insideStack, initStack, payloadStack uintptr

	maker *maker // if not nil, inside becomes the maker
	ahead *ahead // of an init made ahead

	room    letter  // with the pidfd of the room's PID 1 and a user namespace
	pid     uintptr // of the payload in init's namespace; 0 after its end
	payload payload
	ord     order
	stat    unix.Stat_t
	status  int32
	sigs    uint64
	poll    [3]unix.PollFd
	polled  uintptr
	buf     [128]byte
	now     unix.Timespec
	header  unix.CapUserHeader
	none    [2]unix.CapUserData
}

// fresh is a [Tmpfs].
type fresh struct{ target, options *byte }

// payload is the state of the payload's process until it executes the launcher.
type payload struct {
	teller
	*command
	letter   *letter // receives the command; nil if it is known before the fork
	limit    unix.Rlimit
	released byte
}

// command is a command, laid out for execution.
type command struct {
	size       uintptr // of the layout from here on
	terminal   bool
	rlimits    []proc.Rlimit
	cpus       *unix.CPUSet    // nil for the inherited set
	filter     *unix.SockFprog // nil for none
	workdir    *byte
	argv, envv unsafe.Pointer // of the launcher, see launchArgs
}

var (
	procDir  = [...]byte{'/', 'p', 'r', 'o', 'c', 0}
	procType = [...]byte{'p', 'r', 'o', 'c', 0}
	ptsDir   = [...]byte{'/', 'd', 'e', 'v', '/', 'p', 't', 's', 0}
	ptsType  = [...]byte{'d', 'e', 'v', 'p', 't', 's', 0}
	// As bwrap mounts it.
	ptsOptions = [...]byte{'n', 'e', 'w', 'i', 'n', 's', 't', 'a', 'n', 'c', 'e', ',', 'p', 't', 'm', 'x', 'm', 'o', 'd', 'e', '=', '0', '6', '6', '6', ',', 'm', 'o', 'd', 'e', '=', '6', '2', '0', 0}
	ownPIDNS   = [...]byte{'/', 'p', 'r', 'o', 'c', '/', 's', 'e', 'l', 'f', '/', 'n', 's', '/', 'p', 'i', 'd', 0}
	// masked are hidden from the payload: names and owners of the keys that its uid may see
	// (keyrings(7)), and the file locks of the whole machine. A bind of unreadable covers them; it has mode 0400,
	// belongs to the host's root and needs CAP_SYSLOG. Unlike /dev/null, a source in the new /proc cannot be
	// replaced by another command of the sandbox.
	masked = [...][16]byte{
		{'/', 'p', 'r', 'o', 'c', '/', 'k', 'e', 'y', 's'},
		{'/', 'p', 'r', 'o', 'c', '/', 'k', 'e', 'y', '-', 'u', 's', 'e', 'r', 's'},
		{'/', 'p', 'r', 'o', 'c', '/', 'l', 'o', 'c', 'k', 's'},
	}
	// sysctls becomes read-only. Otherwise a command could change the sysctls of its IPC namespace, because they belong to
	// uid 0 of the user namespace that bwrap makes first, which outside is the payload's uid. With kernel.sem raised, an
	// operation on an array of semaphores keeps a CPU of the host in the kernel for seconds.
	sysctls    = [...]byte{'/', 'p', 'r', 'o', 'c', '/', 's', 'y', 's', 0}
	unreadable = [...]byte{'/', 'p', 'r', 'o', 'c', '/', 'k', 'm', 's', 'g', 0}
	meminfo    = [...]byte{'/', 'p', 'r', 'o', 'c', '/', 'm', 'e', 'm', 'i', 'n', 'f', 'o', 0}
	noPath     [1]byte
	initName   = [16]byte{'s', 'b', 'x', 'r', 'u', 'n', '-', 'i', 'n', 'i', 't'}

	// meminfoCopy is MeminfoCopy.
	meminfoCopy = [...]byte{'/', 'r', 'u', 'n', '/', 'm', 'e', 'm', 'i', 'n', 'f', 'o', 0}

	insideCode  = proc.Code(startInside)
	initCode    = proc.Code(startInit)
	payloadCode = proc.Code(startPayload)
)

// enter runs in the keeper's child; p is an *entry.
//
//go:nosplit
//go:norace
//go:nocheckptr
func enter(p unsafe.Pointer) {
	e := (*entry)(p)
	// The memory may hold secrets, such as environment variables, and any process with this UID could otherwise attach
	// (ptrace(2)). The flag belongs to the memory, so it also covers init, and the payload until it executes the launcher.
	// The keeper's own setting was reset by the change of UID. The launcher is undumpable because its file has no read
	// permission.
	e.must(stepHide, unix.SYS_PRCTL, unix.PR_SET_DUMPABLE, 0, 0, 0, 0)
	room, outer := e.receiveRoom()
	if e.sockets != nil {
		e.makeSockets(room, outer)
	}
	if e.furnishing.wanted {
		e.enterNew(room, outer)
	} else if e.maker != nil {
		e.enterMaker(room, outer)
	} else {
		e.must(stepSetns, unix.SYS_SETNS, room, e.namespaces, 0, 0, 0)
	}
	if e.idle {
		e.done(messageFurnished)
	}
	_, errno := proc.Clone(unix.CLONE_PARENT, e.insideStack, insideCode, unsafe.Pointer(e))
	if errno != 0 {
		e.fail(stepInside, errno)
	}
	proc.Exit(0)
}

// receiveRoom waits for the pidfd of the room's PID 1, which sbxrun has verified, and for the user namespace that owns the
// room's mounts, if it is sent.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (e *entry) receiveRoom() (room, outer uintptr) {
	h := &e.room
	for {
		n, _, errno := syscall.RawSyscall(unix.SYS_RECVMSG, entrySocket, uintptr(unsafe.Pointer(&h.msg)), unix.MSG_CMSG_CLOEXEC)
		if errno == unix.EINTR {
			continue
		}
		if errno != 0 {
			e.fail(stepTarget, errno)
		}
		if n == 0 {
			proc.Exit(0) // sbxrun died or gave up
		}
		// Only sbxrun has the other end. The kernel drops the descriptors if this process may not have more.
		c := &h.control
		if h.msg.Controllen == 0 || h.msg.Flags&unix.MSG_CTRUNC != 0 || c.header.Level != unix.SOL_SOCKET || c.header.Type != unix.SCM_RIGHTS {
			e.fail(stepTarget, unix.EMFILE)
		}
		return uintptr(c.fds[0]), uintptr(c.fds[1])
	}
}

// awaitRoom waits until the room's PID 1 reports that the room is built.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (e *entry) awaitRoom() {
	for {
		n, _, errno := syscall.RawSyscall(unix.SYS_READ, entryReady, uintptr(unsafe.Pointer(&e.buf)), 1)
		if errno == unix.EINTR {
			continue
		}
		if errno != 0 {
			e.fail(stepRoom, errno)
		}
		if n != 1 {
			proc.Exit(0) // bwrap failed and has reported why
		}
		return
	}
}

// startInside runs in the room's PID namespace; p is an *entry.
//
//go:nosplit
//go:norace
//go:nocheckptr
func startInside(p unsafe.Pointer) {
	e := (*entry)(p)
	// Another sbxrun may stop all processes in the room now (kill --signal STOP). Without this, a keeper killed after that
	// would leave this process behind.
	e.must(stepParent, unix.SYS_PRCTL, unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0)
	if e.signal != 0 {
		e.signalAll()
	}
	if e.maker != nil {
		e.make()
	}
	_, errno := proc.Clone(unix.CLONE_PARENT|e.spaces, e.initStack, initCode, unsafe.Pointer(e))
	if errno != 0 {
		e.fail(stepInit, errno)
	}
	proc.Exit(0)
}

// startInit is PID 1 of the command's own namespace; p is an *entry.
//
//go:nosplit
//go:norace
//go:nocheckptr
func startInit(p unsafe.Pointer) {
	e := (*entry)(p)
	e.takeAhead()
	// The rest runs while sbxrun verifies this process. An init made ahead reports only when it is complete and has a
	// payload.
	if e.ahead == nil {
		e.present()
	}
	e.setUp()
	// This comes before the fork of the payload, because a failure ends init and so the payload.
	e.sigs = 1 << (unix.SIGCHLD - 1)
	fd := e.must(stepSignals, unix.SYS_SIGNALFD4, ^uintptr(0), uintptr(unsafe.Pointer(&e.sigs)), 8, unix.SFD_NONBLOCK|unix.SFD_CLOEXEC, 0)
	e.poll[0] = unix.PollFd{Fd: int32(fd), Events: unix.POLLIN}
	e.poll[1] = unix.PollFd{Fd: entrySocket, Events: unix.POLLIN}
	e.poll[2] = unix.PollFd{Fd: entryTimer, Events: unix.POLLIN}
	e.polled = 2
	if e.ahead != nil {
		e.polled = 3
	}
	pid, errno := proc.Clone(0, e.payloadStack, payloadCode, unsafe.Pointer(&e.payload))
	if errno != 0 {
		e.fail(stepPayload, errno)
	}
	e.pid = pid
	if e.ahead != nil {
		e.present()
	}
	// Otherwise readers of the payload's output would not see its end.
	syscall.RawSyscall(unix.SYS_CLOSE_RANGE, 0, entrySocket-1, 0)
	syscall.RawSyscall(unix.SYS_CLOSE_RANGE, entryGate, entryLaunch, 0)
	for {
		e.await(e.reap())
	}
}

// signalAll sends the signal to all processes in the sandbox but its init and this one.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (e *entry) signalAll() {
	// ESRCH: there is no process.
	if _, _, errno := syscall.RawSyscall(unix.SYS_KILL, ^uintptr(0), e.signal, 0); errno != 0 && errno != unix.ESRCH {
		e.fail(stepSignal, errno)
	}
	e.done(messageSignaled)
}

// done reports success and exits.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (e *entry) done(kind int64) {
	e.msg.kind = kind
	e.say()
	proc.Exit(0)
}

// present reports that init is ready.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (e *entry) present() {
	// Die with the keeper: sbxrun would find this process in the keeper's session, but may be dead, too. If both died
	// before this line, the gate and the socket are closed, and the payload and init exit.
	e.must(stepParent, unix.SYS_PRCTL, unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0)
	e.must(stepName, unix.SYS_PRCTL, unix.PR_SET_NAME, uintptr(unsafe.Pointer(&initName)), 0, 0, 0)
	pid, _, _ := syscall.RawSyscall(unix.SYS_GETPID, 0, 0, 0)
	e.msg = message{kind: messageReady, inside: int64(pid)}
	pids := uintptr(unsafe.Pointer(&ownPIDNS))
	if e.ahead != nil {
		pidfd := e.must(stepIntroduce, unix.SYS_PIDFD_OPEN, 1, 0, 0, 0, 0)
		fd := e.openOwn(pidfd, pidfdPIDs, pids)
		e.must(stepIdentity, unix.SYS_FSTAT, fd, uintptr(unsafe.Pointer(&e.stat)), 0, 0, 0)
		e.msg.pidNS = e.stat.Ino
		e.introduce(pidfd)
		return
	}
	// This is the /proc of the sandbox, to which init belongs.
	e.must(stepIdentity, unix.SYS_NEWFSTATAT, uintptr(proc.AtCWD), pids, uintptr(unsafe.Pointer(&e.stat)), 0, 0)
	e.msg.pidNS = e.stat.Ino
	e.say()
}

// setUp prepares the new init before the fork of the payload.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (e *entry) setUp() {
	if e.ahead == nil { // the maker's mounts are private
		e.must(stepMounts, unix.SYS_MOUNT, 0, uintptr(unsafe.Pointer(&proc.Root)), 0, unix.MS_REC|unix.MS_PRIVATE, 0)
	}
	e.must(stepProc, unix.SYS_MOUNT, uintptr(unsafe.Pointer(&procType)), uintptr(unsafe.Pointer(&procDir)), uintptr(unsafe.Pointer(&procType)),
		unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, 0)
	e.mask()
	// The room may have a replacement for /proc/meminfo.
	_, _, errno := syscall.RawSyscall6(unix.SYS_MOUNT, uintptr(unsafe.Pointer(&meminfoCopy)), uintptr(unsafe.Pointer(&meminfo)), 0, unix.MS_BIND, 0, 0)
	// ELOOP and EINVAL: a link made by a payload that can write to /run.
	if errno != 0 && errno != unix.ENOENT && errno != unix.ENOTDIR && errno != unix.ELOOP && errno != unix.EINVAL {
		e.fail(stepMeminfo, errno)
	}
	dirs := e.fresh
	for i := range dirs {
		e.must(stepFresh, unix.SYS_MOUNT, uintptr(unsafe.Pointer(&proc.Tmpfs)), uintptr(unsafe.Pointer(dirs[i].target)), uintptr(unsafe.Pointer(&proc.Tmpfs)),
			unix.MS_NOSUID|unix.MS_NODEV, uintptr(unsafe.Pointer(dirs[i].options)))
	}
	if e.ahead != nil { // otherwise the next command would see the terminals' modes and times
		e.must(stepFresh, unix.SYS_MOUNT, uintptr(unsafe.Pointer(&ptsType)), uintptr(unsafe.Pointer(&ptsDir)), uintptr(unsafe.Pointer(&ptsType)),
			unix.MS_NOSUID|unix.MS_NOEXEC, uintptr(unsafe.Pointer(&ptsOptions)))
	}
	if e.ahead == nil { // otherwise takeAhead has closed them
		e.must(stepFiles, unix.SYS_CLOSE_RANGE, entryReady, proc.MaxFD, 0, 0, 0)
	}
	// All signals stay blocked: init learns everything by descriptors.
	e.sigs = ^uint64(0)
	e.must(stepSignals, unix.SYS_RT_SIGPROCMASK, proc.SigSetmask, uintptr(unsafe.Pointer(&e.sigs)), 0, 8, 0)
	if e.ahead == nil { // otherwise the maker has done this
		e.gainNothing()
	}
	e.must(stepCapabilities, unix.SYS_PRCTL, unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
	e.must(stepCapabilities, unix.SYS_CAPSET, uintptr(unsafe.Pointer(&e.header)), uintptr(unsafe.Pointer(&e.none)), 0, 0, 0)
}

// mask hides the masked files in the new /proc and makes sysctls read-only.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (e *entry) mask() {
	for i := range masked {
		file := uintptr(unsafe.Pointer(&masked[i]))
		_, _, errno := syscall.RawSyscall6(unix.SYS_MOUNT, uintptr(unsafe.Pointer(&unreadable)), file, 0, unix.MS_BIND, 0, 0)
		if errno == unix.ENOENT { // of either file: a kernel without keyrings has nothing to hide
			if _, _, missing := syscall.RawSyscall(unix.SYS_FACCESSAT, uintptr(proc.AtCWD), file, unix.F_OK); missing == unix.ENOENT {
				continue
			}
		}
		if errno != 0 {
			e.fail(stepMask, errno)
		}
	}
	dir := uintptr(unsafe.Pointer(&sysctls))
	_, _, errno := syscall.RawSyscall6(unix.SYS_MOUNT, dir, dir, 0, unix.MS_BIND, 0, 0)
	if errno == unix.ENOENT { // a kernel without sysctls
		return
	}
	if errno != 0 {
		e.fail(stepMask, errno)
	}
	e.must(stepMask, unix.SYS_MOUNT, 0, dir, 0, unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, 0)
}

// gainNothing permanently prevents an exec from gaining privileges.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (e *entry) gainNothing() {
	e.must(stepPrivileges, unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
	for c := uintptr(0); c < 64; c++ {
		// EINVAL: beyond the kernel's last capability.
		if _, _, errno := syscall.RawSyscall6(unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, c, 0, 0, 0, 0); errno == unix.EINVAL && c > unix.CAP_AUDIT_READ {
			break
		} else if errno != 0 {
			e.fail(stepBounding, errno)
		}
	}
}

// startPayload prepares the payload and executes the launcher, which waits for the release and
// executes the command; p is a *payload. Limits, the filter, the session and the working directory
// are the payload's own, set here and nowhere else.
//
//go:nosplit
//go:norace
//go:nocheckptr
func startPayload(p unsafe.Pointer) {
	e := (*payload)(p)
	if e.letter != nil {
		e.receive() // until then the command is unknown
	}
	e.confine() // before the release, because the kernel takes a tenth of a millisecond to compile the filter
	e.must(stepSession, unix.SYS_SETSID, 0, 0, 0, 0, 0)
	if e.terminal {
		e.must(stepTerminal, unix.SYS_IOCTL, 0, unix.TIOCSCTTY, 0, 0, 0)
	}
	if _, _, errno := syscall.RawSyscall(unix.SYS_CHDIR, uintptr(unsafe.Pointer(e.workdir)), 0, 0); errno != 0 {
		// After the release: init ends with this process and must live until sbxrun has identified it.
		if e.letter == nil {
			e.awaitRelease()
		}
		e.fail(stepWorkdir, errno)
	}
	// The launcher needs both and sets close-on-exec again.
	e.must(stepExec, unix.SYS_FCNTL, entrySocket, unix.F_SETFD, 0, 0, 0)
	e.must(stepExec, unix.SYS_FCNTL, entryGate, unix.F_SETFD, 0, 0, 0)
	e.must(stepExec, unix.SYS_EXECVEAT, entryLaunch, uintptr(unsafe.Pointer(&noPath)), uintptr(e.argv), uintptr(e.envv), unix.AT_EMPTY_PATH)
}

// awaitRelease waits for the release.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (e *payload) awaitRelease() {
	for {
		n, _, errno := syscall.RawSyscall(unix.SYS_READ, entryGate, uintptr(unsafe.Pointer(&e.released)), 1)
		if errno == unix.EINTR {
			continue
		}
		if errno != 0 || n != 1 {
			proc.Exit(0) // end-of-file: sbxrun died or gave up before Release
		}
		return
	}
}

// confine sets the command's CPUs, resource limits and filter.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (e *payload) confine() {
	if e.cpus != nil {
		// So that nproc(1) matches the limit. The quota enforces it: a program can undo this.
		syscall.RawSyscall(unix.SYS_SCHED_SETAFFINITY, 0, unsafe.Sizeof(*e.cpus), uintptr(unsafe.Pointer(e.cpus)))
	}
	limits := e.rlimits
	for i := range limits {
		e.limit = unix.Rlimit{Cur: limits[i].Value, Max: limits[i].Value}
		e.must(stepLimits, unix.SYS_PRLIMIT64, 0, uintptr(limits[i].Resource), uintptr(unsafe.Pointer(&e.limit)), 0, 0)
	}
	if e.filter != nil {
		e.must(stepFilter, unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(e.filter)), 0, 0)
	}
}

// reap reaps children and reports the payload's exit status. Init exits if no child is left: then the namespace is empty.
// reap returns whether there may be more children. It reaps only some at a time, so that a payload that makes orphans
// faster than that delays neither the report of its own end nor an order.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (e *entry) reap() bool {
	more := true
	for n := 0; more && n < reapedAtOnce; n++ {
		pid, _, errno := syscall.RawSyscall6(unix.SYS_WAIT4, ^uintptr(0), uintptr(unsafe.Pointer(&e.status)), unix.WNOHANG, 0, 0, 0)
		switch {
		case errno == unix.EINTR:
		case errno != 0 || pid == 0:
			more = false
			if errno == unix.ECHILD {
				e.msg.alone = 1
			}
		case e.status&0xff == 0x7f:
			e.letRun(pid)
		case pid == e.pid:
			e.pid = 0
			syscall.RawSyscall(unix.SYS_CLOCK_GETTIME, unix.CLOCK_MONOTONIC, uintptr(unsafe.Pointer(&e.now)), 0)
			e.msg = message{kind: messageExited, value: int64(e.status), at: e.now.Sec*1e9 + e.now.Nsec}
		}
	}
	if e.msg.kind == messageExited {
		e.say()
		e.msg.kind = 0
	}
	if e.msg.alone != 0 {
		proc.Exit(0)
	}
	return more
}

// letRun detaches from a process that made init its tracer and then stopped. PTRACE_TRACEME needs no permission, and from
// then on wait(2) reports the stops (ptrace(2)). The process gets the signal that stopped it, except SIGTRAP, which stops
// a traced process at an exec.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (e *entry) letRun(pid uintptr) {
	signal := uintptr(e.status>>8) & 0x7f
	if signal == uintptr(unix.SIGTRAP) {
		signal = 0
	}
	syscall.RawSyscall6(unix.SYS_PTRACE, unix.PTRACE_DETACH, pid, 0, signal, 0, 0) // ESRCH: it was killed
}

// await waits for the end of a child or for an order and executes the order. With more children to reap it does not
// block.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (e *entry) await(more bool) {
	var timeout *unix.Timespec // nil: no limit
	if more {
		e.now = unix.Timespec{}
		timeout = &e.now
	}
	_, _, errno := syscall.RawSyscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(&e.poll)), e.polled, uintptr(unsafe.Pointer(timeout)), 0, 0, 0)
	if errno != 0 && errno != unix.EINTR {
		// The payload has the same UID, so it may lower init's limits. With RLIMIT_NOFILE below polled, poll(2) fails with
		// EINVAL, and init would miss orders and the timer.
		proc.Exit(0)
	}
	syscall.RawSyscall(unix.SYS_READ, uintptr(e.poll[0].Fd), uintptr(unsafe.Pointer(&e.buf)), uintptr(len(e.buf)))
	if e.poll[2].Revents != 0 {
		proc.Exit(proc.LateStatus) // sbxrun is stopped
	}
	if e.poll[1].Revents == 0 {
		return
	}
	n, _, errno := syscall.RawSyscall6(unix.SYS_RECVFROM, entrySocket, uintptr(unsafe.Pointer(&e.ord)), unsafe.Sizeof(e.ord), unix.MSG_DONTWAIT, 0, 0)
	if errno == unix.EAGAIN || errno == unix.EINTR {
		return
	}
	if errno != 0 || n != unsafe.Sizeof(e.ord) {
		proc.Exit(0) // sbxrun is dead or has closed the socket
	}
	to := ^uintptr(0) // -1: all processes but init (kill(2))
	if e.ord.payload != 0 {
		to = e.pid
	}
	if to == 0 {
		return // the payload has ended
	}
	syscall.RawSyscall(unix.SYS_KILL, to, uintptr(e.ord.signal), 0)
}

// teller sends messages of one process to sbxrun.
type teller struct{ msg message }

// must makes a system call. If it fails, must reports the step and exits.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (t *teller) must(step int64, call, a, b, c, d, f uintptr) uintptr {
	r, _, errno := syscall.RawSyscall6(call, a, b, c, d, f, 0)
	if errno != 0 {
		t.fail(step, errno)
	}
	return r
}

// fail reports a failed step and exits.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (t *teller) fail(step int64, errno syscall.Errno) {
	t.msg = message{kind: messageFailed, step: step, value: int64(errno)}
	t.say()
	proc.Exit(125)
}

// say sends the message.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (t *teller) say() {
	// An error means that sbxrun is dead.
	syscall.RawSyscall(unix.SYS_WRITE, entrySocket, uintptr(unsafe.Pointer(&t.msg)), unsafe.Sizeof(t.msg))
}

// reapedAtOnce is the number of children that init reaps before it checks for an order.
const reapedAtOnce = 256
