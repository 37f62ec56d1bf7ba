package tests

import (
	"strconv"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// With a limit on address space or data a command either runs or is refused in one line with 125, and Go's
// runtime never fails with a stack trace.
func TestAddressSpace(t *testing.T) {
	t.Parallel()
	run := func(option string, mib, enough int) {
		limit := harness.Options{Bare: true, Wrap: []string{"sh", "-c", "ulimit " + option + ` "$0" && exec "$@"`, strconv.Itoa(mib << 10)}}
		for _, args := range [][]string{{"true"}, {"serve", "--check-config", "--listen", "unix:/nonexistent/socket"}} {
			r := harness.Run(t, limit, args...)
			lines := harness.Lines(r.Stderr)
			refused := r.ExitCode == 125 && len(lines) == 1 && strings.HasPrefix(lines[0], "sbxrun: error: ") && len(r.Stdout) == 0
			if r.ExitCode != 0 && (!refused || mib >= enough) {
				t.Errorf("ulimit %s %d MiB, %q: exit code %d, stdout %.100q, stderr %.500q", option, mib, args, r.ExitCode, r.Stdout, r.Stderr)
			}
		}
	}
	for _, mib := range []int{50, 300, 600, 700, 750, 800, 1000, 1100, 1150, 1200, 1250, 1500, 1600, 2000} {
		run("-v", mib, 1600)
	}
	for _, mib := range []int{1, 20, 40, 60, 100, 200} {
		run("-d", mib, 100)
	}
}
