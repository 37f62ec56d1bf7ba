package proc

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Command is what the keeper execs as its only child.
type Command struct {
	Path string   // absolute
	Args []string // with argv[0]
	Env  []string
	// Files become descriptors 0, 1, 2 … of the command; it gets no other.
	// They stay the caller's.
	Files []*os.File
	// UID and GID are taken on, and all supplementary groups dropped, before
	// the exec. Only root can ask for them; nil leaves the identity alone.
	Cred *Cred
	// Stage are files and directories that only root can reach: the i-th is
	// bound to StageDir/i, in a mount namespace that only the command sees,
	// before Cred is taken on. They stay the caller's (O_PATH is enough).
	Stage []*os.File
	// Terminal, if not nil, is the caller's terminal in raw mode: the keeper
	// puts it back to Restore when sbxrun is killed and cannot do so itself.
	Terminal *os.File
	Restore  *unix.Termios
}

// StageDir is where Stage appears. It hides what is there on the host, and is
// the one directory that bwrap needs to exist anyway.
const StageDir = "/tmp"

// Cred is the identity a command runs under.
type Cred struct{ UID, GID uint32 }

// Usage is what the sandbox used: what was reaped of it, so not what was still
// running when init was killed (the kernel discards the times of children that
// nobody waits for: wait(2), zap_pid_ns_processes).
type Usage struct {
	User, System time.Duration
	MaxRSS       int64 // bytes, of the largest process
}

// End is how the keeper's children ended.
type End struct {
	Usage
	Monitor unix.WaitStatus // of bwrap's outer process
	Init    unix.WaitStatus // of the last one reparented to the keeper: init
}

// A StartError names the step in the keeper, or between its fork and the exec
// of bwrap, that failed. Nothing of the sandbox exists then.
type StartError struct {
	Step string
	Err  error
}

func (e *StartError) Error() string { return e.Step + ": " + e.Err.Error() }
func (e *StartError) Unwrap() error { return e.Err }

// Keeper is the running keeper, seen from sbxrun.
type Keeper struct {
	Process
	report   *os.File // the keeper's records
	lifeline *os.File // its end lets the keeper kill what it has
}

// The steps that can fail after the fork. They are numbers there, because a
// bare fork cannot allocate.
const (
	stepSubreaper = iota + 1
	stepSession
	stepSignals
	stepChildren
	stepFork
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
	stepSubreaper: "become a subreaper",
	stepSession:   "make a session",
	stepSignals:   "set up signals",
	stepChildren:  "open /proc/thread-self/children (CONFIG_PROC_CHILDREN)",
	stepFork:      "fork",
	stepFiles:     "hand over descriptors",
	stepLimits:    "switch core dumps off",
	stepStage:     "bind what only root can reach",
	stepGroups:    "drop supplementary groups",
	stepGID:       "change group id",
	stepUID:       "change user id",
	stepParent:    "tie bwrap to the keeper",
	stepExec:      "exec bwrap",
}

// record is what the keeper writes to its report pipe: one when a step failed,
// one when all is reaped. Smaller than PIPE_BUF, so it arrives whole (pipe(7)).
type record struct {
	kind   int64 // recordFailed, recordEmpty
	step   int64 // recordFailed: the step, or …
	errno  int64
	user   int64 // recordEmpty: µs
	system int64 // µs
	maxrss int64 // KiB
	// recordEmpty: wait statuses, of bwrap's monitor and of init.
	monitor, init int64
}

const (
	recordFailed = 1
	recordEmpty  = 2
)

// Descriptors of the keeper, after it has closed all others.
const (
	keeperLifeline = iota // read end of the lifeline
	keeperReport          // write end of the report pipe
	keeperChildren        // /proc/thread-self/children
	keeperSignals         // signalfd for SIGCHLD
	keeperTerminal        // the terminal to restore, if any
	keeperFiles           // how many there are
)

