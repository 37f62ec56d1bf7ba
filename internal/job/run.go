package job

import (
	"context"
	"errors"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/safeopen"
	"github.com/sbxrun/sbxrun/internal/sandbox"
	"github.com/sbxrun/sbxrun/internal/state"
	"github.com/sbxrun/sbxrun/internal/stream"
	"github.com/sbxrun/sbxrun/internal/supervise"
)

// Spec describes a command for a Go program.
type Spec struct {
	Stdin          io.Reader
	Stdout, Stderr io.Writer
	MaxOutput      int64 // bytes per stream; 0 for no limit

	Limits limits.Request
	Group  *limits.Group  // instead of Limits: the renewed cgroup of a warm room; it stays the caller's
	Use    *sandbox.Use   // of an existing sandbox; the Run closes it at its end; nil for a new sandbox
	Parts  *sandbox.Parts // of a new sandbox; the Run ends them, but after an error the caller does
	Shared bool           // an idle room in which other callers run commands
	// Attended is set if the caller calls Wait at once. Then no other goroutine watches the command.
	Attended bool

	Timeout, Grace, ProofTimeout time.Duration

	Hurry <-chan struct{} // when closed, cuts a grace period short; nil for never
}

// proofTimeout is the default of Spec and of the flag.
const proofTimeout = 5 * time.Second

// Run is a job that ends with a context and whose streams are readers and writers. Its deadline, context and limits
// apply even if no caller waits.
type Run struct {
	Cgroups []string // directories of the command's own cgroups

	job    Job
	ctx    context.Context
	cancel context.CancelCauseFunc
	apart  func() bool // see Outlive
	hit    atomic.Bool // MaxOutput
	broken atomic.Pointer[result.Error]

	finish func()
	ended  chan struct{}
	result *result.Result // set at the end
	err    error
}

// Errors caused by the calling program.
var (
	errStarted    = &result.Error{Code: "usage", Message: "it was started before"}
	errNotStarted = &result.Error{Code: "usage", Message: "it was not started"}
	errNegative   = &result.Error{Code: "usage", Message: "a timeout, a grace period or a bound is negative; 0 is for none"}
)

// NewRun starts a command at a place. Its errors are *[result.Error]; after one, all processes have exited, and the Use
// stays the caller's. The command ends when ctx is done, with the cause timeout if ctx's deadline has passed.
func NewRun(ctx context.Context, place supervise.Place, s Spec) (*Run, error) {
	if s.Timeout < 0 || s.Grace < 0 || s.ProofTimeout < 0 || s.MaxOutput < 0 {
		return nil, errNegative
	}
	if ctx.Err() != nil {
		return nil, endedBefore(ctx)
	}
	if err := state.CheckVisible(); err != nil {
		return nil, err
	}
	r := &Run{job: Job{ID: safeopen.RandomName(), Place: place, Nest: s.Shared, Parts: s.Parts}}
	r.job.Terms = supervise.Terms{Timeout: s.Timeout, Grace: s.Grace, ProofTimeout: s.ProofTimeout, Begin: time.Now(), Hurry: s.Hurry, Confirm: place.Maker == nil, Shared: s.Shared, SpareOOM: s.Shared}
	if s.ProofTimeout == 0 {
		r.job.Terms.ProofTimeout = proofTimeout
	}
	r.ctx, r.cancel = context.WithCancelCause(context.Background())
	var in state.Access
	if s.Use != nil {
		in = s.Use.Access
	}
	if s.Parts != nil {
		if err := s.Parts.Begin(place.Plan.Cred()); err != nil {
			return nil, err
		}
	}
	var err error
	if s.Group != nil {
		r.job.Terms.Limits = s.Group
	} else {
		r.job.Limits, err = limits.For(s.Limits, true, in.Cgroups, in.Limits)
	}
	if err == nil {
		bound := stream.Bound{Size: s.MaxOutput, Limited: s.MaxOutput > 0, Exceeded: r.tooMuch}
		r.job.Streams, err = stream.Open(s.Stdin, s.Stdout, s.Stderr, bound, r.brokeOff)
	}
	if err != nil {
		return nil, err
	}
	r.apart = context.AfterFunc(ctx, func() {
		request := supervise.Request{Cause: result.Canceled, Signal: unix.SIGTERM}
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			request.Cause = result.Timeout
		}
		r.cancel(request)
	})
	r.ended = make(chan struct{})
	running := r.job.Hold(r.ctx) && r.job.Release(r.ctx)
	if g := r.job.Terms.Limits; g != nil && running {
		r.Cgroups = g.Dirs()
		if s.Parts != nil {
			s.Parts.Cgroups = r.Cgroups
		}
	}
	r.finish = sync.OnceFunc(func() {
		defer close(r.ended)
		r.result, r.err = r.carryOut()
		if s.Use != nil && r.result.Started {
			s.Use.Settle(r.result)
			s.Use.Close()
		}
		if r.result.Started {
			if _, lost := s.Parts.End(); lost != nil && r.result.Err == nil {
				r.result.Err, r.err = lost, lost
			}
		}
	})
	if running {
		if !s.Attended {
			go r.finish()
		}
		return r, nil
	}
	r.finish()
	switch {
	case r.result.Started: // it was ended before the start was confirmed
		return r, nil
	case r.err != nil:
		return nil, r.err
	}
	return nil, endedBefore(ctx)
}

