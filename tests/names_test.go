package tests

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// A name belongs to one running sandbox, and is free after its end.
func TestNames(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	first := s.Sandbox(harness.Options{}, "--name", "web.1_a-b")
	b, r := s.TrySandbox(harness.Options{}, "--name", "web.1_a-b")
	check.That(t, b == nil && r.ExitCode == 125 && len(harness.Lines(r.Stderr)) == 1 && strings.Contains(string(r.Stderr), "web.1_a-b"),
		"a name in use: exit code %d: %s", r.ExitCode, r.Stderr)
	first.Alive()
	r = s.Run("kill", "--grace", "0", "web.1_a-b")
	check.Require(t, r.ExitCode == 0, "kill: exit code %d: %s", r.ExitCode, r.Stderr)
	first.Ended()
	second := s.Sandbox(harness.Options{}, "--name", "web.1_a-b")
	check.Equal(t, string(s.Run("ps", "--names").Stdout), "web.1_a-b\n", "ps --names")
	// The name refers to the running one; the other keeps its ID.
	var recs []harness.Record
	decode(t, s.Run("inspect", "web.1_a-b", first.ID), &recs)
	check.That(t, len(recs) == 2 && recs[0].ID == second.ID && recs[1].ID == first.ID && recs[1].Status == "killed", "inspect: %+v", recs)
}

// When many want a name at once, one gets it.
func TestNameRace(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	const starts = 12
	var wg sync.WaitGroup
	codes := make([]int, starts)
	for i := range starts {
		wg.Go(func() {
			_, r := s.TrySandbox(harness.Options{}, "--name", "one")
			codes[i] = r.ExitCode
		})
	}
	wg.Wait()
	got := 0
	for _, code := range codes {
		switch code {
		case 0:
			got++
		case 125:
		default:
			t.Errorf("exit codes %v", codes)
		}
	}
	check.That(t, got == 1, "%d sandboxes have got one name: exit codes %v", got, codes)
}

// An invalid name is a usage error, and nothing starts.
func TestNamesBad(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	for _, name := range []string{strings.Repeat("x", 65), strings.Repeat("x", 64), "a/b", "..", ".", "", "-a", ".a", "a b", "a\nb", "ä", "a\x00"[:1] + "*"} {
		b, r := s.TrySandbox(harness.Options{}, "--name="+name)
		check.That(t, b == nil && r.ExitCode == 125 && len(harness.Lines(r.Stderr)) == 1, "--name %q: exit code %d: %q", name, r.ExitCode, r.Stderr)
	}
	s.Run("ps", "--all", "--names").Out(t, "")
	s.Sandbox(harness.Options{}, "--name", strings.Repeat("x", 63))
}

// ps selects by tags and status; all conditions must match.
func TestPsSelects(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	s.Sandbox(harness.Options{}, "--name", "a", "--tag", "job=7", "--tag", "who=me")
	s.Sandbox(harness.Options{}, "--name", "b", "--tag", "job=7")
	s.Sandbox(harness.Options{}, "--name", "c", "--tag", "job=8", "true").Ended()
	s.Sandbox(harness.Options{}, "--name", "d", "false").Ended()
	unnamed := s.Sandbox(harness.Options{}, "sleep", "60")
	for _, c := range []struct{ flags, want string }{
		{"", "a b " + unnamed.ID},
		{"--all", "a b c d " + unnamed.ID},
		{"--tag job=7", "a b"},
		{"--tag job=7 --tag who=me", "a"},
		{"--tag job=8", ""},
		{"--tag job=8 --all", "c"},
		{"--tag job=", ""},
		{"--status completed", "c"},
		{"--status failed --status completed", "c d"},
		{"--status running --tag who=me", "a"},
		{"--status lost", ""},
	} {
		r := s.Run(append([]string{"ps", "--names"}, strings.Fields(c.flags)...)...)
		got := strings.Join(strings.Fields(string(r.Stdout)), " ")
		check.That(t, r.ExitCode == 0 && got == c.want, "ps %s: exit code %d: %q, want %q; %s", c.flags, r.ExitCode, got, c.want, r.Stderr)
		var recs []harness.Record
		decode(t, s.Run(append([]string{"ps", "--json"}, strings.Fields(c.flags)...)...), &recs)
		check.That(t, len(recs) == len(strings.Fields(c.want)), "ps --json %s: %d sandboxes, want %q", c.flags, len(recs), c.want)
		ids := ""
		for _, rec := range recs {
			ids += rec.ID + "\n"
		}
		s.Run(append([]string{"ps", "-q"}, strings.Fields(c.flags)...)...).Exits(t, 0).Out(t, ids)
	}
	table := string(s.Run("ps", "--all").Stdout)
	for _, want := range []string{"ID", "STATUS", unnamed.ID, "running", "completed", "failed (1)", "sleep 60", "(idle)"} {
		check.That(t, strings.Contains(table, want), "no %q in\n%s", want, table)
	}
	for _, args := range []string{"ps --status dead", "ps --tag job", "ps word", "ps --json --names", "inspect", "inspect nobody", "start --tag job", "start --no-such-flag"} {
		s.Run(strings.Fields(args)...).Exits(t, 125).ErrLines(t, 1)
	}
}

// Control characters in a command line don't reach the terminal.
func TestPsPrintable(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	s.Sandbox(harness.Options{}, "sh", "-c", "exec sleep 60 # \x1b[31m\nsecond line")
	r := s.Run("ps")
	check.That(t, !strings.ContainsAny(string(r.Stdout), "\x1b") && len(harness.Lines(r.Stdout)) == 2, "%q", r.Stdout)
}

// The record of a started sandbox has its name and status. A sandbox without a name uses its ID as the name.
func TestStartPrints(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	for _, name := range []string{"", "named"} {
		b := s.Sandbox(harness.Options{}, "--name", "x"+name)
		rec := b.Inspect()
		check.That(t, rec.Name == "x"+name && rec.Status == "running" && rec.Alive && rec.ExitCode == nil, "%+v", rec)
	}
	b := s.Sandbox(harness.Options{})
	check.That(t, b.Name == b.ID, "id %q, name %q", b.ID, b.Name)
}

// A start that fails leaves nothing, not even a zombie.
func TestStartFails(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	for _, c := range []struct {
		args []string
		code int
	}{
		{[]string{"no-such-command"}, 127},
		{[]string{"/etc/passwd"}, 126},
		{[]string{"--bind", "/no/such", "true"}, 125},
		{[]string{"--workdir", "/no/such", "true"}, 125},
		{[]string{"--timeout", "-1", "true"}, 125},
		{[]string{"--ready-tcp", "0"}, 125},
		{[]string{"--ready-tcp", "80", "--ready-log", "x"}, 125},
		{[]string{"--ready-log", "("}, 125},
		{[]string{"--wait-ready"}, 125},
	} {
		b, r := s.TrySandbox(harness.Options{}, c.args...)
		check.That(t, b == nil && r.ExitCode == c.code && len(harness.Lines(r.Stderr)) == 1, "start %q: exit code %d, want %d: %q", c.args, r.ExitCode, c.code, r.Stderr)
	}
	s.Run("ps", "--all", "--names").Out(t, "")
	// A command that exits at once counts as started.
	for code := range 3 {
		b := s.Sandbox(harness.Options{}, "sh", "-c", fmt.Sprintf("exit %d", code))
		rec := b.Ended()
		check.That(t, rec.ExitCode != nil && *rec.ExitCode == code, "%+v", rec)
	}
}
