// Package supervise owns the order of a run, and its single decision: what
// ended it. Everything it does comes in this order, with no way back:
//
//	start     bwrap, or what enters a sandbox, below the keeper, held; init known
//	          and verified
//	release   the payload begins, and with it the deadline
//	watch     one select: the payload's end, the deadline, a [Request]. The first
//	          to happen is the cause, settled before anything is killed
//	grace     if one was asked for
//	teardown  on every path: init killed, its end and the keeper's awaited
package supervise

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/bwrap"
	"github.com/sbxrun/sbxrun/cleanup"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/result"
)

// Options are how a run is carried out.
type Options struct {
	Timeout      time.Duration // from the payload's begin; 0 for none
	Grace        time.Duration // from SIGTERM to SIGKILL; 0 for SIGKILL at once
	ProofTimeout time.Duration // how long the proof may take
	Begin        time.Time     // when sbxrun, or this use of it, began
	// Hurry cuts a grace period short when it is closed.
	Hurry <-chan struct{}
	// Hold, if not nil, is called with the payload held. An error ends the run.
	Hold func(*proc.Kept) error
	// Released, if not nil, is called when the payload runs.
	Released func()
	// Emptied, if not nil, is called when nothing of it is left, or that cannot be
	// shown, and the keeper still keeps the terminal.
	Emptied func(proven bool)
	// Ending, if not nil, is called before all is signalled that a grace period is for.
	// It says whether that is the payload alone, for certain: then nobody has to enter.
	Ending func() (alone bool)
	// Limits, if not nil, is what the payload is in; it stays the caller's.
	Limits *limits.Group
	// SpareOOM lets it go on when the kernel has killed a process of it for want of
	// memory, unless that was the payload.
	SpareOOM bool
	// Doomed, if not nil, says whether what the payload ran in was ended, when
	// the payload was ended from outside: then it is killed, and not lost.
	Doomed func() bool
}

// A Request ends a run: it is the cause that the run's context is cancelled with.
type Request struct {
	Cause  result.Cause // Canceled, Killed, IdleTimeout, OutputLimit
	Signal syscall.Signal
	// Grace is from the signal, which goes to all of the sandbox, to SIGKILL. It does
	// not count for Canceled: there the signal goes to the payload alone, and the grace
	// period is the run's own.
	Grace time.Duration
}

func (r Request) Error() string { return string(r.Cause) + " by " + result.SignalName(r.Signal) }

// Run carries a start out and returns when nothing of it is left, or when the
// proof timeout says that this cannot be shown. Cancelling ctx with a [Request]
// as cause ends the run.
func Run(ctx context.Context, start Start, o Options) result.Result {
	r := result.Result{StartedAt: o.Begin, Verdict: result.NotApplicable, Cause: result.StartFailed}
	if ctx.Err() != nil {
		return failed(ctx, ctx.Err(), r)
	}
	held, err := start(ctx)
	if err != nil {
		r = failed(ctx, err, r)
		r.Duration = time.Since(o.Begin)
		return r
	}
	defer held.Close()

	run := run{ctx: ctx, o: o, held: held, result: &r}
	cause := run.release()
	if cause == "" {
		cause = run.watch()
	}
	decided := time.Now()
	proven := run.end(cause)
	r.Teardown, r.Duration = proven.Sub(decided), time.Since(o.Begin)
	return r
}

type run struct {
	ctx    context.Context
	o      Options
	held   Held
	result *result.Result

	request    Request    // if there was one
	used       proc.Usage // by what runs, and nobody will wait for
	payloadErr error      // why the payload's end is not known
	initEnding bool       // when the payload ended by itself, or with init
	oom        bool       // the kernel has killed something for want of memory
}

