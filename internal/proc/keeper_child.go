package proc

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// This file runs in the keeper's children until they execute bwrap or enter a room. They share the keeper's memory, and
// each has its own part of it.

// The steps that can fail after the fork. They are numbers because a bare fork cannot allocate.
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
	stepGroups:    "set supplementary groups",
	stepGID:       "change group id",
	stepUID:       "change user id",
	stepParent:    "tie it to the keeper",
	stepExec:      "exec bwrap",
}

// child is the state of one child of the keeper.
type child struct {
	teller
	keeper *keeperState
	stack  uintptr
	// sharing is CLONE_VM, or 0 for a copy of the memory.
	sharing uintptr
	files   []int
	become  bool // take on cred
	cred    Cred
	groups  int // number of groups in cred
	sigs    uint64
	core    unix.Rlimit
	slots   []*int    // destinations of descriptors received later
	birth   cloneArgs // for a clone into a v2 cgroup; flags is 0 if there is no such cgroup
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

// spawn forks c, into its v2 cgroup if it has one (clone3(2), CLONE_INTO_CGROUP, Linux 5.7). If the kernel does not
// support clone3, or a container engine filters it, the child moves itself.
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

// bindStage attaches [Program.Stage] below StageDir. It uses move_mount(2) with descriptors because a path may lead to
// another file by now, and mount(2) rejects a descriptor that was opened in another mount namespace.
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
	// Slave: mounts made here do not propagate to the host (mount_namespaces(7)).
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

// takeBounds joins the cgroups and sets the inherited limits, while the process still has sbxrun's identity.
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
	if b.procs >= 0 && c.birth.flags == 0 { // otherwise it was created there
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
		// This makes nproc(1) match the limit. A program can undo it, but the quota enforces the limit.
		syscall.RawSyscall(unix.SYS_SCHED_SETAFFINITY, 0, unsafe.Sizeof(b.cpus), uintptr(unsafe.Pointer(&b.cpus)))
	}
}

// self, written to a cgroup's list of tasks, stands for the writing process (cgroups(7)).
var self = [1]byte{'0'}

// takeFiles moves the command's descriptors to 0, 1, 2 … and the keeper's socket, with close-on-exec, to the next number.
// It closes all others.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (c *child) takeFiles() {
	files := c.files
	n := uintptr(len(files))
	// First move all descriptors up, out of the way, then down to their numbers.
	free := n + 1
	c.socket = int(c.must(stepFiles, unix.SYS_FCNTL, uintptr(c.socket), unix.F_DUPFD_CLOEXEC, free, 0, 0))
	for i := range files {
		if uintptr(files[i]) < free { // its number is needed
			files[i] = int(c.must(stepFiles, unix.SYS_FCNTL, uintptr(files[i]), unix.F_DUPFD_CLOEXEC, free, 0, 0))
		}
	}
	for i := range files {
		flags := uintptr(0)
		if c.enter != nil && i > 2 {
			flags = unix.O_CLOEXEC // for the entering code only
		}
		c.must(stepFiles, unix.SYS_DUP3, uintptr(files[i]), uintptr(i), flags, 0, 0)
	}
	c.must(stepFiles, unix.SYS_DUP3, uintptr(c.socket), n, unix.O_CLOEXEC, 0, 0)
	c.socket = int(n)
	c.must(stepFiles, unix.SYS_CLOSE_RANGE, free, MaxFD, 0, 0, 0)
}

// takeIdentity changes to the sandbox's identity, ties the process to the keeper's life, and unblocks signals for a
// program.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (c *child) takeIdentity() {
	// An error means that the hard limit is 0, which only CAP_SYS_RESOURCE may raise: core dumps are off.
	syscall.RawSyscall6(unix.SYS_PRLIMIT64, 0, unix.RLIMIT_CORE, uintptr(unsafe.Pointer(&c.core)), 0, 0, 0)
	if c.become {
		gid, uid := uintptr(c.cred.GID), uintptr(c.cred.UID)
		c.must(stepGroups, unix.SYS_SETGROUPS, uintptr(c.groups), uintptr(unsafe.Pointer(&c.cred.Groups)), 0, 0, 0)
		c.must(stepGID, unix.SYS_SETRESGID, gid, gid, gid, 0, 0)
		c.must(stepUID, unix.SYS_SETRESUID, uid, uid, uid, 0, 0)
	}
	// Set the death signal after the change of UID, which clears it (prctl(2)). The keeper is single-threaded, so the
	// "thread that forked" is the keeper itself.
	c.must(stepParent, unix.SYS_PRCTL, unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0)
	// The keeper may have died before the line above.
	if c.must(stepParent, unix.SYS_GETPPID, 0, 0, 0, 0, 0) != c.keeper.pid {
		c.fail(stepParent, unix.ESRCH)
	}
	if c.enter == nil {
		c.must(stepSignals, unix.SYS_RT_SIGPROCMASK, SigSetmask, uintptr(unsafe.Pointer(&c.sigs)), 0, 8, 0)
	}
}

// teller sends records of the keeper or one of its children to sbxrun through the keeper's socket.
type teller struct {
	socket int
	rec    record
}

// must makes a system call. If it fails, must reports the step and exits.
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

// fail reports a failed step and exits. If it is the keeper that fails, its children die with it.
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
	// An error means that sbxrun is dead.
	syscall.RawSyscall(unix.SYS_WRITE, uintptr(t.socket), uintptr(unsafe.Pointer(&t.rec)), unsafe.Sizeof(t.rec))
}
