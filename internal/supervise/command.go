// Package supervise owns the order of one command, and its single decision: what
// ended it. run, start, exec, a readiness probe and doctor call the same steps, in
// this order, with no way back:
//
//	Hold     a command in a room that is built for it, or in one that is there: its
//	         init is known and verified, and nothing of it has run
//	Release  the command begins, and with it the deadline
//	Watch    waits for the first of: the command's end, the deadline, a limit, a
//	         [Request]. That is the cause, settled before anything is killed
//	End      the grace period, if there is one; the kill; the proof
//	Collect  the keeper, when the caller has passed on the last output
//
// [Run] makes all of them for a caller that has nothing to do in between.
package supervise

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/enter"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/room"
)

// Terms are how a command is supervised.
type Terms struct {
	Timeout      time.Duration  // from the release; 0 for none
	Signal       syscall.Signal // what comes first at the deadline; 0 for SIGTERM
	Grace        time.Duration  // from that to SIGKILL; 0 for SIGKILL at once
	ProofTimeout time.Duration  // how long the proof may take
	Begin        time.Time      // when sbxrun, or this use of it, began
	// Hurry cuts a grace period short when it is closed.
	Hurry <-chan struct{}
	// Sending, if not nil, is told each signal just before it is sent. A signal for which
	// there is no room is not told: nothing may delay the end.
	Sending chan<- syscall.Signal
	// Limits, if not nil, is what the command is in; it stays the caller's.
	Limits *limits.Group
	// SpareOOM lets it go on when the kernel has killed a process of it for want of
	// memory, unless that was the payload.
	SpareOOM bool
	// Shared says that other commands may run in the room, and end with it.
	Shared bool
	// Confirm makes Release wait for the command's execve(2), for up to room.SetupBound.
	Confirm bool
}

// A Request ends a command: it is the cause that its context is cancelled with.
type Request struct {
	Cause  result.Cause // Canceled, Killed, IdleTimeout, OutputLimit
	Signal syscall.Signal
	// Grace is from the signal, which goes to all of the sandbox, to SIGKILL. It does
	// not count for Canceled: there the signal goes to the payload alone, and the grace
	// period is that of the terms.
	Grace time.Duration
}

func (r Request) Error() string { return string(r.Cause) + " by " + result.SignalName(r.Signal) }

// requestOf is what a context was cancelled with.
func requestOf(ctx context.Context) Request {
	request := Request{Cause: result.Canceled, Signal: unix.SIGTERM}
	errors.As(context.Cause(ctx), &request)
	return request
}

// Command is one command from when it is held to its proven end; or a room that idles,
// which is a command that never ends by itself.
type Command struct {
	Terms
	kept   *proc.Kept
	room   *room.Room  // nil if the command has entered another's
	exec   *enter.Exec // nil for a room that idles
	result result.Result

	cause    result.Cause // "" until it is decided
	deadline time.Time    // zero for none
	request  Request      // if there was one
	used     proc.Usage   // before the kill, see proc.Kept.Used
	looks    []*look
	startErr error // why it never ran
	oom      bool  // the kernel has killed something for want of memory
	asked    bool  // Soon was

	oomAround bool // likewise, of the sandbox that it is in
}

// A Place is where a command runs: in a room that is built for it, or in one that is there.
type Place struct {
	Plan *room.Plan // builds a room, with the plan's command in it, or one that idles

	// Without a plan:
	Entry *enter.Entry
	Room  *proc.Process // PID 1 of the room that is entered, verified; it stays the caller's
	// Maker, in place of Room, has made an init ahead.
	Maker *enter.Maker
}

// Hold makes a command that has not begun, within the limits of its terms. An error is a
// *[result.Error], and nothing is left. stdio stays the caller's, who may close it; what a Maker
// runs gets it with its release.
func Hold(ctx context.Context, p Place, stdio [3]*os.File, ttys []proc.Terminal, t Terms) (*Command, error) {
	var bounds proc.Bounds
	switch {
	case t.Limits == nil:
	case p.Maker != nil:
		bounds = t.Limits.Own() // the maker is in the cgroups
	default:
		bounds = t.Limits.Bounds()
	}
	if p.Plan == nil {
		p.Entry.Bounds, p.Entry.Confirm = bounds, t.Confirm
		var x *enter.Exec
		var err error
		if p.Maker != nil {
			x, err = p.Maker.Take(ctx, p.Entry, stdio)
		} else {
			x, err = p.Entry.Start(ctx, p.Room, stdio, ttys)
		}
		if err != nil {
			return nil, err
		}
		return &Command{Terms: t, kept: &x.Kept, exec: x, result: begun(t)}, nil
	}
	if t.Shared && p.Plan.Alone() { // others would enter the network that the room has, which is the caller's
		return nil, &result.Error{Code: "setup", Message: "others may not enter a room that was planned for one command"}
	}
	p.Plan.Bounds = bounds
	room, err := p.Plan.Start(ctx, stdio, ttys, t.Confirm)
	if err != nil {
		return nil, err
	}
	return &Command{Terms: t, kept: &room.Kept, room: room, exec: room.Exec, result: begun(t)}, nil
}

