// Package cleanup brings a sandbox to nothing and says whether that is proven.
//
// Killing the init of a PID namespace makes the kernel kill every process in
// it, and init is not gone before all of them are dead and reaped
// (pid_namespaces(7)). So the proof has two halves: init's pidfd is readable,
// which speaks for everything in the namespace; and the keeper has said that it
// has no children any more, which speaks for bwrap's own processes and for
// zombies. That is [Teardown].
//
// [Sweep] is for what was left without a supervisor to do that: it ends processes,
// each verified to be a sandbox's, and removes records.
package cleanup

import (
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/hashicorp/go-multierror"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/result"
)

// Outcome is what the teardown came to.
type Outcome struct {
	Verdict   result.Verdict
	At        time.Time         // of the proof, or when it was given up
	Survivors []result.Survivor // if unproven
	End       proc.End          // if proven
	Err       error             // every step that failed
}

// instead is how long it may take to do a keeper's work that does not do it.
const instead = 500 * time.Millisecond

// maxSurvivors bounds the list in the report.
const maxSurvivors = 100

// Teardown kills the sandbox and waits, at most until the deadline, for the
// proof. Every step is made whatever the others came to. emptied, if not nil, is
// called when the proof is there or given up, while the keeper still keeps the
// terminal.
func Teardown(sb *proc.Kept, deadline time.Time, emptied func(proven bool)) Outcome {
	var failed *multierror.Error
	if err := sb.KillInit(); err != nil {
		failed = multierror.Append(failed, fmt.Errorf("kill init %d: %w", sb.Init.PID, err))
	}
	// The monitor, too: it has nothing more to say, and dies beside init
	// instead of after it.
	sb.Keeper.Kill()

	// The keeper's word first: it comes when init has ended, and spares a wait.
	end, err := sb.Keeper.Empty(deadline)
	if errors.Is(err, os.ErrDeadlineExceeded) && stopped(sb.Keeper) && sb.Keeper.Signal(unix.SIGKILL) == nil {
		// Without it, what it should reap is ours.
		err, deadline = proc.ErrNotEmpty, time.Now().Add(instead)
	}
	if errors.Is(err, proc.ErrNotEmpty) {
		err = sb.Keeper.Inherit(sb.Init, deadline)
	}
	if err != nil {
		failed = multierror.Append(failed, fmt.Errorf("wait for the keeper: %w", err))
	}
	if err := sb.Init.Wait(deadline); err != nil {
		failed = multierror.Append(failed, fmt.Errorf("wait for init %d: %w", sb.Init.PID, err))
	}
	at := time.Now()
	go sb.Unmount() // the process does not end before that is done
	if emptied != nil {
		emptied(failed == nil)
		// It may have waited for a reader of the last output until the deadline has passed,
		// and the keeper still needs a moment.
		if soon := time.Now().Add(instead); soon.After(deadline) {
			deadline = soon
		}
	}
	// The keeper is no part of the sandbox, but it must not be left either.
	if err := sb.Keeper.Reap(deadline); err != nil {
		failed = multierror.Append(failed, fmt.Errorf("collect the keeper: %w", err))
	}
	if failed == nil {
		return Outcome{Verdict: result.Proven, At: at, End: end}
	}
	failed.ErrorFormat = inOneLine
	return Outcome{Verdict: result.Unproven, At: at, Survivors: survivors(sb), Err: failed}
}

// stopped says whether somebody has stopped the keeper (SIGSTOP). Any other that is
// late waits for something, and will go on reaping when we are gone.
func stopped(k *proc.Keeper) bool {
	st, err := proc.ReadStat(k.PID)
	return err == nil && st.State == "T"
}

// survivors names what is left: the namespace's members, and what the keeper
// still has.
func survivors(sb *proc.Kept) (left []result.Survivor) {
	seen := map[int]bool{}
	for _, st := range append(proc.Members(sb.PIDNS, maxSurvivors), proc.Descendants(sb.Keeper.PID, maxSurvivors)...) {
		if !seen[st.PID] && len(left) < maxSurvivors {
			seen[st.PID] = true
			left = append(left, result.Survivor{PID: st.PID, Comm: st.Comm, State: st.State})
		}
	}
	return left
}

func inOneLine(errs []error) string {
	line := ""
	for i, err := range errs {
		if i > 0 {
			line += "; "
		}
		line += err.Error()
	}
	return line
}
