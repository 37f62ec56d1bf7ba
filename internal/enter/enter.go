package enter

import (
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/helper"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/seccomp"
)

// This file lays out the script of the four processes that enter a room, below the keeper ([proc.Way]). The first two exit
// at once. They are needed because a process never changes its own PID namespace and a new one is always made below that
// (pid_namespaces(7)):
//
//	enters   receives a pidfd of the room's PID 1 and joins its namespaces (setns(2) on a pidfd, Linux 5.8). It
//	         first waits until bwrap has built a new room, and furnishes it ([Furnishing])
//	inside   is created in the room's PID namespace; sends a signal if that is the request
//	init     is created in a new PID namespace below that; forks the payload and reaps
//	payload  waits for the release and executes the command
//
// inside and init are made with CLONE_PARENT. So the keeper is the parent of all and alone kills and reaps them, and the
// room's PID 1 never has to.

// Descriptors of the entering processes, after the payload's 0, 1 and 2. helper.h has the same numbers.
const (
	entrySocket = iota + 3 // to sbxrun, which sends a pidfd of the room's PID 1
	entryGate              // a byte releases the payload; end-of-file makes it exit
	entryReady             // a byte reports that the room is built; end-of-file means that bwrap failed
	// An init made ahead has this instead of entryReady: a timerfd that ends it.
	entryTimer = entryReady
)

// Steps that sbxrun knows by name.
const (
	stepSetns   = "setns(2) on the pidfd of the room's PID 1 (Linux 5.8)"
	stepMask    = "hide a file of /proc, or make one read-only"
	stepWorkdir = "change to the working directory"
	stepExec    = "exec"

	// StepNetwork is the step of a [proc.StartError] if a network namespace cannot be made.
	StepNetwork = "make a network namespace"
	// StepUserns is the step of a [proc.StartError] if user namespaces cannot be switched off.
	StepUserns = "switch off user namespaces (user.max_user_namespaces)"

	// Steps of a [proc.StartError] about a [Mount].
	StepMount   = "mount in the room"
	StepSource  = "compare a bind with its source"
	StepOverlay = "mount an overlay"
	StepLayer   = "attach a layer of an overlay"
	StepXattr   = "set an attribute in the new layer of an overlay"
)

// Kinds of reports, in addition to package helper's.
const (
	reportSignaled  = helper.Others + iota // the signal was sent
	reportFurnished                        // the idle room is furnished
	reportLayer                            // descriptor of the new layer of an overlay
	reportSockets                          // descriptors of the requested sockets
)

// namespaces returns the namespaces of a room to join.
func namespaces(hostNet bool) int {
	const all = unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS
	if hostNet {
		return all &^ unix.CLONE_NEWNET // only its owner may join the host's
	}
	return all
}

// layStart lays out the start of the entering process. It receives descriptors, at most two: a pidfd of the room's PID 1,
// which sbxrun has verified, and a user namespace.
func layStart(s *helper.Script, descriptors int) {
	// The script may contain secrets, such as environment variables, and any process with this UID could otherwise attach
	// (ptrace(2)). The children inherit the flag. The keeper's own setting was reset by the change of UID.
	s.Do("make the entering process undumpable", unix.SYS_PRCTL, unix.PR_SET_DUMPABLE, 0)
	s.Do("receive a pidfd of the room", helper.Receive, entrySocket, descriptors, int(slotRoom))
}

// layInside continues in a process in the room's PID namespace.
func layInside(s *helper.Script) {
	s.Do("fork into the room", helper.Become, unix.CLONE_PARENT)
	// Another sbxrun may stop all processes in the room now (kill --signal STOP). Without this, a keeper killed after that
	// would leave this process behind.
	layDeath(s)
}

// layDeath makes the process die with the keeper.
func layDeath(s *helper.Script) {
	s.Do("die with the keeper", unix.SYS_PRCTL, unix.PR_SET_PDEATHSIG, int(unix.SIGKILL))
}

// spaces are the new namespaces of a command. Its own cgroup is the root of its cgroup namespace.
const spaces = unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP

