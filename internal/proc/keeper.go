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

// Command is what a keeper starts: a program, which is bwrap and builds a room; or
// what enters a room; or first the one and then, by [Keeper.Enter], the other.
type Command struct {
	Program *Program
	Way     *Way
	// Cred is taken on by both, and all supplementary groups dropped. Only root can
	// ask for it; nil leaves the identity alone.
	Cred *Cred
	// Terminals, at most [MaxTerminals], are restored by the keeper, above all when sbxrun is killed
	// and cannot do so itself.
	Terminals []Terminal
	// Remove are cgroups that the keeper removes in the end, in this order: so nothing
	// is left of them if sbxrun is killed.
	Remove []string
	// Hold are files that the keeper keeps open to its end, with what is locked by them.
	Hold []*os.File
	// Lasting says that the way makes one init after the other: the end of each is told at
	// once, see [Keeper.Reaped].
	Lasting bool
}

// Program is a program to be executed.
type Program struct {
	Path string   // absolute
	Args []string // with argv[0]; the environment is empty
	// Files become descriptors 0, 1, 2 …; the program gets no other. They stay the
	// caller's.
	Files []*os.File
	// Stage are detached mounts (open_tree(2)): the i-th appears at StageDir/i, in
	// a mount namespace that only the program sees, before Cred is taken on. The
	// descriptors stay the caller's.
	Stage []*os.File
}

// Way is code that runs in place of a program.
type Way struct {
	// Lay puts what Enter needs into the block, and returns it.
	Lay func(*Block) unsafe.Pointer
	// Enter is called with it after the child has become all that Command says. It must
	// be a declared function that follows the rules of [bareFork] and never returns. The
	// keeper's socket is still open, next to Files. All signals are blocked.
	Enter func(unsafe.Pointer)
	// Files become descriptors 0, 1, 2 …, those from 3 on closed by an exec; they stay the caller's.
	Files []*os.File
	// Bounds hold from the first instant; but Rlimits are for a payload, and not looked
	// at here.
	Bounds Bounds
}

// Bounds are the limits of a command, as the processes that make it take them. All of
// them are inherited.
type Bounds struct {
	// The cgroups. To be born in one, or to go there by itself, saves the time that it
	// takes to be moved by somebody else if nobody has moved a process for a tenth of a
	// second: 3 to 15 ms, a grace period of RCU, for which the kernel stops all forks and
	// exits (cgroup_threadgroup_rwsem). A process that moves itself while it has one
	// thread stops nobody.
	Tasks  []string // files named tasks, of v1
	V2     string   // the directory; "" for none
	Remove []string // for [Command.Remove]

	Nice        *int
	OOMScoreAdj *int
	CPUs        *unix.CPUSet
	Rlimits     []Rlimit // both limits, soft and hard
}

// Rlimit is a resource limit (getrlimit(2)).
type Rlimit struct {
	Resource int
	Value    uint64
}

// Terminal is a terminal of the caller's, and the state to be restored.
type Terminal struct {
	File  *os.File
	State unix.Termios
}

// Background reports whether a shell has put us in the background of the terminal: then it belongs to
// another job. It is false of a terminal that does not control our session.
func (t Terminal) Background() bool {
	group, err := unix.IoctlGetInt(Descriptor(t.File), unix.TIOCGPGRP)
	return err == nil && group != unix.Getpgrp()
}

// MaxTerminals is one for each of stdin, stdout and stderr.
const MaxTerminals = 3

// StageDir is where Stage appears. It hides what is there on the host, and is
// the one directory that bwrap needs to exist anyway.
const StageDir = "/tmp"

// KeeperName is what ps(1) shows of a keeper.
const KeeperName = "sbxrun-keeper"

// Cred is the identity a command runs under.
type Cred struct{ UID, GID uint32 }

// Usage is CPU time and memory that processes have used.
type Usage struct {
	User, System time.Duration
	MaxRSS       int64 // bytes, of the largest process
}

// Larger is the one of two looks at the same processes that has seen more of their time,
// and the larger memory.
func (u Usage) Larger(v Usage) Usage {
	if v.User+v.System > u.User+u.System {
		u.User, u.System = v.User, v.System
	}
	u.MaxRSS = max(u.MaxRSS, v.MaxRSS)
	return u
}

// End is what a keeper tells of its end.
type End struct {
	// Late: the keeper has ended everything at its deadline, because sbxrun did not.
	Late bool
	// Killed: the keeper was killed and reported nothing.
	Killed bool
	// Program is the program's wait status, nil if there was no program. If it is SIGKILL, the
	// keeper may have sent that.
	Program *unix.WaitStatus
	reaped  []ended
}

// Usage is what a process has used, and those that it had reaped itself; so not what
// still ran when it was killed (the kernel discards the times of children that nobody
// waits for: wait(2), zap_pid_ns_processes). Zero if the keeper has not reaped it.
func (e End) Usage(pid int) (u Usage) {
	for _, r := range e.reaped {
		if r.pid == int64(pid) {
			u = Usage{User: time.Duration(r.user) * time.Microsecond, System: time.Duration(r.system) * time.Microsecond, MaxRSS: r.maxrss << 10}
		}
	}
	return u
}

// A StartError names the step in the keeper, or between its fork and the exec
// of bwrap, or on the way into a sandbox, that failed. There is no payload then.
type StartError struct {
	Step  string
	Err   error
	Mount int // number of the mount that it is about, from 1; 0 for none
}

func (e *StartError) Error() string { return e.Step + ": " + e.Err.Error() }
func (e *StartError) Unwrap() error { return e.Err }

