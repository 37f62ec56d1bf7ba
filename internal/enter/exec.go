package enter

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/helper"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/seccomp"
)

// SetupBound limits the time to enter a room.
const SetupBound = 10 * time.Second

// Dying is how long a room may take to end after its first signs, such as a refused entry or the end of a command. On a
// busy machine that takes seconds.
const Dying = 2 * time.Second

// MeminfoCopy is the room's file that its commands see as /proc/meminfo, if it exists.
const MeminfoCopy = "/run/meminfo"

// Entry describes a command in a room.
type Entry struct {
	Cred    *proc.Cred // identity of the room; nil for sbxrun's
	HostNet bool       // the room has the host's network namespace
	Command []string
	Path    string   // search path for the command, in the room
	Env     []string // NAME=VALUE
	Workdir string   // in the room
	// Terminal makes stdin the controlling terminal.
	Terminal bool
	// Confirm makes [Exec.Running] wait for the execve(2).
	Confirm bool
	Bounds  proc.Bounds
	Filter  seccomp.Filter // for system calls
	// Fresh are directories that are new for each command of a [Maker], so that no command sees files of another. They are
	// mounted in this order.
	Fresh []Tmpfs
}

// Tmpfs is a directory in memory.
type Tmpfs struct {
	Dest string
	Mode uint32
	Size int64 // bytes
}

// options returns the mount options (tmpfs(5)).
func (t Tmpfs) options() string {
	return fmt.Sprintf("mode=%04o,size=%d,nr_inodes=%s", t.Mode, t.Size, inodes(t.Size))
}

// inodes returns the option nr_inodes for a tmpfs of a size in bytes. An empty file costs 1 KiB of
// kernel memory that the size does not include. One inode for each page of 4 KiB is enough for
// files with content, and bounds that memory to a quarter of the size.
func inodes(size int64) string {
	const page, least = 4096, 1024
	return strconv.FormatInt(max(size/page, least), 10)
}

// Exec is a payload in its own PID namespace below a room's. No process inside can read, signal or trace its init.
// The caller ends it.
type Exec struct {
	way
	name    string      // of the command, for errors
	workdir string      // for errors
	maker   *Maker      // nil if it was not made ahead
	stdio   [3]*os.File // with a maker, to be sent with the command
	command *os.File    // with a maker, the command's script
	Workdir *os.File    // with a maker, the room's working directory as the command sees it
	running chan struct{}
	confirm bool
	exited  chan struct{}
	// Set before exited is closed.
	payload *result.Payload // nil if unknown
	alone   bool            // it left no processes behind
	at      int64           // time of its end, CLOCK_MONOTONIC in ns
	err     error           // why payload is nil
}

// Start enters a room and returns when the new init exists and is verified and held by a pidfd. The payload waits for
// [Exec.Release]. stdio stays the caller's and may be closed. Start blocks for at most [SetupBound] or until ctx is done.
// Its errors are *[result.Error]; before it returns one, it waits until all its processes have exited.
func (e *Entry) Start(ctx context.Context, room *proc.Process, stdio [3]*os.File, ttys []proc.Terminal) (*Exec, error) {
	x, way, err := e.Prepare(stdio, nil)
	if err == nil {
		err = x.Enter(room)
	}
	if err == nil {
		x.Keeper, err = proc.Keep(proc.Command{Way: way, Cred: e.Cred, Terminals: ttys, Remove: e.Bounds.Remove})
		x.Entered()
	}
	if err == nil {
		err = x.Identify(ctx, time.Now().Add(SetupBound))
	}
	if err == nil {
		return x, nil
	}
	abandonErr := x.abandon()
	inside := x.Keeper != nil && abandonErr == nil
	if abandonErr != nil {
		err = abandonErr // more specific: a failed step in the keeper, or processes that are left
	}
	x.Close()
	known := &result.Error{Code: "enter", Message: "cannot enter the sandbox: " + err.Error(), Err: err}
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded), ctx.Err() != nil:
		known.Message = "cannot enter the sandbox in time"
	case ended(room, err, inside):
		known.Code, known.Message = "ended", "the sandbox has ended"
	}
	return nil, known
}

