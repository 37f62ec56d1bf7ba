package faults

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// together is the longest time from the start of a run to its kill. Within it an idle machine starts the command.
func (e *env) together() time.Duration {
	e.t.Helper()
	const idle = 15 * time.Millisecond
	return max(idle, 3*e.ok("run", "true").Elapsed/2)
}

// When sbxrun and its keeper are killed at once, no one is left to end the rest. The command still never runs on,
// because init asks to die with the keeper before it releases the command. PID 1 of a room may stay if it had not yet
// asked to die with its monitor (bubblewrap #633); one cleanup finds and ends it.
func TestTogether(t *testing.T) {
	t.Run("sbxrun first", func(t *testing.T) { killTogether(t, pair{sbxrunFirst: true}) })
	t.Run("keeper first", func(t *testing.T) { killTogether(t, pair{}) })
	// A stopped process stays in a state that is otherwise a matter of luck.
	t.Run("room stopped", func(t *testing.T) { killTogether(t, pair{stop: roleRoom}) })
	t.Run("init stopped", func(t *testing.T) { killTogether(t, pair{stop: roleInit}) })
	t.Run("started", func(t *testing.T) { killTogether(t, pair{start: true}) })
}

// pair is one way to kill the two.
type pair struct {
	sbxrunFirst bool
	start       bool // kill the supervisor of a sandbox instead of sbxrun
	stop        int  // role to stop as soon as it exists
}

func killTogether(t *testing.T, how pair) {
	e := newEnv(t)
	met, rooms, commands := 0, 0, 0
	tries := scaled(t, 60)
	if how.stop != 0 {
		tries = scaled(t, 12)
	}
	window, end := e.together(), time.Now().Add(harness.Scaled(30*time.Second))
	// A busy machine may need more time, and another test's cleanup may end the rooms first.
	missed := func() bool { return soak(t) >= enough && (met == 0 || how.stop == roleRoom && rooms == 0) }
	i := 0
	for ; i < tries || missed() && time.Now().Before(end); i++ {
		if met += e.strikeTogether(how, rand.N(window)); met == 0 {
			window += window / 8
		}
		if i%20 == 19 || i >= tries-1 {
			if how.start {
				e.ok("kill", "--all", "--grace", "0") // those that were missed
			}
			rooms += e.abandoned(&commands)
		}
	}
	t.Logf("%d of %d keepers met; %d rooms were left, and %d commands ran on", met, i, rooms, commands)
	check.That(t, commands == 0, "%d commands ran on, with nobody to end them", commands)
	check.That(t, !missed(), "no keeper was met, or no room was left: the test does not meet what it is about")
}

// strikeTogether starts a run or a sandbox, and kills sbxrun and keeper after a time. It returns 1
// if there was a keeper.
func (e *env) strikeTogether(how pair, after time.Duration) (met int) {
	e.t.Helper()
	args := []string{"run", "--env", harness.MarkerName + "=" + e.marker, "--timeout", lifetime, "--bind", e.out + ":/out", "--"}
	if how.start {
		args = append(e.startFlags(), "--")
	}
	c, err := e.begin(append(args, busy...)...)
	check.Must(e.t, err)
	sbxrun := c.PID
	var pids [roles]int
	var stopped *harness.Target
	for !c.Over() && (time.Since(c.Begin) < after || how.stop != 0) && time.Since(c.Begin) < bound {
		if how.start && sbxrun == c.PID {
			if below := harness.Children(c.PID); len(below) > 0 {
				sbxrun = below[0]
			}
		}
		pids = family(sbxrun)
		if how.stop != 0 {
			if stopped, _ = harness.Strike(pids[how.stop], pids[above[how.stop]], unix.SIGSTOP); stopped != nil {
				break
			}
		}
		runtime.Gosched()
	}
	pids = e.family(sbxrun)
	if stopped != nil {
		defer stopped.Close()
	}
	// Open both pidfds first, so that no time passes between the two signals.
	supervisor, err := harness.Open(sbxrun)
	if err != nil {
		e.wait(c)
		return 0 // it has ended
	}
	defer supervisor.Close()
	keeper, err := harness.Open(pids[roleKeeper])
	if err != nil {
		check.Must(e.t, supervisor.Signal(unix.SIGKILL))
		e.wait(c)
		return 0
	}
	defer keeper.Close()
	first, second := keeper, supervisor
	if how.sbxrunFirst {
		first, second = supervisor, keeper
	}
	check.Must(e.t, first.Signal(unix.SIGKILL))
	check.Must(e.t, second.Signal(unix.SIGKILL))
	e.wait(c)
	harness.Until(e.t, settle, "the end of both", func() bool { return supervisor.Ended() && keeper.Ended() })
	return 1
}

// abandoned asserts that no command is left and that one cleanup ends the rest. It returns the
// number of rooms that were left.
func (e *env) abandoned(commands *int) int {
	e.t.Helper()
	// Processes that have asked to die are dying; only rooms may stay.
	var found []harness.Proc
	only := func() bool {
		reapZombies() // a room exits only after the init in it was reaped
		found = found[:0]
		for _, p := range e.left() {
			if numbers := harness.PIDs(p.PID); len(numbers) != 2 || numbers[1] != "1" {
				found = append(found, p)
			}
		}
		return len(found) == 0
	}
	within(settle, only) // the loop below reports the others
	for _, p := range found {
		if len(harness.PIDs(p.PID)) > 2 {
			*commands++
		}
	}
	check.That(e.t, len(found) == 0, "%d processes are left beside the rooms:\n%s", len(found), harness.List(found))
	before := e.logged()
	s := e.ok("cleanup")
	check.That(e.t, !strings.Contains(string(s.Stdout), "failed"), "%v", s)
	// An abandoned room does not exit by itself.
	e.gone(settle)
	reapZombies()
	if after := e.logged(); after != before {
		*commands++
		e.t.Errorf("a command went on: its log has grown from %d to %d bytes", before, after)
	}
	return strings.Count(string(s.Stdout), "held-init")
}

// logged returns how much the payloads have written.
func (e *env) logged() int64 {
	st, err := os.Stat(filepath.Join(e.out, "log"))
	if err != nil {
		return 0
	}
	return st.Size()
}
