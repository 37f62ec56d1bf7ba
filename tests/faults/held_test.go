package faults

import (
	"os"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// sbxrun and its keeper are killed in the same instant while bwrap sets up: an init
// that had not yet asked to die with its monitor is left, blocked and idle. One
// cleanup finds and ends them all.
//
// Between the fork of the command and init's wish to die with its monitor, some ten
// system calls later, the command runs on as well: that is counted here, and only told.
func TestHeldInits(t *testing.T) {
	t.Run("sbxrun first", func(t *testing.T) { heldInits(t, true) })
	t.Run("keeper first", func(t *testing.T) { heldInits(t, false) })
}

func heldInits(t *testing.T, sbxrunFirst bool) {
	e := newEstate(t)
	met, held, running := 0, 0, 0
	for i := range scaled(t, 40) {
		c, err := e.begin("run", "--env", harness.MarkerName+"="+e.marker, "--timeout", lifetime, "--bind", e.out+":/out", "sleep", "600")
		harness.Must(t, err)
		var pids [roles]int
		for !c.over() && pids[roleInit] == 0 {
			pids = family(c.pid)
			if i%10 == 0 && pids[roleMonitor] > 0 {
				break // before there is an init, for a change
			}
			runtime.Gosched()
		}
		init := pids[roleInit]
		var stopped *harness.Target
		if i%3 == 0 {
			// Stopped it stays in the moment that is a matter of luck else.
			stopped, _ = strike(init, pids[roleMonitor], unix.SIGSTOP)
		}
		keeper, err := harness.Open(pids[roleKeeper])
		if err != nil {
			harness.Must(t, c.cmd.Process.Kill())
			e.wait(c)
			continue // it was quicker
		}
		if sbxrunFirst {
			_ = c.cmd.Process.Kill() // it may have ended
			harness.Must(t, keeper.Signal(unix.SIGKILL))
		} else {
			harness.Must(t, keeper.Signal(unix.SIGKILL))
			_ = c.cmd.Process.Kill()
		}
		e.wait(c)
		met++
		e.until(settle, "the keeper's end", keeper.Ended)
		keeper.Close()
		if stopped != nil {
			stopped.Close()
		}
		if i%20 == 19 {
			held += e.heldGone(&running)
		}
	}
	held += e.heldGone(&running)
	t.Logf("%d keepers killed; %d inits held, %d of them had started their command", met, held, running)
	if soak(t) >= 100 && met == 0 {
		t.Errorf("no keeper was met")
	}
}

// heldGone asserts that one cleanup ends all that is left, and says how many inits
// it found.
func (e *estate) heldGone(running *int) int {
	e.t.Helper()
	// Monitors and most inits are dying by themselves.
	var inits []harness.Proc
	e.until(settle, "the monitors' end", func() bool {
		inits = nil
		for _, p := range e.left() {
			if p.Parent != os.Getpid() {
				continue
			}
			if !initial(p.PID) {
				return false
			}
			inits = append(inits, p)
		}
		return true
	})
	for _, p := range inits {
		if pids := below(p.PID); len(pids) > 0 {
			*running++
		}
	}
	s := e.ok("cleanup")
	if strings.Contains(s.stdout, "failed") {
		e.t.Errorf("%v", s)
	}
	e.gone(0)
	reapZombies()
	return strings.Count(s.stdout, "held-init")
}

// initial says whether a process is number 1 of its PID namespace.
func initial(pid int) bool {
	f := pidsOf(pid)
	return len(f) >= 2 && f[len(f)-1] == "1"
}
