// Package supervise owns the order of a run, and its single decision: what
// ended it. Everything it does comes in this order, with no way back:
//
//	start     bwrap below the keeper, held; init known and verified
//	release   the payload begins, and with it the deadline
//	watch     one select: the payload's end, the deadline, a signal to sbxrun.
//	          The first to happen is the cause, settled before anything is killed
//	grace     if one was asked for
//	teardown  on every path: init killed, its end and the keeper's awaited
package supervise

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/bwrap"
	"github.com/sbxrun/sbxrun/cleanup"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/result"
	"github.com/sbxrun/sbxrun/nsenter"
)

// Options are how to run a plan.
type Options struct {
	Timeout      time.Duration // from the payload's begin; 0 for none
	Grace        time.Duration // from SIGTERM to SIGKILL; 0 for SIGKILL at once
	ProofTimeout time.Duration // how long the proof may take
	Stdio        [3]*os.File   // the payload's; stay the caller's
	Terminal     *bwrap.Terminal
	// Forked is called when the sandbox has its copies of Stdio, and bwrap is at
	// work: the time for what needs time.
	Forked func()
	Begin  time.Time // when sbxrun was started
	// Hurry cuts a grace period short when it is closed.
	Hurry <-chan struct{}
}

// SignalError cancels a run's context: sbxrun was signalled.
type SignalError struct{ Signal syscall.Signal }

func (e SignalError) Error() string { return "signal " + result.SignalName(e.Signal) }

// Run carries a plan out and returns when nothing of it is left, or when the
// proof timeout says that this cannot be shown. Cancelling ctx with a
// [SignalError] as cause forwards the signal to the payload and ends the run.
func Run(ctx context.Context, plan *bwrap.Plan, o Options) result.Result {
	r := result.Result{StartedAt: o.Begin, Verdict: result.NotApplicable, Cause: result.StartFailed}
	if ctx.Err() != nil {
		return failed(ctx, ctx.Err(), r)
	}
	sb, err := plan.Start(ctx, o.Stdio, o.Terminal, o.forked)
	if err != nil {
		r = failed(ctx, err, r)
		r.Duration = time.Since(o.Begin)
		return r
	}
	defer sb.Close()

	run := run{ctx: ctx, o: o, sb: sb, result: &r}
	cause := run.watch()
	decided := time.Now()
	proven := run.end(cause)
	r.Teardown, r.Duration = proven.Sub(decided), time.Since(o.Begin)
	return r
}

func (o *Options) forked() {
	if o.Forked != nil {
		o.Forked()
	}
}

type run struct {
	ctx    context.Context
	o      Options
	sb     *bwrap.Sandbox
	result *result.Result

	used       proc.Usage // by what runs, and nobody will wait for
	payloadErr error      // why the payload's end is not known
	lost       bool       // init ended, and the payload by SIGKILL, before we did anything
}

// watch releases the payload and waits for the one thing that ends the run.
func (r *run) watch() result.Cause {
	if r.ctx.Err() != nil {
		return result.Canceled // before the release: it never ran
	}
	r.sb.Release()
	r.result.Started = true // or will be, any moment
	select {
	case <-r.sb.Running:
	case <-r.ctx.Done():
		return result.Canceled
	case <-time.After(bwrap.SetupBound):
		r.payloadErr = bwrap.ErrSetup
		return result.Exited // there never was a payload
	}
	r.result.Setup = time.Since(r.o.Begin)
	// Monotonic timers: a clock that is set does not matter.
	var deadline, before <-chan time.Time
	if t := r.o.Timeout; t > 0 {
		deadline = time.After(t)
		before = time.After(max(0, t-lookAhead))
	}
	unkept, enough := r.watchKeeper()
	defer enough()
	for {
		select {
		case <-r.sb.Exited:
			return result.Exited
		case <-unkept:
			// Usually the payload dies with it, and can tell more. But an init that
			// has not yet asked to die with its parent lives on, without anybody who
			// would end it if we were killed.
			select {
			case <-r.sb.Exited:
				return result.Exited
			case <-time.After(moment):
				return result.Lost
			}
		case <-before:
			r.used = r.sb.Used()
		case <-deadline:
			return result.Timeout
		case <-r.ctx.Done():
			return result.Canceled
		}
	}
}

// watchKeeper returns a channel that is closed when the keeper is dead.
func (r *run) watchKeeper() (dead <-chan struct{}, enough func()) {
	ctx, cancel := context.WithCancel(context.Background())
	gone := make(chan struct{})
	// A pidfd of our own: the other one is for the teardown. Our unreaped child,
	// so the pid is its own.
	keeper, err := proc.Open(r.sb.Keeper.PID)
	if err != nil {
		return nil, cancel // unwatched: the deadline and the payload's end remain
	}
	go func() {
		defer keeper.Close()
		if keeper.WaitContext(ctx, time.Time{}) == nil {
			close(gone)
		}
	}()
	return gone, cancel
}

// moment is how long the death of one process may take to bring about the death
// of those that depend on it.
const moment = 20 * time.Millisecond

// lookAhead is how long before the deadline is asked what the sandbox has used:
// at the deadline it would delay the kill.
const lookAhead = 10 * time.Millisecond

