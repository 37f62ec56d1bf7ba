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

	"github.com/sbxrun/sbxrun/tests/harness"
)

// SIGQUIT at a random system call ends a command with 131 and without a goroutine trace, or comes
// too late: from the moment when internal/quit sets its handler, long before sbxrun handles
// signals, to the last one. One cleanup removes what is left.
func TestQuitCalls(t *testing.T) {
	for _, verb := range []string{"run", "start", "kill", "cleanup"} {
		t.Run(verb, func(t *testing.T) {
			e := newEnv(t)
			total := e.quit(verb, 0)
			if total < 50 {
				t.Fatalf("only %d stops were seen", total)
			}
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
	if s.signal != 0 || s.stderr != "" || s.code != 0 && (s.code != 131 || at == 0) {
		e.t.Errorf("at stop %d of %d: want 131 without a word, or 0: %v", at, stops, s)
	}
	if s.code == 131 {
		return -1
	}
	return stops
}
