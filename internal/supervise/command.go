// Package supervise runs commands and decides what ended them. All callers use a [Command], which is modelled on
// os/exec's Cmd: the command line, the library, the server, readiness probes and doctor.
//
// Start sets up the command in a new or an existing room, where its init is verified and the command waits, and then
// starts it and its deadline. Wait performs the other steps in this order:
//
//	Watch  waits for the command's end, the deadline, a limit or a [Request]. The first of them is the cause,
//	       decided before anything is killed
//	End    grants the grace period, if any, kills the command and proves its end
//	       Then the last output is forwarded, and the keeper is reaped.
package supervise

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/admission"
	"github.com/sbxrun/sbxrun/internal/enter"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/safeopen"
	"github.com/sbxrun/sbxrun/internal/state"
	"github.com/sbxrun/sbxrun/internal/stream"
)

// Options are a caller's choices for a command. The zero value is a command without input, output and bounds.
type Options struct {
	Stdin          io.Reader
	Stdout, Stderr io.Writer
	MaxOutput      int64 // bytes per stream, after which the command is killed; 0 for no limit

	Limits       limits.Request
	Timeout      time.Duration  // from the release; 0 for none
	Signal       syscall.Signal // first signal at the deadline; 0 for SIGTERM
	Grace        time.Duration  // from Signal to SIGKILL; 0 for SIGKILL at once
	ProofTimeout time.Duration  // bound for the proof; 0 for 5 s
	// Hurry cuts a grace period short when it is closed.
	Hurry <-chan struct{}
	// Attended is set if the caller calls Wait at once. Otherwise another goroutine does, so that deadline, context and
	// limits apply.
	Attended bool
}

// proofTimeout is the default of Options and of the flag.
const proofTimeout = 5 * time.Second

// A Request ends a command. It is the cause of the context's cancellation.
type Request struct {
	Cause  result.Cause // Canceled, Killed, IdleTimeout, OutputLimit
	Signal syscall.Signal
	// Grace is the time between Signal, which goes to all processes of the sandbox, and SIGKILL. Canceled does not use it:
	// its signal goes to the payload alone, and its grace period is [Options.Grace].
	Grace time.Duration
}

func (r Request) Error() string { return string(r.Cause) + " by " + result.SignalName(r.Signal) }

// requestOf returns the request in the cause of a cancellation, or else the one that ctx stands for.
func requestOf(ctx context.Context, cause error) Request {
	request := Request{Cause: result.Canceled, Signal: unix.SIGTERM}
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		request.Cause = result.Timeout
	}
	errors.As(cause, &request)
	return request
}

// asked returns the request that has ended the command's context.
func (c *Command) asked() Request { return requestOf(c.given, context.Cause(c.ctx)) }

// Outlive returns a context for the start of a command or room that outlives ctx. It is done with ctx until release is
// called, which returns false if ctx was done before.
func Outlive(ctx context.Context) (own context.Context, release func() bool) {
	own, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	return own, context.AfterFunc(ctx, func() { cancel(requestOf(ctx, context.Cause(ctx))) })
}

