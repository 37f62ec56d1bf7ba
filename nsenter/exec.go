package nsenter

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/result"
	"github.com/sbxrun/sbxrun/internal/seccomp"
)

// SetupBound is how long the way in may take.
const SetupBound = 10 * time.Second

// dying is how long the end of a sandbox may take that shows in what it refuses.
const dying = 500 * time.Millisecond

// Entry is what to run in which sandbox.
type Entry struct {
	Target
	Command []string
	Path    string   // where the command is looked for, in the sandbox
	Env     []string // NAME=VALUE
	Workdir string   // in the sandbox
	// Terminal makes stdin the controlling terminal.
	Terminal bool
	// Confirm makes [Exec.Running] wait until the command was really executed.
	Confirm bool
	Bounds  proc.Bounds
	Filter  *seccomp.Filter // for system calls; the sandbox's own
}

// Exec is a payload in a PID namespace of its own, below that of a sandbox.
// Whoever started it ends it: package cleanup.
type Exec struct {
	way
	name    string // of the command, for errors
	workdir string // for errors
	running chan struct{}
	confirm bool
	exited  chan struct{}
	// Set before exited is closed.
	payload *result.Payload // nil if not known
	alone   bool            // it has left nothing behind
	err     error           // why payload is nil
}

// Start enters the sandbox and returns once the new init exists, is verified and
// held by a pidfd. The payload waits for [Exec.Release]. stdio stays the
// caller's. An error is a *[result.Error], and nothing is left. forked is called
// when the payload has descriptors of its own. It blocks for at most [SetupBound], or
// until ctx is done, and then until nothing is left.
func (e *Entry) Start(ctx context.Context, stdio [3]*os.File, tty *proc.Terminal, forked func()) (*Exec, error) {
	x := &Exec{name: e.Command[0], workdir: e.Workdir, running: make(chan struct{}), confirm: e.Confirm, exited: make(chan struct{})}
	entry, err := e.lay()
	if err == nil {
		err = x.enter(&e.Target, entry, stdio, tty, e.Bounds)
	}
	if err == nil {
		forked()
		err = x.identify(ctx)
	}
	if err == nil {
		return x, nil
	}
	if abandonErr := x.abandon(); abandonErr != nil {
		err = abandonErr // it says more: a step in the keeper, or that something is left
	}
	x.Close()
	known := &result.Error{Code: "enter", Message: "cannot enter the sandbox: " + err.Error(), Err: err}
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded), ctx.Err() != nil:
		known.Message, known.Hint = "cannot enter the sandbox in time", "does something in it stop what comes in? sbxrun kill ends it"
	case e.Init.Wait(time.Now().Add(dying)) == nil:
		known.Code, known.Message = "ended", "the sandbox has ended"
	}
	return nil, known
}

// lay puts everything into the form that system calls take.
func (e *Entry) lay() (*entry, error) {
	n := &entry{
		namespaces: e.Target.namespaces(),
		terminal:   e.Terminal,
		rlimits:    e.Bounds.Rlimits,
		header:     unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3},
	}
	program, err := e.Filter.Program()
	if err != nil {
		return nil, err
	}
	if len(program) > 0 {
		n.filter = &unix.SockFprog{Len: uint16(len(program) / unix.SizeofSockFilter), Filter: (*unix.SockFilter)(unsafe.Pointer(&program[0]))}
	}
	words := func(list []string) (**byte, []*byte, error) {
		p, err := syscall.SlicePtrFromStrings(list)
		if err != nil {
			return nil, nil, fmt.Errorf("%q holds a NUL byte", list)
		}
		return &p[0], p, nil
	}
	argv, all, err := words(e.Command)
	if err != nil {
		return nil, err
	}
	n.argv = argv
	n.shell = []uintptr{uintptr(unsafe.Pointer(&shellPath)), 0}
	for _, word := range all[1:] { // with the nil at the end; argv keeps them
		n.shell = append(n.shell, uintptr(unsafe.Pointer(word)))
	}
	if n.envv, _, err = words(e.Env); err != nil {
		return nil, err
	}
	if n.workdir, err = syscall.BytePtrFromString(e.Workdir); err != nil {
		return nil, fmt.Errorf("working directory %q: %w", e.Workdir, err)
	}
	paths := []string{e.Command[0]}
	if e.Command[0] != "" && !strings.Contains(e.Command[0], "/") {
		paths = nil
		for dir := range strings.SplitSeq(e.Path, ":") {
			if dir == "" {
				dir = "." // as in the shells
			}
			paths = append(paths, dir+"/"+e.Command[0])
		}
	}
	_, candidates, err := words(paths)
	if err != nil {
		return nil, err
	}
	n.candidates = candidates[:len(paths)]
	return n, nil
}

