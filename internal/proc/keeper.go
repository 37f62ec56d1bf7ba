package proc

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Command is what the keeper starts: the only child that it forks itself.
type Command struct {
	Path string   // absolute
	Args []string // with argv[0]
	Env  []string
	// Enter, if it is not nil, is called with Arg in place of an exec, after the
	// child has become all that Command says; Path, Args and Env are not used then.
	// It must be a function, not a method or closure, that follows the rules of
	// [BareFork] and never returns. The keeper's socket is still open, next to Files.
	Enter func(unsafe.Pointer)
	Arg   unsafe.Pointer
	// Files become descriptors 0, 1, 2 … of the command; what is executed gets no
	// other. They stay the caller's.
	Files []*os.File
	// Cred is taken on, and all supplementary groups dropped, before the exec. Only
	// root can ask for it; nil leaves the identity alone.
	Cred *Cred
	// Stage are files and directories that only root can reach: the i-th is
	// bound to StageDir/i, in a mount namespace that only the command sees,
	// before Cred is taken on. They stay the caller's (O_PATH is enough).
	Stage []*os.File
	// Terminal, if not nil, is put back by the keeper when sbxrun is killed and
	// cannot do so itself.
	Terminal *Terminal
	// Bounds hold for the command from its first instant; but Rlimits are for a
	// payload, and not looked at here.
	Bounds Bounds
}

// Bounds are the limits of a sandbox or an exec, as the processes that make it take
// them. All of them are inherited.
type Bounds struct {
	// The cgroups. To be born in one, or to go there by itself, saves the time that it
	// takes to be moved by somebody else if nobody has moved a process for a tenth of a
	// second: 3 to 15 ms, a grace period of RCU, for which the kernel stops all forks and
	// exits (cgroup_threadgroup_rwsem). A process that moves itself while it has one
	// thread stops nobody.
	Tasks []string // files named tasks, of v1
	V2    string   // the directory; "" for none
	// Remove are directories that the keeper removes in the end, in this order:
	// so nothing is left of them if sbxrun is killed.
	Remove []string

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

// Terminal is the caller's terminal, made raw, and the state to be restored.
type Terminal struct {
	File  *os.File
	State unix.Termios
}

// StageDir is where Stage appears. It hides what is there on the host, and is
// the one directory that bwrap needs to exist anyway.
const StageDir = "/tmp"

// KeeperName is what ps(1) shows of a keeper.
const KeeperName = "sbxrun-keeper"

// Marker is the name that the bwrap of a user's sandbox is started under, its first
// argument: for who looks for what crashes have left, to tell it from everybody
// else's. Root's sandboxes do not run as root.
func Marker(uid int) string { return "sbxrun-bwrap:" + strconv.Itoa(uid) }

// Cred is the identity a command runs under.
type Cred struct{ UID, GID uint32 }

// Usage is CPU time and memory that processes have used.
type Usage struct {
	User, System time.Duration
	MaxRSS       int64 // bytes, of the largest process
}

// End is how the keeper's children ended.
type End struct {
	// Usage is what was reaped of the sandbox, so not what was still running when
	// init was killed (the kernel discards the times of children that nobody waits
	// for: wait(2), zap_pid_ns_processes).
	Usage
	Monitor unix.WaitStatus // of the [Command]: bwrap's outer process, or what enters
	Init    unix.WaitStatus // if ReapedInit
	// ReapedInit: the keeper has reaped init. An exec's is its own child. A
	// sandbox's is reparented to it when the monitor ends first; the monitor reaps
	// init itself only if init is killed, by somebody else, while the monitor waits
	// for it.
	ReapedInit bool
}

// A StartError names the step in the keeper, or between its fork and the exec
// of bwrap, or on the way into a sandbox, that failed. There is no payload then.
type StartError struct {
	Step string
	Err  error
}

func (e *StartError) Error() string { return e.Step + ": " + e.Err.Error() }
func (e *StartError) Unwrap() error { return e.Err }

// Keeper is the running keeper, seen from sbxrun.
type Keeper struct {
	Process
	// A socket pair is all there is between the two. The keeper's records come
	// this way; and when our end is shut down or closes, because we say so or
	// are dead, the keeper kills all.
	socket  *os.File
	failure error // a StartError that was read on the way
}

// Keep forks the keeper, which starts c as its child, and returns at once: that
// the command was really executed shows in what it does; [Keeper.StartError]
// tells why it was not. The caller owns the Keeper and must [Keeper.Reap] it.
func Keep(c Command) (*Keeper, error) {
	k := &keeperState{
		pidfd:    -1,
		terminal: -1,
		cgroup:   -1,
		cred:     c.Cred,
		// Not 0: a core_pattern that is a pipe is fed whatever the limit, except
		// at 1 (core(5), fs/coredump.c); for files 1 is below any core's size.
		core: unix.Rlimit{Cur: 1, Max: 1},
	}
	if err := k.lay(c); err != nil {
		return nil, err
	}
	defer k.closeBounds()
	if err := k.layBounds(c.Bounds); err != nil {
		return nil, err
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("socketpair: %w", err)
	}
	defer unix.Close(pair[1])
	k.socket = pair[1]
	// PR_SET_CHILD_SUBREAPER for sbxrun as well: should somebody kill the
	// keeper, what it had comes to us and not to a PID 1 that may not reap.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		unix.Close(pair[0])
		return nil, fmt.Errorf("become a subreaper (Linux 3.4): %w", err)
	}
	pid, errno := k.fork()
	runtime.KeepAlive(c)
	if errno != 0 {
		unix.Close(pair[0])
		return nil, &StartError{Step: "fork the keeper", Err: errno}
	}
	_ = unix.SetNonblock(pair[0], true) // for the poller
	return &Keeper{Process: newProcess(int(pid), int(k.pidfd)), socket: os.NewFile(uintptr(pair[0]), "keeper")}, nil
}

