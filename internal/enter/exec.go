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
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/seccomp"
)

// SetupBound is how long the way in may take.
const SetupBound = 10 * time.Second

// Dying is how long the end of a room may take that shows in what it refuses, and in how its commands
// end: seconds, on a busy machine.
const Dying = 2 * time.Second

// MeminfoCopy is where a room has the text that its commands see as /proc/meminfo, if
// that is not the host's.
const MeminfoCopy = "/run/meminfo"

// Entry is what to run in a room, and how.
type Entry struct {
	Cred    *proc.Cred // who the room runs as; nil if as sbxrun
	HostNet bool       // the room has the host's network namespace
	Command []string
	Path    string   // where the command is looked for, in the room
	Env     []string // NAME=VALUE
	Workdir string   // in the room
	// Terminal makes stdin the controlling terminal.
	Terminal bool
	// Confirm makes [Exec.Running] wait until the command was executed.
	Confirm bool
	Bounds  proc.Bounds
	Filter  *seccomp.Filter // for system calls
	// Fresh are mounted for each command of a [Maker], in this order, in the place of what the
	// room has there. So no command finds what another has left.
	Fresh []Tmpfs
}

// Tmpfs is a directory in memory.
type Tmpfs struct{ Dest, Options string } // see tmpfs(5)

// Inodes returns the option nr_inodes for a tmpfs of a size in bytes. An empty file costs 1 KiB of
// kernel memory that the size does not include. One inode for each page of 4 KiB is enough for
// files with content, and bounds that memory to a quarter of the size.
func Inodes(size int64) string {
	const page, least = 4096, 1024
	return strconv.FormatInt(max(size/page, least), 10)
}

// Exec is a payload in a PID namespace of its own, below that of a room, with an init
// that nothing inside can see into, signal or trace. Whoever started it ends it: package
// cleanup.
type Exec struct {
	way
	name    string      // of the command, for errors
	workdir string      // for errors
	maker   *Maker      // that has made it ahead; nil for none
	stdio   [3]*os.File // then, what is sent with the command
	Workdir *os.File    // then, the room's working directory as the command finds it
	running chan struct{}
	confirm bool
	exited  chan struct{}
	// Set before exited is closed.
	payload *result.Payload // nil if not known
	alone   bool            // it has left nothing behind
	at      int64           // when it ended, CLOCK_MONOTONIC in ns
	err     error           // why payload is nil
}

// Start enters a room and returns once the new init exists, is verified and
// held by a pidfd. The payload waits for [Exec.Release]. stdio stays the
// caller's, who may close it. An error is a *[result.Error], and nothing is left. It
// blocks for at most [SetupBound], or until ctx is done, and then until nothing is left.
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
		err = abandonErr // it says more: a step in the keeper, or that something is left
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

// Prepare makes an Exec that has not begun, and what a keeper has to fork for it. f is for
// a room that is still being built, and nil for one that is there; f.Ready stays the
// caller's. Without a command the room is furnished, and that is all. After the fork the caller
// calls [Exec.Entered].
func (e *Entry) Prepare(stdio [3]*os.File, f *Furnishing) (*Exec, *proc.Way, error) {
	x := &Exec{workdir: e.Workdir, running: make(chan struct{}), confirm: e.Confirm, exited: make(chan struct{})}
	if err := x.open(); err != nil {
		return x, nil, err
	}
	end, gate := x.inner[0], x.inner[1]
	launcher := gate // something has to be there
	way, idle := &proc.Way{Enter: enter, Bounds: e.Bounds}, len(e.Command) == 0
	if !idle {
		if err := x.openLauncher(); err != nil {
			return x, nil, err
		}
		launcher = x.inner[2]
	}
	if idle { // it has no use for 0, 1 and 2, and something has to be there; and what is limited is the commands
		stdio, way.Bounds = [3]*os.File{gate, gate, gate}, proc.Bounds{}
	} else {
		x.name = e.Command[0]
	}
	way.Lay = func(b *proc.Block) unsafe.Pointer {
		n := newEntry(b, e.HostNet)
		n.furnishing = layFurnishing(b, f)
		if n.idle = idle; !idle {
			n.payload.command = e.layCommand(b, true)
			n.payload.filter = layFilter(b, e.Filter)
		}
		return unsafe.Pointer(n)
	}
	way.Files = []*os.File{stdio[0], stdio[1], stdio[2], end, gate, launcher}
	if f != nil {
		x.expected = f.overlays()
		way.Files = append(append(way.Files, f.Ready), f.from()...)
	} else {
		way.Files = append(way.Files, gate) // something has to be there
	}
	return x, way, nil
}