// keeperState is everything the keeper needs, laid out before the fork.
type keeperState struct {
	pidfd    int32 // of the keeper, for the parent
	pid      uintptr
	command  uintptr // pid of bwrap
	rec      record
	usage    unix.Rusage
	status   int32
	poll     [2]unix.PollFd
	sigs     uint64
	buf      [512]byte
	noAction [4]uintptr // struct kernel_sigaction: SIG_DFL
	core     unix.Rlimit
	name     [16]byte
	children [32]byte

	lifeline, report, terminal int
	restore                    unix.Termios
	path                       *byte
	argv, envv                 **byte
	files                      []int
	cred                       *Cred
	stage                      []staged
}

// staged is one bind of [Command.Stage].
type staged struct {
	source uintptr // descriptor
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

// Keep forks the keeper, which starts c as its child, and returns at once: that
// the command was really executed shows in what it does; [Keeper.StartError]
// tells why it was not. The caller owns the Keeper and must [Keeper.Reap] it.
func Keep(c Command) (*Keeper, error) {
	path, err := syscall.BytePtrFromString(c.Path)
	if err != nil {
		return nil, fmt.Errorf("path of %q: %w", c.Path, err)
	}
	argv, err := syscall.SlicePtrFromStrings(c.Args)
	if err != nil {
		return nil, fmt.Errorf("arguments of %q: %w", c.Path, err)
	}
	envv, err := syscall.SlicePtrFromStrings(c.Env)
	if err != nil {
		return nil, fmt.Errorf("environment of %q: %w", c.Path, err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer w.Close()
	// Not a pidfd of sbxrun but a pipe, of which only sbxrun has the other end:
	// it closes with sbxrun's death, and sbxrun can close it before.
	lifelineEnd, lifeline, err := os.Pipe()
	if err != nil {
		r.Close()
		return nil, err
	}
	defer lifelineEnd.Close()

	k := &keeperState{
		pidfd:    -1,
		lifeline: Descriptor(lifelineEnd),
		report:   Descriptor(w),
		terminal: -1,
		path:     path,
		argv:     &argv[0],
		envv:     &envv[0],
		cred:     c.Cred,
		// Not 0: a core_pattern that is a pipe is fed whatever the limit, except
		// at 1 (core(5), fs/coredump.c); for files 1 is below any core's size.
		core: unix.Rlimit{Cur: 1, Max: 1},
	}
	copy(k.name[:], "sbxrun-keeper")
	copy(k.children[:], "/proc/thread-self/children")
	for _, f := range c.Files {
		k.files = append(k.files, Descriptor(f))
	}
	for i, f := range c.Stage {
		st, err := f.Stat()
		if err != nil {
			return nil, err
		}
		target, err := syscall.BytePtrFromString(fmt.Sprintf("%s/%d", StageDir, i))
		if err != nil {
			return nil, err
		}
		k.stage = append(k.stage, staged{uintptr(Descriptor(f)), target, st.IsDir()})
	}
	if c.Terminal != nil && c.Restore != nil {
		k.terminal, k.restore = Descriptor(c.Terminal), *c.Restore
	}

	// PR_SET_CHILD_SUBREAPER for sbxrun as well: should somebody kill the
	// keeper, what it had comes to us and not to a PID 1 that may not reap.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("become a subreaper (Linux 3.4): %w", err)
	}
	pid, errno := k.fork()
	runtime.KeepAlive(c)
	if errno != 0 {
		r.Close()
		lifeline.Close()
		return nil, &StartError{Step: "fork the keeper", Err: errno}
	}
	return &Keeper{Process: newProcess(int(pid), int(k.pidfd)), report: r, lifeline: lifeline}, nil
}

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

// run is the life of the keeper.
//
//go:nosplit
//go:norace
func (k *keeperState) run() {
	k.pid, _, _ = syscall.RawSyscall(unix.SYS_GETPID, 0, 0, 0)
	// Every signal is blocked for good: nobody but SIGKILL can end the keeper
	// before its work is done.
	k.sigs = ^uint64(0)
	k.check(stepSignals, k.sigmask())
	k.check(stepSubreaper, k.prctl(unix.PR_SET_CHILD_SUBREAPER, 1))
	// A session of its own: neither the caller's Ctrl-C nor its kill(0, …)
	// reaches the keeper, and its kill never reaches the caller's group.
	_, _, e := syscall.RawSyscall(unix.SYS_SETSID, 0, 0, 0)
	k.check(stepSession, e)
	k.prctl(unix.PR_SET_NAME, uintptr(unsafe.Pointer(&k.name))) // for ps(1) only

	// The thread's own list of children, opened while failing is still free.
	at := unix.AT_FDCWD
	children, _, e := syscall.RawSyscall6(unix.SYS_OPENAT, uintptr(at), uintptr(unsafe.Pointer(&k.children)), unix.O_RDONLY|unix.O_CLOEXEC, 0, 0, 0)
	k.check(stepChildren, e)
	k.sigs = 1 << (unix.SIGCHLD - 1)
	signals, _, e := syscall.RawSyscall6(unix.SYS_SIGNALFD4, ^uintptr(0), uintptr(unsafe.Pointer(&k.sigs)), 8, unix.SFD_NONBLOCK|unix.SFD_CLOEXEC, 0, 0)
	k.check(stepSignals, e)

	k.command, _, e = syscall.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	k.check(stepFork, e)
	if k.command == 0 {
		k.exec()
	}
	// Hold nothing but what is polled: otherwise the keeper keeps the caller's
	// pipes open, and other keepers' descriptors alive.
	k.files = k.files[:0]
	k.lift(&k.lifeline, keeperFiles)
	k.lift(&k.report, keeperFiles)
	k.liftRaw(&children, keeperFiles)
	k.liftRaw(&signals, keeperFiles)
	k.move(uintptr(k.lifeline), keeperLifeline)
	k.move(uintptr(k.report), keeperReport)
	if k.terminal >= 0 {
		k.lift(&k.terminal, keeperFiles)
		k.move(uintptr(k.terminal), keeperTerminal)
	} else {
		syscall.RawSyscall(unix.SYS_CLOSE, keeperTerminal, 0, 0)
	}
	k.move(children, keeperChildren)
	k.move(signals, keeperSignals)
	syscall.RawSyscall(unix.SYS_CLOSE_RANGE, keeperFiles, uintptr(maxFD), 0)
	k.report = keeperReport

	orphaned := false
	for {
		k.reap()
		if orphaned {
			k.killChildren()
		}
		k.wait(&orphaned)
	}
}

// reap collects whatever has ended; with nothing left at all it reports so and
// ends the keeper. In a loop, because SIGCHLD coalesces (signal(7)).
//
//go:nosplit
//go:norace
func (k *keeperState) reap() {
	for {
		pid, _, e := syscall.RawSyscall6(unix.SYS_WAIT4, ^uintptr(0), uintptr(unsafe.Pointer(&k.status)), unix.WNOHANG, uintptr(unsafe.Pointer(&k.usage)), 0, 0)
		if e == unix.EINTR {
			continue
		}
		if e == unix.ECHILD {
			k.rec.kind = recordEmpty
			k.write()
			Exit(0)
		}
		if e != 0 || pid == 0 {
			return
		}
		if pid == k.command {
			// bwrap's monitor. Its usage does not count: until its exec it was
			// a copy of sbxrun.
			k.rec.monitor = int64(k.status)
			continue
		}
		k.rec.init = int64(k.status)
		k.rec.user += k.usage.Utime.Sec*1e6 + int64(k.usage.Utime.Usec)
		k.rec.system += k.usage.Stime.Sec*1e6 + int64(k.usage.Stime.Usec)
		if k.usage.Maxrss > k.rec.maxrss {
			k.rec.maxrss = k.usage.Maxrss
		}
	}
}

// wait blocks until the lifeline has ended or a child has.
//
//go:nosplit
//go:norace
func (k *keeperState) wait(orphaned *bool) {
	k.poll[0] = unix.PollFd{Fd: keeperSignals, Events: unix.POLLIN}
	k.poll[1] = unix.PollFd{Fd: keeperLifeline, Events: unix.POLLIN}
	n := uintptr(2)
	if *orphaned {
		n = 1
	}
	syscall.RawSyscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(&k.poll)), n, 0, 0, 0, 0)
	if !*orphaned && k.poll[1].Revents != 0 {
		*orphaned = true
		if k.terminal >= 0 {
			// Harmless if sbxrun lives and has done it already. TCSETS from outside the terminal's session is not stopped by job
			// control: the keeper has no controlling terminal (tty_ioctl(4)).
			syscall.RawSyscall(unix.SYS_IOCTL, keeperTerminal, unix.TCSETS, uintptr(unsafe.Pointer(&k.restore)))
		}
	}
	syscall.RawSyscall(unix.SYS_READ, keeperSignals, uintptr(unsafe.Pointer(&k.buf)), uintptr(len(k.buf)))
}