// identify waits for init's first word and makes sure of who said it.
func (x *Exec) identify(ctx context.Context) error {
	deadline := time.Now().Add(SetupBound)
	if own, ok := ctx.Deadline(); ok && own.Before(deadline) {
		deadline = own
	}
	stop := proc.ReadUntil(ctx, x.socket, deadline)
	msg, pid, err := x.read()
	stop()
	if err != nil {
		return err
	}
	if msg.kind != messageReady {
		return msg.err()
	}
	if x.Init, err = proc.Open(pid); err != nil {
		// It is gone, and may have said why.
		if msg, _, readErr := x.read(); readErr == nil && msg.kind == messageFailed {
			return msg.err()
		}
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
	x.PIDNS = msg.pidNS
	return nil
}

// Release lets init start the payload. From here on it is followed in the
// background until Exited is closed.
func (x *Exec) Release() {
	_, _ = x.gate.Write([]byte{0}) // nobody is there any more: follow will see
	if !x.confirm {
		close(x.running)
	}
	go x.follow()
}

// follow waits for the payload's end, or for init's.
func (x *Exec) follow() {
	defer close(x.exited)
	if x.confirm && x.executed() {
		close(x.running)
	}
	_ = x.socket.SetReadDeadline(time.Time{}) // ended by whoever kills init
	for {
		msg, _, err := x.read()
		switch {
		case err != nil:
			x.err = result.ErrUnknown
			return
		case msg.kind == messageFailed:
			x.err = x.notExecuted(msg)
			return
		case msg.kind == messageExited:
			p := result.FromWaitStatus(unix.WaitStatus(msg.value))
			x.payload, x.alone = &p, msg.alone == 1
			return
		}
	}
}

// executed waits until the payload has executed its command, or could not. Both
// close the gate, which nobody else has open for reading any more; but who could not
// has said so before.
func (x *Exec) executed() bool {
	if proc.WaitHangup(x.gate, time.Now().Add(SetupBound)) != nil {
		return false
	}
	fds := []unix.PollFd{{Fd: int32(proc.Descriptor(x.socket)), Events: unix.POLLIN}}
	n, err := unix.Poll(fds, 0)
	return n == 0 && err == nil
}

// notExecuted words why there was no payload.
func (x *Exec) notExecuted(m message) error {
	errno := syscall.Errno(m.value)
	switch {
	case m.step == stepWorkdir:
		return &result.Error{Code: "workdir", Message: fmt.Sprintf("working directory %q of the sandbox: %v", x.workdir, errno), Err: errno}
	case m.step != stepExec:
		return &result.Error{Code: "setup", Message: m.err().Error(), Err: errno}
	case errno == unix.ENOENT || errno == unix.ENOTDIR:
		return &result.Error{Code: "not-found", ExitCode: result.ExitNotFound, Message: fmt.Sprintf("command %q not found in the sandbox", x.name), Err: errno}
	}
	return &result.Error{Code: "not-executable", ExitCode: result.ExitNotExecutable, Message: fmt.Sprintf("command %q cannot be executed: %v", x.name, errno), Err: errno}
}

// Ends is what has to go for the exec to be gone.
func (x *Exec) Ends() *proc.Kept { return &x.Kept }

// Running is closed when the payload runs; right after its release, if that is not
// to be confirmed.
func (x *Exec) Running() <-chan struct{} { return x.running }

// Exited is closed when the payload has ended, or never came to be.
func (x *Exec) Exited() <-chan struct{} { return x.exited }

// ExitStatus is the payload's end, as its parent has seen it. After Exited.
// Otherwise [result.ErrUnknown], or a *[result.Error] if it was not executed.
func (x *Exec) ExitStatus(time.Time) (*result.Payload, error) { return x.payload, x.err }

// Strays looks at what the payload has left behind: how many processes are
// alive, at most 1,000, and what they have used. After Exited.
func (x *Exec) Strays() (n int, used proc.Usage) {
	if x.alone {
		return 0, used
	}
	return x.Kept.Strays(0)
}

// Signal sends a signal to the payload alone. An init that has ended is no error.
func (x *Exec) Signal(sig syscall.Signal) error { return x.order(order{int32(sig), 1}) }

// SignalAll sends a signal to everything but init, in one step of the kernel's
// (kill(2), pid -1), so that nothing can fork its way out of it.
func (x *Exec) SignalAll(sig syscall.Signal) error { return x.order(order{int32(sig), 0}) }

func (x *Exec) order(o order) error {
	_, err := x.socket.Write((*[unsafe.Sizeof(o)]byte)(unsafe.Pointer(&o))[:])
	if errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) {
		return proc.ErrGone
	}
	return err
}