// release lets the payload begin. If it did not come to that, it returns the cause;
// otherwise none.
func (r *run) release() result.Cause {
	if r.ctx.Err() != nil {
		return r.requested() // before the release: it never ran
	}
	if r.o.Hold != nil {
		if err := r.o.Hold(r.held.Ends()); err != nil {
			r.payloadErr = err
			return result.StartFailed
		}
	}
	r.held.Release()
	r.result.Started = true // or will be, any moment
	select {
	case <-r.held.Running():
	case <-r.held.Exited():
		select {
		case <-r.held.Running():
		default:
			return result.Exited // it never ran, and can tell why
		}
	case <-r.ctx.Done():
		return r.requested()
	case <-time.After(bwrap.SetupBound):
		r.payloadErr = result.ErrSetup
		return result.Exited // there never was a payload
	}
	if g := r.o.Limits; g != nil {
		// Not before: most of what sets the sandbox up comes after the release.
		if err := g.Throttle(); err != nil {
			r.payloadErr = err
			return result.StartFailed
		}
	}
	r.result.Setup = time.Since(r.o.Begin)
	if r.o.Released != nil {
		r.o.Released()
	}
	return ""
}

// watch waits for the one thing that ends a run whose payload runs.
func (r *run) watch() result.Cause {
	// Monotonic timers: a clock that is set does not matter.
	var deadline, before <-chan time.Time
	if t := r.o.Timeout; t > 0 {
		deadline = time.After(t)
		before = time.After(max(0, t-lookAhead))
	}
	unkept, enough := r.watchKeeper()
	defer enough()
	var unheard <-chan time.Time
	var exceeded <-chan limits.Event
	if g := r.o.Limits; g != nil {
		ctx, enough := context.WithCancel(context.Background())
		defer enough()
		exceeded = g.Watch(ctx)
	}
	for {
		select {
		case <-r.held.Exited():
			return result.Exited
		case <-unkept:
			// Usually all is over, or the payload dies with it, and can tell more. But
			// an init that has not yet asked to die with its parent lives on, without
			// anybody who would end it if we were killed.
			unkept, unheard = nil, time.After(patience)
		case <-unheard:
			return result.Lost
		case event := <-exceeded:
			if event == limits.CPUTime {
				return result.CPUTime
			}
			if !r.o.SpareOOM {
				return result.OOM
			}
		case <-before:
			r.used = r.held.Used()
			r.held.Ends().HoldMounts()
		case <-deadline:
			return result.Timeout
		case <-r.ctx.Done():
			return r.requested()
		}
	}
}

// requested takes over who ends the run, and how.
func (r *run) requested() result.Cause {
	r.request = requestOf(r.ctx)
	return r.request.Cause
}

func requestOf(ctx context.Context) Request {
	request := Request{Cause: result.Canceled, Signal: unix.SIGTERM}
	errors.As(context.Cause(ctx), &request)
	return request
}