// layFilter is the filter as seccomp(2) takes it; nil for none.
func layFilter(b *proc.Block, f *seccomp.Filter) *unix.SockFprog {
	program := proc.Copy(b, f.Program())
	if len(program) == 0 {
		return nil
	}
	p := proc.New[unix.SockFprog](b)
	p.Len, p.Filter = uint16(len(program)), &program[0]
	return p
}

// layCommand lays out the command without the filter. With wait, the launcher waits at the gate.
func (e *Entry) layCommand(b *proc.Block, wait bool) *command {
	p := proc.New[command](b)
	p.terminal = e.Terminal
	p.rlimits = proc.Copy(b, append(keptBack(e.Bounds.Rlimits), e.Bounds.Rlimits...))
	p.argv = unsafe.Pointer(&b.Texts(e.launchArgs(wait))[0])
	p.envv = unsafe.Pointer(&b.Texts(e.Env)[0])
	p.workdir = b.Text(e.Workdir)
	return p
}

// candidates are the paths where the command may be.
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

// keptBack is what of the caller's own limits (getrlimit(2)) no command may use up, beside those
// that were asked for.
func keptBack(asked []proc.Rlimit) []proc.Rlimit {
	// The caller may use real time, or a niceness below its own: sbxrun would get no processor from
	// a command that does.
	kept := []proc.Rlimit{{Resource: unix.RLIMIT_RTPRIO}, {Resource: unix.RLIMIT_NICE}}
	// No process may send a descriptor, as we do to set up each sandbox, while more of its user's
	// than it may have open were sent and are not received (unix(7)). A command of an ordinary
	// user, who shares the count with us, could send as many as it may, and stop all others.
	// One message has up to 253, and that there are enough is checked before it is counted.
	const reserve = 1024
	var own unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &own) == nil && own.Max >= 4*reserve &&
		!slices.ContainsFunc(asked, func(l proc.Rlimit) bool { return l.Resource == unix.RLIMIT_NOFILE }) {
		kept = append(kept, proc.Rlimit{Resource: unix.RLIMIT_NOFILE, Value: own.Max - reserve})
	}
	return kept
}

// Identify waits, at most until the deadline or until ctx is done, for init's first word
// and makes sure of who said it; or, without a command, for the word that the room is furnished.
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
	case msg.kind == messageFurnished:
		return nil
	case msg.kind != messageReady:
		return msg.err()
	}
	x.Init, err = proc.Open(pid)
	if err == proc.ErrGone { // it may have said why
		if msg, _, readErr := x.read(); readErr == nil && msg.kind == messageFailed {
			return msg.err()
		}
	}
	if err != nil {
		return err
	}
	// The kernel says who has sent the message, and only what we have forked has the
	// socket. That it is our keeper's child is looked at all the same; and that it
	// has not ended meanwhile, last.
	st, err := proc.ReadStat(pid)
	if err != nil {
		return err
	}
	if st.Parent != x.Keeper.PID || msg.inside != 1 {
		return fmt.Errorf("process %d is not the init that was started", pid)
	}
	if x.Init.Exited() {
		return proc.ErrGone
	}
	x.InitNS = msg.pidNS
	return nil
}

// Release lets init start the payload. From here on it is followed in the
// background until Exited is closed; what a Maker runs, from [Exec.Follow] on.
func (x *Exec) Release() {
	if x.maker != nil {
		x.maker.send(x)
	} else if _, err := x.gate.Write([]byte{0}); err != nil {
		// Nobody is there any more; or the kernel has no page for the byte, and what waits for it
		// is not to wait for ever.
		_ = x.Init.Signal(unix.SIGKILL)
	}
	if !x.confirm {
		close(x.running)
	}
	if x.maker == nil {
		go x.follow(time.Time{}) // ended by whoever kills init
	}
}

// Follow waits so long for the end of what a Maker runs, which costs less than to be told of it by
// somebody else, and reports whether it has come. If not, it is waited for in the background.
func (x *Exec) Follow(within time.Duration) (ended bool) {
	// An init with nothing left ends as soon as it has told of the payload. Who waits for the keeper's
	// word of that, the last there is, is woken once and not twice.
	if x.Ends(time.Now().Add(within)) && x.follow(time.Now().Add(within)) {
		return true
	}
	go x.follow(time.Time{})
	return false
}

