package hostfiles

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/check"
)

// The digest of a git index changes with its entries, and not with the status of files, in every format.
func TestGitIndex(t *testing.T) {
	if _, err := exec.LookPath("git"); err != nil {
		t.Log("no git")
		return
	}
	for _, format := range [][]string{{"index.version=2"}, {"index.version=4"}, {"core.untrackedCache=true"}, {"index.version=4", "extensions.objectFormat=sha256"}} {
		dir := t.TempDir()
		git := func(args ...string) {
			t.Helper()
			cmd := exec.Command("git", append([]string{"-C", dir, "-c", "user.name=x", "-c", "user.email=x@x", "-c", "commit.gpgsign=false"}, args...)...)
			out, err := cmd.CombinedOutput()
			check.Require(t, err == nil, "git %q: %v\n%s", args, err, out)
		}
		digest := func() string {
			t.Helper()
			f, err := os.Open(dir)
			check.Must(t, err)
			defer f.Close()
			return GitIndex(int(f.Fd()))
		}
		init := []string{"init", "-q"}
		if len(format) > 1 {
			init = append(init, "--object-format=sha256")
		}
		git(init...)
		check.Equal(t, digest(), "", "%v: without an index", format)
		for _, name := range []string{"a", "dir/b", "dir/a-longer-name", "dir/sub/c", "z"} {
			check.Must(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755), os.WriteFile(filepath.Join(dir, name), []byte("x"), 0o644))
		}
		git("config", "index.version", map[bool]string{true: "4", false: "2"}[format[0] == "index.version=4"])
		git("add", ".")
		git("commit", "-qm", "first")
		before := digest()
		content, _ := os.ReadFile(filepath.Join(dir, GitIndexName))
		check.Must(t, os.Chtimes(filepath.Join(dir, "a"), time.Unix(1, 0), time.Unix(1, 0)))
		git("status")
		now, _ := os.ReadFile(filepath.Join(dir, GitIndexName))
		check.That(t, string(now) != string(content), "%v: git status did not write the index", format)
		got := digest()
		check.That(t, got != "" && got == before, "%v: after git status: %q, before %q", format, got, before)
		check.Must(t, os.WriteFile(filepath.Join(dir, "z"), []byte("y"), 0o644))
		git("add", "z")
		added := digest()
		git("update-index", "--chmod=+x", "a")
		chmod := digest()
		check.That(t, added != "" && added != before && chmod != "" && chmod != added, "%v: digests %q, %q, %q; want three", format, before, added, chmod)
		content, _ = os.ReadFile(filepath.Join(dir, GitIndexName))
		for n := range content { // no panic when it is truncated
			indexDigest(content[:n])
		}
		git("update-index", "--split-index")
		check.Equal(t, digest(), "", "%v: split index", format)
	}
}
