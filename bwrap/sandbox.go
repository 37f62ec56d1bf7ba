package bwrap

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/result"
)

// SetupBound is how long bwrap may take until init is known, and init until it
// has started the payload: mounting hangs if a file system does.
const SetupBound = 30 * time.Second

// Sandbox is a running bwrap with an init that is known for certain. Whoever
// started it ends it: package cleanup.
type Sandbox struct {
	proc.Kept
	Cred    *proc.Cred // who bwrap runs as; nil if as sbxrun
	HostNet bool       // it has the caller's network namespace

	running chan struct{}
	exited  chan struct{}

	monitor  *proc.Process // bwrap's outer process
	payload  *proc.Process // nil until running, and if it was too quick for us
	fallback exitReport    // of the status stream, if payload is nil; set before exited

	status *os.File // read end
	stream statusStream
	block  *os.File // write end
}

type exitReport struct {
	code int
	err  error
}

// Start forks the keeper with bwrap below it, and returns once init exists, is
// verified and held by a pidfd. The payload waits for [Sandbox.Release]. stdio
// stays the caller's. An error is a *[result.Error], and nothing is left.
//
// forked is called as soon as the sandbox has descriptors of its own, while
// bwrap is at work.
func (p *Plan) Start(ctx context.Context, stdio [3]*os.File, tty *proc.Terminal, forked func()) (*Sandbox, error) {
	sb := &Sandbox{Cred: p.cred, HostNet: p.hostNet, running: make(chan struct{}), exited: make(chan struct{})}
	if err := p.start(ctx, sb, stdio, tty, forked); err != nil {
		return nil, sb.abandon(err, p.staged)
	}
	return sb, nil
}

// start leaves it to its caller to bring an unfinished sandbox to an end.
func (p *Plan) start(ctx context.Context, sb *Sandbox, stdio [3]*os.File, tty *proc.Terminal, forked func()) error {
	// Each word ends with a NUL, the last one too: it may be empty.
	args, err := memory("args", []byte(strings.Join(p.options, "\x00")+"\x00"))
	if err != nil {
		return err
	}
	defer args.Close()
	blockEnd, block, err := blockPipe()
	if err != nil {
		return err
	}
	defer blockEnd.Close()
	sb.block = block
	status, statusEnd, err := statusPipe()
	if err != nil {
		return err
	}
	sb.status, sb.stream = status, newStatusStream(status)
	cmd := proc.Command{
		Path: p.Program.Path,
		// The name is for who looks for what a crash has left. It is not printed:
		// bwrap calls itself bwrap.
		Args: append([]string{proc.Marker(os.Geteuid()),
			"--args", strconv.Itoa(argsFD), "--block-fd", strconv.Itoa(blockFD), "--json-status-fd", strconv.Itoa(statusFD), "--"}, p.command...),
		Files: append([]*os.File{stdio[0], stdio[1], stdio[2], args, blockEnd, statusEnd}, p.copies...),
		Cred:  p.cred,
		Stage: p.staged,

		Terminal: tty,
		Bounds:   p.Bounds,
	}
	sb.Keeper, err = proc.Keep(cmd)
	// bwrap's must be the only writer left, so that its death ends the stream.
	statusEnd.Close()
	if err != nil {
		return err
	}
	forked()
	if err := sb.identify(ctx); err != nil {
		return err
	}
	// Not before: bwrap itself needs more than a payload may be given.
	if err := sb.Init.SetLimits(p.Bounds.Rlimits, p.cred); err != nil {
		return fmt.Errorf("set resource limits: %w", err)
	}
	return sb.fillStatus()
}

// blockPipe makes the pipe that holds init. bwrap's end is open for writing
// too (the descriptor's own /proc/self/fd entry opened again), so that it never
// sees end-of-file: bwrap takes that for the release.
func blockPipe() (bwrapEnd, ours *os.File, err error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, nil, err
	}
	defer r.Close()
	if bwrapEnd, err = reopen(r, os.O_RDWR); err != nil {
		w.Close()
		return nil, nil, err
	}
	return bwrapEnd, w, nil
}

// reopen opens what f is once more, with a mode and flags of its own.
func reopen(f *os.File, flags int) (*os.File, error) {
	fd, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", proc.Descriptor(f)), flags|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s again: %w", f.Name(), err)
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

// statusPipe makes the pipe for bwrap's status. Ours is the reading end, which
// takes deadlines.
func statusPipe() (ours, bwrapEnd *os.File, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, err
	}
	if err := unix.SetNonblock(fds[0], true); err != nil {
		unix.Close(fds[0])
		unix.Close(fds[1])
		return nil, nil, err
	}
	return os.NewFile(uintptr(fds[0]), "status"), os.NewFile(uintptr(fds[1]), "status"), nil
}

