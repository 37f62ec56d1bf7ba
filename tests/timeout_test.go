package tests

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// sbxrun accepts timeout(1)'s flags, times and signals and returns its exit codes. One difference:
// a deadline is 124 even if SIGKILL was needed, unless --preserve-status is given.
func TestTimeoutWords(t *testing.T) {
	t.Parallel()
	const (
		// The scripts set traps before they print, and sh handles signals between two sleeps.
		loop   = `; echo ready; while :; do sleep 0.02; done`
		deaf   = `trap "" TERM INT` + loop
		ends7  = `trap "exit 7" TERM INT HUP` + loop
		ends0  = `trap "exit 0" TERM` + loop
		onUsr1 = `trap "echo got; exit 3" USR1` + loop
	)
	const short = "0.5"
	dir := harness.Dir(t)
	check.Must(t, os.WriteFile(filepath.Join(dir, "text"), []byte("no program\n"), 0o644))
	sh := func(flags, script string) []string {
		return append(strings.Fields(flags), "sh", "-c", script)
	}
	with := func(script string) []string { return []string{"sh", "-c", script + `; exec "$@"`, "sh"} }
	usage := func(line string) []string { return strings.Fields(line) }
	for _, c := range []struct {
		name   string
		args   []string
		code   int
		cause  string
		wrap   []string // a command that starts sbxrun
		stdout string   // the end of it
	}{
		// The command exits by itself.
		{"ends in time", sh("--timeout 100", "exit 0"), 0, "exited", nil, ""},
		{"own 124", sh("--timeout 100", "exit 124"), 124, "exited", nil, ""},
		{"own signal", sh("--timeout 100", "kill -9 $$"), 137, "signaled", nil, ""},
		{"own end with all flags", sh("-v -k 5 -s INT --preserve-status --timeout 100", "exit 5"), 5, "exited", nil, ""},
		{"not found", usage("--timeout 100 no-such-command-anywhere"), 127, "start-failed", nil, ""},
		{"not found, preserved", usage("--preserve-status --timeout 100 no-such-command-anywhere"), 127, "start-failed", nil, ""},

		// Times.
		{"0 is never", usage("--timeout 0 sleep 0.1"), 0, "exited", nil, ""},
		{"seconds", usage("--timeout 1 sleep 100"), 124, "timeout", nil, ""},
		{"fraction", usage("--timeout .1 sleep 100"), 124, "timeout", nil, ""},
		{"days", usage("--timeout 0.000001d sleep 100"), 124, "timeout", nil, ""},
		{"no command", usage("--timeout 100"), 125, "start-failed", nil, ""},

		// The first signal.
		{"by name", sh("-s USR1 --preserve-status --timeout "+short, onUsr1), 3, "timeout", nil, "got\n"},
		{"by number", sh("-s10 --preserve-status --timeout "+short, onUsr1), 3, "timeout", nil, "got\n"},
		{"is 124", sh("-s USR1 --timeout "+short, onUsr1), 124, "timeout", nil, "got\n"},
		{"INT", usage("-s INT --preserve-status --timeout " + short + " sleep 100"), 130, "timeout", nil, ""},
		{"KILL", usage("-s KILL --timeout " + short + " sleep 100"), 124, "timeout", nil, ""},
		{"CONT ends nothing", usage("-s CONT -k 0.1 --preserve-status --timeout " + short + " sleep 100"), 137, "timeout", nil, ""},

		// The SIGKILL after it.
		{"TERM is enough", usage("-k 50 --timeout " + short + " sleep 100"), 124, "timeout", nil, ""},
		{"TERM is enough, preserved", usage("--kill-after=50 --preserve-status --timeout " + short + " sleep 100"), 143, "timeout", nil, ""},
		{"deaf", sh("-k 0.1 --timeout "+short, deaf), 124, "timeout", nil, "ready\n"},
		{"deaf, preserved", sh("--kill-after .1 --preserve-status --timeout "+short, deaf), 137, "timeout", nil, "ready\n"},
		{"handler", sh("-k 50 --timeout "+short, ends7), 124, "timeout", nil, ""},
		{"handler, preserved", sh("-k 50 --preserve-status --timeout "+short, ends7), 7, "timeout", nil, ""},
		{"success, preserved", sh("-k 50 --preserve-status --timeout "+short, ends0), 0, "timeout", nil, ""},
		{"at once, preserved", usage("--preserve-status --timeout " + short + " sleep 100"), 137, "timeout", nil, ""},

		// Inherited descriptors and signals.
		{"stdout closed", usage("--timeout 100 true"), 0, "exited", with("exec >&-"), ""},
		{"all closed", usage("--timeout 100 true"), 0, "exited", with("exec <&- >&- 2>&-"), ""},
		{"CHLD ignored", sh("--timeout 100", "exit 3"), 3, "exited", with("trap '' CHLD"), ""},
		{"TERM ignored", usage("-k 50 --preserve-status --timeout " + short + " sleep 100"), 143, "timeout", with("trap '' TERM"), ""},
		{"ALRM ignored", usage("--timeout " + short + " sleep 100"), 124, "timeout", with("trap '' ALRM"), ""},
		{"ALRM blocked", usage("--timeout " + short + " sleep 100"), 124, "timeout", []string{"env", "--block-signal=ALRM,TERM,CHLD"}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			start := func(timeout string) *harness.Process {
				args := slices.Clone(c.args)
				if i := slices.Index(args, short); i >= 0 {
					args[i] = timeout
				}
				return harness.Start(t, harness.Options{Dir: dir, Wrap: c.wrap}, args...)
			}
			var p *harness.Process
			if strings.Contains(c.args[len(c.args)-1], "echo ready") {
				p, _ = harness.InTime(t, 500*time.Millisecond, "ready\n", start)
			} else {
				p = start(short)
			}
			r := p.Wait().Expect(t, c.code, c.cause)
			check.That(t, strings.HasSuffix(string(r.Stdout), c.stdout), "stdout %q, want %q at its end", r.Stdout, c.stdout)
		})
	}
}

