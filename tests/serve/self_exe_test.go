package serve

import (
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/check"
)

// A call cannot execute the server's own file through /proc/self/exe, with or without a warm room
// (CVE-2019-5736).
func TestSelfExe(t *testing.T) {
	t.Parallel()
	const refusal = "sbxrun: /proc/self/exe cannot be executed here"
	for config, room := range map[string]string{"[rooms]\nmax = 0\n": "", "[rooms]\nmin = 1\nmax = 1\n": "warm"} {
		s := serve(t, config)
		if room == "warm" {
			s.warm(1)
		}
		for _, argv := range [][]string{{"/proc/self/exe", "--version"}, {"/proc/self/exe"}} {
			a := s.run(api.Call{Argv: argv})
			check.That(t, a.ExitCode == 126 && text(a.Stdout) == "" && strings.Contains(text(a.Stderr), refusal),
				"room %q, %q: exit code %d, stdout %q, stderr %q", a.Room, argv, a.ExitCode, text(a.Stdout), text(a.Stderr))
		}
	}
}