// layCommand lays out, from inside on, init and the payload of a command.
func (e *Entry) layCommand(s *helper.Script) {
	s.Do("make a PID namespace in the room", helper.Become, unix.CLONE_PARENT|spaces)
	// sbxrun would find this process in the keeper's session, but may be dead, too. If both died before this line, the gate
	// and the socket are closed, and the payload and init exit.
	layDeath(s)
	layName(s, initName)
	// This is the /proc of the sandbox, to which init belongs. The rest runs while sbxrun verifies this process.
	const step = "stat /proc/self/ns/pid"
	status := s.Space(statxSize)
	s.Do(step, unix.SYS_STATX, unix.AT_FDCWD, "/proc/self/ns/pid", 0, unix.STATX_INO, status)
	s.Add(step, slotPID, unix.SYS_GETPID)
	s.Do("report", helper.ReportReady, status, slotPID, 0, 0)
	s.Do("make mounts private", unix.SYS_MOUNT, 0, "/", 0, unix.MS_REC|unix.MS_PRIVATE, 0)
	layProc(s)
	s.Do("close descriptors", unix.SYS_CLOSE_RANGE, entryReady, proc.MaxFD, 0)
	layNoGain(s)
	layNoCapabilities(s)
	payload := layPayload(s)
	layReaping(s, -1)

	s.Begin(payload)
	e.layLimits(s) // before the release, because the kernel takes a tenth of a millisecond to compile the filter
	layFilter(s, e.Filter)
	e.layWorkdir(s)
	s.Do("wait for the release", helper.Await, entryGate)
	// After the release: init ends with this process and must live until sbxrun has identified it.
	s.Do(stepWorkdir, helper.Check, slotResult)
	e.layExec(s)
}

const (
	initName  = "sbxrun-init"
	makerName = "sbxrun-maker"
)

// layName sets the name for ps(1).
func layName(s *helper.Script, name string) {
	s.Do("take a name", unix.SYS_PRCTL, unix.PR_SET_NAME, name)
}

