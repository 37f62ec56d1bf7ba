package supervise

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/proc"
)

// End brings the command down, on every path, and returns the result when nothing of it
// is left, or when the proof timeout says that this cannot be shown. ctx is the one that
// requests come by: a second one can only shorten a grace period.
func (c *Command) End(ctx context.Context) result.Result {
	decided := time.Now()
	res := &c.result
	res.Cause = c.cause
	graceErr := c.beforeKill(ctx)
	out := c.teardown()
	c.seen()
	res.Verdict, res.Survivors = out.Verdict, out.Survivors
	used := c.used
	if c.kept.Init != nil {
		used = used.Larger(out.End.Usage(c.kept.Init.PID))
	}
	res.CPUUser, res.CPUSystem, res.MaxRSS = used.User, used.System, used.MaxRSS
	if c.overdue() && out.Verdict == result.Proven && c.heardLate() {
		graceErr = nil // none was due
	}
	c.readLimits()
	if res.Cause == result.Lost && c.exec == nil && out.End.Late {
		res.Cause = result.Timeout // of a room: we were stopped; the keeper was not
	}
	if res.Cause == result.Exited {
		c.settle(out)
	} else if c.exec != nil && res.Started && out.Verdict == result.Proven {
		<-c.exec.Exited() // dead, so at once
		res.Payload, _, _ = c.exec.ExitStatus()
	}
	switch {
	case out.Err != nil:
		res.Err = &result.Error{Code: "unproven", Err: out.Err,
			Message: fmt.Sprintf("the sandbox could not be proven empty within %v: %v", c.ProofTimeout, out.Err),
			Hint:    "the report lists what is left; a process in state D waits for the kernel or a device"}
	case graceErr != nil:
		res.Err = &result.Error{Code: "grace", Err: graceErr,
			Message: fmt.Sprintf("no grace period, the sandbox was killed at once: %v", graceErr)}
	}
	res.Teardown, res.Duration = out.At.Sub(decided), time.Since(c.Begin)
	return *res
}

// overdue reports whether the command's own deadline has passed, and not one that was requested, such as
// that of the context which it was started with: of that nobody knows the moment here.
func (c *Command) overdue() bool { return c.cause == result.Timeout && c.request.Cause == "" }

// heardLate reports whether the payload had ended before the deadline after all, which init
// may tell only after Watch has decided that it was a timeout; then it corrects the result. A
// grace period that was given meanwhile has only let strays live longer.
func (c *Command) heardLate() bool {
	if c.exec == nil {
		return false
	}
	<-c.exec.Exited() // dead, so at once
	payload, at, err := c.exec.ExitStatus()
	if err != nil || at.After(c.deadline) {
		return false
	}
	c.result.Cause, c.result.Payload = result.Exited, payload
	c.result.Strays, _ = c.exec.Strays()
	return true
}

// beforeKill is what comes before the kill: a look at what the payload has left behind,
// or a grace period; and what all have used, which the kernel will not tell
// afterwards. An error is one of the grace period.
func (c *Command) beforeKill(ctx context.Context) (err error) {
	res := &c.result
	switch c.cause {
	case result.Exited:
		if c.exec != nil {
			res.Payload, _, c.startErr = c.exec.ExitStatus()
			if res.Payload != nil {
				c.countStrays()
			}
		}
		return nil
	case result.StartFailed:
		res.Started, res.Err = false, AsError(c.startErr)
		return nil
	case result.Lost:
		return nil
	case result.Canceled:
		res.Signal = c.request.Signal
	}
	if c.exec != nil && res.Started {
		err = c.grace(ctx)
		if c.Sending != nil && !c.kept.Init.Exited() {
			c.tell(unix.SIGKILL)
		}
	}
	if !c.overdue() || c.Grace > 0 { // otherwise Watch has just looked
		c.look(0, c.sum).within(lookBound)
	}
	return err
}

// countStrays looks at what the payload has left behind, at most until the deadline.
func (c *Command) countStrays() {
	var known bool
	if c.result.Strays, known = c.exec.Strays(); known {
		return
	}
	wait := time.Second
	if !c.deadline.IsZero() {
		wait = min(wait, max(lookBound, time.Until(c.deadline)))
	}
	if c.look(0, c.kept.Strays).within(wait) {
		c.result.Strays = 0 // it counts
	}
	c.seen()
}

// grace tells the sandbox to end and gives it time, if there is a grace period for the
// cause.
func (c *Command) grace(ctx context.Context) error {
	switch c.cause {
	case result.Timeout:
		if !c.overdue() {
			ctx = nil // it has brought its request
		}
		return c.wait(c.Grace, cmp.Or(c.Terms.Signal, unix.SIGTERM), c.Signal, nil, ctx)
	case result.Canceled:
		// Only the command is told, so only for the command is waited.
		return c.wait(c.Grace, c.request.Signal, c.exec.Signal, c.exec.Exited(), nil)
	case result.Killed, result.IdleTimeout, result.OutputLimit:
		return c.wait(c.request.Grace, c.request.Signal, c.Signal, nil, nil)
	}
	return nil
}

