package tests

import (
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// exec --detach returns while the command runs, which ends at its deadline, and
// writes its report then.
func TestExecDetach(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{})
	d := b.Detach([]string{"--timeout", "1"}, "sh", "-c", "echo up >/tmp/up; setsid sleep 60 & sleep 60")
	if d.Supervisor.Ended() {
		t.Errorf("it has ended")
	}
	r := d.Ended()
	if r.Cause != "timeout" || r.ExitCode != 124 || r.Teardown.Verdict != "proven" {
		t.Errorf("%s", r.Raw())
	}
	harness.Within(t, "the command", time.Duration(r.DurationMS*float64(time.Millisecond)), time.Second, 1300*time.Millisecond)
	if r := b.Exec(harness.Options{}, nil, "cat", "/tmp/up"); string(r.Stdout) != "up\n" {
		t.Errorf("%q", r.Stdout)
	}
	// It keeps the sandbox from being idle.
	b = s.Sandbox(harness.Options{}, "--idle-timeout", harness.Deadline(1500*time.Millisecond).String())
	d = b.Detach(nil, "sleep", strconv.FormatFloat(harness.Deadline(2500*time.Millisecond).Seconds(), 'f', -1, 64))
	rep := d.Ended()
	b.Ended()
	if rep.Cause != "exited" || rep.ExitCode != 0 {
		t.Errorf("%s", rep.Raw())
	}
	// What cannot be started is said at once.
	b = s.Sandbox(harness.Options{})
	for _, args := range [][]string{{"exec", "-d", "nobody", "true"}, {"exec", "-d", b.ID, "nosuch-command"}, {"exec", "-d", "-t", b.ID, "true"}} {
		if r := s.Run(args...); r.ExitCode != 125 && r.ExitCode != 127 || len(harness.Lines(r.Stderr)) != 1 {
			t.Errorf("%q: exit code %d: %s", args, r.ExitCode, r.Stderr)
		}
	}
}

// A detached command ends with its sandbox.
func TestExecDetachEndsWithSandbox(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{})
	d := b.Detach(nil, "/fixtures/tree-daemon")
	e := b.Detach(nil, "/fixtures/tree-term-immune")
	kill(t, s, 0, "--grace", "0", b.ID)
	for _, d := range []*harness.Detached{d, e} {
		if r := d.Ended(); r.Cause != "killed" || r.ExitCode != 137 || r.Teardown.Verdict != "proven" {
			t.Errorf("%s", r.Raw())
		}
	}
}

// exec --tty: a terminal that is the command's own, restored on every end.
func TestExecTerminal(t *testing.T) {
	t.Parallel()
	b := harness.NewState(t).Sandbox(harness.Options{})
	s := newExecScreen(t, b, nil, "sh", "-c", `test -t 0 && test -t 1 && test -t 2 && (: </dev/tty) && echo all of it; read line; echo "<$line>"; read line; exit 3`)
	s.waitFor("all of it\r\n")
	s.typeIn("word\r")
	s.waitFor("<word>\r\n")
	s.typeIn("\r") // not before: see TestTerminalOutputComplete
	s.p.Wait().Expect(t, 3, "exited")
	if n := strings.Count(s.shows(), "word"); n != 2 {
		t.Errorf("%q", s.shows())
	}
	s.restored()

	s = newExecScreen(t, b, []string{"--timeout", "0.5"}, "sh", "-c", "trap '' TERM HUP; echo up; while :; do sleep 60; done")
	s.p.Wait().Expect(t, 124, "timeout")
	s.waitFor("up\r\n")
	s.restored()

	// By the keeper, when sbxrun cannot.
	s = newExecScreen(t, b, nil, "sh", "-c", "echo up; exec sleep 60")
	s.waitFor("up\r\n")
	s.p.Kill()
	s.p.Wait()
	s.restored()

	// Ctrl-C is the command's.
	s = newExecScreen(t, b, nil, "sh", "-c", "echo up; exec sleep 60")
	s.waitFor("up\r\n")
	s.typeIn("\x03")
	s.p.Wait().Expect(t, 128+2, "signaled")
	s.restored()

	// A shell has job control.
	s = newExecScreen(t, b, nil, "bash", "--norc", "--noprofile", "-i")
	s.typeIn("PS1='> '; echo rea''dy\r")
	s.waitFor("ready\r\n")
	s.typeIn("set -o | grep monitor\r")
	s.waitFor("on\r\n")
	s.typeIn("exit 6\r")
	s.p.Wait().Expect(t, 6, "exited")
	if got := s.shows(); strings.Contains(got, "no job control") {
		t.Errorf("%q", got)
	}
	s.restored()

	// And the sandbox ends while it is in use.
	b.Dying = true
	s = newExecScreen(t, b, nil, "sh", "-c", "echo up; exec sleep 60")
	s.waitFor("up\r\n")
	kill(t, b.State, 0, "--grace", "0", b.ID)
	s.p.Wait().Expect(t, 137, "killed")
	s.restored()
}