// killChildren sends SIGKILL to every child there is now. Those that are
// reparented here when they die are found by the next call.
//
//go:nosplit
//go:norace
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

// exec is the child that becomes bwrap.
//
//go:nosplit
//go:norace
func (k *keeperState) exec() {
	// exec resets handlers to the default but lets SIG_IGN through, and a bwrap
	// that ignores SIGCHLD hangs for ever (bubblewrap before 0.11.1).
	for sig := uintptr(1); sig <= 64; sig++ {
		if sig != uintptr(unix.SIGKILL) && sig != uintptr(unix.SIGSTOP) {
			syscall.RawSyscall6(unix.SYS_RT_SIGACTION, sig, uintptr(unsafe.Pointer(&k.noAction)), 0, 8, 0, 0)
		}
	}
	if len(k.stage) > 0 {
		k.bindStage()
	}
	// First all descriptors up, out of the way, then down to their places.
	n := len(k.files)
	k.lift(&k.report, n+1)
	for i := range k.files {
		k.lift(&k.files[i], n+1)
	}
	for i := range k.files {
		k.move(uintptr(k.files[i]), uintptr(i))
	}
	_, _, e := syscall.RawSyscall(unix.SYS_DUP3, uintptr(k.report), uintptr(n), unix.O_CLOEXEC)
	k.check(stepFiles, e)
	k.report = n
	_, _, e = syscall.RawSyscall(unix.SYS_CLOSE_RANGE, uintptr(n+1), uintptr(maxFD), 0)
	k.check(stepFiles, e)
	_, _, e = syscall.RawSyscall6(unix.SYS_PRLIMIT64, 0, unix.RLIMIT_CORE, uintptr(unsafe.Pointer(&k.core)), 0, 0, 0)
	k.check(stepLimits, e)
	if k.cred != nil {
		_, _, e = syscall.RawSyscall(unix.SYS_SETGROUPS, 0, 0, 0)
		k.check(stepGroups, e)
		gid, uid := uintptr(k.cred.GID), uintptr(k.cred.UID)
		_, _, e = syscall.RawSyscall(unix.SYS_SETRESGID, gid, gid, gid)
		k.check(stepGID, e)
		_, _, e = syscall.RawSyscall(unix.SYS_SETRESUID, uid, uid, uid)
		k.check(stepUID, e)
	}
	// After the change of uid, which clears it (prctl(2)). The keeper is
	// single-threaded, so "the thread that forked" is the keeper itself.
	k.check(stepParent, k.prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL)))
	// The keeper may have died before the line above could notice.
	if parent, _, _ := syscall.RawSyscall(unix.SYS_GETPPID, 0, 0, 0); parent != k.pid {
		k.check(stepParent, unix.ESRCH)
	}
	k.sigs = 0
	k.check(stepSignals, k.sigmask())
	_, _, e = syscall.RawSyscall(unix.SYS_EXECVE, uintptr(unsafe.Pointer(k.path)), uintptr(unsafe.Pointer(k.argv)), uintptr(unsafe.Pointer(k.envv)))
	k.check(stepExec, e)
}