// watchKeeper returns a channel that is closed when the keeper is dead.
func (r *run) watchKeeper() (dead <-chan struct{}, enough func()) {
	ctx, cancel := context.WithCancel(context.Background())
	gone := make(chan struct{})
	// Not at once: most keepers of short runs need no watching.
	timer := time.AfterFunc(moment, func() {
		// A pidfd of our own: the other one is for the teardown. Our unreaped child,
		// so the pid is its own.
		keeper, err := proc.Open(r.held.Ends().Keeper.PID)
		if err != nil {
			return // unwatched: the deadline and the payload's end remain
		}
		defer keeper.Close()
		if keeper.WaitContext(ctx, time.Time{}) == nil {
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

// lookAhead is how long before the deadline is asked what the sandbox has used:
// at the deadline it would delay the kill.
const lookAhead = 10 * time.Millisecond

// end brings the sandbox down, completes the result, and returns the time of the
// proof.
func (r *run) end(cause result.Cause) time.Time {
	r.result.Cause = cause
	graceErr := r.lead(cause)
	out := r.teardown()
	r.account(out)
	switch {
	case out.Err != nil:
		r.result.Err = &result.Error{Code: "unproven", Err: out.Err,
			Message: fmt.Sprintf("the sandbox could not be proven empty within %v: %v", r.o.ProofTimeout, out.Err),
			Hint:    "the report lists what is left; a process in state D waits for the kernel or a device"}
	case graceErr != nil:
		r.result.Err = &result.Error{Code: "grace", Err: graceErr,
			Message: fmt.Sprintf("no grace period, the sandbox was killed at once: %v", graceErr)}
	}
	return out.At
}

// lead is what comes before the kill: a look at how the payload has ended, or a grace
// period for all who have not; and what they have used, which the kernel will not tell
// afterwards. An error is one of the grace period.
func (r *run) lead(cause result.Cause) (err error) {
	res := r.result
	switch cause {
	case result.Exited:
		if r.payloadErr == nil {
			r.initEnding = r.held.InitEnding()
			res.Payload, r.payloadErr = r.held.ExitStatus(r.proofBy())
			res.Strays, r.used = r.held.Strays()
		}
		return nil
	case result.StartFailed:
		res.Err = asError(r.payloadErr)
		return nil
	case result.Lost:
		return nil
	case result.Timeout:
		if r.o.Grace == 0 {
			return nil // it was looked at shortly before
		}
		err = r.grace(r.o.Grace, func() error { return r.signalAll(unix.SIGTERM) }, nil, r.ctx.Done())
	case result.Canceled:
		res.Signal = r.request.Signal
		if r.o.Grace > 0 && res.Started {
			// Only the command is told, so only for the command is waited.
			err = r.grace(r.o.Grace, func() error { return r.held.Signal(res.Signal) }, r.held.Exited(), nil)
		}
	case result.Killed, result.IdleTimeout, result.OutputLimit:
		if r.request.Grace > 0 && res.Started {
			err = r.grace(r.request.Grace, func() error { return r.signalAll(r.request.Signal) }, nil, nil)
		}
	}
	r.used = r.held.Used()
	return err
}

func (r *run) proofBy() time.Time { return time.Now().Add(r.o.ProofTimeout) }

// teardown kills, with help if that takes long.
func (r *run) teardown() cleanup.Outcome {
	if g := r.o.Limits; g != nil {
		g.Unthrottle()
	}
	rescued := make(chan struct{})
	rescue := time.AfterFunc(late, func() {
		defer close(rescued)
		r.rescue()
	})
	out := cleanup.Teardown(r.held.Ends(), r.proofBy(), r.emptied)
	if !rescue.Stop() {
		<-rescued
	}
	return out
}

// account completes the result with what is known when all is over.
func (r *run) account(out cleanup.Outcome) {
	res := r.result
	res.Verdict, res.Survivors = out.Verdict, out.Survivors
	res.CPUUser, res.CPUSystem, res.MaxRSS = out.End.User+r.used.User, out.End.System+r.used.System, max(out.End.MaxRSS, r.used.MaxRSS)
	if res.Cause == result.Exited {
		r.settle(out)
	} else if res.Started && out.Verdict == result.Proven {
		<-r.held.Exited()                                   // dead, so at once
		res.Payload, _ = r.held.ExitStatus(time.Unix(1, 0)) // nil where the kernel does not tell
	}
	if res.Cause == result.Lost && r.o.Doomed != nil && r.o.Doomed() {
		res.Cause = result.Killed
	}
}

// late is when a teardown is helped: it takes some milliseconds, or, with thousands
// of processes, some hundred.
const late = 100 * time.Millisecond

// rescue is the second way to the end, beside the teardown: somebody may have frozen
// what is to die, or throttled it, or stopped the one that reaps it.
func (r *run) rescue() {
	init := r.held.Ends().Init
	// What cannot be done here, the proof will miss: it says what is left.
	if m, err := limits.Detect(); err == nil && !init.Exited() {
		_ = m.Thaw(init.PID)
	}
	if g := r.o.Limits; g != nil {
		_ = g.Loosen()
		_ = g.Kill()
	}
}

// emptied reads what was counted, before the keeper removes the cgroups.
func (r *run) emptied(proven bool) {
	if g := r.o.Limits; g != nil {
		died := syscall.Signal(0)
		if p := r.result.Payload; p != nil {
			died = p.Signal
		}
		r.result.Limits = append(r.result.Limits, g.Limits(died)...)
		used := g.Usage()
		r.result.MemoryPeak, r.result.PidsPeak = used.MemoryPeak, used.PidsPeak
		r.oom = g.OOMKilled()
	}
	if r.o.Emptied != nil {
		r.o.Emptied(proven)
	}
}

// signalAll sends the signal that begins a grace period for all, and first lets that be
// known.
func (r *run) signalAll(sig syscall.Signal) error {
	if r.o.Ending != nil && r.o.Ending() {
		// It may be unknown, where init could not be traced.
		if err := r.held.Signal(sig); !errors.Is(err, proc.ErrGone) {
			return err
		}
	}
	return r.held.SignalAll(sig)
}

// grace tells the sandbox to end and gives it time. It ends when init has
// exited, which it does by itself when it has no children left; when until is
// closed; when the grace period is over, that of a later request included; or when
// somebody is in a hurry.
func (r *run) grace(period time.Duration, tell func() error, until, request <-chan struct{}) error {
	if err := tell(); err != nil && !errors.Is(err, proc.ErrGone) {
		return err
	}
	over := time.Now().Add(period)
	ctx, enough := context.WithCancel(context.Background())
	waited := make(chan struct{})
	go func() {
		defer close(waited)
		_ = r.held.Ends().Init.WaitContext(ctx, over) // an error means that the time is over
	}()
	select {
	case <-waited:
	case <-until:
	case <-r.o.Hurry:
	case <-request:
		// Somebody wants an end who has perhaps less patience.
		select {
		case <-waited:
		case <-time.After(requestOf(r.ctx).Grace):
		case <-r.o.Hurry:
		}
	}
	enough()
	<-waited
	return nil
}

// lost says whether somebody has killed init, and the payload with it. A payload that
// died of SIGKILL may have done so by itself: then init still waits for what the
// payload has left behind, or exits in good order.
func (r *run) lost(end proc.End) bool {
	if p := r.result.Payload; p == nil || p.Signal != unix.SIGKILL {
		return false
	}
	// Not reaped by the keeper, because bwrap's monitor did before it had heard of the
	// payload; or because the keeper itself was killed. If init was not about to end then,
	// either may also be our own doing.
	return r.initEnding && (!end.ReapedInit || end.Init.Signaled())
}

// settle names the cause where the payload has ended without us.
func (r *run) settle(out cleanup.Outcome) {
	res := r.result
	switch {
	case r.lost(out.End):
		res.Cause = result.Lost
	case res.Payload != nil && res.Payload.Signal != 0:
		res.Cause = result.Signaled
	case res.Payload != nil:
		res.Cause = result.Exited
	case errors.As(r.payloadErr, &res.Err):
		res.Cause, res.Started = result.StartFailed, false
	case errors.Is(r.payloadErr, result.ErrSetup) || out.End.Monitor.ExitStatus() == 1:
		// bwrap exits with 1 when it gives up, and with init's 128+n when init was killed.
		res.Cause, res.Started = result.StartFailed, false
		res.Err = &result.Error{Code: "setup", Message: "bubblewrap could not set up the sandbox",
			Hint: "sbxrun doctor tells what this machine allows"}
	default:
		res.Cause = result.Lost
	}
	killed := res.Cause == result.Lost || res.Payload != nil && res.Payload.Signal == unix.SIGKILL
	switch {
	case res.Err != nil:
	case r.oom && (killed || !r.o.SpareOOM):
		res.Cause = result.OOM
	case res.Cause == result.Signaled && res.Payload.Signal == unix.SIGXFSZ && hit(res.Limits, "fsize"):
		res.Cause = result.FileSize
	}
}

func hit(list []result.Limit, name string) bool {
	return slices.ContainsFunc(list, func(l result.Limit) bool { return l.Name == name && l.Hit })
}

// failed is the result of a start that came to nothing.
func failed(ctx context.Context, err error, res result.Result) result.Result {
	if ctx.Err() != nil {
		request := requestOf(ctx)
		res.Cause, res.Signal = request.Cause, request.Signal
		return res
	}
	res.Err = asError(err)
	return res
}

func asError(err error) *result.Error {
	var e *result.Error
	if !errors.As(err, &e) {
		e = &result.Error{Code: "setup", Message: "cannot set up the sandbox: " + err.Error(), Err: err}
	}
	return e
}
