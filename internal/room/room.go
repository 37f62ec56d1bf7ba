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

// SetupBound is how long bwrap may take to build a room: mounting hangs if a file
// system does.
const SetupBound = 30 * time.Second

// Room is a room that bwrap has built, with a PID 1 that is known for certain and only
// waits. Whoever started it ends it: package supervise.
type Room struct {
	proc.Kept
	Cred    *proc.Cred  // who it runs as; nil if as sbxrun
	HostNet bool        // it has the caller's network namespace
	Exec    *enter.Exec // the plan's command, held; nil if it has none
	// Overlays are the room's, in the order of the policy. Whoever takes them over sets this to
	// nil.
	Overlays []*Overlay
}

// Start forks the keeper, with bwrap below it and, if the plan has a command, what
// enters the room for that as soon as it is built. It returns once the room's PID 1 is
// verified and held by a pidfd, and so is the command's init; the payload waits for its
// release. Without a command it returns when the room is built. stdio stays the caller's,
// who may close it; bwrap speaks on stdio[2]. An error is a *[result.Error], and nothing is
// left.
func (p *Plan) Start(ctx context.Context, stdio [3]*os.File, ttys []proc.Terminal, confirm bool) (*Room, error) {
	mounts, err := p.detach()
	if err != nil {
		return nil, err
	}
	b := p.builder
	p.builder = nil
	if b != nil && len(mounts) > 0 { // somebody has just changed what root's path leads to
		_ = b.abandon()
		b = nil
	}
	if b == nil {
		b, err = p.begin(stdio[2], mounts)
		closeAll(mounts) // the keeper has copies
		if err != nil {
			return nil, (&Room{}).abandon(err)
		}
	}
	defer b.close()
	r := &Room{Kept: proc.Kept{Keeper: b.Keeper}, Cred: p.cred, HostNet: p.hostNet || p.ownNet}
	if err = p.start(ctx, r, b, stdio, ttys, confirm); err != nil {
		return nil, r.abandon(err)
	}
	return r, nil
}

// Entry is the plan's command.
func (p *Plan) Entry() *enter.Entry {
	return &enter.Entry{Cred: p.cred, HostNet: p.hostNet || p.ownNet, Command: p.command, Path: p.path, Env: values.Pairs(p.env), Workdir: p.Workdir,
		Terminal: p.terminal, Bounds: p.Bounds, Filter: p.filter}
}

// start does the rest of Start. After an error the caller ends the unfinished room.
func (p *Plan) start(ctx context.Context, r *Room, b *builder, stdio [3]*os.File, ttys []proc.Terminal, confirm bool) error {
	deadline := time.Now().Add(SetupBound)
	if err := b.order(ctx, p.words, deadline); err != nil {
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
	if err := r.Keeper.Enter(proc.Command{Way: way, Cred: p.cred, Terminals: ttys, Remove: p.Bounds.Remove}); err != nil {
		return err
	}
	for _, o := range p.copies() { // while bwrap builds the room
		o.from.Close() // only ever read from: nothing can be lost
	}
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

// identify reads who the room's PID 1 is and makes sure of it. Only then may it ever be
// signalled.
func (r *Room) identify(ctx context.Context, info *os.File, deadline time.Time) error {
	stop := proc.ReadUntil(ctx, info, deadline)
	child, err := readStatus(info)
	stop()
	if err != nil {
		return err
	}
	if r.Room, err = proc.Open(child.pid); err != nil {
		return fmt.Errorf("bwrap's child %d: %w", child.pid, err)
	}
	r.RoomNS = child.pidNS
	return r.verify()
}

// verify makes sure that the room's PID 1 is a child of our keeper's child, the monitor, and
// the first of a PID namespace. There is one such: nobody but bwrap has run below the
// keeper yet.
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
		return proc.ErrGone // so all of the above may have been about another
	}
	return nil
}

// abandon ends a room that did not come to be. Its PID 1 may be unknown, so it is
// the keeper that kills what it has.
func (r *Room) abandon(cause error) error {
	var end proc.End
	var reapErr error
	if r.Keeper != nil {
		end, reapErr = r.Abandon(time.Now().Add(SetupBound))
		if err := r.Keeper.StartError(); err != nil {
			cause = err // of bwrap or of what enters, and so the rest
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
	case isStep: // which says of what it is
		e.Message = "cannot set up the sandbox: " + step.Error()
	case errors.Is(cause, os.ErrDeadlineExceeded):
		e.Message = fmt.Sprintf("bubblewrap did not set up the sandbox within %v", SetupBound)
	case errors.Is(cause, io.EOF), errors.Is(cause, proc.ErrGone), errors.Is(cause, fs.ErrNotExist), errors.Is(cause, enter.ErrClosed), errors.Is(cause, unix.EPIPE), errors.Is(cause, unix.ECONNRESET):
		e.Message += unexplained(end, cause) // its own words are on stderr
	default:
		e.Message = "cannot set up the sandbox: " + cause.Error()
	}
	if reapErr != nil {
		e.Message += fmt.Sprintf("; and it could not be ended: %v", reapErr)
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

// Close gives up all descriptors. Should the keeper still have something, it
// goes on killing it.
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