// Bind gives a command that was started ahead of its call the context and timeout that [NewRun] would have set. It is
// called once.
func (r *Run) Bind(ctx context.Context, timeout time.Duration) {
	stops := []func() bool{context.AfterFunc(ctx, func() { r.cancel(supervise.Request{Cause: result.Canceled, Signal: unix.SIGTERM}) })}
	if timeout > 0 {
		r.job.Kept().EndAt(time.Now().Add(timeout).Add(supervise.Lateness))
		t := time.AfterFunc(timeout, func() { r.cancel(supervise.Request{Cause: result.Timeout, Signal: unix.SIGTERM}) })
		stops = append(stops, t.Stop)
	}
	go func() {
		<-r.ended
		for _, stop := range stops {
			stop()
		}
	}()
}

// endedBefore returns the error of a command that was ended before its start.
func endedBefore(ctx context.Context) error {
	e := &result.Error{Code: "ended", Message: "the command was ended before it began", Err: context.Cause(ctx)}
	if e.Err != nil {
		e.Message += ": " + e.Err.Error()
	}
	return e
}

// tooMuch ends a command that has exceeded its output limit.
func (r *Run) tooMuch() {
	if !r.hit.Swap(true) {
		r.cancel(supervise.Request{Cause: result.OutputLimit, Signal: unix.SIGKILL})
	}
}

// brokeOff ends a command whose input or output could not be forwarded, as SIGPIPE would.
func (r *Run) brokeOff(e *result.Error) {
	r.broken.CompareAndSwap(nil, e)
	r.cancel(supervise.Request{Cause: result.Canceled, Signal: unix.SIGPIPE})
}

// Outlive detaches the command or room from the context that it was started with. It returns false if that context is
// already done.
func (r *Run) Outlive() bool { return r.apart() }

// End ends the command or room at once.
func (r *Run) End() { r.cancel(supervise.Request{Cause: result.Killed, Signal: unix.SIGKILL}) }

// Room returns PID 1 of the room. It is closed with the Run.
func (r *Run) Room() *proc.Process { return r.job.Kept().Room }

// Wait waits until all processes of the command have exited and its output is forwarded. The error is the result's Err;
// it does not describe how the command ended. Wait may be called again.
func (r *Run) Wait() (*result.Result, error) {
	if r == nil {
		return nil, errNotStarted
	}
	r.finish()
	<-r.ended
	return r.result, r.err
}

// Ended returns a channel that is closed when Wait no longer blocks, or nil before the start.
func (r *Run) Ended() <-chan struct{} {
	if r == nil {
		return nil
	}
	return r.ended
}

// carryOut waits for the job and returns its result and error.
func (r *Run) carryOut() (*result.Result, error) {
	defer r.cancel(nil)
	defer r.apart()
	res, delivered, left := r.job.Wait(r.ctx, nil)
	switch lost := r.broken.Load(); {
	case res.Err != nil:
	case lost != nil:
		res.Err = lost
	case !delivered:
		res.Err = &result.Error{Code: "output", ExitCode: result.ExitOutput, Message: "the rest of the output is lost: its writer does not return", Err: os.ErrDeadlineExceeded}
	case len(left) > 0:
		res.Err = &result.Error{Code: "left", Message: "the command is gone, but something else was left behind: " + left[0].Error(), Err: left[0]}
	}
	if res.Err != nil {
		return &res, res.Err
	}
	return &res, nil
}

// Signal sends a signal to all processes of a running command.
func (r *Run) Signal(sig unix.Signal) error {
	if r == nil {
		return errNotStarted
	}
	if sig < 0 || sig > lastSignal { // init does not report an error of kill(2)
		return unix.EINVAL
	}
	return r.job.Signal(sig)
}

// lastSignal is the last real-time signal (signal(7)).
const lastSignal = 64

// SignalAlone sends a signal to the command's own process only. The signal is generated before SignalAlone returns
// (pidfd_send_signal(2)).
func (r *Run) SignalAlone(sig unix.Signal) error {
	if r == nil {
		return errNotStarted
	}
	p, err := r.job.Kept().Payload()
	if err != nil {
		return err
	}
	defer p.Close()
	return p.Signal(sig)
}

// Started returns an error if the command was already started.
func (r *Run) Started() error {
	if r != nil {
		return errStarted
	}
	return nil
}