// Prepare returns an Exec that has not started and the Way for its keeper to fork. f describes the furnishing of a new
// room, and is nil for an existing one; f.Ready stays the caller's. Without a command the room is only furnished. After
// the fork the caller calls [Exec.Entered].
func (e *Entry) Prepare(stdio [3]*os.File, f *Furnishing) (*Exec, *proc.Way, error) {
	x := &Exec{workdir: e.Workdir, running: make(chan struct{}), confirm: e.Confirm, exited: make(chan struct{})}
	if err := x.open(); err != nil {
		return x, nil, err
	}
	end, gate := x.inner[0], x.inner[1]
	way, idle := &proc.Way{Bounds: e.Bounds}, len(e.Command) == 0
	if idle { // gate fills the unused numbers; limits apply only to commands
		stdio, way.Bounds = [3]*os.File{gate, gate, gate}, proc.Bounds{}
	} else {
		x.name = e.Command[0]
	}
	way.Lay = func(s *helper.Script) {
		if f != nil {
			layStart(s, 2)
			f.lay(s, e.HostNet)
		} else {
			layStart(s, 1)
			s.Do(stepSetns, unix.SYS_SETNS, slotRoom, namespaces(e.HostNet))
		}
		if idle {
			s.Do("report", helper.Say, reportFurnished, 0, 0)
			s.Do("exit", helper.Exit, 0)
			return
		}
		layInside(s)
		e.layCommand(s)
	}
	way.Files = []*os.File{stdio[0], stdio[1], stdio[2], end, gate}
	if f != nil {
		x.expected = f.overlays()
		way.Files = append(way.Files, f.Ready)
	}
	return x, way, nil
}

// candidates returns the possible paths of the command.
func (e *Entry) candidates() (paths []string) {
	name := e.Command[0]
	if name == "" {
		return nil
	}
	if strings.Contains(name, "/") {
		return []string{name}
	}
	for dir := range strings.SplitSeq(e.Path, ":") {
		if dir == "" {
			dir = "." // as in the shells
		}
		paths = append(paths, dir+"/"+name)
	}
	return paths
}

// keptBack returns limits, in addition to the requested ones, that keep commands from using up resources
// (getrlimit(2)) that sbxrun itself needs.
func keptBack(asked []proc.Rlimit) []proc.Rlimit {
	// If the caller may use real-time scheduling or a lower niceness, a command with these would starve sbxrun.
	kept := []proc.Rlimit{{Resource: unix.RLIMIT_RTPRIO}, {Resource: unix.RLIMIT_NICE}}
	// A process cannot send a descriptor, as sbxrun does for each sandbox, if its user has more unreceived descriptors in
	// messages than the process may have open (unix(7)). A command of an ordinary user shares this count with sbxrun and
	// could block all sandboxes. A message has up to 253, and the kernel checks the limit before it counts them.
	const reserve = 1024
	var own unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &own) == nil && own.Max >= 4*reserve &&
		!slices.ContainsFunc(asked, func(l proc.Rlimit) bool { return l.Resource == unix.RLIMIT_NOFILE }) {
		kept = append(kept, proc.Rlimit{Resource: unix.RLIMIT_NOFILE, Value: own.Max - reserve})
	}
	// The kernel also counts queued signals per user. Without one left, timer_create(2) fails for all programs of the user.
	if unix.Getrlimit(unix.RLIMIT_SIGPENDING, &own) == nil && own.Max >= 4*reserve {
		kept = append(kept, proc.Rlimit{Resource: unix.RLIMIT_SIGPENDING, Value: min(own.Cur, own.Max-reserve)})
	}
	return kept
}