// identify reads who init is and makes sure of it.
func (sb *Sandbox) identify(ctx context.Context) error {
	defer proc.ReadUntil(ctx, sb.status, time.Now().Add(SetupBound))()
	child, err := sb.stream.child()
	if err != nil {
		return err
	}
	if sb.Init, err = proc.Open(child.pid); err != nil {
		return fmt.Errorf("bwrap's child %d: %w", child.pid, err)
	}
	sb.monitor, sb.PIDNS, err = verify(sb.Init, child, sb.Keeper.PID)
	return err
}

// verify makes sure that init is what bwrap says: a child of our keeper's
// child, the first process of the reported PID namespace. Only then may it ever
// be signalled.
func verify(init *proc.Process, child statusChild, keeper int) (monitor *proc.Process, ns uint64, err error) {
	st, err := proc.ReadStat(init.PID)
	if err != nil {
		return nil, 0, err
	}
	if monitor, err = proc.Open(st.Parent); err != nil {
		return nil, 0, err
	}
	if ns, err = verifyBelow(init, monitor, child, keeper); err != nil {
		monitor.Close()
		return nil, 0, err
	}
	return monitor, ns, nil
}

func verifyBelow(init, monitor *proc.Process, child statusChild, keeper int) (ns uint64, err error) {
	// Read after it was opened; and with both dead init would be our own child.
	above, err := proc.ReadStat(monitor.PID)
	if err != nil {
		return 0, err
	}
	if above.Parent != keeper {
		return 0, fmt.Errorf("process %d is not below our bwrap", init.PID)
	}
	if ns, err = proc.Namespace(init.PID, "pid"); err != nil {
		return 0, err
	}
	if ns != child.pidNS {
		return 0, fmt.Errorf("process %d is in PID namespace %d, not in bwrap's %d", init.PID, ns, child.pidNS)
	}
	n, err := proc.NSPID(init.PID)
	if err != nil {
		return 0, err
	}
	if n != 1 {
		return 0, fmt.Errorf("process %d is number %d of its PID namespace, not init", init.PID, n)
	}
	if init.Exited() {
		return 0, proc.ErrGone // so all of the above may have been about another
	}
	return ns, nil
}

// abandon ends a sandbox that did not come to be. Init may be unknown, so it is
// the keeper that kills what it has.
func (sb *Sandbox) abandon(cause error, staged []*os.File) error {
	var startErr, reapErr error
	if sb.Keeper != nil {
		reapErr = sb.Abandon(time.Now().Add(SetupBound))
		startErr = sb.Keeper.StartError()
	}
	sb.Close()
	e := &result.Error{Code: "setup", Message: "bubblewrap could not set up the sandbox", Err: cause}
	switch {
	case startErr != nil:
		e.Message, e.Err = fmt.Sprintf("cannot start bubblewrap: %v", startErr), startErr
		if len(staged) > 0 && errors.Is(startErr, unix.EPERM) {
			e.Code, e.Hint = "stage", fmt.Sprintf("root needs CAP_SYS_ADMIN to bind %q, which only root can reach; make it reachable for everybody, or run sbxrun as its owner", staged[0].Name())
		}
	case errors.Is(cause, os.ErrDeadlineExceeded):
		e.Message = fmt.Sprintf("bubblewrap did not set up the sandbox within %v", SetupBound)
	case !errors.Is(cause, io.EOF) && !errors.Is(cause, proc.ErrGone) && !errors.Is(cause, fs.ErrNotExist): // its own words are on stderr
		e.Message += ": " + cause.Error()
	}
	if reapErr != nil {
		e.Message += fmt.Sprintf("; and it could not be ended: %v", reapErr)
	}
	return e
}

// Ends is what has to go for the sandbox to be gone.
func (sb *Sandbox) Ends() *proc.Kept { return &sb.Kept }

// Running is closed when init has started the payload, or failed to.
func (sb *Sandbox) Running() <-chan struct{} { return sb.running }

// Exited is closed when the payload has ended, or never came to be.
func (sb *Sandbox) Exited() <-chan struct{} { return sb.exited }

// Close gives up all descriptors. Should the keeper still have something, it
// goes on killing it.
func (sb *Sandbox) Close() {
	if sb.Keeper != nil {
		sb.Keeper.Kill()
	}
	for _, f := range []*os.File{sb.block, sb.status} {
		if f != nil {
			f.Close()
		}
	}
	for _, p := range []*proc.Process{sb.Init, sb.monitor} {
		if p != nil {
			p.Close()
		}
	}
	select {
	case <-sb.running:
		if sb.payload != nil {
			sb.payload.Close()
		}
	default:
	}
}