// bindStage makes [Command.Stage] visible below StageDir. The new mount API
// (open_tree(2), move_mount(2), Linux 5.2) takes what a descriptor stands for:
// a path may have come to mean something else, and mount(2) refuses a
// descriptor that was opened in another mount namespace.
//
//go:nosplit
//go:norace
func (k *keeperState) bindStage() {
	at := unix.AT_FDCWD
	for i := range k.stage {
		s := &k.stage[i]
		tree, _, e := syscall.RawSyscall(unix.SYS_OPEN_TREE, s.source, uintptr(unsafe.Pointer(&empty)), unix.AT_EMPTY_PATH|unix.AT_RECURSIVE|unix.OPEN_TREE_CLONE)
		k.check(stepStage, e)
		s.source = tree
	}
	_, _, e := syscall.RawSyscall(unix.SYS_UNSHARE, unix.CLONE_NEWNS, 0, 0)
	k.check(stepStage, e)
	// Slave: nothing mounted here shows on the host (mount_namespaces(7)).
	k.check(stepStage, k.mount(nil, &slash[0], nil, unix.MS_SLAVE|unix.MS_REC, nil))
	k.check(stepStage, k.mount(&stageType[0], &stageDir[0], &stageType[0], unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, &stageMode[0]))
	for i := range k.stage {
		s := &k.stage[i]
		if s.dir {
			_, _, e = syscall.RawSyscall(unix.SYS_MKDIRAT, uintptr(at), uintptr(unsafe.Pointer(s.target)), 0o755)
		} else {
			_, _, e = syscall.RawSyscall6(unix.SYS_MKNODAT, uintptr(at), uintptr(unsafe.Pointer(s.target)), unix.S_IFREG|0o644, 0, 0, 0)
		}
		k.check(stepStage, e)
		_, _, e = syscall.RawSyscall6(unix.SYS_MOVE_MOUNT, s.source, uintptr(unsafe.Pointer(&empty)), uintptr(at), uintptr(unsafe.Pointer(s.target)), unix.MOVE_MOUNT_F_EMPTY_PATH, 0)
		k.check(stepStage, e)
	}
}

