package hostfiles

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
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
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("git %q: %v\n%s", args, err, out)
			}
		}
		digest := func() string {
			t.Helper()
			f, err := os.Open(dir)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			return GitIndex(int(f.Fd()))
		}
		init := []string{"init", "-q"}
		if len(format) > 1 {
			init = append(init, "--object-format=sha256")
		}
		git(init...)
		if got := digest(); got != "" {
			t.Errorf("%v: without an index: %q", format, got)
		}
		for _, name := range []string{"a", "dir/b", "dir/a-longer-name", "dir/sub/c", "z"} {
			must(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755), os.WriteFile(filepath.Join(dir, name), []byte("x"), 0o644))
		}
		git("config", "index.version", map[bool]string{true: "4", false: "2"}[format[0] == "index.version=4"])
		git("add", ".")
		git("commit", "-qm", "first")
		before := digest()
		content, _ := os.ReadFile(filepath.Join(dir, GitIndexName))
		must(t, os.Chtimes(filepath.Join(dir, "a"), time.Unix(1, 0), time.Unix(1, 0)))
		git("status")
		if now, _ := os.ReadFile(filepath.Join(dir, GitIndexName)); string(now) == string(content) {
			t.Errorf("%v: git status did not write the index", format)
		}
		if got := digest(); got == "" || got != before {
			t.Errorf("%v: after git status: %q, before %q", format, got, before)
		}
		must(t, os.WriteFile(filepath.Join(dir, "z"), []byte("y"), 0o644))
		git("add", "z")
		added := digest()
		git("update-index", "--chmod=+x", "a")
		if chmod := digest(); added == "" || added == before || chmod == "" || chmod == added {
			t.Errorf("%v: digests %q, %q, %q; want three", format, before, added, chmod)
		}
		content, _ = os.ReadFile(filepath.Join(dir, GitIndexName))
		for n := range content { // no panic when it is truncated
			indexDigest(content[:n])
		}
		git("update-index", "--split-index")
		if got := digest(); got != "" {
			t.Errorf("%v: split index: %q", format, got)
		}
	}
}

func must(t *testing.T, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}
