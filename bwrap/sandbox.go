package bwrap

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/result"
)

// setupBound is how long bwrap may take until init is known, and init until it
// takes the release: mounting hangs if a file system does.
const setupBound = 30 * time.Second

// Sandbox is a running bwrap with an init that is known for certain. Whoever
// started it ends it: package cleanup.
type Sandbox struct {
	Keeper *proc.Keeper
	Init   *proc.Process // PID 1 of the sandbox
	PIDNS  uint64        // inode of the sandbox's PID namespace
	Cred   *proc.Cred    // who bwrap runs as; nil if as sbxrun

	// Running is closed when init has started the payload, or failed to;
	// Exited when the payload has ended, or never came to be.
	Running chan struct{}
	Exited  chan struct{}

	payload  *proc.Process // nil until Running, and if it was too quick for us
	fallback exitReport    // of the status stream, if payload is nil; set before Exited

	status *os.File // read end
	stream statusStream
	block  *os.File // write end
}

type exitReport struct {
	code int
	err  error
}

// Terminal is the caller's terminal in raw mode, to be restored by the keeper
// if sbxrun is killed.
type Terminal struct {
	File  *os.File
	State unix.Termios
}

// Start forks the keeper with bwrap below it, and returns once init exists, is
// verified and held by a pidfd. The payload waits for [Sandbox.Release]. stdio
// stays the caller's. An error is a *[result.Error], and nothing is left.
//
// forked is called as soon as the sandbox has descriptors of its own, while
// bwrap is at work.
func (p *Plan) Start(ctx context.Context, stdio [3]*os.File, tty *Terminal, forked func()) (*Sandbox, error) {
	sb := &Sandbox{Cred: p.cred, Running: make(chan struct{}), Exited: make(chan struct{})}
	if err := p.start(ctx, sb, stdio, tty, forked); err != nil {
		return nil, sb.abandon(err, p.staged)
	}
	return sb, nil
}