// end brings the sandbox down, completes the result, and returns the time of the
// proof.
func (r *run) end(cause result.Cause) time.Time {
	res := r.result
	res.Cause = cause
	proofBy := func() time.Time { return time.Now().Add(r.o.ProofTimeout) }
	var graceErr error
	switch cause {
	case result.Exited:
		if r.payloadErr == nil {
			res.Payload, r.payloadErr = r.sb.ExitStatus(proofBy())
			r.lost = r.lostInit()
			res.Strays, r.used = r.sb.Strays()
		}
	case result.Timeout:
		if r.o.Grace > 0 {
			graceErr = r.grace(func() error { return nsenter.Signal(r.sb.Init, r.sb.Cred, unix.SIGTERM) }, nil, r.ctx.Done())
			r.used = r.sb.Used()
		}
	case result.Canceled:
		var canceled SignalError
		errors.As(context.Cause(r.ctx), &canceled)
		res.Signal = canceled.Signal
		if r.o.Grace > 0 && res.Started {
			// Only the command is told, so only for the command is waited.
			graceErr = r.grace(func() error { return r.sb.Signal(res.Signal) }, r.sb.Exited, nil)
		}
		r.used = r.sb.Used()
	}
	out := cleanup.Teardown(cleanup.Sandbox{Init: r.sb.Init, PIDNS: r.sb.PIDNS, Keeper: r.sb.Keeper}, proofBy())
	res.Verdict, res.Survivors = out.Verdict, out.Survivors
	res.CPUUser, res.CPUSystem, res.MaxRSS = out.End.User+r.used.User, out.End.System+r.used.System, max(out.End.MaxRSS, r.used.MaxRSS)
	if cause == result.Exited {
		r.settle(out)
	} else if res.Started && out.Verdict == result.Proven {
		<-r.sb.Exited                                     // dead, so at once
		res.Payload, _ = r.sb.ExitStatus(time.Unix(1, 0)) // nil where the kernel does not tell
	}
	switch {
	case out.Err != nil:
		res.Err = &result.Error{Code: "unproven", Err: out.Err,
			Message: fmt.Sprintf("the sandbox could not be proven empty within %v: %v", r.o.ProofTimeout, out.Err),
			Hint:    "the report lists what is left; a process in state D waits for the kernel or a device"}
	case graceErr != nil:
		res.Err = &result.Error{Code: "grace", Err: graceErr,
			Message: fmt.Sprintf("no grace period, the sandbox was killed at once: %v", graceErr)}
	}
	return out.At
}

// grace tells the sandbox to end and gives it time. It ends when init has
// exited, which it does by itself when it has no children left; when until is
// closed; when the grace period is over; or when somebody is in a hurry.
func (r *run) grace(tell func() error, until, alsoHurry <-chan struct{}) error {
	if err := tell(); err != nil && !errors.Is(err, proc.ErrGone) {
		return err
	}
	over := time.Now().Add(r.o.Grace)
	ctx, enough := context.WithCancel(context.Background())
	waited := make(chan struct{})
	go func() {
		defer close(waited)
		_ = r.sb.Init.WaitContext(ctx, over) // an error means that the time is over
	}()
	select {
	case <-waited:
	case <-until:
	case <-alsoHurry:
	case <-r.o.Hurry:
	}
	enough()
	<-waited
	return nil
}

// lostInit finds out whether somebody killed init, and the payload with it. A
// payload that died of SIGKILL may have done so by itself: then init still
// waits for what the payload has left behind, or exits in good order.
func (r *run) lostInit() bool {
	if p := r.result.Payload; p == nil || p.Signal != unix.SIGKILL {
		return false
	}
	if r.sb.Keeper.Exited() {
		return true // bwrap dies with it, and init with bwrap
	}
	return r.sb.Init.Wait(time.Now().Add(moment)) == nil
}

// settle names the cause where the payload has ended without us.
func (r *run) settle(out cleanup.Outcome) {
	res := r.result
	switch {
	case r.lost && (out.End.Init.Signaled() || !out.End.ReapedInit): // the latter also if the keeper was killed
		res.Cause = result.Lost
	case res.Payload != nil && res.Payload.Signal != 0:
		res.Cause = result.Signaled
	case res.Payload != nil:
		res.Cause = result.Exited
	case errors.Is(r.payloadErr, bwrap.ErrNotExecuted):
		res.Cause, res.Started = result.StartFailed, false
		res.Err = &result.Error{Code: "not-executable", ExitCode: result.ExitNotExecutable,
			Message: "the command could not be executed; bubblewrap says why"}
	case errors.Is(r.payloadErr, bwrap.ErrSetup) || out.End.Monitor.ExitStatus() == 1:
		// bwrap exits with 1 when it gives up, and with init's 128+n when init was killed.
		res.Cause, res.Started = result.StartFailed, false
		res.Err = &result.Error{Code: "setup", Message: "bubblewrap could not set up the sandbox",
			Hint: "sbxrun doctor tells what this machine allows"}
	default:
		res.Cause = result.Lost
	}
}

// failed is the result of a start that came to nothing.
func failed(ctx context.Context, err error, res result.Result) result.Result {
	var canceled SignalError
	if errors.As(context.Cause(ctx), &canceled) {
		res.Cause, res.Signal = result.Canceled, canceled.Signal
		return res
	}
	if !errors.As(err, &res.Err) {
		res.Err = &result.Error{Code: "setup", Message: "cannot set up the sandbox: " + err.Error(), Err: err}
	}
	return res
}
