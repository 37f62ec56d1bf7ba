package proc

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Command describes the children of a keeper: bwrap, which builds a room, or code that enters a room, or first bwrap and
// then, by [Keeper.Enter], that code.
type Command struct {
	Program *Program
	Way     *Way
	// Cred is the identity of both. Only root can set it; nil keeps the identity.
	Cred *Cred
	// Terminals, at most [MaxTerminals], are restored by the keeper, mainly for when sbxrun is killed.
	Terminals []Terminal
	// Remove are cgroups that the keeper removes at its end, in this order, even if sbxrun is killed.
	Remove []string
	// Hold are files that the keeper keeps open until its end, with their locks.
	Hold []*os.File
	// Lasting is set if the Way makes one init after the other. The keeper reports the end of each at once, see
	// [Keeper.Reaped].
	Lasting bool
}

// Program is a program to execute.
type Program struct {
	Path string   // absolute
	Args []string // with argv[0]; the environment is empty
	// Files become descriptors 0, 1, 2 …; the program gets no others. They stay the
	// caller's.
	Files []*os.File
	// Stage are detached mounts (open_tree(2)). The i-th is attached at StageDir/i, in the program's own mount namespace
	// and before the change to Cred. The descriptors stay the caller's.
	Stage []*os.File
}

// Way is code that a keeper runs instead of a program.
type Way struct {
	// Lay lays out the argument of Enter in the block and returns it.
	Lay func(*Block) unsafe.Pointer
	// Enter is called after the child has applied all settings of the Command. It must be a declared function that follows
	// the rules of [bareFork] and never returns. The keeper's socket is still open, at the number after Files. All signals
	// are blocked.
	Enter func(unsafe.Pointer)
	// Files become descriptors 0, 1, 2 …, with close-on-exec from 3 on; they stay the caller's.
	Files []*os.File
	// Bounds apply from the start, except Rlimits, which are for a payload and ignored here.
	Bounds Bounds
}

// Bounds are the inherited limits of a command.
type Bounds struct {
	// The cgroups. The child is created in them or moves itself. A move by another process would take 3 to 15 ms if no
	// process was moved in the last tenth of a second: an RCU grace period, during which the kernel blocks all forks and
	// exits (cgroup_threadgroup_rwsem). A process with one thread that moves itself blocks no others.
	Tasks  []string // files named tasks, of v1
	V2     string   // directory; "" for none
	Remove []string // for [Command.Remove]

	Nice        *int
	OOMScoreAdj *int
	CPUs        *unix.CPUSet
	Rlimits     []Rlimit // soft and hard limits
}

// Rlimit is a resource limit (getrlimit(2)).
type Rlimit struct {
	Resource int
	Value    uint64
}

// Terminal is a terminal of the caller and the state to restore.
type Terminal struct {
	File  *os.File
	State unix.Termios
}

// Background reports whether sbxrun is in the background of the terminal, which then belongs to another job of the shell.
// It returns false if the terminal is not the controlling terminal of sbxrun's session.
func (t Terminal) Background() bool {
	group, err := unix.IoctlGetInt(Descriptor(t.File), unix.TIOCGPGRP)
	return err == nil && group != unix.Getpgrp()
}

// MaxTerminals is the maximum number of terminals: stdin, stdout and stderr.
const MaxTerminals = 3

// StageDir is where Stage is attached. It hides the host's directory, which bwrap itself requires to exist.
const StageDir = "/tmp"

// KeeperName is the process name of a keeper.
const KeeperName = "sbxrun-keeper"

// Cred is the identity of a command.
type Cred struct {
	UID, GID uint32
	Groups   Groups // supplementary groups
}

// Groups are IDs of groups. The first 0 ends them: no sandbox gets root's group.
type Groups [16]uint32

// Len returns the number of groups.
func (g *Groups) Len() int {
	if n := slices.Index(g[:], 0); n >= 0 {
		return n
	}
	return len(g)
}

// Usage is CPU time and memory that processes have used.
type Usage struct {
	User, System time.Duration
	MaxRSS       int64 // bytes, of the largest process
}

// Larger combines two measurements of the same processes: the one with more CPU time, and the larger memory.
func (u Usage) Larger(v Usage) Usage {
	if v.User+v.System > u.User+u.System {
		u.User, u.System = v.User, v.System
	}
	u.MaxRSS = max(u.MaxRSS, v.MaxRSS)
	return u
}

