package tests

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// project makes a git repository with a commit, and a sandbox with an overlay of it.
func project(t *testing.T, s *harness.State) (dir string, b *harness.Sandbox) {
	t.Helper()
	dir = repository(t)
	for _, name := range []string{"file", "other", "staged"} {
		harness.Must(t, os.WriteFile(filepath.Join(dir, name), []byte("old\n"), 0o644))
	}
	git(t, dir, "branch", "-M", "main")
	git(t, dir, "add", ".")
	git(t, dir, "commit", "-qm", "files")
	return dir, s.Sandbox(harness.Options{Dir: dir}, layer(t, "--name", "agent", "--cwd", "overlay")...)
}

const commit = `export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*' GIT_AUTHOR_NAME=x GIT_AUTHOR_EMAIL=x GIT_COMMITTER_NAME=x GIT_COMMITTER_EMAIL=x
`

// diff summarises git's own data unless it is named, apply lists what it applied, and git status on the
// host, which writes the index, is no conflict.
func TestDiffApplyGit(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	dir, b := project(t, s)
	execOut(t, b, commit+`echo new >file; git add file; git commit -qm second; echo x >.git/hooks/pre-commit`)
	got, _ := text(t, s, 0, "diff", "agent")
	check.That(t, strings.HasPrefix(got, "A .git/hooks/pre-commit (held back)\nM file\nM .git/ (") && strings.HasSuffix(got, " changes of git's data)\n") && strings.Count(got, "\n") == 3,
		"diff: %q", got)
	got, _ = text(t, s, 0, "diff", "agent", ".git/refs")
	check.That(t, got == "M .git/refs/heads/main\n", "diff .git/refs: %q", got)
	got, _ = text(t, s, 0, "diff", "agent", "--json")
	check.That(t, strings.Contains(got, `"path":".git/index"`), "diff --json: %s", got)
	patch, note := text(t, s, 0, "diff", "agent", "-p")
	check.That(t, strings.HasPrefix(patch, "# held back: programs on the host execute or trust this file\ndiff --git a/.git/hooks/pre-commit") && !strings.Contains(patch, ".git/index") && strings.Contains(note, "changes of git's data in .git; name it to see them"),
		"diff -p: %s%s", patch, note)

	// The status of a file on the host changes, so git status writes the index.
	before, err := os.ReadFile(filepath.Join(dir, ".git/index"))
	harness.Must(t, err)
	harness.Must(t, os.Chtimes(filepath.Join(dir, "other"), time.Unix(1, 0), time.Unix(1, 0)))
	git(t, dir, "status")
	now, _ := os.ReadFile(filepath.Join(dir, ".git/index"))
	check.Require(t, string(now) != string(before), "git status did not write the index")
	stdout, _ := text(t, s, 1, "apply", "agent", "--delete")
	check.That(t, strings.HasPrefix(stdout, "M file\nM .git/ ("), "apply: %q", stdout)
	got = git(t, dir, "status", "--porcelain") + git(t, dir, "log", "--format=%s")
	check.That(t, got == "second\nfiles\nfirst\n", "after the apply: %q", got)
	got, _ = text(t, s, 0, "diff", "agent")
	check.That(t, got == "A .git/hooks/pre-commit (held back)\n", "after the apply: %q", got)
}

// Commits can be fetched from the sandbox as a bundle, as docs/concepts/files.md shows.
func TestFetchBundle(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	dir, b := project(t, s)
	execOut(t, b, commit+`echo new >file; git commit -qam second; git bundle create -q /tmp/work.bundle HEAD`)
	text(t, s, 0, "cp", "agent:/tmp/work.bundle", dir)
	git(t, dir, "fetch", "-q", "./work.bundle", "HEAD")
	check.Equal(t, git(t, dir, "log", "--format=%s", "..FETCH_HEAD"), "second\n", "fetched")
}

// A file that was staged on the host is a conflict, and git status in the sandbox is no change.
func TestApplyGitIndexConflict(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	dir, b := project(t, s)
	execOut(t, b, commit+`touch -d 2001-01-01 other; git status >&2`)
	got, _ := text(t, s, 0, "diff", "agent")
	check.That(t, got == "", "after git status in the sandbox: %q", got)
	execOut(t, b, commit+`echo new >file; git add file`)
	harness.Must(t, os.WriteFile(filepath.Join(dir, "staged"), []byte("changed\n"), 0o644))
	git(t, dir, "add", "staged")
	_, stderr := text(t, s, 1, "apply", "agent")
	check.That(t, strings.Contains(stderr, `".git/index" has changed on the host`), "apply: %s", stderr)
	stdout, _ := text(t, s, 0, "apply", "agent", "--exclude", ".git")
	check.That(t, stdout == "M file\n", "apply --exclude .git: %q", stdout)
}

// --exclude leaves out names at any depth and paths, with everything below them.
func TestDiffExclude(t *testing.T) {
	t.Parallel()
	s, dir := harness.NewState(t), original(t)
	b := s.Sandbox(harness.Options{Dir: dir}, layer(t, "--name", "agent", "--cwd", "overlay")...)
	execOut(t, b, `mkdir -p sub/vendor/x build; echo >sub/vendor/x/f; echo >build/a.o; echo >build/b.c; echo >sub/c.pyc; echo >keep; rm sub/deep`)
	for args, want := range map[string]string{
		"":               "A build/\nA build/a.o\nA build/b.c\nA keep\nA sub/c.pyc\nD sub/deep\nA sub/vendor/\nA sub/vendor/x/\nA sub/vendor/x/f\n",
		"vendor *.pyc":   "A build/\nA build/a.o\nA build/b.c\nA keep\nD sub/deep\n",
		"build/*.o sub/": "A build/\nA build/b.c\nA keep\n",
		"x /nowhere":     "A build/\nA build/a.o\nA build/b.c\nA keep\nA sub/c.pyc\nD sub/deep\nA sub/vendor/\n",
		dir + "/build":   "A keep\nA sub/c.pyc\nD sub/deep\nA sub/vendor/\nA sub/vendor/x/\nA sub/vendor/x/f\n",
	} {
		flags := []string{"diff", "agent"}
		for _, p := range strings.Fields(args) {
			flags = append(flags, "--exclude", p)
		}
		got, _ := text(t, s, 0, flags...)
		check.That(t, got == want, "--exclude %s: %q, want %q", args, got, want)
	}
	_, stderr := text(t, s, 125, "diff", "agent", "--exclude", "[x")
	check.That(t, strings.Contains(stderr, "--exclude"), "a bad pattern: %s", stderr)
	stdout, _ := text(t, s, 0, "apply", "agent", "--exclude", "sub", "--exclude", "build")
	check.That(t, stdout == "A keep\n", "apply: %q", stdout)
}

// A patch does not contain the text of binary files.
func TestDiffBinary(t *testing.T) {
	t.Parallel()
	s, dir := harness.NewState(t), original(t)
	b := s.Sandbox(harness.Options{Dir: dir}, layer(t, "--name", "agent", "--cwd", "overlay")...)
	execOut(t, b, `printf 'a\001b\n' >control; printf 'a\000b\n' >zero; printf 'caf\351\t\033[0m\r\n' >latin1`)
	patch, _ := text(t, s, 0, "diff", "agent", "-p")
	check.That(t, strings.Count(patch, "\nBinary files /dev/null and b/") == 2 && strings.Contains(patch, "\n+caf\xe9\t\x1b[0m\r\n"), "%q", patch)
}
