package tests

import (
	stdjson "encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// A checker of branches prepares a sandbox with a cache, starts its checks from a snapshot, shows what one of them has
// changed in the project alone, and applies a part of that.
func TestChecker(t *testing.T) {
	t.Parallel()
	top, s := harness.SharedDir(t), harness.NewState(t)
	project, cache := filepath.Join(top, "project"), filepath.Join(top, "cache")
	check.Must(t, errors.Join(os.Mkdir(project, 0o755), os.Mkdir(cache, 0o755), os.WriteFile(project+"/main", []byte("old\n"), 0o644)))
	if harness.Root() {
		check.Must(t, errors.Join(os.Chown(project, 65534, 65534), os.Chown(cache, 65534, 65534), os.Chown(project+"/main", 65534, 65534)))
	}
	o := harness.Options{Dir: project}
	flags := []string{"--cwd", "overlay", "--overlay", cache + ":/cache"}
	prepared := s.Sandbox(o, layer(t, append(flags, "--name", "prepared")...)...)
	execOut(t, prepared, "echo downloaded >/cache/package")
	snapshot(t, s, "prepared", "--name", "base")
	fix := s.Sandbox(o, layer(t, "--name", "fix", "--from", "base", "--cwd", "overlay")...)
	execOut(t, fix, "cat /cache/package; echo new >main; echo x >other")
	got, _ := text(t, s, 0, "diff", "fix", project)
	check.That(t, got == "M "+project+"/main\nA "+project+"/other\n", "diff of one overlay: %s", got)
	got, _ = text(t, s, 0, "apply", "--json", "fix", "main")
	var done struct {
		Changes int
		Applied []string
	}
	check.Must(t, stdjson.Unmarshal([]byte(got), &done))
	check.That(t, done.Changes == 1 && slices.Equal(done.Applied, []string{project + "/main"}), "apply --json: %s", got)
	holds(t, project+"/main", "new\n")
	// The directories for results are created.
	o.Dir = top
	harness.Run(t, o, "--cwd", "none", "--get", "out*:results/one/two", "sh", "-c", "echo made >out").Expect(t, 0, "exited")
	holds(t, top+"/results/one/two/out", "made\n")
}