// Identify waits until the deadline, or until ctx is done, for init's first message and verifies its sender. Without a
// command it waits for the message that the room is furnished.
func (x *Exec) Identify(ctx context.Context, deadline time.Time) error {
	if x.maker != nil {
		return x.meet(ctx, deadline)
	}
	stop := proc.ReadUntil(ctx, x.socket, deadline)
	msg, pid, err := x.readNext()
	stop()
	switch {
	case err != nil:
		return err
	case msg.Kind == reportFurnished:
		return nil
	case msg.Kind != helper.Ready:
		return proc.Failure(&msg)
	}
	x.Init, err = proc.Open(pid)
	if err == proc.ErrGone { // it may have reported why
		if msg, _, readErr := x.read(); readErr == nil && msg.Kind == helper.Failed {
			return proc.Failure(&msg)
		}
	}
	if err != nil {
		return err
	}
	// The kernel names the sender, and only the forked processes have the socket. Nevertheless check that it is the keeper's
	// child, and finally that it is still alive.
	st, err := proc.ReadStat(pid)
	if err != nil {
		return err
	}
	if st.Parent != x.Keeper.PID || msg.Number != 1 {
		return fmt.Errorf("process %d is not the init that was started", pid)
	}
	if x.Init.Exited() {
		return proc.ErrGone
	}
	x.InitNS = uint64(msg.Value)
	return nil
}

// Release releases the payload. From then on, or with a Maker from [Exec.Follow] on, a goroutine follows it until
// Exited is closed.
func (x *Exec) Release() {
	if x.maker != nil {
		x.maker.send(x)
	} else if _, err := x.gate.Write([]byte{0}); err != nil {
		x.unreleased(err)
	}
	if !x.confirm {
		close(x.running)
	}
	if x.maker == nil {
		go x.follow(time.Time{}) // until the end of init
	}
}

// unreleased ends a command that could not be released: the kernel has no memory for the message, for which the payload
// would wait forever. A payload that was killed (EPIPE) has ended, which init reports.
func (x *Exec) unreleased(err error) {
	if !errors.Is(err, unix.EPIPE) {
		_ = x.Init.Signal(unix.SIGKILL)
	}
}

// Follow waits in this goroutine, which costs less than another one, for the end of a Maker's command and reports whether
// the command has ended. Otherwise a goroutine continues to wait.
func (x *Exec) Follow(within time.Duration) (ended bool) {
	// An init without children exits right after its report. Waiting for the keeper's report of that, the last one, takes
	// one wakeup instead of two.
	if x.Ends(time.Now().Add(within)) && x.follow(time.Now().Add(within)) {
		return true
	}
	go x.follow(time.Time{})
	return false
}

// follow waits until the payload or init has ended, or until a time; a zero time means no limit.
func (x *Exec) follow(until time.Time) (ended bool) {
	running := !x.confirm
	// Only the payload still has the gate open for reading, and closes it when it executes its command. If that fails, it
	// reports the failure first.
	if x.confirm && proc.WaitHangup(x.gate, time.Time{}) == nil && !x.Ending() {
		running = true
		close(x.running)
	}
	_ = x.socket.SetReadDeadline(until)
	for {
		msg, _, err := x.read()
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return false
		}
		if err == nil && msg.Kind != helper.Failed && msg.Kind != helper.Exited {
			continue
		}
		defer close(x.exited)
		switch {
		case err != nil:
			x.err = result.ErrUnknown
		case msg.Kind == helper.Failed:
			x.err = x.notExecuted(msg)
		default:
			if !running {
				// The command ended before this check. It was executed, because a failure would have been reported.
				close(x.running)
			}
			x.payload, x.alone, x.at = new(result.FromWaitStatus(unix.WaitStatus(msg.Value))), msg.Number == 1, msg.At
		}
		return true
	}
}

