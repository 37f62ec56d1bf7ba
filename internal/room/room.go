package room

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/enter"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/values"
)

// SetupBound limits the time in which bwrap builds a room: a mount hangs if its file system does.
const SetupBound = 30 * time.Second

// Room is a room that bwrap has built. Its PID 1 is verified and only waits. Package supervise ends it.
type Room struct {
	proc.Kept
	Cred    *proc.Cred  // identity of its processes; nil for sbxrun's
	HostNet bool        // it shares the caller's network namespace
	Exec    *enter.Exec // the plan's command, held; nil for none
	// Overlays of the room, in the order of the policy. A function that takes them over sets this to nil.
	Overlays []*Overlay
}

// Start forks the keeper, with bwrap below it and, if the plan has a command, the process that enters the room as soon
// as it is built. It returns when the room's PID 1 and the command's init are verified and held by pidfds; the payload
// waits for its release. Without a command it returns when the room is built. The caller keeps stdio and may close it;
// bwrap writes errors to stdio[2]. An error is a *[result.Error], and all processes have exited.
func (p *Plan) Start(ctx context.Context, stdio [3]*os.File, ttys []proc.Terminal, confirm bool) (*Room, error) {
	mounts, err := p.detach()
	if err != nil {
		return nil, err
	}
	defer closeAll(mounts) // the keeper has copies
	r := &Room{Cred: p.cred, HostNet: p.hostNet || p.ownNet}
	if err = p.start(ctx, r, mounts, stdio, ttys, confirm); err != nil {
		return nil, r.abandon(err)
	}
	return r, nil
}

// Entry returns the plan's command.
func (p *Plan) Entry() *enter.Entry {
	return &enter.Entry{Cred: p.cred, HostNet: p.hostNet || p.ownNet, Command: p.command, Path: p.path, Env: values.Pairs(p.env), Workdir: p.Workdir,
		Terminal: p.terminal, Bounds: p.Bounds, Filter: p.filter}
}

// start is the rest of Start. After an error, the caller ends the unfinished room.
func (p *Plan) start(ctx context.Context, r *Room, mounts []*os.File, stdio [3]*os.File, ttys []proc.Terminal, confirm bool) error {
	deadline := time.Now().Add(SetupBound)
	b, err := p.builder(stdio[2], mounts)
	defer b.close()
	if err != nil {
		return err
	}
	entry, furnishing := p.Entry(), p.furnishing()
	entry.Confirm, furnishing.Ready = confirm, b.ready
	x, way, err := entry.Prepare(stdio, furnishing)
	if len(p.command) > 0 {
		r.Exec = x
	} else {
		defer x.Close()
	}
	if err != nil {
		return err
	}
	r.Keeper, err = proc.Keep(proc.Command{Program: b.program, Way: way, Cred: p.cred, Hold: p.hold, Terminals: ttys, Remove: p.Bounds.Remove})
	if err != nil {
		return err
	}
	b.started()
	if err := r.identify(ctx, b.info, deadline); err != nil {
		return err
	}
	outer, err := r.Room.NamespaceOwner("mnt")
	if err != nil {
		return err
	}
	defer outer.Close()
	r.Overlays, p.overlays = p.overlays, nil
	x.Entered()
	if r.Exec != nil {
		x.Keeper = r.Keeper
	}
	if err := x.Enter(r.Room, outer); err != nil {
		return err
	}
	if err := x.Identify(ctx, deadline); err != nil {
		return p.mountError(err, furnishing.Mounts)
	}
	r.Init, r.InitNS = x.Init, x.InitNS
	err = adopt(r.Overlays, x.Layers)
	x.Layers = nil
	return err
}

// identify reads the PID of the room's PID 1 and verifies it. It must not be signalled before.
func (r *Room) identify(ctx context.Context, info *os.File, deadline time.Time) error {
	stop := proc.ReadUntil(ctx, info, deadline)
	pid, ns, err := readStatus(info)
	stop()
	if err != nil {
		return err
	}
	if r.Room, err = proc.Open(pid); err != nil {
		return fmt.Errorf("bwrap's child %d: %w", pid, err)
	}
	r.RoomNS = ns
	return r.verify()
}