//go:nosplit
//go:norace
func (k *keeperState) mount(source, target, fstype *byte, flags uintptr, data *byte) syscall.Errno {
	_, _, e := syscall.RawSyscall6(unix.SYS_MOUNT, uintptr(unsafe.Pointer(source)), uintptr(unsafe.Pointer(target)), uintptr(unsafe.Pointer(fstype)), flags, uintptr(unsafe.Pointer(data)), 0)
	return e
}

// check reports a failed step and ends the process; 0 is no failure.
//
//go:nosplit
//go:norace
func (k *keeperState) check(step int64, e syscall.Errno) {
	if e == 0 {
		return
	}
	k.rec.kind, k.rec.step, k.rec.errno = recordFailed, step, int64(e)
	k.write()
	Exit(125)
}

//go:nosplit
//go:norace
func (k *keeperState) write() {
	// Nothing can be done about a failure: sbxrun is dead, or will miss the record.
	syscall.RawSyscall(unix.SYS_WRITE, uintptr(k.report), uintptr(unsafe.Pointer(&k.rec)), unsafe.Sizeof(k.rec))
}

//go:nosplit
//go:norace
func (k *keeperState) prctl(option, arg uintptr) syscall.Errno {
	_, _, e := syscall.RawSyscall6(unix.SYS_PRCTL, option, arg, 0, 0, 0, 0)
	return e
}

//go:nosplit
//go:norace
func (k *keeperState) sigmask() syscall.Errno {
	const sigSetmask = 2
	_, _, e := syscall.RawSyscall6(unix.SYS_RT_SIGPROCMASK, sigSetmask, uintptr(unsafe.Pointer(&k.sigs)), 0, 8, 0, 0)
	return e
}

