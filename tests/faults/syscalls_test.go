package faults

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"testing"

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
			if total < least {
				t.Fatalf("only %d stops were seen", total)
			}
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
				if t.Failed() {
					t.Fatalf("that was at stop %d of %d", at, total)
				}
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
	if o.code >= 200 {
		t.Fatalf("the tracer failed: %v", o)
	}
	text, err := os.ReadFile(count)
	harness.Must(t, err)
	if stops, err = strconv.Atoi(string(text)); err != nil {
		t.Fatal(err)
	}
	switch {
	case at == 0 && o.code != 7:
		t.Fatalf("traced, and left alone: %v", o)
	case at == 0 || stops < at:
		if o.code != 7 {
			t.Errorf("nobody was killed at %d of %d: %v", at, stops, o)
		}
	default:
		judge(t, o, victim, r.wrote("ran"))
	}
	return stops
}
