// Package job carries a command through with all that belongs to it: its streams, its
// limits, and the leave to start it. run, exec and the library are such jobs; they differ in
// where the command runs, and in what they tell of it.
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

// Job is one command. It is started once, and then waited for.
type Job struct {
	ID      string // of its cgroups
	Place   supervise.Place
	Terms   supervise.Terms // but for Limits, which Start makes
	Limits  *limits.Plan    // nil for none
	Nest    bool            // other commands will have cgroups within
	Streams *stream.Streams
	Leave   *admission.Permit // nil if none was asked for
	Parts   *sandbox.Parts    // of the sandbox, if the place is a new one; begun, and the caller's to end

	command *supervise.Command
	err     error // why there is none
}

// Hold makes the cgroups and a command that has not begun, and reports whether there is one.
// Wait is called in either case, and tells why. The cause that ctx is cancelled with may be a
// [supervise.Request].
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
		if err != nil && ctx.Err() == nil { // or Release says who ended it
			j.Refuse(err)
		}
	}
	return j.err == nil
}

// Refuse decides that the command that is held is not to begin.
func (j *Job) Refuse(err error) { j.command.Refuse(err) }

// Release lets it begin, and reports whether it did.
func (j *Job) Release(ctx context.Context) (running bool) {
	running = j.command.Release(ctx)
	j.Streams.Started()
	if !running {
		return false
	}
	j.Leave.Running()
	return true
}

// Signal sends a signal to everything of the command. An error means that it has ended.
func (j *Job) Signal(sig unix.Signal) error { return j.command.Signal(sig) }

// Kept is what has to go for the command to be gone.
func (j *Job) Kept() *proc.Kept { return j.command.Kept() }

// removeBound is how long a cgroup may stay busy that holds nothing any more.
const removeBound = time.Second

// Wait waits for the command's end and comes back when nothing of it is left, its last
// output is passed on and the terminal is as it was. told, if not nil, cuts short the
// passing on when it is closed; delivered says whether all of it was taken. left is what
// could not be put away although the command is gone, for a warning.
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
	// The last output first, or it would come to a terminal that is not raw any more.
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
	if g := j.Terms.Limits; g != nil && j.Limits != nil { // what the keeper has not removed already
		if err := g.Remove(time.Now().Add(removeBound)); err != nil {
			left = append(left, fmt.Errorf("%w; sbxrun cleanup removes it when it is empty", err))
		}
	}
	return res, delivered, left
}
