package tests

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// --max-size 0 of snapshot create and import is no limit, and 1 is too little.
func TestSnapshotMaxSize(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{Dir: original(t)}, layer(t, "--name", "box", "--cwd", "overlay")...)
	execOut(t, b, "echo x >new")
	file := filepath.Join(harness.SharedDir(t), "snapshot.tar")
	snapshot(t, s, "box", "--name", "one", "--max-size", "0")
	for _, args := range [][]string{{"export", "one", file}, {"import", "--name", "two", "--max-size", "0", file}} {
		r := s.Run(append([]string{"snapshot"}, args...)...)
		check.That(t, r.ExitCode == 0, "snapshot %q: %d, %s", args, r.ExitCode, r.Stderr)
	}
	for _, args := range [][]string{{"create", "box"}, {"import", "--name", "three", file}} {
		r := s.Run(append(append([]string{"snapshot"}, args...), "--max-size", "1")...)
		check.That(t, r.ExitCode != 0 && strings.Contains(string(r.Stderr), "raise --max-size"), "snapshot %q: %d, %s", args, r.ExitCode, r.Stderr)
	}
}