// End is a keeper's report of its end.
type End struct {
	// Late is set if the keeper killed all processes at its deadline because sbxrun had not.
	Late bool
	// Killed is set if the keeper was killed before it could report.
	Killed bool
	// Program is the program's wait status, nil if there was no program. A SIGKILL may be the keeper's own.
	Program *unix.WaitStatus
	reaped  []ended
}

// Usage returns the resource usage of a process and of the children that it had reaped. It excludes children that still
// ran when the process was killed: the kernel discards their times (wait(2), zap_pid_ns_processes). It is zero if the
// keeper has not reaped the process.
func (e End) Usage(pid int) (u Usage) {
	for _, r := range e.reaped {
		if r.pid == int64(pid) {
			u = Usage{User: time.Duration(r.user) * time.Microsecond, System: time.Duration(r.system) * time.Microsecond, MaxRSS: r.maxrss << 10}
		}
	}
	return u
}

// A StartError is the error of a step in the keeper, between its fork and the exec of bwrap, or while entering a sandbox.
// After a StartError there is no payload.
type StartError struct {
	Step  string
	Err   error
	Mount int // number of the failed mount, from 1; 0 for none
}

func (e *StartError) Error() string { return e.Step + ": " + e.Err.Error() }
func (e *StartError) Unwrap() error { return e.Err }

// Keeper is sbxrun's handle of a running keeper.
type Keeper struct {
	Process
	// The keeper sends its records through this socket. It kills all its children when sbxrun's end is shut down, or closes
	// because sbxrun has died.
	socket    *os.File
	failure   error // a StartError among the records
	terminals []Terminal
	// The keeper's memory; nil when nothing more will be laid out.
	block *Block
	state *keeperState
}

// Keep forks a keeper, which starts c, and returns at once. The program itself shows the caller that it was executed;
// otherwise [Keeper.StartError] returns the reason. The caller owns the Keeper and must [Keeper.Reap] it. The memory that the
// Way has laid out stays mapped until then, or until [Keeper.Enter].
func Keep(c Command) (_ *Keeper, err error) {
	block, err := NewBlock()
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			block.Free()
		}
	}()
	if c.Cred != nil && !Capable(unix.CAP_KILL) { // sbxrun could not kill it (kill(2))
		return nil, &StartError{Step: "kill what has another user id (CAP_KILL)", Err: unix.EPERM}
	}
	k := New[keeperState](block)
	var open descriptors
	defer open.close()
	if err := k.lay(block, c, &open); err != nil {
		return nil, err
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("socketpair: %w", err)
	}
	defer unix.Close(pair[1])
	k.socket = pair[1]
	if k.exec != nil {
		k.exec.socket = pair[1]
	}
	if k.enter != nil {
		k.enter.socket = pair[1]
	}
	// sbxrun becomes a subreaper, too, so that the children of a killed keeper are reparented to sbxrun, and not to a PID 1
	// that may not reap.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		unix.Close(pair[0])
		return nil, fmt.Errorf("become a subreaper (Linux 3.4): %w", err)
	}
	pid, errno := bareFork(block, &k.pidfd, Code(startKeeper), unsafe.Pointer(k))
	runtime.KeepAlive(c)
	if errno != 0 {
		unix.Close(pair[0])
		return nil, &StartError{Step: "fork the keeper", Err: errno}
	}
	_ = unix.SetNonblock(pair[0], true) // for the poller
	return &Keeper{Process: polled(int(pid), int(k.pidfd)), socket: os.NewFile(uintptr(pair[0]), "keeper"), terminals: c.Terminals, block: block, state: k}, nil
}

// Enter makes a keeper that was started with a program also fork the Way of c and take over c's terminals and cgroups. It
// is called once and does not wait: the code of the Way reports whether it succeeded.
func (k *Keeper) Enter(c Command) error {
	defer k.giveUpBlock()
	block, s := k.block, k.state
	var open descriptors
	defer open.close()
	later, err := s.layWay(block, c, &open)
	if err != nil {
		return err
	}
	slots := later.numbers()
	k.terminals = c.Terminals
	for i := range c.Terminals {
		slots = append(slots, &s.terminals[i].fd)
	}
	var files []int
	for _, fd := range slots {
		files = append(files, *fd)
	}
	if len(files) > maxOrdered {
		return &StartError{Step: stepNames[stepFiles], Err: unix.E2BIG}
	}
	for i := range s.terminals {
		s.terminals[i].fd = -1 // until it is received
	}
	later.socket, later.slots = s.socket, Copy(block, slots)
	s.later = later
	if err := block.Err(); err != nil {
		return fmt.Errorf("arguments and environment: %w", err)
	}
	err = unix.Sendmsg(Descriptor(k.socket), []byte{0}, unix.UnixRights(files...), nil, unix.MSG_NOSIGNAL)
	runtime.KeepAlive(c)
	if err != nil {
		return fmt.Errorf("tell the keeper: %w", err)
	}
	return nil
}

