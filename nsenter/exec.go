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
)

// SetupBound is how long the way in may take.
const SetupBound = 10 * time.Second

// Entry is what to run in which sandbox.
type Entry struct {
	Init    *proc.Process // the sandbox's, verified; stays the caller's
	Cred    *proc.Cred    // who the sandbox runs as; nil if as sbxrun
	HostNet bool          // it has the host's network namespace
	Command []string
	Path    string   // where the command is looked for, in the sandbox
	Env     []string // NAME=VALUE
	Workdir string   // in the sandbox
	// Terminal makes stdin the controlling terminal.
	Terminal bool
}

// Exec is a payload in a PID namespace of its own, below that of a sandbox.
// Whoever started it ends it: package cleanup.
type Exec struct {
	proc.Kept
	entry   *entry
	name    string   // of the command, for errors
	workdir string   // for errors
	socket  *os.File // to init
	exited  chan struct{}
	payload *result.Payload // before exited is closed
	err     error
}

// Start enters the sandbox and returns once the new init exists, is verified and
// held by a pidfd. The payload waits for [Exec.Release]. stdio stays the
// caller's. An error is a *[result.Error], and nothing is left. forked is called
// when the payload has descriptors of its own.
func (e *Entry) Start(ctx context.Context, stdio [3]*os.File, tty *proc.Terminal, forked func()) (*Exec, error) {
	x := &Exec{exited: make(chan struct{}), name: e.Command[0], workdir: e.Workdir}
	err := x.start(ctx, e, stdio, tty, forked)
	if err == nil {
		return x, nil
	}
	if x.Keeper != nil {
		if abandonErr := x.Abandon(time.Now().Add(SetupBound)); abandonErr != nil {
			err = fmt.Errorf("%w; and it could not be ended: %w", err, abandonErr)
		}
		if startErr := x.Keeper.StartError(); startErr != nil {
			err = startErr
		}
	}
	x.Close()
	known := &result.Error{Code: "enter", Message: "cannot enter the sandbox: " + err.Error(), Err: err}
	if e.Init.Exited() {
		known.Code, known.Message = "ended", "the sandbox has ended"
	}
	return nil, known
}

func (x *Exec) start(ctx context.Context, e *Entry, stdio [3]*os.File, tty *proc.Terminal, forked func()) error {
	entry, err := e.lay()
	if err != nil {
		return err
	}
	x.entry = entry
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("socketpair: %w", err)
	}
	theirs := os.NewFile(uintptr(pair[1]), "entry")
	defer theirs.Close()
	_ = unix.SetNonblock(pair[0], true) // for the poller
	x.socket = os.NewFile(uintptr(pair[0]), "entry")
	if err := unix.SetsockoptInt(pair[0], unix.SOL_SOCKET, unix.SO_PASSCRED, 1); err != nil {
		return fmt.Errorf("SO_PASSCRED: %w", err)
	}
	x.Keeper, err = proc.Keep(proc.Command{
		Files:    []*os.File{stdio[0], stdio[1], stdio[2], theirs, e.Init.File()},
		Cred:     e.Cred,
		Terminal: tty,
		Enter:    enter,
		Arg:      unsafe.Pointer(entry),
	})
	theirs.Close() // init's must be the only one left, so that its death ends the stream
	if err != nil {
		return err
	}
	forked()
	return x.identify(ctx)
}

// lay puts everything into the form that system calls take.
func (e *Entry) lay() (*entry, error) {
	n := &entry{
		namespaces: unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWCGROUP,
		cmdline:    commandLine(),
		terminal:   e.Terminal,
		header:     unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3},
	}
	if e.HostNet {
		n.namespaces &^= unix.CLONE_NEWNET // the host's, which only its owner may join
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
	n.shell = append([]*byte{&shellPath[0], nil}, all[1:]...)
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
	stop := proc.ReadUntil(ctx, x.socket, time.Now().Add(SetupBound))
	msg, pid, err := x.read()
	stop()
	if err != nil {
		return err
	}
	if msg.kind != messageReady {
		return msg.err()
	}
	if x.Init, err = proc.Open(pid); err != nil {
		return err
	}
	// The kernel says who has sent the message. That it is our keeper's child, and
	// the first process of a namespace, is looked at now; that it has not ended
	// meanwhile, last.
	st, err := proc.ReadStat(pid)
	if err != nil {
		return err
	}
	n, err := proc.NSPID(pid)
	if err != nil {
		return err
	}
	if st.Parent != x.Keeper.PID || n != 1 || msg.inside != 1 {
		return fmt.Errorf("process %d is not the init that was started", pid)
	}
	if x.Init.Exited() {
		return proc.ErrGone
	}
	x.PIDNS = msg.pidNS
	return nil
}