// --signal without --grace gives the command time to handle it, and waits no longer than needed.
func TestTimeoutSignalHeard(t *testing.T) {
	t.Parallel()
	p, timeout := harness.InTime(t, 600*time.Millisecond, "ready\n", func(timeout string) *harness.Process {
		return harness.Start(t, harness.Options{}, "-s", "HUP", "--timeout", timeout, "--preserve-status", "sh", "-c", `trap "sleep 0.3; echo heard; exit 4" HUP; echo ready; while :; do sleep 0.02; done`)
	})
	p.WaitOutput("ready\nheard\n")
	r := p.Wait().Expect(t, 4, "timeout")
	harness.Within(t, "the run", r.Elapsed, timeout, timeout+time.Second)
}

// A signal to sbxrun ends the command; --preserve-status applies only to deadlines.
func TestTimeoutSignaled(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{}, "-v", "--preserve-status", "-k", "50", "--timeout", "500", "sh", "-c", `trap "exit 9" TERM; echo ready; while :; do sleep 0.02; done`)
	p.WaitOutput("ready\n")
	p.Signal(syscall.SIGTERM)
	r := p.Wait().Expect(t, 143, "canceled")
	got := string(r.Stderr)
	check.That(t, strings.HasPrefix(got, "sbxrun: sending signal TERM to the command \"sh\"\n"), "stderr %q", got)
}

