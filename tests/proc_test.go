package tests

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// otherNamespace returns a command that runs another in a new PID namespace.
func otherNamespace(more ...string) []string {
	wrap := append([]string{"unshare", "--pid", "--fork"}, more...)
	if !harness.Root() {
		wrap = append(wrap, "--user", "--map-root-user")
	}
	return wrap
}

// A sandbox in another PID namespace does not count as ended.
func TestOtherNamespace(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{})
	there := harness.Options{Wrap: otherNamespace("--mount-proc")}
	s.Start(there, "kill", "--json", "--grace", "0", b.ID).Wait().OutHas(t, `"verdict":"unproven"`).OutHas(t, "another PID namespace").Exits(t, 123)
	s.Start(there, "cleanup").Wait()
	b.Alive()
	rec := b.Inspect()
	check.That(t, rec.Status == "running", "%+v", rec)
	for _, args := range [][]string{{"wait", "--timeout", "0.3", b.ID}, {"wait", "--timeout", "0.3", "--log", "x", b.ID}} {
		s.Start(there, args...).Wait().Exits(t, 124)
	}
	follow, waiter := s.Start(there, "logs", "-f", b.ID), s.Start(there, "wait", "--json", b.ID)
	s.Run("kill", b.ID)
	waiter.Wait().Exits(t, 137).OutHas(t, `"status":"killed"`)
	follow.Wait().Exits(t, 0)
}

// A sandbox that has ended there and left something does not count as proven here, where its processes are invisible.
func TestOtherNamespaceUnproven(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{}, "true")
	b.Ended()
	record := filepath.Join(s.Dir, b.ID, "record.json")
	text := harness.ReadFile(t, record)
	left := bytes.Replace(text, []byte(`"verdict":"proven"`), []byte(`"verdict":"unproven"`), 1)
	check.Require(t, !bytes.Equal(left, text), "%s", text)
	check.Must(t, os.WriteFile(record, left, 0o600))
	s.Start(harness.Options{Wrap: otherNamespace("--mount-proc")}, "kill", "--json", b.ID).Wait().OutHas(t, `"verdict":"unproven"`).Exits(t, 123)
	// In its own namespace, kill can look for its init, which is gone.
	s.Run("kill", "--json", b.ID).OutHas(t, `"verdict":"proven"`).Exits(t, 0)
}

// foreignProc returns ways to get a /proc of another PID namespace, with the resulting error.
func foreignProc() map[string][]string {
	return map[string][]string{
		"/proc shows another PID namespace": otherNamespace(),
		"/proc is not mounted":              append(otherNamespace("--mount"), "sh", "-c", `mount -t tmpfs none /proc && exec "$@"`, "-"),
	}
}

// Every command refuses a /proc of another PID namespace at once, and doctor names it.
func TestForeignProc(t *testing.T) {
	t.Parallel()
	state := "SBXRUN_STATE_DIR=" + harness.SharedDir(t) + "/state"
	for said, wrap := range foreignProc() {
		for _, args := range []string{"true", "run true", "exec box true", "exec -d box true", "start", "ps", "inspect box", "wait box", "logs box", "kill --all", "cleanup", "stats"} {
			r := harness.Run(t, harness.Options{Bare: true, Wrap: wrap, Env: []string{state}}, strings.Fields(args)...)
			stderr := string(r.Stderr)
			check.That(t, r.ExitCode == 125 && len(harness.Lines(r.Stderr)) == 1 && strings.Contains(stderr, said) && strings.Contains(stderr, "mount -t proc proc /proc") && strings.Contains(stderr, "--mount-proc"),
				"%s: exit code %d: %s%s", args, r.ExitCode, r.Stdout, stderr)
			harness.Within(t, args, r.Elapsed, 0, 100*time.Millisecond)
		}
		for _, args := range []string{"--json true", "start --json"} {
			harness.Run(t, harness.Options{Bare: true, Wrap: wrap, Env: []string{state}}, strings.Fields(args)...).Exits(t, 125).OutHas(t, `"error":{"code":"proc"`)
		}
		harness.Run(t, harness.Options{Bare: true, Wrap: wrap}, "doctor").Exits(t, 125).OutHas(t, "process table        "+said).OutHas(t, "--mount-proc")
		// Commands that don't need /proc.
		for _, args := range []string{"--help", "exec --help", "--version"} {
			harness.Run(t, harness.Options{Bare: true, Wrap: wrap}, strings.Fields(args)...).Exits(t, 0)
		}
	}
	// With the suggested change it works.
	r := harness.Run(t, harness.Options{Bare: true, Wrap: otherNamespace("--mount-proc")}, "sh", "-c", "exit 7")
	want := 7
	check.That(t, r.ExitCode == want || !harness.Root(), "--mount-proc: exit code %d, want %d: %s", r.ExitCode, want, r.Stderr) // an ordinary user's sandbox in the namespace needs a second UID
}

// doctor, and every command that handles processes of a sandbox, report a /proc that hides processes.
func TestHiddenProc(t *testing.T) {
	t.Parallel()
	// PID 1 keeps its capabilities, so a caller with only those needed to end a run may not trace
	// it and does not see it.
	script := `mount -t proc -o hidepid=4 proc /proc && setpriv --bounding-set=-all,+kill --ambient-caps=-all --inh-caps=-all "$@"; exit $?`
	o := harness.Options{Bare: true, Wrap: append(otherNamespace("--mount-proc"), "sh", "-c", script, "-")}
	const said = "process table        /proc hides the processes of others (hidepid)"
	harness.Run(t, o, "doctor").Exits(t, 125).OutHas(t, said).OutHas(t, "mount -o remount,hidepid=0 /proc")
	state := harness.SharedDir(t) + "/state"
	o.Env = []string{"SBXRUN_STATE_DIR=" + state}
	const message = "sbxrun: error: /proc hides the processes of others (hidepid); mount -o remount,hidepid=0 /proc; or, for one group, with gid=ITS-ID instead\n"
	for _, args := range []string{"true", "start", "start true", "exec box true", "exec -d box true", "--json true"} {
		harness.Run(t, o, strings.Fields(args)...).Exits(t, 125).Err(t, message)
	}
	_, err := os.Stat(state)
	check.That(t, os.IsNotExist(err), "%s: %v", state, err)
}
