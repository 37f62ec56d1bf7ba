package sandbox

import (
	"context"
	"io"
	"os"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/state"
)

// ExecSpec is a detached exec as it is on record.
type ExecSpec struct {
	Command []string
	Workdir string
	Limits  []result.Limit
	Begin   time.Time // when it was asked for
	Timeout time.Duration

	LogMax       int64 // bytes of each log
	KillAtLogMax bool  // it ends when there is more
}

// Exec is a detached exec: a command in a sandbox with a record and logs of its own there. All
// that others know of it, and how they end it, is as of a [Sandbox].
type Exec struct {
	*recorded
	spec ExecSpec
	use  *Use
	dir  *state.Dir

	running bool // the caller of exec has its handle
}

// NewExec makes a place for the record of a detached exec in the sandbox. Nobody knows of it
// before [Exec.Begin]. When ctx is done it ends.
func (u *Use) NewExec(ctx context.Context, id string, spec ExecSpec) (*Exec, error) {
	dir, err := u.entry.MakeExecs()
	if err != nil {
		return nil, err
	}
	claim, err := dir.Create(id, "")
	if err != nil {
		return nil, result.All(err, dir.Close())
	}
	return &Exec{recorded: newRecorded(ctx, claim, spec.LogMax, spec.KillAtLogMax), spec: spec, use: u, dir: dir}, nil
}

// Handle is the word that others name it by.
func (e *Exec) Handle() string { return e.use.entry.Title() + "/" + e.ID() }

// Context is done when it is to end, for the reason that is its cause.
func (e *Exec) Context() context.Context { return e.ctx }

// Cancel has it end.
func (e *Exec) Cancel(cause error) { e.cancel(cause) }

// Hurry is closed when whoever wants its end has no patience left.
func (e *Exec) Hurry() chan struct{} { return e.hurry }

// Begin makes logs and record: from here on others know of it.
func (e *Exec) Begin() error {
	self, err := proc.Identify(os.Getpid())
	if err != nil {
		return err
	}
	if err := e.openLogs(); err != nil {
		return err
	}
	return e.write(func(r *state.Record) {
		*r = state.Record{
			Argv: e.spec.Command, CreatedAt: e.spec.Begin.UTC().Format(result.TimeFormat), Phase: state.Starting, Supervisor: self,
			Workdir: e.spec.Workdir, Net: e.use.Access.Net, TimeoutMS: result.Milliseconds(e.spec.Timeout), Limits: e.spec.Limits,
		}
		if cred := e.use.Access.Cred; cred != nil {
			r.UID, r.GID = &cred.UID, &cred.GID
		}
	})
}

// Output is where the command's stdout (0) and stderr (1) go.
func (e *Exec) Output(i int) io.Writer { return taker(e.log(i)) }

// taker takes all that is written.
type taker func([]byte)

func (t taker) Write(b []byte) (int, error) {
	t(b)
	return len(b), nil
}

// Held puts on record who its init is, before the command may start.
func (e *Exec) Held(kept *proc.Kept) error {
	init, err := identity(kept.Init, kept.InitNS)
	if err != nil {
		return err
	}
	return e.write(func(r *state.Record) { r.Init = &init })
}

// Running puts on record that the command runs. On a full disk nothing depends on it.
func (e *Exec) Running() {
	e.running = true
	_ = e.write(func(r *state.Record) { r.Phase = state.Running })
}

// Cut reports whether it has written more than its logs hold.
func (e *Exec) Cut() bool { return e.logs[0].Truncated() || e.logs[1].Truncated() }

// Settle names the cause where somebody has killed it without us.
func (e *Exec) Settle(res *result.Result) {
	if res.Cause == result.Lost && e.doomed() {
		res.Cause = result.Killed
	}
}

// Finish records how it has ended, or removes the record of one that could not be started. The
// oldest of those that have ended make room; nobody waits for that.
func (e *Exec) Finish(res result.Result, report result.Report) error {
	defer e.dir.Close()
	e.cancel(nil)
	for _, log := range e.logs {
		log.Close()
	}
	if res.Cause == result.StartFailed && res.Verdict != result.Unproven && !e.running { // nobody knows of it
		return e.claim.Remove()
	}
	return result.All(e.conclude(report), e.claim.Close(), e.dir.Forget())
}