// verify checks that the room's PID 1 is a child of the monitor, which is a child of our keeper, and the first process
// of a PID namespace. Only bwrap has run below the keeper so far, so there is only one such process.
func (r *Room) verify() error {
	st, err := proc.ReadStat(r.Room.PID)
	if err != nil {
		return err
	}
	if r.Monitor, err = proc.Open(st.Parent); err != nil {
		return err
	}
	above, err := proc.ReadStat(st.Parent)
	if err != nil {
		return err
	}
	if above.Parent != r.Keeper.PID {
		return fmt.Errorf("process %d is not below our bwrap", r.Room.PID)
	}
	n, err := proc.NSPID(r.Room.PID)
	if err != nil {
		return err
	}
	if n != 1 {
		return fmt.Errorf("process %d is number %d of its PID namespace, not the first", r.Room.PID, n)
	}
	if r.Room.Exited() || r.Monitor.Exited() {
		return proc.ErrGone // the PIDs may have been reused
	}
	return nil
}

// abandon ends a room that could not be built. Its PID 1 may be unknown, so the keeper kills its children.
func (r *Room) abandon(cause error) error {
	var end proc.End
	var reapErr error
	if r.Keeper != nil {
		end, reapErr = r.Abandon(time.Now().Add(SetupBound))
		if err := r.Keeper.StartError(); err != nil {
			cause = err // of bwrap or the entering process, which explains all other errors
		}
	}
	r.Close()
	e := &result.Error{Code: "setup", Message: "bubblewrap could not set up the sandbox", Err: cause}
	step, isStep := errors.AsType[*proc.StartError](cause)
	known, isKnown := errors.AsType[*result.Error](cause)
	switch {
	case isKnown:
		e = known
	case isStep && overlayError(step) != nil:
		e = overlayError(step)
	case isStep:
		e.Message = "cannot set up the sandbox: " + step.Error()
	case errors.Is(cause, os.ErrDeadlineExceeded):
		e.Message = fmt.Sprintf("bubblewrap did not set up the sandbox within %v", SetupBound)
	case errors.Is(cause, io.EOF), errors.Is(cause, proc.ErrGone), errors.Is(cause, fs.ErrNotExist), errors.Is(cause, enter.ErrClosed), errors.Is(cause, unix.EPIPE), errors.Is(cause, unix.ECONNRESET):
		e.Message += unexplained(end, cause) // bwrap's own message is on stderr
	default:
		e.Message = "cannot set up the sandbox: " + cause.Error()
	}
	if reapErr != nil {
		e.Message += fmt.Sprintf("; ending it failed: %v", reapErr)
	}
	return e
}

// unexplained returns how bwrap ended, to be appended to the error. It is empty for exit code 1:
// then bwrap has printed the reason. bwrap may have been killed by the keeper because of cause;
// SIGKILL came from elsewhere only if its pipes were closed before.
func unexplained(end proc.End, cause error) string {
	switch ws := end.Program; {
	case end.Killed:
		return ": the keeper was killed"
	case ws == nil:
		return ": it was never started"
	case ws.Signal() == unix.SIGKILL && !errors.Is(cause, io.EOF) && !errors.Is(cause, unix.EPIPE):
		return ": " + cause.Error()
	case ws.Signaled():
		return ": it was killed by SIG" + result.SignalName(ws.Signal())
	case ws.ExitStatus() != 1:
		return fmt.Sprintf(": it exited with %d", ws.ExitStatus())
	}
	return ""
}

// Close closes all descriptors. The keeper kills any remaining processes.
func (r *Room) Close() {
	if r.Keeper != nil {
		r.Keeper.Kill()
	}
	if r.Exec != nil {
		r.Exec.Close()
	}
	for _, o := range r.Overlays {
		o.Close()
	}
	r.Room.Close()
	r.Monitor.Close()
}