// Command is a command, or an idle room, which never ends by itself. It is started once. After Start has returned, any
// goroutine may call Signal, Kill and Wait.
type Command struct {
	Options
	Place Place
	ID    string    // of its cgroups; "" for a random one
	Begin time.Time // when sbxrun, or this call of the library, began; zero for the start
	// Planned are limits instead of Options.Limits.
	Planned *limits.Plan
	// Group is the command's cgroup, or nil. It is made, and in the end removed, by the command if it was nil before.
	Group   *limits.Group
	Streams *stream.Streams   // instead of the Options; nil for those
	Permit  *admission.Permit // nil if none was requested
	// Shared allows other commands to run in the room. They end with it, and the OOM killer may kill one without ending it.
	Shared bool
	// Confirm makes Start wait for the command's execve(2), for up to room.SetupBound.
	Confirm bool
	// Sending, if not nil, receives each signal just before it is sent. If the channel is full, the signal is
	// dropped: nothing may delay the end.
	Sending chan<- syscall.Signal
	// Cut, if not nil, cuts the forwarding of the last output short when it is closed.
	Cut <-chan struct{}
	// Held, if not nil, is called when the command is set up but not released. An error means that it does not start.
	Held func(context.Context, *Command) error
	// Settle, if not nil, may change the result before Wait returns it.
	Settle func(*result.Result)

	// These are set by Wait.
	Undelivered bool    // not all output was forwarded
	Left        []error // of the cleanup after the command's end

	given  context.Context // of the start
	ctx    context.Context // ends with it, and by Kill
	cancel context.CancelCauseFunc
	kept   *proc.Kept
	room   *room.Room  // nil if the command entered an existing room
	exec   *enter.Exec // nil for an idle room
	result result.Result
	made   bool // the Group was made here
	opened bool // the Streams were opened here
	hit    atomic.Bool
	broken atomic.Pointer[result.Error]
	waited sync.Once
	over   chan struct{} // closed by Wait

	cause    result.Cause // "" until it is decided
	deadline time.Time    // zero for none
	request  Request
	used     proc.Usage // before the kill, see proc.Kept.Used
	looks    []*look
	startErr error // why the command never ran
	oom      bool  // the OOM killer killed a process of the command
	brief    bool  // soon was called
	ended    bool  // End was called

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

// Errors caused by the calling program.
var (
	errStarted    = &result.Error{Code: "usage", Message: "it was started before"}
	errNotStarted = &result.Error{Code: "usage", Message: "it was not started"}
	errNegative   = &result.Error{Code: "usage", Message: "a timeout, a grace period or a bound is negative; 0 is for none"}
)

// Start sets up the command, within its limits, and starts it. The command ends when ctx is done: with the [Request] that
// is the cause, or else with the cause timeout if ctx's deadline has passed, or canceled. After an error the command has
// not run and all its processes have exited; the plan, Room and Maker stay the caller's. Wait then returns the result of
// a failed start.
func (c *Command) Start(ctx context.Context) error {
	c.over = make(chan struct{})
	c.given = ctx
	c.ctx, c.cancel = context.WithCancelCause(ctx)
	err := c.prepare()
	if c.startErr == nil {
		c.startErr = err
	}
	if c.hold() && c.release() {
		if !c.Attended {
			go c.Wait()
		}
		return nil
	}
	res, failed := c.Wait()
	switch {
	case err != nil:
		return err
	case res.Started: // it was ended before the start was confirmed
		return nil
	case failed != nil:
		return failed
	}
	e := &result.Error{Code: "ended", Message: "the command was ended before it began", Err: context.Cause(ctx)}
	if e.Err != nil {
		e.Message += ": " + e.Err.Error()
	}
	return e
}

// prepare checks the options, makes a plan of the limits and opens the streams.
func (c *Command) prepare() (err error) {
	if c.Begin.IsZero() {
		c.Begin = time.Now()
	}
	c.result = result.Result{StartedAt: c.Begin, Verdict: result.NotApplicable, Cause: result.StartFailed}
	if c.Timeout < 0 || c.Grace < 0 || c.ProofTimeout < 0 || c.MaxOutput < 0 {
		return errNegative
	}
	if c.ProofTimeout == 0 {
		c.ProofTimeout = proofTimeout
	}
	if c.ctx.Err() != nil || c.startErr != nil || c.Streams != nil {
		return nil
	}
	if err := state.CheckVisible(); err != nil {
		return err
	}
	if c.Planned == nil && c.Group == nil {
		if c.Planned, err = limits.For(c.Limits, true, nil, limits.Request{}); err != nil {
			return err
		}
	}
	c.opened = true
	bound := stream.Bound{Size: c.MaxOutput, Limited: c.MaxOutput > 0, Exceeded: func() {
		if !c.hit.Swap(true) {
			c.cancel(Request{Cause: result.OutputLimit, Signal: unix.SIGKILL})
		}
	}}
	c.Streams, err = stream.Open(c.Stdin, c.Stdout, c.Stderr, bound, func(e *result.Error) {
		// End the command as SIGPIPE would.
		c.broken.CompareAndSwap(nil, e)
		c.cancel(Request{Cause: result.Canceled, Signal: unix.SIGPIPE})
	})
	return err
}

// hold makes the cgroups and sets up the command without starting it. It reports whether that succeeded.
func (c *Command) hold() bool {
	if c.startErr == nil && c.Planned != nil && c.Group == nil {
		c.Group, c.startErr = c.Planned.Make(cmp.Or(c.ID, safeopen.RandomName()), c.Shared)
		c.made = c.Group != nil
	}
	if c.startErr == nil {
		c.Permit.Reserved()
		c.startErr = c.ctx.Err()
	}
	if c.startErr == nil {
		c.startErr = c.place()
	}
	if c.Streams != nil && (c.startErr != nil || c.Place.Maker == nil) {
		c.Streams.Started()
	}
	if c.startErr != nil {
		return false
	}
	if c.Held != nil {
		if err := c.Held(c.ctx, c); err != nil && c.ctx.Err() == nil { // after a request, release decides
			c.cause, c.startErr = result.StartFailed, err
		}
	}
	return true
}

// place makes init and the waiting payload, or an idle room. Its errors are *[result.Error]; after one, all processes
// have exited.
func (c *Command) place() (err error) {
	p := c.Place
	var bounds proc.Bounds
	switch {
	case c.Group == nil:
	case p.Maker != nil:
		bounds = c.Group.Own() // the maker is in the cgroups already
	default:
		bounds = c.Group.Bounds()
	}
	stdio, ttys := c.Streams.Payload, c.Streams.Terminals
	if p.Plan == nil {
		p.Entry.Bounds, p.Entry.Confirm = bounds, c.Confirm
		if p.Maker != nil {
			c.exec, err = p.Maker.Take(c.ctx, p.Entry, stdio)
		} else {
			c.exec, err = p.Entry.Start(c.ctx, p.Room, stdio, ttys)
		}
		if err == nil {
			c.kept = &c.exec.Kept
		}
		return err
	}
	if c.Shared && p.Plan.Alone() { // other commands would enter the room's network, which is the caller's
		return &result.Error{Code: "setup", Message: "others may not enter a room that was planned for one command"}
	}
	p.Plan.Bounds = bounds
	if c.room, err = p.Plan.Start(c.ctx, stdio, ttys, c.Confirm); err == nil {
		c.kept, c.exec = &c.room.Kept, c.room.Exec
	}
	return err
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

// Refuse makes Start fail.
func (c *Command) Refuse(err error) { c.startErr = err }

// release starts the command and reports whether it started. With Confirm it waits for the execve(2). If the command did
// not start, the cause is decided.
func (c *Command) release() bool {
	if c.cause == "" && c.ctx.Err() != nil {
		c.requested() // it never ran
	}
	if c.cause == "" && c.Group != nil {
		// Throttle only now, because building and entering the room are not part of the command.
		if err := c.Group.Throttle(); err != nil {
			c.cause, c.startErr = result.StartFailed, err
		}
	}
	running := c.cause == ""
	if running {
		c.result.Started = true // or is about to start
		c.result.Setup = time.Since(c.Begin)
		if t := c.Timeout; t > 0 {
			c.deadline = time.Now().Add(t)
			// The keeper's deadline matters only while sbxrun is stopped, so it is later.
			c.kept.EndAt(c.deadline.Add(c.Grace).Add(lateness)) // the sum of two durations can overflow
		}
		if c.exec != nil {
			c.exec.Release()
			running = !c.Confirm || c.confirmed()
		}
	}
	c.Streams.Started()
	switch {
	case !running:
	case c.exec != nil:
		c.Permit.Running()
	default:
		c.Permit.Idling()
	}
	return running
}

// confirmBound is a variable for tests.
var confirmBound = room.SetupBound

// lateness is the time from sbxrun's own deadline to the keeper's.
const lateness = 500 * time.Millisecond

// confirmed waits until the command's execve(2) has succeeded or failed. If it takes longer than confirmBound, for
// example on a network file system, the command counts as started, and its deadline applies.
func (c *Command) confirmed() bool {
	late := time.After(confirmBound)
	var deadline <-chan time.Time // execve(2) may hang in a file system
	if !c.deadline.IsZero() {
		deadline = time.After(time.Until(c.deadline))
	}
	for asked := c.ctx.Done(); ; {
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
			if c.asked().Cause == result.OutputLimit {
				asked = nil // it has written output, so it is running, and the confirmation will follow
				continue
			}
			c.requested()
		case <-deadline:
			c.cause = result.Timeout
		case <-late:
			return true
		}
		return false
	}
}

// requested sets the cause to the request that has ended the context.
func (c *Command) requested() {
	c.request = c.asked()
	c.cause = c.request.Cause
}

// soon waits briefly for the end of a command in a warm room and reports whether it has ended. This saves the cost of
// Watch for a short command. Limits and requests wait until Watch. Only the first call waits.
func (c *Command) soon() (ended bool) {
	if c.brief || c.cause != "" || !c.kept.Lasting {
		return false
	}
	c.brief = true
	wait := short
	if !c.deadline.IsZero() {
		wait = min(wait, time.Until(c.deadline)/2)
	}
	if !c.exec.Follow(wait) {
		return false
	}
	c.cause = c.inTime()
	return true
}

// short is the time that soon waits.
const short = 5 * time.Millisecond

// Watch waits for the first event that ends a running command.
func (c *Command) Watch() {
	if c.kept == nil || c.cause != "" || c.soon() {
		return
	}
	c.Streams.Begin()
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
	if g := c.Group; g != nil {
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
			} else if !c.Shared {
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
		case <-c.ctx.Done():
			c.requested()
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

// Signal sends a signal to all processes of the command, and in a shared room to all commands. An error means that the
// command has ended or that the signal does not exist. It is safe for concurrent use at any time.
func (c *Command) Signal(sig syscall.Signal) error {
	switch {
	case c == nil:
		return errNotStarted
	case sig < 0 || sig > lastSignal: // init does not report an error of kill(2)
		return unix.EINVAL
	case !c.Shared:
		return c.exec.SignalAll(sig)
	}
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

// lastSignal is the last real-time signal (signal(7)).
const lastSignal = 64

// SignalAlone sends a signal to the command's own process only. The signal is generated before SignalAlone returns
// (pidfd_send_signal(2)).
func (c *Command) SignalAlone(sig syscall.Signal) error {
	if c == nil {
		return errNotStarted
	}
	p, err := c.kept.Payload()
	if err != nil {
		return err
	}
	defer p.Close()
	return p.Signal(sig)
}

// Kill ends the command or room at once, if it was started.
func (c *Command) Kill() {
	if c != nil {
		c.cancel(Request{Cause: result.Killed, Signal: unix.SIGKILL})
	}
}

// Bind gives a command that was started ahead of its call the context and timeout that Start would have set. It is
// called once.
func (c *Command) Bind(ctx context.Context, timeout time.Duration) {
	stops := []func() bool{context.AfterFunc(ctx, func() { c.cancel(Request{Cause: result.Canceled, Signal: unix.SIGTERM}) })}
	if timeout > 0 {
		c.kept.EndAt(time.Now().Add(timeout).Add(lateness))
		t := time.AfterFunc(timeout, func() { c.cancel(Request{Cause: result.Timeout, Signal: unix.SIGTERM}) })
		stops = append(stops, t.Stop)
	}
	go func() {
		<-c.over
		for _, stop := range stops {
			stop()
		}
	}()
}

// Started returns an error if the command was already started.
func (c *Command) Started() error {
	if c != nil {
		return errStarted
	}
	return nil
}

// Ended returns a channel that is closed when Wait no longer blocks, or nil before the start.
func (c *Command) Ended() <-chan struct{} {
	if c == nil {
		return nil
	}
	return c.over
}

// Run starts the command and waits for its end.
func (c *Command) Run(ctx context.Context) *result.Result {
	c.Attended = true
	_ = c.Start(ctx) // the result has the error
	res, _ := c.Wait()
	return res
}

// Wait waits until all processes of the command have exited, its output is forwarded and the terminal is restored. The
// error is the result's Err; it does not describe how the command ended. Wait may be called again.
func (c *Command) Wait() (*result.Result, error) {
	if c == nil {
		return nil, errNotStarted
	}
	c.waited.Do(func() {
		defer close(c.over)
		c.Watch()
		c.End()
		c.finish()
		if c.Settle != nil {
			c.Settle(&c.result)
		}
		c.cancel(nil)
	})
	if c.result.Err != nil {
		return &c.result, c.result.Err
	}
	return &c.result, nil
}

// removeBound is how long an empty cgroup may stay busy.
const removeBound = time.Second

// finish releases everything after the end.
func (c *Command) finish() {
	res := &c.result
	c.Permit.End()
	if res.Cause == result.StartFailed {
		res.Err = c.Permit.Explain(res.Err)
	}
	if c.Streams != nil { // drain first: the output expects a raw terminal
		c.Undelivered = !c.Streams.Drain(c.Cut)
		c.Streams.Restore()
	}
	if c.kept != nil {
		if res.Verdict == result.Unproven {
			res.Gone = c.kept.Gone()
		}
		if err := c.collect(); err != nil {
			c.Left = append(c.Left, err)
		}
		defer c.close()
	}
	if c.made { // the keeper may have removed it
		if err := c.Group.Remove(time.Now().Add(removeBound)); err != nil {
			c.Left = append(c.Left, fmt.Errorf("%w; sbxrun cleanup removes it when it is empty", err))
		}
	}
	lost := c.broken.Load()
	switch {
	case !c.opened || res.Err != nil: // Undelivered and Left are the caller's to report
	case lost != nil:
		res.Err = lost
	case c.Undelivered:
		res.Err = &result.Error{Code: "output", ExitCode: result.ExitOutput, Message: "the rest of the output is lost: its writer does not return", Err: os.ErrDeadlineExceeded}
	case len(c.Left) > 0:
		res.Err = &result.Error{Code: "left", Message: "the command is gone, but something else was left behind: " + c.Left[0].Error(), Err: c.Left[0]}
	}
}

// collect ends and reaps the keeper, which first restores the terminal and removes the cgroups. It is not part of the
// proof. After an error the keeper still has children and continues on its own.
func (c *Command) collect() error {
	if c.result.Verdict == result.Unproven { // the verdict reports it, and the proof timeout has passed
		_ = c.kept.Collect(time.Now().Add(moment))
		return nil
	}
	if err := c.kept.Collect(time.Now().Add(c.ProofTimeout)); err != nil {
		return fmt.Errorf("collect the keeper: %w", err)
	}
	return nil
}

// close closes all descriptors. A keeper with processes left continues to kill them.
func (c *Command) close() {
	if c.room != nil {
		c.room.Close()
	} else {
		c.exec.Close()
	}
}

// AsError returns err as a *[result.Error].
func AsError(err error) *result.Error {
	return result.AsError(err, "setup", "cannot set up the sandbox")
}