func begun(t Terms) result.Result {
	return result.Result{StartedAt: t.Begin, Verdict: result.NotApplicable, Cause: result.StartFailed}
}

// NotStarted is the result of a command that came to nothing before it was held.
func NotStarted(ctx context.Context, err error, t Terms) result.Result {
	r := begun(t)
	r.Duration = time.Since(t.Begin)
	if ctx.Err() != nil {
		request := requestOf(ctx)
		r.Cause, r.Signal = request.Cause, request.Signal
		return r
	}
	r.Err = AsError(err)
	return r
}

// Run makes all steps one after the other.
func Run(ctx context.Context, p Place, stdio [3]*os.File, t Terms) result.Result {
	err := ctx.Err()
	var c *Command
	if err == nil {
		c, err = Hold(ctx, p, stdio, nil, t)
	}
	if err != nil {
		return NotStarted(ctx, err, t)
	}
	defer c.Close()
	c.Release(ctx)
	c.Watch(ctx)
	r := c.End(ctx)
	c.Collect()
	return r
}

// Kept is what has to go for the command to be gone.
func (c *Command) Kept() *proc.Kept { return c.kept }

// TakeOverlays returns the overlays of the room that was built for the command, which are the
// caller's to close from now on.
func (c *Command) TakeOverlays() []*room.Overlay {
	if c.room == nil {
		return nil
	}
	list := c.room.Overlays
	c.room.Overlays = nil
	return list
}

// Refuse decides that the command is not to begin.
func (c *Command) Refuse(err error) { c.cause, c.startErr = result.StartFailed, err }

// Release lets the command begin and reports whether it did, as far as is known: with
// [Terms.Confirm] that it was executed. If not, the cause is decided.
func (c *Command) Release(ctx context.Context) bool {
	if c.cause != "" {
		return false
	}
	if ctx.Err() != nil {
		c.requested(ctx) // it never ran
		return false
	}
	if g := c.Limits; g != nil {
		// Not before: what made the room and entered it is no part of what is limited.
		if err := g.Throttle(); err != nil {
			c.Refuse(err)
			return false
		}
	}
	c.result.Started = true // or will be, any moment
	c.result.Setup = time.Since(c.Begin)
	if t := c.Timeout; t > 0 {
		c.deadline = time.Now().Add(t)
		// Only for when we are stopped, so never before us.
		c.kept.EndAt(c.deadline.Add(c.Grace).Add(Lateness)) // the sum of two durations can overflow
	}
	if c.exec != nil {
		c.exec.Release()
		if c.Confirm && !c.confirmed(ctx) {
			return false
		}
	}
	return true
}

// confirmBound is a variable for tests.
var confirmBound = room.SetupBound

// Lateness is how much later than sbxrun's own deadline the keeper's is.
const Lateness = 500 * time.Millisecond

// confirmed waits until the command was executed or could not be. An execve(2) that takes longer than
// confirmBound, on a network file system for example, goes on: the command may run, and its deadline holds.
func (c *Command) confirmed(ctx context.Context) bool {
	late := time.After(confirmBound)
	var deadline <-chan time.Time // execve(2) may hang as long as a file system likes
	if !c.deadline.IsZero() {
		deadline = time.After(time.Until(c.deadline))
	}
	for asked := ctx.Done(); ; {
		select {
		case <-c.exec.Running():
			return true
		case <-c.exec.Exited():
			select {
			case <-c.exec.Running(): // and is over
				return true
			default:
			}
			c.cause = result.Exited // End finds out why
		case <-asked:
			if requestOf(ctx).Cause == result.OutputLimit {
				asked = nil // it can write, so it runs: we only have not heard it yet
				continue
			}
			c.requested(ctx)
		case <-deadline:
			c.cause = result.Timeout
		case <-late:
			return true
		}
		return false
	}
}

// requested takes over who ends the command, and how.
func (c *Command) requested(ctx context.Context) {
	c.request = requestOf(ctx)
	c.cause = c.request.Cause
}

// Soon waits a moment for the end of a command in a room that has many, and reports whether it has come.
// For such a short one all that Watch does is not worth it: nothing else is looked at meanwhile. Only the
// first call waits.
func (c *Command) Soon() (ended bool) {
	if c.asked || c.cause != "" || !c.kept.Lasting {
		return false
	}
	c.asked = true
	soon := short
	if !c.deadline.IsZero() {
		soon = min(soon, time.Until(c.deadline)/2)
	}
	if !c.exec.Follow(soon) {
		return false
	}
	c.cause = c.inTime()
	return true
}

// short is how long that moment is.
const short = 5 * time.Millisecond

