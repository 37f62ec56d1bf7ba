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

// End ends the command on every path. It returns when all processes have exited, or after the proof timeout.
func (c *Command) End() {
	if c.ended {
		return
	}
	c.ended = true
	res := &c.result
	if c.kept == nil {
		c.notStarted()
		return
	}
	decided := time.Now()
	res.Cause = c.cause
	graceErr := c.beforeKill()
	out := c.teardown()
	c.seen()
	res.Verdict, res.Survivors = out.Verdict, out.Survivors
	used := c.used
	if c.kept.Init != nil {
		used = used.Larger(out.End.Usage(c.kept.Init.PID))
	}
	res.CPUUser, res.CPUSystem, res.MaxRSS = used.User, used.System, used.MaxRSS
	if c.overdue() && out.Verdict == result.Proven && c.heardLate() {
		graceErr = nil // no grace period was due
	}
	c.readLimits()
	if res.Cause == result.Lost && c.exec == nil && out.End.Late {
		res.Cause = result.Timeout // sbxrun was stopped, and the keeper ended the room
	}
	if res.Cause == result.Exited {
		c.settle(out)
	} else if c.exec != nil && res.Started && out.Verdict == result.Proven {
		<-c.exec.Exited() // init has exited, so this does not block
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
}

// notStarted sets the result of a command that could not be set up.
func (c *Command) notStarted() {
	res := &c.result
	res.Duration = time.Since(c.Begin)
	if c.ctx.Err() != nil {
		c.requested()
		res.Cause, res.Signal = c.request.Cause, c.request.Signal
		return
	}
	res.Err = AsError(c.startErr)
}

// overdue reports whether the command's own deadline is the cause. A requested timeout, for example by the context
// of the start, does not count: its time is unknown here.
func (c *Command) overdue() bool { return c.cause == result.Timeout && c.request.Cause == "" }

// heardLate corrects the result, and returns true, if the payload ended before the deadline but init reported this
// only after Watch had decided on a timeout. A grace period in between only lets strays live longer.
func (c *Command) heardLate() bool {
	if c.exec == nil {
		return false
	}
	<-c.exec.Exited() // init has exited, so this does not block
	payload, at, err := c.exec.ExitStatus()
	if err != nil || at.After(c.deadline) {
		return false
	}
	c.result.Cause, c.result.Payload = result.Exited, payload
	c.result.Strays, _ = c.exec.Strays()
	return true
}

// beforeKill counts the processes that the payload left behind or grants a grace period, and reads the resource
// usage, which the kernel discards with the kill. The error comes from the grace period.
func (c *Command) beforeKill() (err error) {
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
		err = c.grace()
		if c.Sending != nil && !c.kept.Init.Exited() {
			c.tell(unix.SIGKILL)
		}
	}
	if !c.overdue() || c.Grace > 0 { // otherwise Watch has just read it
		c.look(0, c.sum).within(lookBound)
	}
	return err
}

// countStrays counts the processes that the payload left behind, at most until the deadline.
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
		c.result.Strays = 0 // seen sets the exact number
	}
	c.seen()
}

// grace signals the sandbox and waits, if the cause has a grace period.
func (c *Command) grace() error {
	switch c.cause {
	case result.Timeout:
		return c.wait(c.Grace, cmp.Or(c.Options.Signal, unix.SIGTERM), c.Signal, nil)
	case result.Canceled:
		// Only the payload gets the signal, so wait only for the payload.
		return c.wait(c.Grace, c.request.Signal, c.exec.Signal, c.exec.Exited())
	case result.Killed, result.IdleTimeout, result.OutputLimit:
		return c.wait(c.request.Grace, c.request.Signal, c.Signal, nil)
	}
	return nil
}

// tell announces a signal on Sending.
func (c *Command) tell(sig syscall.Signal) {
	select {
	case c.Sending <- sig:
	default:
	}
}

// wait sends a signal and waits for the end of the grace period, but no longer than until init has exited (init exits
// when it has no children), until or Hurry is closed, or the grace period of a later request is over. Without a grace
// period it does nothing.
func (c *Command) wait(period time.Duration, sig syscall.Signal, send func(syscall.Signal) error, until <-chan struct{}) error {
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
		_ = c.kept.Init.WaitContext(waiting, over) // it fails only at the end of the grace period
	}()
	var request <-chan struct{}
	if c.overdue() { // otherwise the context's end is the cause
		request = c.ctx.Done()
	}
	select {
	case <-waited:
	case <-until:
	case <-c.Hurry:
	case <-request:
		// The second request may have a shorter grace period.
		select {
		case <-waited:
		case <-time.After(c.asked().Grace):
		case <-c.Hurry:
		}
	}
	stop()
	<-waited
	return nil
}

// Spare moves the keeper's own deadline past the end of a grace period.
func (c *Command) Spare(over time.Time) {
	if !c.deadline.IsZero() {
		c.kept.EndAt(over.Add(lateness))
	}
}

// teardown kills the command, and calls rescue if this takes long.
func (c *Command) teardown() Outcome {
	if g := c.Group; g != nil {
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
	if g := c.Group; g != nil && out.Verdict == result.Unproven {
		_ = g.Throttle() // for the survivors; it fails if the cgroup is gone
	}
	return out
}

// late is the time after which teardown calls rescue. A normal teardown takes a few milliseconds, or a few hundred with
// thousands of processes.
const late = 100 * time.Millisecond

// rescue helps a slow teardown: another process may have frozen or throttled the command's processes.
func (c *Command) rescue() {
	// If a step fails, the teardown remains unproven and the survivors are listed.
	if m, err := limits.Detect(); err == nil {
		for _, p := range []*proc.Process{c.kept.Init, c.kept.Room} {
			if p != nil && !p.Exited() {
				_ = m.Thaw(p.PID)
			}
		}
	}
	if g := c.Group; g != nil {
		_ = g.Loosen()
		if !c.kept.Lasting { // this would also kill the next command's init
			_ = g.Kill()
		}
	}
}

// readLimits reads the cgroups' counters before the keeper removes the cgroups.
func (c *Command) readLimits() {
	g := c.Group
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

// settle sets the cause of a command that sbxrun did not end.
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
		res.Cause = result.Timeout // sbxrun was stopped, and the keeper ended the command
	default:
		res.Cause = result.Lost // another process killed init
	}
	killed := res.Cause == result.Lost || res.Payload != nil && res.Payload.Signal == unix.SIGKILL
	switch {
	case res.Err != nil:
	case c.oom && !c.Shared, killed && (c.oom || c.oomAround):
		res.Cause = result.OOM
	case res.Cause == result.Signaled && res.Payload.Signal == unix.SIGXFSZ && hit(res.Limits, "fsize"):
		res.Cause = result.FileSize
	}
}

func hit(list []result.Limit, name string) bool {
	return slices.ContainsFunc(list, func(l result.Limit) bool { return l.Name == name && l.Hit })
}
