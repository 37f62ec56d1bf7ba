package supervise

import (
	"fmt"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
)

// Outcome is what the teardown came to.
type Outcome struct {
	Verdict   result.Verdict
	At        time.Time         // of the proof, or when it was given up
	Survivors []result.Survivor // if unproven
	End       proc.End          // if proven
	Err       error             // every step that failed
}

// maxSurvivors bounds the list in the report.
const maxSurvivors = 100

// Killing the init of a PID namespace makes the kernel kill every process in it, and init is
// not gone before all of them are dead and reaped (pid_namespaces(7)). So the proof has two
// halves: init's pidfd is readable, which speaks for everything in the namespace; and the
// keeper has said that it has no children any more, which speaks for bwrap's own processes
// and for zombies.

// Teardown kills what a keeper keeps and waits, at most until the deadline, for the
// proof. Every step is made whatever the others came to. The keeper is still there
// afterwards; [Collect] ends it.
func Teardown(k *proc.Kept, deadline time.Time) Outcome {
	killErr := k.KillInits()
	k.Kill() // whatever else the keeper has
	// Of many rooms that idle, and end at once, the proofs come first; and who goes on has the
	// time for it afterwards.
	if k.Init != nil && !k.Lasting {
		k.Unmount(deadline)
	}

	// The keeper's word first: it comes when the inits have ended, and spares a wait.
	end, keeperErr := k.Empty(deadline)
	if keeperErr != nil {
		keeperErr = fmt.Errorf("wait for the keeper: %w", keeperErr)
	}
	err := result.All(killErr, keeperErr, k.Wait(deadline))
	at := time.Now()
	if k.Init == nil {
		k.Unmount(deadline)
	}
	if err == nil {
		return Outcome{Verdict: result.Proven, At: at, End: end}
	}
	out := Outcome{Verdict: result.Unproven, At: at, Err: err}
	for _, st := range k.Survivors(maxSurvivors) {
		out.Survivors = append(out.Survivors, result.Survivor{PID: st.PID, Comm: st.Comm, State: st.State})
	}
	return out
}