// read takes one message, with its sender as the kernel names it.
func (x *Exec) read() (msg message, pid int, err error) {
	conn, err := x.socket.SyscallConn()
	if err != nil {
		return msg, 0, err
	}
	buf := (*[unsafe.Sizeof(msg)]byte)(unsafe.Pointer(&msg))
	var oob [64]byte
	var n, oobn int
	var failed error
	err = conn.Read(func(fd uintptr) bool {
		n, oobn, _, _, failed = unix.Recvmsg(int(fd), buf[:], oob[:], unix.MSG_CMSG_CLOEXEC)
		return failed != unix.EAGAIN && failed != unix.EINTR
	})
	switch {
	case err != nil:
		return msg, 0, err
	case failed != nil:
		return msg, 0, failed
	case n == 0:
		return msg, 0, errClosed
	case n != len(buf):
		return msg, 0, errors.New("short message from the sandbox")
	}
	for _, c := range controls(oob[:oobn]) {
		if cred, err := unix.ParseUnixCredentials(&c); err == nil {
			return msg, int(cred.Pid), nil
		}
	}
	return msg, 0, errors.New("message without its sender's pid (SO_PASSCRED)")
}

func controls(oob []byte) []unix.SocketControlMessage {
	list, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil // and so no sender, which is an error
	}
	return list
}

// errClosed: nobody is left who could say something.
var errClosed = errors.New("it ended before it was ready")

// err is a step that failed.
func (m message) err() error {
	step := "enter"
	if m.step > 0 && m.step < int64(len(stepNames)) {
		step = stepNames[m.step]
	}
	return &proc.StartError{Step: step, Err: syscall.Errno(m.value)}
}

// Release lets init start the payload. From here on it is followed in the
// background until Exited is closed.
func (x *Exec) Release() {
	if err := x.send(order{}); err != nil {
		x.err = result.ErrUnknown // init is dead: the next read says so, too
	}
	go x.follow()
}

func (x *Exec) send(o order) error {
	_, err := x.socket.Write((*[unsafe.Sizeof(o)]byte)(unsafe.Pointer(&o))[:])
	return err
}

// follow waits for the payload's end, or for init's.
func (x *Exec) follow() {
	defer close(x.exited)
	_ = x.socket.SetReadDeadline(time.Time{}) // ended by whoever kills init
	for {
		msg, _, err := x.read()
		switch {
		case err != nil:
			if x.err == nil {
				x.err = result.ErrUnknown
			}
			return
		case msg.kind == messageFailed:
			x.err = x.notExecuted(msg)
			return
		case msg.kind == messageExited:
			p := result.FromWaitStatus(unix.WaitStatus(msg.value))
			x.payload = &p
			return
		}
	}
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

// Running is closed: after its release the payload runs, or cannot.
func (x *Exec) Running() <-chan struct{} { return always }

var always = func() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

// Exited is closed when the payload has ended, or never came to be.
func (x *Exec) Exited() <-chan struct{} { return x.exited }

// ExitStatus is the payload's end, as its parent has seen it. After Exited.
// Otherwise [result.ErrUnknown], or a *[result.Error] if it was not executed.
func (x *Exec) ExitStatus(time.Time) (*result.Payload, error) { return x.payload, x.err }

// Strays looks at what the payload has left behind: how many processes are
// alive, at most 1,000, and what they have used. After Exited.
func (x *Exec) Strays() (n int, used proc.Usage) { return x.Kept.Strays(0) }

// Signal sends a signal to the payload alone. An init that has ended is no error.
func (x *Exec) Signal(sig syscall.Signal) error { return x.order(order{int32(sig), 1}) }

// SignalAll sends a signal to everything but init, in one step of the kernel's
// (kill(2), pid -1), so that nothing can fork its way out of it.
func (x *Exec) SignalAll(sig syscall.Signal) error { return x.order(order{int32(sig), 0}) }

func (x *Exec) order(o order) error {
	err := x.send(o)
	if errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) {
		return proc.ErrGone
	}
	return err
}

// Close gives up all descriptors. Should the keeper still have something, it
// goes on killing it.
func (x *Exec) Close() {
	if x.Keeper != nil {
		x.Keeper.Kill()
	}
	if x.socket != nil {
		x.socket.Close()
	}
	if x.Init != nil {
		x.Init.Close()
	}
}