// lay lays out the keeper's state and its children for system calls.
func (k *keeperState) lay(b *Block, c Command, open *descriptors) error {
	k.words, k.size = words()
	k.pidfd = -1
	for i := range k.terminals {
		k.terminals[i].fd = -1
	}
	copy(k.name[:], KeeperName)
	copy(k.children[:], "/proc/thread-self/children")
	k.pause.Nsec = removePause
	k.lasting = c.Lasting
	hold := make([]int, len(c.Hold))
	for i, f := range c.Hold {
		hold[i] = Descriptor(f)
	}
	k.hold = Copy(b, hold)
	k.orders.lay()
	var err error
	if c.Program != nil {
		k.exec, err = k.layProgram(b, c)
	} else {
		k.enter, err = k.layWay(b, c, open)
		k.entering = true
	}
	if err == nil && b.Err() != nil {
		err = fmt.Errorf("arguments and environment: %w", b.Err())
	}
	return err
}

// layWay lays out the Way and those parts of c that do not belong to the program.
func (k *keeperState) layWay(b *Block, c Command, open *descriptors) (*child, error) {
	for i, t := range c.Terminals {
		k.terminals[i] = terminal{Descriptor(t.File), t.State}
	}
	if len(c.Remove) > 0 {
		k.remove = b.Texts(c.Remove)[:len(c.Remove)]
	}
	if c.Way == nil {
		return nil, nil
	}
	ch := k.child(b, c, c.Way.Files)
	if err := ch.bounds.lay(b, c.Way.Bounds, open); err != nil {
		return nil, err
	}
	ch.sharing = c.Way.Bounds.sharing()
	ch.birth = ch.bounds.birth(ch.stack)
	ch.arg = c.Way.Lay(b)
	ch.enter = c.Way.Enter
	return ch, nil
}

// numbers returns pointers to the child's descriptor numbers, in the order in which Enter sends the descriptors.
func (c *child) numbers() (list []*int) {
	for i := range c.files {
		list = append(list, &c.files[i])
	}
	for i := range c.bounds.tasks {
		list = append(list, &c.bounds.tasks[i])
	}
	if c.bounds.cgroup >= 0 {
		list = append(list, &c.bounds.cgroup, &c.bounds.procs)
	}
	return list
}

func (k *keeperState) child(b *Block, c Command, files []*os.File) *child {
	ch := New[child](b)
	ch.keeper, ch.stack, ch.sharing = k, b.Stack(), unix.CLONE_VM
	// The limit is 1 and not 0: if core_pattern is a pipe, the kernel ignores every limit but 1 (core(5), fs/coredump.c). For
	// files 1 is smaller than any core.
	ch.core = unix.Rlimit{Cur: 1, Max: 1}
	if c.Cred != nil {
		ch.become, ch.cred, ch.groups = true, *c.Cred, c.Cred.Groups.Len()
	}
	numbers := make([]int, 0, len(files))
	for _, f := range files {
		numbers = append(numbers, Descriptor(f))
	}
	ch.files = Copy(b, numbers)
	return ch
}

func (k *keeperState) layProgram(b *Block, command Command) (*child, error) {
	p := command.Program
	c := k.child(b, command, p.Files)
	c.path = unsafe.Pointer(b.Text(p.Path))
	c.argv = unsafe.Pointer(&b.Texts(p.Args)[0])
	c.envv = unsafe.Pointer(&b.Texts(nil)[0])
	var stage []staged
	for i, f := range p.Stage {
		st, err := f.Stat()
		if err != nil {
			return nil, err
		}
		stage = append(stage, staged{uintptr(Descriptor(f)), b.Text(StageDir + "/" + strconv.Itoa(i)), st.IsDir()})
	}
	c.stage = Copy(b, stage)
	return c, nil
}

// giveUpBlock unmaps the block when nothing more will be laid out.
func (k *Keeper) giveUpBlock() {
	if k.block != nil {
		k.block.Free()
		k.block, k.state = nil, nil
	}
}

