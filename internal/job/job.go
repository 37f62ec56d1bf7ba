// Package job runs a command together with its streams, its limits and its admission permit. run, exec and the
// library use it; they differ in where the command runs and in what they report.
package job

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/admission"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/sandbox"
	"github.com/sbxrun/sbxrun/internal/stream"
	"github.com/sbxrun/sbxrun/internal/supervise"
)

// Job is one command, which is started and waited for once.
type Job struct {
	ID      string // of its cgroups
	Place   supervise.Place
	Terms   supervise.Terms // without Limits, which Hold sets
	Limits  *limits.Plan    // nil for none
	Nest    bool            // other commands will have nested cgroups
	Streams *stream.Streams
	Leave   *admission.Permit // nil if none was requested
	Parts   *sandbox.Parts    // of a new sandbox; begun, and ended by the caller

	command *supervise.Command
	err     error // of Hold
}

// Hold makes the cgroups and sets up the command without starting it. It reports whether that succeeded. The caller
// calls Wait in either case, which returns the error. The cause of ctx may be a [supervise.Request].
func (j *Job) Hold(ctx context.Context) (held bool) {
	if j.Limits != nil {
		j.Terms.Limits, j.err = j.Limits.Make(j.ID, j.Nest)
	}
	if j.err == nil {
		j.Leave.Reserved()
		j.err = ctx.Err()
	}
	if j.err == nil {
		j.command, j.err = supervise.Hold(ctx, j.Place, j.Streams.Payload, j.Streams.Terminals, j.Terms)
	}
	if j.err != nil || j.Place.Maker == nil {
		j.Streams.Started()
	}
	if j.err == nil && j.Parts != nil {
		j.Parts.Overlays = j.command.TakeOverlays()
		err := j.Parts.Held(ctx, j.command.Kept().Room, j.Place.Plan.Cred())
		if err != nil && ctx.Err() == nil { // after a request, Release decides
			j.Refuse(err)
		}
	}
	return j.err == nil
}

// Refuse decides that the held command does not start.
func (j *Job) Refuse(err error) { j.command.Refuse(err) }

// Release starts the command and reports whether it started.
func (j *Job) Release(ctx context.Context) (running bool) {
	running = j.command.Release(ctx)
	j.Streams.Started()
	if !running {
		return false
	}
	j.Leave.Running()
	return true
}

// Signal sends a signal to all processes of the command. An error means that it has ended.
func (j *Job) Signal(sig unix.Signal) error { return j.command.Signal(sig) }

// Kept returns the processes whose end is the command's end.
func (j *Job) Kept() *proc.Kept { return j.command.Kept() }

// removeBound is how long an empty cgroup may stay busy.
const removeBound = time.Second

// Wait waits until all processes of the command have exited, its output is forwarded and the terminal is restored.
// Closing told, if not nil, cuts the forwarding short; delivered reports whether all output was forwarded. left are
// the errors of the cleanup after the command's end, for warnings.
func (j *Job) Wait(ctx context.Context, told <-chan struct{}) (res result.Result, delivered bool, left []error) {
	if j.command != nil {
		defer j.command.Close()
		if !j.command.Soon() {
			j.Streams.Begin()
			j.command.Watch(ctx)
		}
		res = j.command.End(ctx)
	} else {
		res = supervise.NotStarted(ctx, j.err, j.Terms)
	}
	j.Leave.End()
	if res.Cause == result.StartFailed {
		res.Err = j.Leave.Explain(res.Err)
	}
	// Drain first: the output expects a raw terminal.
	delivered = j.Streams.Drain(told)
	j.Streams.Restore()
	if j.command != nil {
		if res.Verdict == result.Unproven {
			res.Gone = j.command.Kept().Gone()
		}
		if err := j.command.Collect(); err != nil {
			left = append(left, err)
		}
	}
	if g := j.Terms.Limits; g != nil && j.Limits != nil { // the keeper may have removed it
		if err := g.Remove(time.Now().Add(removeBound)); err != nil {
			left = append(left, fmt.Errorf("%w; sbxrun cleanup removes it when it is empty", err))
		}
	}
	return res, delivered, left
}