// lay puts everything into the form that system calls take.
func (k *keeperState) lay(c Command) (err error) {
	// Go's heap, which has the stacks of goroutines as well, is in one place, and has
	// less than four gigabytes.
	const heap = 1 << 32
	k.cmdline = commandLine()
	k.high = uintptr(unsafe.Pointer(k))&^(heap-1) + 2*heap
	copy(k.name[:], KeeperName)
	copy(k.children[:], "/proc/thread-self/children")
	k.enter, k.arg = c.Enter, c.Arg
	if k.path, err = syscall.BytePtrFromString(c.Path); err != nil {
		return fmt.Errorf("path of %q: %w", c.Path, err)
	}
	argv, err := syscall.SlicePtrFromStrings(c.Args)
	if err != nil {
		return fmt.Errorf("arguments of %q: %w", c.Path, err)
	}
	envv, err := syscall.SlicePtrFromStrings(c.Env)
	if err != nil {
		return fmt.Errorf("environment of %q: %w", c.Path, err)
	}
	k.argv, k.envv = &argv[0], &envv[0]
	for _, f := range c.Files {
		k.files = append(k.files, Descriptor(f))
	}
	for i, f := range c.Stage {
		st, err := f.Stat()
		if err != nil {
			return err
		}
		target, err := syscall.BytePtrFromString(StageDir + "/" + strconv.Itoa(i))
		if err != nil {
			return err
		}
		k.stage = append(k.stage, staged{uintptr(Descriptor(f)), target, st.IsDir()})
	}
	if c.Terminal != nil {
		k.terminal, k.restore = Descriptor(c.Terminal.File), c.Terminal.State
	}
	return nil
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
	if err != nil {
		return record{}, err
	}
	if n != len(buf) {
		return record{}, errors.New("short record")
	}
	return rec, nil
}

// Kill lets the keeper kill whatever it still has; Empty tells when it has. It
// does not block, and may be called more than once.
func (k *Keeper) Kill() {
	// An error means that the keeper is dead.
	_ = unix.Shutdown(Descriptor(k.socket), unix.SHUT_WR)
}

// ErrNotEmpty says that the keeper ended without having reaped all it had:
// somebody killed it, or it failed before it had anything. What it had is now
// sbxrun's.
var ErrNotEmpty = errors.New("the keeper was killed before it had reaped the sandbox")

// Inherit kills and reaps what a killed keeper has left to sbxrun, which is a
// subreaper too: bwrap's processes, which are in the keeper's session, and init,
// which may have made one of its own; nil if it is not known yet, and then it has
// not. Other children that sbxrun may have, from before it was executed, are not
// touched. It blocks until none is left, or the deadline has passed.
func (k *Keeper) Inherit(init *Process, deadline time.Time) error {
	// Its socket closes before its children are reparented; its pidfd tells later.
	if err := k.Wait(deadline); err != nil {
		return err
	}
	for {
		left := 0
		for _, tid := range threads(os.Getpid()) {
			for _, pid := range Children(os.Getpid(), tid) {
				// Our own unreaped children: their pids cannot be recycled.
				st, err := ReadStat(pid)
				if err != nil || pid == k.PID || st.Session != k.PID && (init == nil || pid != init.PID) {
					continue
				}
				_ = unix.Kill(pid, unix.SIGKILL)
				_, _ = unix.Wait4(pid, nil, unix.WNOHANG, nil)
				left++ // or gone, but what it had may be ours only now: look again
			}
		}
		if left == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return os.ErrDeadlineExceeded
		}
		time.Sleep(time.Millisecond) // between two looks, in a case that nobody waits for
	}
}

// Empty waits, at most until deadline, for the keeper's word that all it ever had
// is dead and reaped. [ErrNotEmpty]; os.ErrDeadlineExceeded: it still has
// children.
func (k *Keeper) Empty(deadline time.Time) (End, error) {
	for {
		rec, err := k.read(deadline)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return End{}, err
		}
		if err != nil {
			return End{}, ErrNotEmpty // nobody is left to say it
		}
		if rec.kind != recordEmpty {
			k.failure = rec.startError()
			continue
		}
		return End{
			Usage: Usage{
				User:   time.Duration(rec.user) * time.Microsecond,
				System: time.Duration(rec.system) * time.Microsecond,
				MaxRSS: rec.maxrss << 10,
			},
			Monitor:    unix.WaitStatus(rec.monitor),
			Init:       unix.WaitStatus(rec.init),
			ReapedInit: rec.reapedInit != 0,
		}, nil
	}
}

// Reap waits for the keeper's own end, at most until deadline, and collects it.
func (k *Keeper) Reap(deadline time.Time) error {
	k.socket.Close() // a keeper of a terminal, or of cgroups, waits for that
	if err := k.Wait(deadline); err != nil {
		return err
	}
	for {
		_, err := unix.Wait4(k.PID, nil, 0, nil)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return fmt.Errorf("wait for the keeper: %w", err)
		}
		k.Close()
		return nil
	}
}