// tell tells which signal is about to be sent.
func (c *Command) tell(sig syscall.Signal) {
	select {
	case c.Sending <- sig:
	default:
	}
}

// wait sends a signal, and ends when init has exited, which it does by itself when it has no
// children left; when until is closed; when the grace period is over, that of a later request
// by ctx included; or when somebody is in a hurry. Without a grace period it does nothing.
func (c *Command) wait(period time.Duration, sig syscall.Signal, send func(syscall.Signal) error, until <-chan struct{}, ctx context.Context) error {
	if period <= 0 {
		return nil
	}
	c.tell(sig)
	if err := send(sig); err != nil && !errors.Is(err, proc.ErrGone) {
		return err
	}
	over := time.Now().Add(period)
	c.Spare(over)
	waiting, stop := context.WithCancel(context.Background())
	waited := make(chan struct{})
	go func() {
		defer close(waited)
		_ = c.kept.Init.WaitContext(waiting, over) // an error means that the time is over
	}()
	var request <-chan struct{}
	if ctx != nil {
		request = ctx.Done()
	}
	select {
	case <-waited:
	case <-until:
	case <-c.Hurry:
	case <-request:
		// Somebody wants an end who has perhaps less patience.
		select {
		case <-waited:
		case <-time.After(requestOf(ctx).Grace):
		case <-c.Hurry:
		}
	}
	stop()
	<-waited
	return nil
}

// Spare keeps the keeper, whose own deadline may be sooner, from ending anything before a
// grace period is over.
func (c *Command) Spare(over time.Time) {
	if !c.deadline.IsZero() {
		c.kept.EndAt(over.Add(Lateness))
	}
}

// teardown kills, with help if that takes long.
func (c *Command) teardown() Outcome {
	if g := c.Limits; g != nil {
		g.Unthrottle(c.result.Payload != nil && c.result.Strays == 0)
	}
	rescued := make(chan struct{})
	rescue := time.AfterFunc(late, func() {
		defer close(rescued)
		c.rescue()
	})
	out := Teardown(c.kept, time.Now().Add(c.ProofTimeout))
	if !rescue.Stop() {
		<-rescued
	}
	if g := c.Limits; g != nil && out.Verdict == result.Unproven {
		_ = g.Throttle() // the survivors keep to the quota; a cgroup that is gone needs none
	}
	return out
}

// late is when a teardown is helped: it takes some milliseconds, or, with thousands
// of processes, some hundred.
const late = 100 * time.Millisecond

// rescue is the second way to the end, beside the teardown: somebody may have frozen
// what is to die, or throttled it.
func (c *Command) rescue() {
	// What cannot be done here, the proof will miss: it says what is left.
	if m, err := limits.Detect(); err == nil {
		for _, p := range []*proc.Process{c.kept.Init, c.kept.Room} {
			if p != nil && !p.Exited() {
				_ = m.Thaw(p.PID)
			}
		}
	}
	if g := c.Limits; g != nil {
		_ = g.Loosen()
		if !c.kept.Lasting { // or the next command's init would die, too
			_ = g.Kill()
		}
	}
}

// readLimits reads what was counted, before the keeper removes the cgroups.
func (c *Command) readLimits() {
	g := c.Limits
	if g == nil {
		return
	}
	died := syscall.Signal(0)
	if p := c.result.Payload; p != nil {
		died = p.Signal
	}
	c.result.Limits = append(c.result.Limits, g.Limits(died)...)
	used := g.Usage()
	c.result.MemoryPeak, c.result.PidsPeak = used.MemoryPeak, used.PidsPeak
	c.oom, c.oomAround = g.OOMKilled(), g.OOMKilledAround()
}

// settle names the cause where the payload has ended without us.
func (c *Command) settle(out Outcome) {
	res := &c.result
	switch {
	case res.Payload != nil && res.Payload.Signal != 0:
		res.Cause = result.Signaled
	case res.Payload != nil:
		res.Cause = result.Exited
	case errors.As(c.startErr, &res.Err):
		res.Cause, res.Started = result.StartFailed, false
	case out.End.Late:
		res.Cause = result.Timeout // we were stopped; the keeper was not
	default:
		res.Cause = result.Lost // init was killed, by nobody of ours
	}
	killed := res.Cause == result.Lost || res.Payload != nil && res.Payload.Signal == unix.SIGKILL
	switch {
	case res.Err != nil:
	case c.oom && !c.SpareOOM, killed && (c.oom || c.oomAround):
		res.Cause = result.OOM
	case res.Cause == result.Signaled && res.Payload.Signal == unix.SIGXFSZ && hit(res.Limits, "fsize"):
		res.Cause = result.FileSize
	}
}

func hit(list []result.Limit, name string) bool {
	return slices.ContainsFunc(list, func(l result.Limit) bool { return l.Name == name && l.Hit })
}