// layProc mounts a command's own /proc and hides parts of it.
func layProc(s *helper.Script) {
	s.Do("mount /proc", unix.SYS_MOUNT, "proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, 0)
	// Names and owners of the keys that the payload's uid may see (keyrings(7)), and the file locks of the whole machine. A
	// bind of kmsg covers them; it has mode 0400, belongs to the host's root and needs CAP_SYSLOG. Unlike /dev/null, a source
	// in the new /proc cannot be replaced by another command of the sandbox.
	for _, name := range []string{"/proc/keys", "/proc/key-users", "/proc/locks"} {
		s.Do(stepMask, unix.SYS_FACCESSAT, unix.AT_FDCWD, name, unix.F_OK)
		s.Allow(1, unix.ENOENT) // a kernel without keyrings has nothing to hide
		s.Do(stepMask, unix.SYS_MOUNT, "/proc/kmsg", name, 0, unix.MS_BIND, 0)
	}
	// Otherwise a command could change the sysctls of its IPC namespace, because they belong to uid 0 of the user namespace
	// that bwrap makes first, which outside is the payload's uid. With kernel.sem raised, an operation on an array of
	// semaphores keeps a CPU of the host in the kernel for seconds.
	//
	// The kernel waits for an RCU grace period at each close of a trigger in /proc/pressure (Linux 6.5), so a killed command
	// with thousands of them would end after minutes.
	for _, name := range []string{"/proc/sys", "/proc/pressure"} {
		s.Do(stepMask, unix.SYS_MOUNT, name, name, 0, unix.MS_BIND, 0)
		s.Allow(1, unix.ENOENT) // a kernel without it
		s.Do(stepMask, unix.SYS_MOUNT, 0, name, 0, unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, 0)
	}
	s.Do("show the room's /proc/meminfo", unix.SYS_MOUNT, MeminfoCopy, "/proc/meminfo", 0, unix.MS_BIND, 0)
	s.Allow(0, helper.AnyError) // it does not exist, or a payload that can write to /run has replaced it with a broken link
}

// layNoGain permanently prevents an exec from gaining privileges.
func layNoGain(s *helper.Script) {
	const highest = 63
	s.Do("set no_new_privs", unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
	for c := range highest + 1 {
		s.Do("drop the capability bounding set", unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, c, 0, 0, 0)
		if c > unix.CAP_AUDIT_READ {
			s.Allow(highest-c, unix.EINVAL) // beyond the kernel's last capability
		}
	}
}

func layNoCapabilities(s *helper.Script) {
	const step = "drop capabilities"
	s.Do(step, unix.SYS_PRCTL, unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
	s.Do(step, unix.SYS_CAPSET, s.Words(unix.LINUX_CAPABILITY_VERSION_3), s.Space(24))
}

// layPayload lays out the last preparations of init and the fork of the payload. They come before the fork, because a
// failure ends init and so the payload.
func layPayload(s *helper.Script) (child int) {
	const step = "set up signals" // all stay blocked: init learns everything from descriptors
	s.Add(step, slotSignals, unix.SYS_SIGNALFD4, -1, s.Words(1<<(unix.SIGCHLD-1)), 8, unix.SFD_NONBLOCK|unix.SFD_CLOEXEC)
	return s.Fork("fork the payload", slotPayload, 0)
}

// layReaping closes init's copies of the payload's descriptors, without which readers of the payload's output would not
// see its end, and makes it reap.
func layReaping(s *helper.Script, timer int) {
	s.Do("close descriptors", unix.SYS_CLOSE_RANGE, 0, entrySocket-1, 0)
	s.Do("close descriptors", unix.SYS_CLOSE, entryGate)
	s.Do("reap", helper.Init, slotSignals, slotPayload, timer)
}

// layLimits sets the resource limits of the command. It gives up the caller's real-time scheduling (sched(7)), with which
// the command would starve sbxrun.
func (e *Entry) layLimits(s *helper.Script) {
	policy, _, errno := unix.Syscall(unix.SYS_SCHED_GETSCHEDULER, 0, 0, 0)
	if policy &^= unix.SCHED_RESET_ON_FORK; errno == 0 && (policy == unix.SCHED_FIFO || policy == unix.SCHED_RR) {
		s.Do("give up real-time scheduling", unix.SYS_SCHED_SETSCHEDULER, 0, unix.SCHED_NORMAL, s.Words(0))
	}
	for _, l := range append(keptBack(e.Bounds.Rlimits), e.Bounds.Rlimits...) {
		s.Do("set resource limits", unix.SYS_PRLIMIT64, 0, l.Resource, s.Words(l.Value, l.Value), 0)
	}
}

// layFilter loads the filter for system calls.
func layFilter(s *helper.Script, f seccomp.Filter) {
	program := f.Program()
	if len(program) == 0 {
		return
	}
	size := int(unsafe.Sizeof(program[0]))
	text := unsafe.Slice((*byte)(unsafe.Pointer(&program[0])), size*len(program))
	p := s.Words(uint64(len(program)), 0) // struct sock_fprog
	s.Pointer(p+8, s.Data(text))
	s.Do("load the filter for system calls", unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, p)
}

// layWorkdir sets the session, the terminal and the working directory. slotResult is the result of the change of directory.
func (e *Entry) layWorkdir(s *helper.Script) {
	s.Do("make a session", unix.SYS_SETSID)
	if e.Terminal {
		s.Do("take the terminal", unix.SYS_IOCTL, 0, unix.TIOCSCTTY, 0)
	}
	s.Add(stepWorkdir, slotResult, unix.SYS_CHDIR, e.Workdir)
	s.Allow(0, helper.AnyError)
}

// layExec executes the command. Only a successful exec closes the gate, which confirms it.
func (e *Entry) layExec(s *helper.Script) {
	s.Do("set up signals", unix.SYS_RT_SIGPROCMASK, proc.SigSetmask, s.Words(0), 0, 8) // until here nothing but SIGKILL can end the process
	s.Do(stepExec, helper.Exec, s.Texts(e.candidates()), s.Texts(e.Command), s.Texts(e.Env))
}