// --verbose names the signals that were sent, and no others.
func TestTimeoutVerbose(t *testing.T) {
	t.Parallel()
	const term, kill = "sbxrun: sending signal TERM to the command \"sh\"\n", "sbxrun: sending signal KILL to the command \"sh\"\n"
	over := "sbxrun: timeout after 500ms; everything in the sandbox is gone (proven)\n"
	for _, c := range []struct{ flags, script, want string }{
		{"-v --timeout 0.5", "sleep 100", kill + over},
		{"--verbose -k 50 --timeout 0.5", "exec sleep 100", term + over},
		{"-v -k 0.1 --timeout 0.5", `trap "" TERM; while :; do sleep 0.02; done`, term + kill + over},
		{"-vq -s KILL --timeout 0.5", "sleep 100", kill},
		{"-v --timeout 500", "sleep 100 & exit 0", ""}, // leftover processes get no requested signal
		{"--foreground --timeout 500", "exit 0", "sbxrun: warning: --foreground has no effect: all processes end with the command; use --tty for a terminal\n"},
		{"--foreground -q --timeout 500", "exit 0", ""},
	} {
		t.Run(c.flags, func(t *testing.T) {
			t.Parallel()
			r := harness.Run(t, harness.Options{}, append(strings.Fields(c.flags), "sh", "-c", c.script)...)
			got := string(r.Stderr)
			// On a busy machine the keeper may kill first, and then sbxrun has not sent one.
			late := strings.Replace(c.want, kill, "", 1)
			check.That(t, got == c.want || harness.Slack != time.Second && got == late, "stderr %q, want %q", got, c.want)
		})
	}
}

// exec and start accept the same flags.
func TestTimeoutSandboxes(t *testing.T) {
	t.Parallel()
	state := harness.NewState(t)
	box := state.Sandbox(harness.Options{})
	r := box.Exec(harness.Options{}, []string{"-v", "-s", "INT", "--preserve-status", "--timeout", "0.5"}, "sleep", "100").Expect(t, 130, "timeout")
	want := "sbxrun: sending signal INT to the command \"sleep\"\nsbxrun: timeout after 500ms; everything of the command is gone (proven)\n"
	check.That(t, string(r.Stderr) == want, "stderr %q", r.Stderr)
	harness.Longer(t, 500*time.Millisecond, func(timeout time.Duration) bool {
		timed := state.Sandbox(harness.Options{}, "-s", "HUP", "-k", "50", "--timeout", timeout.String(), "sh", "-c", `trap "echo got; exit 3" HUP; echo ready; while :; do sleep 0.02; done`)
		record := timed.Ended()
		out := string(state.Run("logs", timed.ID).Stdout)
		if !strings.HasPrefix(out, "ready\n") {
			return false
		}
		r := record.Report
		check.That(t, r != nil && r.Cause == "timeout" && r.ExitCode == 124 && out == "ready\ngot\n", "the record: %+v, logs %q", record, out)
		return true
	})
}

// No timer of sbxrun or its keeper uses a clock that can be set. The test inspects the timers
// (proc_pid_fdinfo(5), proc_pid_timers(5)), because setting the clock would disturb the machine.
func TestClockMonotonic(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{}, "--timeout", "600", "--grace", "1", "/fixtures/tree-sleep")
	p.WaitOutput("ready 2\n")
	pids := []int{p.PID}
	if harness.Root() {
		pids = append(pids, p.Role(harness.RoleKeeper).PID) // not dumpable, so only root can inspect it
	}
	for _, pid := range pids {
		infos := harness.ReadDir(t, fmt.Sprintf("/proc/%d/fdinfo", pid))
		for _, info := range infos {
			data, err := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/%s", pid, info.Name()))
			check.That(t, err != nil || !strings.Contains(string(data), "clockid: 0"), "process %d has a timer on CLOCK_REALTIME:\n%s", pid, data)
		}
		timers, err := os.ReadFile(fmt.Sprintf("/proc/%d/timers", pid))
		check.That(t, err != nil || !strings.Contains(string(timers), "ClockID: 0"), "process %d has a timer on CLOCK_REALTIME:\n%s", pid, timers)
	}
	p.Signal(syscall.SIGTERM)
	p.Wait().Expect(t, 143, "canceled")
}