// lift duplicates *fd to a number of at least low.
//
//go:nosplit
//go:norace
func (k *keeperState) lift(fd *int, low int) {
	r, _, e := syscall.RawSyscall(unix.SYS_FCNTL, uintptr(*fd), unix.F_DUPFD_CLOEXEC, uintptr(low))
	k.check(stepFiles, e)
	*fd = int(r)
}

//go:nosplit
//go:norace
func (k *keeperState) liftRaw(fd *uintptr, low int) {
	r, _, e := syscall.RawSyscall(unix.SYS_FCNTL, *fd, unix.F_DUPFD_CLOEXEC, uintptr(low))
	k.check(stepFiles, e)
	*fd = r
}

// move makes from also the descriptor to, without close-on-exec.
//
//go:nosplit
//go:norace
func (k *keeperState) move(from, to uintptr) {
	_, _, e := syscall.RawSyscall(unix.SYS_DUP3, from, to, 0)
	k.check(stepFiles, e)
}

// maxFD is the greatest descriptor close_range(2) accepts.
const maxFD = 1<<32 - 1

// StartError tells which step between the keeper's fork and the exec of its
// command failed, or nil if none did. It reads the keeper's report without
// blocking for longer than a failed start takes to arrive, so it belongs after
// the first sign that the command is not there.
func (k *Keeper) StartError(deadline time.Time) error {
	rec, err := k.read(deadline)
	if err != nil || rec.kind != recordFailed {
		return nil
	}
	step := "start"
	if rec.step > 0 && rec.step < int64(len(stepNames)) {
		step = stepNames[rec.step]
	}
	return &StartError{Step: step, Err: syscall.Errno(rec.errno)}
}

func (k *Keeper) read(deadline time.Time) (rec record, err error) {
	// A pipe takes deadlines; an error here shows in the read.
	_ = k.report.SetReadDeadline(deadline)
	buf := (*[unsafe.Sizeof(rec)]byte)(unsafe.Pointer(&rec))
	n, err := k.report.Read(buf[:])
	if err != nil {
		return record{}, err
	}
	if n != len(buf) {
		return record{}, errors.New("short record")
	}
	return rec, nil
}

// Kill lets the keeper kill whatever it still has; Reap tells when it has. It
// does not block, and may be called more than once.
func (k *Keeper) Kill() { k.lifeline.Close() }

func (k *Keeper) close() {
	k.lifeline.Close()
	k.report.Close()
	k.Close()
}

// ErrNotEmpty says that the keeper ended without having reaped all it had,
// which only somebody else's SIGKILL can bring about.
var ErrNotEmpty = errors.New("the keeper was killed before it had reaped the sandbox")

// Reap waits for the keeper's end, at most until deadline, and collects it.
// After a nil error all that the keeper ever had is dead and reaped.
// os.ErrDeadlineExceeded: the keeper still has children.
func (k *Keeper) Reap(deadline time.Time) (End, error) {
	if err := k.Wait(deadline); err != nil {
		return End{}, err
	}
	var ws unix.WaitStatus
	for {
		_, err := unix.Wait4(k.PID, &ws, 0, nil)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return End{}, fmt.Errorf("wait for the keeper: %w", err)
		}
		break
	}
	defer k.close()
	rec, err := k.read(time.Time{}) // its writers are dead: there is a record, or the end
	if err != nil || rec.kind != recordEmpty {
		return End{}, ErrNotEmpty
	}
	return End{
		Usage: Usage{
			User:   time.Duration(rec.user) * time.Microsecond,
			System: time.Duration(rec.system) * time.Microsecond,
			MaxRSS: rec.maxrss << 10,
		},
		Monitor: unix.WaitStatus(rec.monitor),
		Init:    unix.WaitStatus(rec.init),
	}, nil
}
