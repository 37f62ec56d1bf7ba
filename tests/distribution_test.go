//go:build distribution

package tests

import (
	"os"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
)

// Every program in distribution.txt prints the same in a sandbox as on the host, and exits with the same code: where the
// sandbox shows the public files of the host, and where the host's tree is its root directory. internal/setup/distribution.sh
// installs the programs into a tree and runs this test there.
func TestDistribution(t *testing.T) {
	lines := append([]string{}, programs...)
	for line := range strings.Lines(readFile(t, "distribution.txt")) {
		if line = strings.TrimSpace(line); line != "" && line[0] != '#' {
			lines = append(lines, line)
		}
	}
	for name, flags := range map[string][]string{
		"host":   nil,
		"rootfs": {"--rootfs", os.Getenv("SBXRUN_DISTRIBUTION")},
	} {
		t.Run(name, func(t *testing.T) {
			n := comparePrograms(t, lines, flags...)
			check.That(t, n >= len(lines), "%d of %d commands are not installed", len(lines)-n, len(lines))
		})
	}
}
