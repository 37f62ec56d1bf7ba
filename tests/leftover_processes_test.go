package tests

import (
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// exec prints the number of killed background processes and a hint, but not with --quiet or --json.
func TestExecReportsLeftoverProcesses(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{}, "--name", "web")
	const hint = "; use exec --detach to keep one running\n"
	for _, c := range []struct {
		args []string
		want string // all of stderr
	}{
		{[]string{"sh", "-c", "sleep 60 >/dev/null 2>&1 &"}, "sbxrun: killed 1 leftover process" + hint},
		{[]string{"sh", "-c", "sleep 60 >/dev/null 2>&1 & sleep 60 >/dev/null 2>&1 &"}, "sbxrun: killed 2 leftover processes" + hint},
		{[]string{"sh", "-c", "exec sleep 0.01"}, ""},
		{[]string{"--", "sh", "-c", "sleep 60 >/dev/null 2>&1 & exit 3"}, "sbxrun: killed 1 leftover process" + hint},
	} {
		s.Start(harness.Options{}, append([]string{"exec", b.ID}, c.args...)...).Wait().Err(t, c.want)
		for _, flag := range []string{"--quiet", "--json"} {
			r := s.Start(harness.Options{}, append([]string{"exec", flag, b.ID}, c.args...)...).Wait()
			check.That(t, len(r.Stderr) == 0, "%s %q: stderr %q", flag, c.args, r.Stderr)
			check.That(t, flag != "--json" || strings.Contains(string(r.Stdout), `"strays":0`) != (c.want != ""), "%q: report %s", c.args, r.Stdout)
		}
	}
	s.Start(harness.Options{}, "sh", "-c", "sleep 60 >/dev/null 2>&1 &").Wait().Err(t, "")
}