// notExecuted returns the error of a command that was not executed.
func (x *Exec) notExecuted(m helper.Report) error {
	errno, step := syscall.Errno(m.Value), m.Step()
	switch {
	case step == stepWorkdir:
		return &result.Error{Code: "workdir", Message: fmt.Sprintf("working directory %q of the sandbox: %v", x.workdir, errno), Hint: "name one that can be entered there", Err: errno}
	case step != stepExec:
		return &result.Error{Code: "setup", Message: proc.Failure(&m).Error(), Err: errno}
	case errno == unix.ENOENT || errno == unix.ENOTDIR:
		return &result.Error{Code: "not-found", ExitCode: result.ExitNotFound, Message: fmt.Sprintf("command %q not found in the sandbox", x.name), Err: errno}
	}
	return &result.Error{Code: "not-executable", ExitCode: result.ExitNotExecutable, Message: fmt.Sprintf("command %q cannot be executed: %v", x.name, errno), Err: errno}
}

// Running returns a channel that is closed when the command runs, or without Confirm right after its release.
func (x *Exec) Running() <-chan struct{} { return x.running }

// Ending reports whether init has sent an unread message or has ended. Then Exited is about to be closed.
func (x *Exec) Ending() bool { return proc.Poll(proc.Descriptor(x.socket), unix.POLLIN) != 0 }

// Exited returns a channel that is closed when the payload has ended or failed to start.
func (x *Exec) Exited() <-chan struct{} { return x.exited }

// ExitStatus returns the payload's exit status and the time of its end on the clock of [time.Now]. Call it after Exited.
// It fails with [result.ErrUnknown] if init was killed, or a *[result.Error] if the command was not executed.
func (x *Exec) ExitStatus() (*result.Payload, time.Time, error) {
	if x.payload == nil {
		return nil, time.Time{}, x.err
	}
	now, clock := clocks()
	return x.payload, now.Add(time.Duration(x.at - clock)), nil
}

// clocks returns [time.Now] and CLOCK_MONOTONIC in ns at the same time. It retries if this process was preempted between
// the two, because otherwise a payload that ended just after a deadline would seem to have ended before it.
func clocks() (now time.Time, clock int64) {
	const near = 100 * time.Microsecond
	least := time.Duration(math.MaxInt64)
	for i := 0; i < 10 && least >= near; i++ {
		var ts unix.Timespec
		at := time.Now()
		_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) // it cannot fail
		if took := time.Since(at); took < least {
			least, now, clock = took, at, ts.Nano()
		}
	}
	return now, clock
}

// Strays returns the number of processes that the payload left behind, if it is known without counting them: 0, or at
// least 1 if init has ended, too. Call it after Exited.
func (x *Exec) Strays() (n int, known bool) {
	if x.alone {
		return 0, true
	}
	return 1, x.Init.Exited()
}

// Signal sends a signal to the payload alone.
func (x *Exec) Signal(sig syscall.Signal) error { return x.order(order{int32(sig), 1}) }

// SignalAll sends a signal to all processes but init with a single kill(2) of PID -1, which no process can escape by
// forking.
func (x *Exec) SignalAll(sig syscall.Signal) error { return x.order(order{int32(sig), 0}) }

// order is a signal for init to deliver. struct order of init.c has the same layout.
type order struct {
	signal  int32
	payload int32 // 1 for the payload alone, 0 for all processes
}

func (x *Exec) order(o order) error {
	conn, err := x.socket.SyscallConn()
	if err != nil {
		return err
	}
	// Without blocking: a stopped init does not read, and a kill may follow.
	closed := conn.Write(func(fd uintptr) bool {
		_, err = unix.Write(int(fd), (*[unsafe.Sizeof(o)]byte)(unsafe.Pointer(&o))[:])
		return true
	})
	if closed != nil || errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) {
		return proc.ErrGone
	}
	return err
}

// Close closes all descriptors. A keeper with processes left continues to kill them.
func (x *Exec) Close() {
	x.Workdir.Close() // on nil it only returns an error
	x.command.Close()
	x.Unmount(time.Now())
	x.way.Close()
}
