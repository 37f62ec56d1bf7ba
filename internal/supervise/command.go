// Package supervise runs the steps of one command and decides what ended it. run, start, exec, readiness probes
// and doctor use the same steps in this order:
//
//	Hold     sets up a command in a new or an existing room: its init is verified, and the command waits
//	Release  starts the command and its deadline
//	Watch    waits for the command's end, the deadline, a limit or a [Request]. The first of them is the cause,
//	         decided before anything is killed
//	End      grants the grace period, if any, kills the command and proves its end
//	Collect  ends the keeper after the caller has forwarded the last output
//
// [Run] performs all steps for a caller that does nothing in between.
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

// Terms describes how a command is supervised.
type Terms struct {
	Timeout      time.Duration  // from the release; 0 for none
	Signal       syscall.Signal // first signal at the deadline; 0 for SIGTERM
	Grace        time.Duration  // from Signal to SIGKILL; 0 for SIGKILL at once
	ProofTimeout time.Duration  // bound for the proof
	Begin        time.Time      // when sbxrun, or this call of the library, began
	// Hurry cuts a grace period short when it is closed.
	Hurry <-chan struct{}
	// Sending, if not nil, receives each signal just before it is sent. If the channel is full, the signal is
	// dropped: nothing may delay the end.
	Sending chan<- syscall.Signal
	// Limits, if not nil, is the command's cgroup. It stays the caller's.
	Limits *limits.Group
	// SpareOOM lets the command continue if the OOM killer killed a process other than the payload.
	SpareOOM bool
	// Shared allows other commands to run in the room. They end with it.
	Shared bool
	// Confirm makes Release wait for the command's execve(2), for up to room.SetupBound.
	Confirm bool
}

// A Request ends a command. It is the cause of the context's cancellation.
type Request struct {
	Cause  result.Cause // Canceled, Killed, IdleTimeout, OutputLimit
	Signal syscall.Signal
	// Grace is the time between Signal, which goes to all processes of the sandbox, and SIGKILL. Canceled does not use it:
	// its signal goes to the payload alone, and its grace period is [Terms.Grace].
	Grace time.Duration
}

func (r Request) Error() string { return string(r.Cause) + " by " + result.SignalName(r.Signal) }

// requestOf returns the request that a context was cancelled with.
func requestOf(ctx context.Context) Request {
	request := Request{Cause: result.Canceled, Signal: unix.SIGTERM}
	errors.As(context.Cause(ctx), &request)
	return request
}

// Command is a command from Hold to its proven end, or an idle room, which never ends by itself.
type Command struct {
	Terms
	kept   *proc.Kept
	room   *room.Room  // nil if the command entered an existing room
	exec   *enter.Exec // nil for an idle room
	result result.Result

	cause    result.Cause // "" until it is decided
	deadline time.Time    // zero for none
	request  Request
	used     proc.Usage // before the kill, see proc.Kept.Used
	looks    []*look
	startErr error // why the command never ran
	oom      bool  // the OOM killer killed a process of the command
	asked    bool  // Soon was called

	oomAround bool // the OOM killer killed a process of the surrounding sandbox
}

// A Place is a new room for a command or an existing one.
type Place struct {
	Plan *room.Plan // builds a room with the plan's command or an idle room

	// Without a plan:
	Entry *enter.Entry
	Room  *proc.Process // verified PID 1 of the existing room; it stays the caller's
	// Maker has an init ready and is used instead of Room.
	Maker *enter.Maker
}

