package faults

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// When any process is killed at its n-th system call, before or after the call, the run ends
// completely. Tries a sample of the calls, or all with SBXRUN_SOAK=1000.
func TestKilledAtSystemCalls(t *testing.T) {
	for _, victim := range []struct {
		role, least int
		name        string
	}{
		{roleSbxrun, 500, "sbxrun"},
		{roleKeeper, 100, "keeper"},
		{roleMonitor, 100, "monitor"},
		{roleRoom, 100, "room"},
		{tracedEnters, 20, "enters"},
		{tracedInside, 3, "inside"},
		{roleInit, 100, "init"},
	} {
		t.Run(victim.name, func(t *testing.T) {
			victim, least := victim.role, victim.least
			total := traced(t, victim, 0)
			check.Require(t, total >= least, "only %d stops were seen", total)
			samples := scaled(t, 40)
			if soak(t) >= 1000 {
				samples = total
			}
			samples = min(samples, total)
			for i := range samples {
				// Pick one from each equal part, so that repeated tests come to see all calls.
				low, high := i*total/samples, (i+1)*total/samples
				at := 1 + low + rand.IntN(high-low)
				traced(t, victim, at)
				check.Require(t, !t.Failed(), "that was at stop %d of %d", at, total)
			}
			t.Logf("%d of %d stops", samples, total)
		})
	}
}

// traced does a run whose victim is killed at a stop; 0 is never.
func traced(t *testing.T, victim, at int) (stops int) {
	t.Helper()
	self, err := os.Executable()
	harness.Must(t, err)
	count := filepath.Join(harness.Dir(t), "stops")
	r := start(t, options{wrap: []string{self}, env: []string{
		fmt.Sprintf("%s=%d %d", tracerEnv, victim, at), tracerStops + "=" + count,
	}}, append([]string{"--timeout", lifetime}, leaver...)...)
	// The tracer dies as sbxrun does, and leaves what sbxrun leaves.
	r.killed = victim == roleSbxrun && at > 0
	o := r.wait()
	if t.Failed() {
		return 0
	}
	check.Require(t, o.code < 200, "the tracer failed: %v", o)
	text, err := os.ReadFile(count)
	harness.Must(t, err)
	stops, err = strconv.Atoi(string(text))
	check.Require(t, err == nil, "%v", err)
	switch {
	case at == 0 && o.code != 7:
		t.Fatalf("traced, and left alone: %v", o)
	case at == 0 || stops < at:
		check.That(t, o.code == 7, "nobody was killed at %d of %d: %v", at, stops, o)
	default:
		judge(t, o, victim, r.wrote("ran"))
	}
	return stops
}

// SIGQUIT at a random system call ends a command with 131 and without a goroutine trace, or comes
// too late: from the moment when internal/quit sets its handler, long before sbxrun handles
// signals, to the last one. One cleanup removes what is left.
func TestQuitCalls(t *testing.T) {
	for _, verb := range []string{"run", "start", "kill", "cleanup"} {
		t.Run(verb, func(t *testing.T) {
			e := newEnv(t)
			total := e.quit(verb, 0)
			check.Require(t, total >= 50, "only %d stops were seen", total)
			quit := 0
			for range scaled(t, 10) {
				if at := 1 + rand.IntN(total); e.quit(verb, at) < 0 {
					quit++
				}
				if t.Failed() {
					break
				}
			}
			e.clean()
			t.Logf("131 of %d times, %d stops", quit, total)
		})
	}
}

// quit runs a command that gets SIGQUIT at a stop; 0 is never. It returns the number of stops, or
// -1 if the command exited with 131.
func (e *env) quit(verb string, at int) int {
	e.t.Helper()
	self, err := os.Executable()
	harness.Must(e.t, err)
	args := []string{verb}
	switch verb {
	case "run":
		args = slices.Concat(args, harness.Proof(), []string{"--env", harness.MarkerName + "=" + e.marker, "true"})
	case "start":
		args = e.startFlags()
	case "kill":
		args = slices.Concat(args, harness.Proof(), []string{e.start(nil).ID})
	}
	count := filepath.Join(e.top, "stops")
	c, err := e.command(func(cmd *exec.Cmd) {
		cmd.Env = append(cmd.Env, fmt.Sprintf("%s=%d %d QUIT", tracerEnv, roleSbxrun, at), tracerStops+"="+count)
	}, slices.Concat([]string{self, harness.Binary(e.t)}, args)...)
	harness.Must(e.t, err)
	s := e.wait(c)
	text, err := os.ReadFile(count)
	harness.Must(e.t, err)
	stops, err := strconv.Atoi(string(text))
	harness.Must(e.t, err)
	check.That(e.t, s.signal == 0 && s.stderr == "" && (s.code == 0 || s.code == 131 && at != 0), "at stop %d of %d: want 131 without a word, or 0: %v", at, stops, s)
	if s.code == 131 {
		return -1
	}
	return stops
}