// Keeper is the running keeper, seen from sbxrun.
type Keeper struct {
	Process
	// A socket pair is all there is between the two. The keeper's records come
	// this way; and when our end is shut down or closes, because we say so or
	// are dead, the keeper kills all.
	socket    *os.File
	failure   error // a StartError that was read on the way
	terminals []Terminal
	// Where all is laid out; nil when nothing more is to be.
	block *Block
	state *keeperState
}

// Keep forks the keeper, which starts c below itself, and returns at once: that
// a program was really executed shows in what it does; [Keeper.StartError]
// tells why it was not. The caller owns the Keeper and must [Keeper.Reap] it; what the Way has laid
// out stays mapped until then, or until [Keeper.Enter].
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
	if c.Cred != nil && !Capable(unix.CAP_KILL) { // nobody could end it (kill(2))
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
	// PR_SET_CHILD_SUBREAPER for sbxrun as well: should somebody kill the
	// keeper, what it had comes to us and not to a PID 1 that may not reap.
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

// Enter has a keeper that was started with a program fork the Way of c as well, and take over
// c's terminal and cgroups. It is called once, and does not wait: whether the keeper could
// do it shows in what the Way says.
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
		s.terminals[i].fd = -1 // until it has come
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

// lay puts everything into the form that system calls take.
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

// layWay lays out the Way, and what else of c does not belong to the program.
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

// numbers are the places of the descriptors that the process needs, in the order in which they
// are sent to a keeper that runs already.
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
	// Not 0: a core_pattern that is a pipe is fed whatever the limit, except
	// at 1 (core(5), fs/coredump.c); for files 1 is below any core's size.
	ch.core = unix.Rlimit{Cur: 1, Max: 1}
	if c.Cred != nil {
		ch.become, ch.cred = true, *c.Cred
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

// giveUpBlock is for when nothing is to be laid out any more.
func (k *Keeper) giveUpBlock() {
	if k.block != nil {
		k.block.Free()
		k.block, k.state = nil, nil
	}
}

// StartError tells which step between the keeper's fork and the exec of its
// command failed, or nil if none did. After Empty.
func (k *Keeper) StartError() error { return k.failure }

func (r record) startError() error {
	step := "start"
	if r.step > 0 && r.step < int64(len(stepNames)) {
		step = stepNames[r.step]
	}
	return &StartError{Step: step, Err: syscall.Errno(r.errno)}
}

func (k *Keeper) read(deadline time.Time) (rec record, err error) {
	// A socket takes deadlines; an error here shows in the read.
	_ = k.socket.SetReadDeadline(deadline)
	buf := (*[unsafe.Sizeof(rec)]byte)(unsafe.Pointer(&rec))
	n, err := k.socket.Read(buf[:])
	if errors.Is(err, unix.ECONNRESET) {
		// Said once, of a keeper that has ended without reading a deadline; its records are
		// still there.
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

// EndAt has the keeper end everything at a time, should sbxrun not have done so by
// then because it is stopped. Each call replaces the time before.
func (k *Keeper) EndAt(t time.Time) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return // it cannot fail; and without a deadline the keeper still waits for our end
	}
	at := now.Nano() + int64(time.Until(t))
	// An error means that the keeper is dead, or was reaped meanwhile.
	_, _ = k.socket.Write((*[8]byte)(unsafe.Pointer(&at))[:])
}

// Kill lets the keeper kill whatever it still has; Empty tells when it has. It
// does not block, and may be called more than once.
func (k *Keeper) Kill() {
	if slices.ContainsFunc(k.terminals, Terminal.Background) {
		k.terminals = nil
		_, _ = k.socket.Write([]byte{0, 0}) // it is not to restore them
	}
	// An error means that the keeper is dead.
	_ = unix.Shutdown(Descriptor(k.socket), unix.SHUT_WR)
}

// errNotEmpty says that the keeper ended without having reaped all it had:
// somebody killed it, or it failed before it had anything. What it had is now
// sbxrun's.
var errNotEmpty = errors.New("the keeper was killed before it had reaped the sandbox")

// Empty waits, at most until deadline, for the keeper's word that all it ever had
// is dead and reaped. [errNotEmpty]; os.ErrDeadlineExceeded: it still has
// children.
func (k *Keeper) Empty(deadline time.Time) (End, error) { return k.Reaped(0, deadline) }

// LateStatus is what an init exits with at the time of [Kept.EndAt].
const LateStatus = 124

// Forget drops what a lasting keeper has told until now: of processes that it has reaped, whose
// numbers may be others' by now.
func (k *Keeper) Forget() {
	var rec record
	for {
		n, _, err := unix.Recvfrom(Descriptor(k.socket), (*[unsafe.Sizeof(rec)]byte)(unsafe.Pointer(&rec))[:], unix.MSG_DONTWAIT)
		if err != nil || n == 0 {
			return // an end is told again
		}
	}
}

// Reaped waits, at most until deadline, for a lasting keeper's word that it has reaped the
// process, which was alive when [Keeper.Forget] was called last; or, as Empty, that it has no more.
func (k *Keeper) Reaped(pid int, deadline time.Time) (End, error) {
	for {
		rec, err := k.read(deadline)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return End{}, err
		case err != nil:
			return End{}, errNotEmpty // nobody is left to say it
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

// Reap waits for the keeper's own end, at most until deadline, and collects it.
func (k *Keeper) Reap(deadline time.Time) error {
	k.socket.Close() // a keeper of a terminal, or of cgroups, waits for that
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
