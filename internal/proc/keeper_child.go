package proc

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// This file is what the keeper forks, until it executes bwrap or enters a room. It
// shares the keeper's memory, and has a part of it for itself.

// The steps that can fail after the fork. They are numbers there, because a
// bare fork cannot allocate.
const (
	stepSubreaper = iota + 1
	stepSession
	stepHide
	stepName
	stepSignals
	stepChildren
	stepFork
	stepCgroup
	stepNice
	stepOOM
	stepFiles
	stepStage
	stepGroups
	stepGID
	stepUID
	stepParent
	stepExec
)

var stepNames = [...]string{
	stepSubreaper: "become a subreaper",
	stepSession:   "make a session",
	stepHide:      "become undumpable",
	stepName:      "take a name",
	stepSignals:   "set up signals",
	stepChildren:  "open /proc/thread-self/children (CONFIG_PROC_CHILDREN)",
	stepFork:      "fork",
	stepCgroup:    "join the cgroup",
	stepNice:      "set the niceness",
	stepOOM:       "set oom_score_adj",
	stepFiles:     "hand over descriptors",
	stepStage:     "bind root's own paths",
	stepGroups:    "drop supplementary groups",
	stepGID:       "change group id",
	stepUID:       "change user id",
	stepParent:    "tie it to the keeper",
	stepExec:      "exec bwrap",
}

// child is what one process that the keeper forks needs.
type child struct {
	teller
	keeper *keeperState
	stack  uintptr
	// sharing is CLONE_VM, or 0 for a copy of the memory.
	sharing uintptr
	files   []int
	become  bool // take on cred
	cred    Cred
	sigs    uint64
	core    unix.Rlimit
	slots   []*int    // where the descriptors are that come later
	birth   cloneArgs // into a v2 cgroup, if that has flags
	bounds  bounds

	// A program:
	path, argv, envv unsafe.Pointer
	stage            []staged

	// Or a way into a room:
	enter func(unsafe.Pointer)
	arg   unsafe.Pointer
}

// staged is one bind of [Program.Stage].
type staged struct {
	source uintptr
	target *byte
	dir    bool
}

// cloneArgs is struct clone_args (clone(2), clone3).
type cloneArgs struct {
	flags, pidfd, childTID, parentTID, exitSignal, stack, stackSize, tls, setTID, setTIDSize, cgroup uint64
}

var (
	empty     [1]byte
	stageDir  = [...]byte{'/', 't', 'm', 'p', 0}
	stageMode = [...]byte{'m', 'o', 'd', 'e', '=', '0', '7', '5', '5', ',', 's', 'i', 'z', 'e', '=', '1', 'm', 0}
	oomFile   = [...]byte{'/', 'p', 'r', 'o', 'c', '/', 's', 'e', 'l', 'f', '/', 'o', 'o', 'm', '_', 's', 'c', 'o', 'r', 'e', '_', 'a', 'd', 'j', 0}

	execCode  = Code(startExec)
	enterCode = Code(startEnter)
)

// spawn forks c: into its v2 cgroup, if it has one (clone3(2), CLONE_INTO_CGROUP,
// Linux 5.7). Where that is not known or not allowed - container engines filter
// clone3 - it goes there by itself.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (k *keeperState) spawn(c *child, code uintptr) uintptr {
	if c.birth.flags != 0 {
		c.birth.cgroup = uint64(c.bounds.cgroup)
		pid, errno := failed(cloneCall(unix.SYS_CLONE3, uintptr(unsafe.Pointer(&c.birth)), unsafe.Sizeof(c.birth), 0, 0, 0, code, unsafe.Pointer(c)))
		if errno == 0 {
			return pid
		}
		if errno == unix.EAGAIN || errno == unix.ENOMEM {
			k.fail(stepFork, errno)
		}
		c.birth.flags = 0
	}
	pid, errno := failed(cloneCall(unix.SYS_CLONE, c.sharing|uintptr(unix.SIGCHLD), c.stack, 0, 0, 0, code, unsafe.Pointer(c)))
	if errno != 0 {
		k.fail(stepFork, errno)
	}
	return pid
}