// follow waits for the payload's end, or for init's, until a time; zero for no bound.
func (x *Exec) follow(until time.Time) (ended bool) {
	running := !x.confirm
	// The payload that executes its command, and the one that could not, close the gate, which nobody
	// else has open for reading any more; but who could not has said so before.
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
		if err == nil && msg.kind != messageFailed && msg.kind != messageExited {
			continue
		}
		defer close(x.exited)
		switch {
		case err != nil:
			x.err = result.ErrUnknown
		case msg.kind == messageFailed:
			x.err = x.notExecuted(msg)
		default:
			if !running {
				// It was over before we looked, and had it not been executed it would have
				// said so.
				close(x.running)
			}
			x.payload, x.alone, x.at = new(result.FromWaitStatus(unix.WaitStatus(msg.value))), msg.alone == 1, msg.at
		}
		return true
	}
}

// notExecuted words why there was no payload.
func (x *Exec) notExecuted(m message) error {
	errno := syscall.Errno(m.value)
	switch {
	case m.step == stepWorkdir:
		return &result.Error{Code: "workdir", Message: fmt.Sprintf("working directory %q of the sandbox: %v", x.workdir, errno), Hint: "name one that can be entered there", Err: errno}
	case m.step != stepExec:
		return &result.Error{Code: "setup", Message: m.err().Error(), Err: errno}
	case errno == unix.ENOENT || errno == unix.ENOTDIR:
		return &result.Error{Code: "not-found", ExitCode: result.ExitNotFound, Message: fmt.Sprintf("command %q not found in the sandbox", x.name), Err: errno}
	}
	return &result.Error{Code: "not-executable", ExitCode: result.ExitNotExecutable, Message: fmt.Sprintf("command %q cannot be executed: %v", x.name, errno), Err: errno}
}

// Running is closed when the payload runs; right after its release, if that is not
// to be confirmed.
func (x *Exec) Running() <-chan struct{} { return x.running }

// Ending reports whether init has said something that was not read yet, or has ended:
// then Exited is closed any moment.
func (x *Exec) Ending() bool { return proc.Poll(proc.Descriptor(x.socket), unix.POLLIN) != 0 }

// Exited is closed when the payload has ended, or never came to be.
func (x *Exec) Exited() <-chan struct{} { return x.exited }

// ExitStatus is the payload's end, as its parent has seen it, and when that was, on the
// clock of [time.Now]. After Exited. Otherwise [result.ErrUnknown], if init was killed, or
// a *[result.Error] if the command was not executed.
func (x *Exec) ExitStatus() (*result.Payload, time.Time, error) {
	if x.payload == nil {
		return nil, time.Time{}, x.err
	}
	now, clock := clocks()
	return x.payload, now.Add(time.Duration(x.at - clock)), nil
}

// clocks returns [time.Now], and what CLOCK_MONOTONIC says at the same time, in ns. Somebody else
// may have had the processor between the two, and then they are asked again: a payload that ended
// just after a deadline would seem to have ended before it.
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

// Strays returns how many processes the payload has left behind, if that is known without a look at
// them: none, or at least one when init has ended, too. After Exited.
func (x *Exec) Strays() (n int, known bool) {
	if x.alone {
		return 0, true
	}
	return 1, x.Init.Exited()
}

// Signal sends a signal to the payload alone. An init that has ended is no error.
func (x *Exec) Signal(sig syscall.Signal) error { return x.order(order{int32(sig), 1}) }

// SignalAll sends a signal to everything but init, in one step of the kernel's
// (kill(2), pid -1), so that nothing can fork its way out of it.
func (x *Exec) SignalAll(sig syscall.Signal) error { return x.order(order{int32(sig), 0}) }

func (x *Exec) order(o order) error {
	conn, err := x.socket.SyscallConn()
	if err != nil {
		return err
	}
	// It does not wait: an init that is stopped reads nothing, and the kill comes after this.
	closed := conn.Write(func(fd uintptr) bool {
		_, err = unix.Write(int(fd), (*[unsafe.Sizeof(o)]byte)(unsafe.Pointer(&o))[:])
		return true
	})
	if closed != nil || errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) {
		return proc.ErrGone
	}
	return err
}

// Close gives up all descriptors. Should the keeper have nobody else's, it goes on killing what
// it has.
func (x *Exec) Close() {
	x.Workdir.Close() // nil is an error, and no more
	x.Unmount(time.Now())
	x.way.Close()
}