// start leaves it to its caller to bring an unfinished sandbox to an end.
func (p *Plan) start(ctx context.Context, sb *Sandbox, stdio [3]*os.File, tty *Terminal, forked func()) error {
	args, err := memory("args", []byte(strings.Join(p.options, "\x00")))
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
		Args: append([]string{p.Program.Path,
			"--args", strconv.Itoa(argsFD), "--block-fd", strconv.Itoa(blockFD), "--json-status-fd", strconv.Itoa(statusFD), "--"}, p.command...),
		Files: append([]*os.File{stdio[0], stdio[1], stdio[2], args, blockEnd, statusEnd}, p.copies...),
		Cred:  p.cred,
		Stage: p.staged,
	}
	if tty != nil {
		cmd.Terminal, cmd.Restore = tty.File, &tty.State
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
	// An error shows in the read.
	_ = sb.status.SetReadDeadline(time.Now().Add(setupBound))
	stop := context.AfterFunc(ctx, func() { _ = sb.status.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	child, err := sb.stream.child()
	if err != nil {
		return err
	}
	if sb.Init, err = proc.Open(child.pid); err != nil {
		return fmt.Errorf("bwrap's child %d: %w", child.pid, err)
	}
	if sb.PIDNS, err = verify(sb.Init, child, sb.Keeper.PID); err != nil {
		return err
	}
	return nil
}

// verify makes sure that init is what bwrap says: a child of our keeper's
// child, the first process of the reported PID namespace. Only then may it ever
// be signalled.
func verify(init *proc.Process, child statusChild, keeper int) (ns uint64, err error) {
	st, err := proc.ReadStat(init.PID)
	if err != nil {
		return 0, err
	}
	monitor, err := proc.ReadStat(st.Parent)
	if err != nil || monitor.Parent != keeper {
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
		startErr = sb.Keeper.StartError(time.Now().Add(10 * time.Millisecond))
		sb.Keeper.Kill()
		if _, reapErr = sb.Keeper.Empty(time.Now().Add(setupBound)); reapErr == nil {
			reapErr = sb.Keeper.Reap(time.Now().Add(setupBound))
		}
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
		e.Message = fmt.Sprintf("bubblewrap did not set up the sandbox within %v", setupBound)
	case !errors.Is(cause, io.EOF): // its own words are on stderr
		e.Message += ": " + cause.Error()
	}
	if reapErr != nil {
		e.Message += fmt.Sprintf("; and it could not be ended: %v", reapErr)
	}
	return e
}

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
	if sb.Init != nil {
		sb.Init.Close()
	}
	select {
	case <-sb.Running:
		if sb.payload != nil {
			sb.payload.Close()
		}
	default:
	}
}

// Release lets init start the payload. From here on the sandbox is followed in
// the background until Exited is closed.
//
// When the payload ends, bwrap's monitor writes its exit code to the status
// pipe and exits, and init is killed with it (--die-with-parent): what the
// payload has left behind would be gone before anybody could count it or give
// it a grace period. So the pipe was filled before (fillStatus): the monitor
// waits in write(2) until we read. The filling is white space to JSON.
func (sb *Sandbox) Release() error {
	if _, err := sb.block.Write([]byte{0}); err != nil {
		return fmt.Errorf("release init: %w", err)
	}
	go sb.follow()
	return nil
}

// fillStatus makes the monitor wait with the exit code: the pipe is made to hold
// one message and no more, and gets one.
func (sb *Sandbox) fillStatus() error {
	w, err := reopen(sb.status, unix.O_WRONLY)
	if err != nil {
		return err
	}
	defer w.Close()
	fd := uintptr(proc.Descriptor(w))
	if _, err := unix.FcntlInt(fd, unix.F_SETPIPE_SZ, os.Getpagesize()); err != nil {
		return fmt.Errorf("shrink the status pipe: %w", err)
	}
	// In packet mode nothing is added to a message, however short it is (open(2)
	// does not take O_DIRECT for a pipe; fcntl(2) does, since Linux 4.5). And not
	// blocking: were there something in the pipe already, it would be full as it is.
	if _, err := unix.FcntlInt(fd, unix.F_SETFL, unix.O_DIRECT|unix.O_NONBLOCK); err != nil {
		return fmt.Errorf("packet mode of the status pipe: %w", err)
	}
	if _, err := unix.Write(int(fd), []byte(" ")); err != nil && err != unix.EAGAIN {
		return fmt.Errorf("fill the status pipe: %w", err)
	}
	return nil
}

// follow sees the payload begin and end.
func (sb *Sandbox) follow() {
	defer close(sb.Exited)
	// When init has read the release it closes the block pipe, and as nobody
	// else has that end open, ours reports an error: now comes the fork.
	if err := proc.WaitHangup(sb.block, time.Now().Add(setupBound)); err != nil {
		sb.fallback.err = fmt.Errorf("%w: %w", ErrSetup, err)
	} else {
		sb.payload = sb.findPayload()
	}
	close(sb.Running)
	if sb.fallback.err != nil {
		return
	}
	if sb.payload == nil {
		sb.fallback.code, sb.fallback.err = sb.stream.exitCode()
		return
	}
	// No deadline: ended by whoever kills init.
	_ = sb.payload.Wait(time.Time{})
}

// findPayload takes hold of the payload, which init is forking right now. It
// lives for a few hundred microseconds at the least (fork, exec), so it is
// nearly always found; if not, bwrap's word on how it ended must do. nil if
// there was none to be seen.
func (sb *Sandbox) findPayload() *proc.Process {
	const bound = 20 * time.Millisecond
	for start := time.Now(); time.Since(start) < bound && !sb.Init.Exited(); runtime.Gosched() {
		children := proc.Children(sb.Init.PID, sb.Init.PID)
		if len(children) == 0 {
			continue
		}
		p, err := proc.Open(children[0])
		if err != nil {
			return nil
		}
		// An orphan of the payload's could be the first child if the payload
		// has ended already; the payload is process 2 of its namespace.
		st, err := proc.ReadStat(p.PID)
		n, nerr := proc.NSPID(p.PID)
		if err != nil || nerr != nil || st.Parent != sb.Init.PID || n != 2 {
			p.Close()
			return nil
		}
		return p
	}
	return nil
}

// maxLook bounds every look at the sandbox's processes: it delays the kill.
const maxLook = 1000

// Strays looks at what the payload has left behind: how many processes are
// alive, at most 1,000, and the CPU time they have used. After Exited, and while
// init still lives.
func (sb *Sandbox) Strays() (n int, used proc.Times) {
	var alive []proc.Stat
	for _, st := range proc.Descendants(sb.Init.PID, maxLook) {
		if st.State != "Z" && st.State != "X" && (sb.payload == nil || st.PID != sb.payload.PID) {
			alive = append(alive, st)
		}
	}
	return len(alive), sum(alive)
}

func sum(stats []proc.Stat) (total proc.Times) {
	for _, st := range stats {
		total.User += st.CPU.User
		total.System += st.CPU.System
	}
	return total
}

// Signal sends a signal to the payload alone. [proc.ErrGone] if it has ended or
// is not known.
func (sb *Sandbox) Signal(sig unix.Signal) error {
	select {
	case <-sb.Running:
	default:
		return proc.ErrGone
	}
	if sb.payload == nil {
		return proc.ErrGone
	}
	return sb.payload.Signal(sig)
}

// Used is the CPU time of the processes that run now and that nobody may wait
// for any more: when init is killed the kernel discards it (zap_pid_ns_processes
// ignores SIGCHLD). Up to 100 processes are asked, so as not to delay the kill.
func (sb *Sandbox) Used() proc.Times { return sum(proc.Descendants(sb.Init.PID, 100)) }

// ErrSetup says that init never came to the point of starting the payload.
var ErrSetup = errors.New("the sandbox was not set up")

// ErrNotExecuted says that the payload was never executed.
var ErrNotExecuted = errors.New("the command was not executed")

// ErrUnknown says that the payload was executed, or may have been, and that
// nobody can tell how it ended.
var ErrUnknown = errors.New("the command's end is unknown")

// ExitStatus is the payload's end. After Exited; it blocks until deadline at
// the most. Otherwise ErrSetup, ErrNotExecuted or ErrUnknown.
func (sb *Sandbox) ExitStatus(deadline time.Time) (*result.Payload, error) {
	if sb.payload == nil {
		if sb.fallback.err == nil {
			p := result.FromShellCode(sb.fallback.code)
			return &p, nil
		}
		if errors.Is(sb.fallback.err, ErrSetup) {
			return nil, sb.fallback.err
		}
		return nil, ErrUnknown
	}
	// The kernel keeps the status from the moment the payload is reaped, which
	// is a matter of microseconds; and where it does not, there is nothing to
	// wait for.
	soon := time.Now().Add(5 * time.Millisecond)
	_ = sb.payload.WaitReaped(soon)
	if ws, ok := sb.payload.ExitStatus(); ok {
		// bwrap's child exits with 1 if it could not exec: only then ask.
		if p := result.FromWaitStatus(ws); p.Signal != 0 || p.ExitCode != 1 {
			return &p, nil
		} else if _, err := sb.readExitCode(deadline); err != nil {
			return nil, ErrNotExecuted
		} else {
			return &p, nil
		}
	}
	code, err := sb.readExitCode(deadline)
	if err != nil {
		return nil, ErrUnknown
	}
	p := result.FromShellCode(code)
	return &p, nil
}

func (sb *Sandbox) readExitCode(deadline time.Time) (int, error) {
	_ = sb.status.SetReadDeadline(deadline) // an error shows in the read
	return sb.stream.exitCode()
}