// StartError returns the failed step between the keeper's fork and the exec of its command, or nil. Call it after Empty.
func (k *Keeper) StartError() error { return k.failure }

func (r record) startError() error {
	step := "start"
	if r.step > 0 && r.step < int64(len(stepNames)) {
		step = stepNames[r.step]
	}
	return &StartError{Step: step, Err: syscall.Errno(r.errno)}
}

func (k *Keeper) read(deadline time.Time) (rec record, err error) {
	// A socket supports deadlines; any error here shows in the read.
	_ = k.socket.SetReadDeadline(deadline)
	buf := (*[unsafe.Sizeof(rec)]byte)(unsafe.Pointer(&rec))
	n, err := k.socket.Read(buf[:])
	if errors.Is(err, unix.ECONNRESET) {
		// The kernel returns this once if the keeper has exited with an unread deadline. Its records are still there.
		n, err = k.socket.Read(buf[:])
	}
	if err != nil {
		return record{}, err
	}
	if n != len(buf) {
		return record{}, errors.New("short record")
	}
	return rec, nil
}

// EndAt sets a deadline at which the keeper kills all processes, in case sbxrun is stopped. Each call replaces the
// previous deadline.
func (k *Keeper) EndAt(t time.Time) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return // it cannot fail, and without a deadline the keeper still watches for sbxrun's end
	}
	at := now.Nano() + int64(time.Until(t))
	// An error means that the keeper is dead or was reaped.
	_, _ = k.socket.Write((*[8]byte)(unsafe.Pointer(&at))[:])
}

// Kill makes the keeper kill all its children, without waiting: see Empty. It may be called more than once.
func (k *Keeper) Kill() {
	if slices.ContainsFunc(k.terminals, Terminal.Background) {
		k.terminals = nil
		_, _ = k.socket.Write([]byte{0, 0}) // do not restore them
	}
	// An error means that the keeper is dead.
	_ = unix.Shutdown(Descriptor(k.socket), unix.SHUT_WR)
}

// errNotEmpty reports that the keeper ended before it had reaped all its children, because it was killed or failed before
// it had any. The children are now sbxrun's.
var errNotEmpty = errors.New("the keeper was killed before it had reaped the sandbox")

// Empty waits until the deadline for the keeper's report that all its children are dead and reaped. It fails with
// [errNotEmpty], or with os.ErrDeadlineExceeded if there are children left.
func (k *Keeper) Empty(deadline time.Time) (End, error) { return k.Reaped(0, deadline) }

// LateStatus is the exit code of an init at the deadline set by [Kept.EndAt].
const LateStatus = 124

// Forget discards the unread reports of a lasting keeper. They are about reaped processes, whose PIDs may be in use again.
func (k *Keeper) Forget() {
	var rec record
	for {
		n, _, err := unix.Recvfrom(Descriptor(k.socket), (*[unsafe.Sizeof(rec)]byte)(unsafe.Pointer(&rec))[:], unix.MSG_DONTWAIT)
		if err != nil || n == 0 {
			return // end-of-file is returned again by the next read
		}
	}
}

// Reaped waits until the deadline for a lasting keeper's report that it has reaped a process, or that it has no children,
// as Empty does. The process must have been alive at the last call of [Keeper.Forget].
func (k *Keeper) Reaped(pid int, deadline time.Time) (End, error) {
	for {
		rec, err := k.read(deadline)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return End{}, err
		case err != nil:
			return End{}, errNotEmpty // the keeper is dead
		case rec.kind == recordFailed:
			k.failure = rec.startError()
		case rec.kind == recordEmpty:
			end := End{Late: rec.late != 0, reaped: rec.ended[:min(rec.count, maxEnded)]}
			if rec.program != 0 {
				end.Program = new(unix.WaitStatus(rec.status))
			}
			return end, nil
		case rec.ended[0].pid == int64(pid):
			ws := unix.WaitStatus(rec.ended[0].status)
			return End{Late: ws.Exited() && ws.ExitStatus() == LateStatus, reaped: rec.ended[:1]}, nil
		}
	}
}

// Reap waits until the deadline for the keeper's end and reaps it.
func (k *Keeper) Reap(deadline time.Time) error {
	k.socket.Close() // a keeper with a terminal or cgroups waits for this
	k.giveUpBlock()
	if err := k.Wait(deadline); err != nil {
		return err
	}
	if err := reap(k.PID); err != nil {
		return fmt.Errorf("wait for the keeper: %w", err)
	}
	k.Close()
	return nil
}