// Hold sets up a command, within the limits of its terms, without starting it. Its errors are *[result.Error]; after
// one, all processes have exited. stdio stays the caller's and may be closed, with a Maker only after Release.
func Hold(ctx context.Context, p Place, stdio [3]*os.File, ttys []proc.Terminal, t Terms) (*Command, error) {
	var bounds proc.Bounds
	switch {
	case t.Limits == nil:
	case p.Maker != nil:
		bounds = t.Limits.Own() // the maker is in the cgroups already
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
	if t.Shared && p.Plan.Alone() { // other commands would enter the room's network, which is the caller's
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

// NotStarted returns the result of a command that failed before Hold.
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

// Run performs all steps in order.
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

// Kept returns the processes whose end is the command's end.
func (c *Command) Kept() *proc.Kept { return c.kept }

// TakeOverlays hands the overlays of a new room over to the caller, who closes them.
func (c *Command) TakeOverlays() []*room.Overlay {
	if c.room == nil {
		return nil
	}
	list := c.room.Overlays
	c.room.Overlays = nil
	return list
}

// Refuse decides that the command does not start.
func (c *Command) Refuse(err error) { c.cause, c.startErr = result.StartFailed, err }

// Release starts the command and reports whether it started. With [Terms.Confirm] it waits for the execve(2). If the
// command did not start, the cause is decided.
func (c *Command) Release(ctx context.Context) bool {
	if c.cause != "" {
		return false
	}
	if ctx.Err() != nil {
		c.requested(ctx) // it never ran
		return false
	}
	if g := c.Limits; g != nil {
		// Throttle only now, because building and entering the room are not part of the command.
		if err := g.Throttle(); err != nil {
			c.Refuse(err)
			return false
		}
	}
	c.result.Started = true // or is about to start
	c.result.Setup = time.Since(c.Begin)
	if t := c.Timeout; t > 0 {
		c.deadline = time.Now().Add(t)
		// The keeper's deadline matters only while sbxrun is stopped, so it is later.
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

// Lateness is the time from sbxrun's own deadline to the keeper's.
const Lateness = 500 * time.Millisecond

// confirmed waits until the command's execve(2) has succeeded or failed. If it takes longer than confirmBound, for
// example on a network file system, the command counts as started, and its deadline applies.
func (c *Command) confirmed(ctx context.Context) bool {
	late := time.After(confirmBound)
	var deadline <-chan time.Time // execve(2) may hang in a file system
	if !c.deadline.IsZero() {
		deadline = time.After(time.Until(c.deadline))
	}
	for asked := ctx.Done(); ; {
		select {
		case <-c.exec.Running():
			return true
		case <-c.exec.Exited():
			select {
			case <-c.exec.Running(): // it ran and has ended
				return true
			default:
			}
			c.cause = result.Exited // End determines why
		case <-asked:
			if requestOf(ctx).Cause == result.OutputLimit {
				asked = nil // it has written output, so it is running, and the confirmation will follow
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

// requested makes the request of ctx the cause.
func (c *Command) requested(ctx context.Context) {
	c.request = requestOf(ctx)
	c.cause = c.request.Cause
}

// Soon waits briefly for the end of a command in a warm room and reports whether it has ended. This saves the cost of
// Watch for a short command. Limits and requests wait until Watch. Only the first call waits.
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

// short is the time that Soon waits.
const short = 5 * time.Millisecond

// Watch waits for the first event that ends a running command.
func (c *Command) Watch(ctx context.Context) {
	if c.cause != "" || c.Soon() {
		return
	}
	var exited <-chan struct{}
	if c.exec != nil {
		exited = c.exec.Exited()
	}
	c.kept.HoldMounts()
	// The timers are monotonic: setting the clock does not affect them.
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
			// Usually the command has ended, or the payload dies with the keeper, and its exit status says more.
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
				<-exited // if sbxrun was stopped in between, init has already reported
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

// inTime returns the cause of a command that has ended: Timeout if it ended after its deadline, otherwise Exited.
func (c *Command) inTime() result.Cause {
	if _, at, err := c.exec.ExitStatus(); err == nil && !c.deadline.IsZero() && at.After(c.deadline) {
		return result.Timeout
	}
	return result.Exited
}

// watchKept returns a channel that is closed at the death of the keeper, or of PID 1 of an idle room, which dies with
// its keeper. The keeper may outlive that PID 1 to remove cgroups.
func (c *Command) watchKept() (dead <-chan struct{}, stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	gone := make(chan struct{})
	watched := c.kept.Room
	if c.exec != nil {
		watched = &c.kept.Keeper.Process
	}
	// Start watching later, because most short commands end before that.
	timer := time.AfterFunc(moment, func() {
		// Use a separate pidfd, because the teardown uses the other one.
		p, err := watched.Dup()
		if err != nil {
			return // the deadline and the payload's end are still watched
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

// moment is the time for processes to die after a process that they depend on.
const moment = 50 * time.Millisecond

// patience is the time that Watch waits after the keeper's death for the command's exit status, for slow machines.
const patience = 2 * time.Second

// Cause returns the cause of the command's end, or "" before it is decided.
func (c *Command) Cause() result.Cause { return c.cause }

// Request returns the request that ended the command, if any.
func (c *Command) Request() Request { return c.request }

// Signal sends a signal to all processes of the command, and with [Terms.Shared] to all commands in the room. It is
// safe for concurrent use at any time.
func (c *Command) Signal(sig syscall.Signal) error {
	if c.Shared {
		// Use a separate pidfd, because a concurrent teardown may use the other one.
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

// Collect ends and reaps the keeper, which first restores the terminal and removes the cgroups. The caller must have
// forwarded the last output before. Collect is not part of the proof. After an error the keeper still has children
// and continues on its own.
func (c *Command) Collect() error {
	if c.result.Verdict == result.Unproven { // the verdict reports it, and the proof timeout has passed
		_ = c.kept.Collect(time.Now().Add(moment))
		return nil
	}
	if err := c.kept.Collect(time.Now().Add(c.ProofTimeout)); err != nil {
		return fmt.Errorf("collect the keeper: %w", err)
	}
	return nil
}

// Close closes all descriptors. A keeper with processes left continues to kill them.
func (c *Command) Close() {
	if c.room != nil {
		c.room.Close()
		return
	}
	c.exec.Close()
}

// AsError returns err as a *[result.Error].
func AsError(err error) *result.Error {
	return result.AsError(err, "setup", "cannot set up the sandbox")
}
