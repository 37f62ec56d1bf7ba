package supervise

import (
	"fmt"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
)

// Outcome is the result of a teardown.
type Outcome struct {
	Verdict   result.Verdict
	At        time.Time         // when it was proven or given up
	Survivors []result.Survivor // if unproven
	End       proc.End          // if proven
	Err       error             // of all steps
}

// maxSurvivors bounds the list in the report.
const maxSurvivors = 100

// If the init of a PID namespace is killed, the kernel kills every process in the namespace, and init does not exit
// before all of them are dead and reaped (pid_namespaces(7)). So the proof has two parts: init's pidfd is readable,
// which covers all processes in the namespace, and the keeper has reported that it has no children, which covers
// bwrap's processes and zombies.

// Teardown kills all processes of a keeper and waits for the proof until the deadline. A failed step does not stop
// the others. The keeper stays alive; [Command.Wait] ends it.
func Teardown(k *proc.Kept, deadline time.Time) Outcome {
	killErr := k.KillInits()
	k.Kill() // all other children of the keeper
	// If many idle rooms end at once, their proofs come first, and a process that keeps running unmounts afterwards.
	if k.Init != nil && !k.Lasting {
		k.Unmount(deadline)
	}

	// First the keeper's report: it comes after the inits have ended, which saves a wait.
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