// startExec becomes the program.
//
//go:nosplit
//go:norace
//go:nocheckptr
func startExec(p unsafe.Pointer) {
	c := (*child)(p)
	c.bindStage()
	c.takeFiles()
	c.takeIdentity()
	c.must(stepExec, unix.SYS_EXECVE, uintptr(c.path), uintptr(c.argv), uintptr(c.envv), 0, 0)
}

// startEnter enters a room.
//
//go:nosplit
//go:norace
//go:nocheckptr
func startEnter(p unsafe.Pointer) {
	c := (*child)(p)
	c.takeBounds()
	c.takeFiles()
	c.takeIdentity()
	c.enter(c.arg)
}

// bindStage makes [Program.Stage] visible below StageDir. move_mount(2) takes what a
// descriptor stands for: a path may have come to mean something else, and mount(2)
// refuses a descriptor that was opened in another mount namespace.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (c *child) bindStage() {
	if len(c.stage) == 0 {
		return
	}
	stage := c.stage
	here, none := uintptr(AtCWD), uintptr(unsafe.Pointer(&empty))
	c.must(stepStage, unix.SYS_UNSHARE, unix.CLONE_NEWNS, 0, 0, 0, 0)
	// Slave: nothing mounted here shows on the host (mount_namespaces(7)).
	c.must(stepStage, unix.SYS_MOUNT, 0, uintptr(unsafe.Pointer(&Root)), 0, unix.MS_SLAVE|unix.MS_REC, 0)
	c.must(stepStage, unix.SYS_MOUNT, uintptr(unsafe.Pointer(&Tmpfs)), uintptr(unsafe.Pointer(&stageDir)), uintptr(unsafe.Pointer(&Tmpfs)),
		unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, uintptr(unsafe.Pointer(&stageMode)))
	for i := range stage {
		target := uintptr(unsafe.Pointer(stage[i].target))
		if stage[i].dir {
			c.must(stepStage, unix.SYS_MKDIRAT, here, target, 0o755, 0, 0)
		} else {
			c.must(stepStage, unix.SYS_MKNODAT, here, target, unix.S_IFREG|0o644, 0, 0)
		}
		c.must(stepStage, unix.SYS_MOVE_MOUNT, stage[i].source, none, here, target, unix.MOVE_MOUNT_F_EMPTY_PATH)
	}
}

// takeBounds joins the cgroups and takes on what is inherited, while the process is
// still who sbxrun is.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (c *child) takeBounds() {
	b := &c.bounds
	tasks := b.tasks
	for i := range tasks {
		c.must(stepCgroup, unix.SYS_WRITE, uintptr(tasks[i]), uintptr(unsafe.Pointer(&self)), 1, 0, 0)
	}
	if b.procs >= 0 && c.birth.flags == 0 { // or it was born there
		c.must(stepCgroup, unix.SYS_WRITE, uintptr(b.procs), uintptr(unsafe.Pointer(&self)), 1, 0, 0)
	}
	if b.setNice {
		c.must(stepNice, unix.SYS_SETPRIORITY, unix.PRIO_PROCESS, 0, uintptr(b.nice), 0, 0)
	}
	if b.oom != nil {
		fd := c.must(stepOOM, unix.SYS_OPENAT, uintptr(AtCWD), uintptr(unsafe.Pointer(&oomFile)), unix.O_WRONLY|unix.O_CLOEXEC, 0, 0)
		c.must(stepOOM, unix.SYS_WRITE, fd, uintptr(b.oom), uintptr(b.oomSize), 0, 0)
	}
	if b.setCPUs {
		// So that nproc(1) fits. It is no limit, a program can undo it; the quota is.
		syscall.RawSyscall(unix.SYS_SCHED_SETAFFINITY, 0, unsafe.Sizeof(b.cpus), uintptr(unsafe.Pointer(&b.cpus)))
	}
}