// Watch waits for the one thing that ends a command that runs.
func (c *Command) Watch(ctx context.Context) {
	if c.cause != "" || c.Soon() {
		return
	}
	var exited <-chan struct{}
	if c.exec != nil {
		exited = c.exec.Exited()
	}
	c.kept.HoldMounts()
	// Monotonic timers: a clock that is set does not matter.
	var deadline <-chan struct{}
	if !c.deadline.IsZero() {
		left := time.Until(c.deadline)
		var stop func()
		deadline, stop = alarm(left)
		defer stop()
		c.look(max(0, left-lookAhead), c.sum)
	}
	unkept, stop := c.watchKept()
	defer stop()
	var keeperLost <-chan time.Time
	var exceeded <-chan limits.Event
	if g := c.Limits; g != nil {
		watching, stop := context.WithCancel(context.Background())
		defer stop()
		exceeded = g.Watch(watching)
	}
	for c.cause == "" {
		select {
		case <-exited:
			c.cause = c.inTime()
		case <-unkept:
			// Usually all is over, or the payload dies with it, and can tell more.
			unkept, keeperLost = nil, time.After(patience)
			if exited == nil {
				c.cause = result.Lost
			}
		case <-keeperLost:
			c.cause = result.Lost
		case event := <-exceeded:
			if event == limits.CPUTime {
				c.cause = result.CPUTime
			} else if !c.SpareOOM {
				c.cause = result.OOM
			}
		case <-deadline:
			c.cause = result.Timeout
			if c.exec != nil && c.exec.Ending() {
				<-exited // it is told already, if we were stopped in between
			}
			select {
			case <-exited:
				c.cause = c.inTime()
			default:
			}
		case <-ctx.Done():
			c.requested(ctx)
		}
	}
}

// inTime is the cause of a command that has ended: nobody calls a timeout what ended
// before the deadline, nor the other way round, however late we look.
func (c *Command) inTime() result.Cause {
	if _, at, err := c.exec.ExitStatus(); err == nil && !c.deadline.IsZero() && at.After(c.deadline) {
		return result.Timeout
	}
	return result.Exited
}

// watchKept returns a channel that is closed when the keeper is dead; or PID 1 of a room
// that idles, which dies with its keeper, and for whose end that may wait with cgroups still to
// remove.
func (c *Command) watchKept() (dead <-chan struct{}, stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	gone := make(chan struct{})
	watched := c.kept.Room
	if c.exec != nil {
		watched = &c.kept.Keeper.Process
	}
	// Not at once: most keepers of short commands need no watching.
	timer := time.AfterFunc(moment, func() {
		// A pidfd of our own: the other one is for the teardown.
		p, err := watched.Dup()
		if err != nil {
			return // unwatched: the deadline and the payload's end remain
		}
		defer p.Close()
		if p.WaitContext(ctx, time.Time{}) == nil {
			close(gone)
		}
	})
	return gone, func() {
		timer.Stop()
		cancel()
	}
}

// moment is how long the death of one process may take to bring about the death
// of those that depend on it.
const moment = 50 * time.Millisecond

// patience is how long it may take to hear of what the end of the keeper means: a
// machine may be slow, and nothing depends on it.
const patience = 2 * time.Second

// Cause is what ended the command; "" until that is decided.
func (c *Command) Cause() result.Cause { return c.cause }

// Request is what was asked for, if somebody has asked for the end.
func (c *Command) Request() Request { return c.request }

// Signal sends a signal to everything of the command, and with [Terms.Shared] to all
// other commands in the room. It may be called at any time, by any goroutine.
func (c *Command) Signal(sig syscall.Signal) error {
	if c.Shared {
		// A pidfd of our own: the other one is for the teardown, which may be under way.
		room, err := c.room.Room.Dup()
		if errors.Is(err, os.ErrClosed) {
			return proc.ErrGone
		}
		if err != nil {
			return err
		}
		defer room.Close()
		return enter.Signal(room, c.room.Cred, c.room.HostNet, sig)
	}
	return c.exec.SignalAll(sig)
}

// Collect ends the keeper, which puts back the terminal and removes the cgroups first, and reaps it,
// after the caller has passed on the last output. It is no part of what was to be proven. An error says
// that it still has something, and goes on without us.
func (c *Command) Collect() error {
	if c.result.Verdict == result.Unproven { // which says so, and it was waited for
		_ = c.kept.Collect(time.Now().Add(moment))
		return nil
	}
	if err := c.kept.Collect(time.Now().Add(c.ProofTimeout)); err != nil {
		return fmt.Errorf("collect the keeper: %w", err)
	}
	return nil
}

// Close gives up all descriptors. Should the keeper still have something, it goes on
// killing it.
func (c *Command) Close() {
	if c.room != nil {
		c.room.Close()
		return
	}
	c.exec.Close()
}

// AsError is an error as a *[result.Error].
func AsError(err error) *result.Error {
	return result.AsError(err, "setup", "cannot set up the sandbox")
}
