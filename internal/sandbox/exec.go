package sandbox

import (
	"context"
	"io"
	"os"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/state"
	"github.com/sbxrun/sbxrun/internal/supervise"
)

// Exec is a detached exec: a command in a sandbox, with its own record and logs. Other processes know it and
// request its end as for a [Sandbox].
type Exec struct {
	*recorded
	command *supervise.Command
	use     *Use
	dir     *state.Dir

	running bool // its caller has its handle
}

// NewExec creates the directory for the record of a detached exec in the sandbox, which runs c. Other processes see it
// after [Exec.Begin]. The exec ends when ctx is done. See [recorded] for the other parameters.
func (u *Use) NewExec(ctx context.Context, c *supervise.Command, logMax int64, killAtLogMax bool) (*Exec, error) {
	dir, err := u.entry.MakeExecs()
	if err != nil {
		return nil, err
	}
	claim, err := dir.Create(c.ID, "")
	if err != nil {
		return nil, result.All(err, dir.Close())
	}
	e := &Exec{recorded: newRecorded(ctx, claim, logMax, killAtLogMax), command: c, use: u, dir: dir}
	c.Held, c.Settle = e.held, e.settle
	return e, nil
}

// Handle returns the name that other processes use for it.
func (e *Exec) Handle() string { return e.use.entry.Title() + "/" + e.ID() }

// Context returns a context that is done when the exec must end; its cause is the reason.
func (e *Exec) Context() context.Context { return e.ctx }

// Cancel ends the exec.
func (e *Exec) Cancel(cause error) { e.cancel(cause) }

// Hurry is closed when the grace period of a request has passed.
func (e *Exec) Hurry() chan struct{} { return e.hurry }

// Begin creates logs and record, which makes the exec visible.
func (e *Exec) Begin() error {
	self, err := proc.Identify(os.Getpid())
	if err != nil {
		return err
	}
	if err := e.openLogs(); err != nil {
		return err
	}
	c := e.command
	return e.write(func(r *state.Record) {
		*r = state.Record{
			Argv: c.Place.Entry.Command, CreatedAt: c.Begin.UTC().Format(result.TimeFormat), Phase: state.Starting, Supervisor: self,
			Workdir: c.Place.Entry.Workdir, Net: e.use.Access.Net, TimeoutMS: result.Milliseconds(c.Timeout),
		}
		if c.Planned != nil {
			r.Limits = c.Planned.Limits
		}
		if cred := e.use.Access.Cred(); cred != nil {
			r.UID, r.GID = &cred.UID, &cred.GID
		}
	})
}

// Output returns the writer for the command's stdout (0) or stderr (1).
func (e *Exec) Output(i int) io.Writer { return taker(e.log(i)) }

// taker is a writer that never fails.
type taker func([]byte)

func (t taker) Write(b []byte) (int, error) {
	t(b)
	return len(b), nil
}

// held records its init before the command may start.
func (e *Exec) held(_ context.Context, c *supervise.Command) error {
	init, err := identity(c.Kept().Init, c.Kept().InitNS)
	if err != nil {
		return err
	}
	return e.write(func(r *state.Record) { r.Init = &init })
}

// Running records that the command runs. Nothing depends on it, so a full disk does not matter.
func (e *Exec) Running() {
	e.running = true
	_ = e.write(func(r *state.Record) { r.Phase = state.Running })
}

// Cut reports whether it has written more than its logs hold.
func (e *Exec) Cut() bool { return e.logs[0].Truncated() || e.logs[1].Truncated() }

// settle corrects the cause if another process has killed the exec.
func (e *Exec) settle(res *result.Result) {
	if res.Cause == result.Lost && e.doomed() {
		res.Cause = result.Killed
	}
}

// Finish records how the exec ended, or removes its record if it did not start. It also removes the oldest ended
// execs.
func (e *Exec) Finish(res result.Result, report result.Report) error {
	defer e.dir.Close()
	e.cancel(nil)
	for _, log := range e.logs {
		log.Close()
	}
	if res.Cause == result.StartFailed && res.Verdict != result.Unproven && !e.running { // no other process knows it
		return e.claim.Remove()
	}
	return result.All(e.conclude(report), e.claim.Close(), e.dir.Forget())
}