// self means the writer in a cgroup's list of tasks (cgroups(7)).
var self = [1]byte{'0'}

// takeFiles moves the command's descriptors to 0, 1, 2 …, the keeper's socket
// behind them, closed by a successful exec, and closes all others.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (c *child) takeFiles() {
	files := c.files
	n := uintptr(len(files))
	// First all up, out of the way, then down to their places.
	free := n + 1
	c.socket = int(c.must(stepFiles, unix.SYS_FCNTL, uintptr(c.socket), unix.F_DUPFD_CLOEXEC, free, 0, 0))
	for i := range files {
		if uintptr(files[i]) < free { // in the way, or about to be overwritten
			files[i] = int(c.must(stepFiles, unix.SYS_FCNTL, uintptr(files[i]), unix.F_DUPFD_CLOEXEC, free, 0, 0))
		}
	}
	for i := range files {
		flags := uintptr(0)
		if c.enter != nil && i > 2 {
			flags = unix.O_CLOEXEC // only the way's own
		}
		c.must(stepFiles, unix.SYS_DUP3, uintptr(files[i]), uintptr(i), flags, 0, 0)
	}
	c.must(stepFiles, unix.SYS_DUP3, uintptr(c.socket), n, unix.O_CLOEXEC, 0, 0)
	c.socket = int(n)
	c.must(stepFiles, unix.SYS_CLOSE_RANGE, free, MaxFD, 0, 0, 0)
}

// takeIdentity becomes who the sandbox runs as, dies with the keeper from here on,
// and takes signals again.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (c *child) takeIdentity() {
	// An error means that the hard limit is 0, which only CAP_SYS_RESOURCE may raise: core dumps are off.
	syscall.RawSyscall6(unix.SYS_PRLIMIT64, 0, unix.RLIMIT_CORE, uintptr(unsafe.Pointer(&c.core)), 0, 0, 0)
	if c.become {
		gid, uid := uintptr(c.cred.GID), uintptr(c.cred.UID)
		c.must(stepGroups, unix.SYS_SETGROUPS, 0, 0, 0, 0, 0)
		c.must(stepGID, unix.SYS_SETRESGID, gid, gid, gid, 0, 0)
		c.must(stepUID, unix.SYS_SETRESUID, uid, uid, uid, 0, 0)
	}
	// After the change of uid, which clears it (prctl(2)). The keeper is
	// single-threaded, so "the thread that forked" is the keeper itself.
	c.must(stepParent, unix.SYS_PRCTL, unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0)
	// The keeper may have died before the line above could notice.
	if c.must(stepParent, unix.SYS_GETPPID, 0, 0, 0, 0, 0) != c.keeper.pid {
		c.fail(stepParent, unix.ESRCH)
	}
	if c.enter == nil {
		c.must(stepSignals, unix.SYS_RT_SIGPROCMASK, SigSetmask, uintptr(unsafe.Pointer(&c.sigs)), 0, 8, 0)
	}
}

// teller tells sbxrun, by the keeper's socket, what has become of the keeper or a child
// of it.
type teller struct {
	socket int
	rec    record
}

// must makes a system call, and does not come back if it fails.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (t *teller) must(step int64, call, a1, a2, a3, a4, a5 uintptr) uintptr {
	r, _, errno := syscall.RawSyscall6(call, a1, a2, a3, a4, a5, 0)
	if errno != 0 {
		t.fail(step, errno)
	}
	return r
}

// fail tells which step failed, and ends the process; what the keeper has dies with it.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (t *teller) fail(step int64, errno syscall.Errno) {
	t.rec.kind, t.rec.step, t.rec.errno = recordFailed, step, int64(errno)
	t.say()
	Exit(125)
}

// say sends the record.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (t *teller) say() {
	// Nothing can be done about an error: sbxrun is dead.
	syscall.RawSyscall(unix.SYS_WRITE, uintptr(t.socket), uintptr(unsafe.Pointer(&t.rec)), unsafe.Sizeof(t.rec))
}
