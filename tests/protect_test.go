package tests

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// repository creates a git repository with a commit.
func repository(t *testing.T) string {
	t.Helper()
	if _, err := exec.LookPath("git"); err != nil {
		harness.Skip(t, "there is no git")
	}
	dir := harness.Dir(t) + "/project"
	check.Must(t, os.Mkdir(dir, 0o755))
	for _, words := range []string{"init -q .", "config user.name me", "config user.email me@example.com", "commit -q --allow-empty -m first"} {
		git(t, dir, strings.Fields(words)...)
	}
	return dir
}

func git(t *testing.T, dir string, args ...string) string {
	t.Helper()
	cmd := exec.Command("git", args...)
	cmd.Dir = dir
	cmd.Env = []string{"PATH=" + harness.Path, "HOME=/nonexistent", "GIT_CONFIG_NOSYSTEM=1"}
	out, err := harness.Command(t, cmd, harness.Bound)
	check.Require(t, err == nil, "git %q: %v, %s", args, err, out)
	return out
}

// plant tries to make git on the host execute a program.
const plant = `
printf '#!/bin/sh\ntouch PLANTED\n' >planted; chmod 755 planted
try() { "$@" 2>/dev/null; }
for hook in pre-commit post-commit post-checkout; do try cp planted .git/hooks/$hook; done
try mkdir .git/hooks && try cp planted .git/hooks/pre-commit
try git config core.fsmonitor ./planted
{ echo '[core]'; echo 'fsmonitor = ./planted'; } >config
try cp config .git/config; try mv config .git/config; try ln -sf /tmp/x .git/config
try cp config .git/config.worktree
try rm -f .git/config; try rm -rf .git/hooks
try mv .git/hooks .git/old && try mkdir .git/hooks && try cp planted .git/hooks/pre-commit
try mv .git moved && try cp -r moved .git && try cp config .git/config && try cp planted .git/hooks/pre-commit
true
`

// With -w and --bind a command cannot change the hooks and configuration of a repository, and git works in it.
func TestProtectGit(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		prepare func(t *testing.T, dir string) // what exists before
		flags   []string
		below   string // working directory in the repository
	}{
		"writable":      {flags: []string{"-w"}},
		"bound":         {flags: []string{"--bind", "."}},
		"from below":    {flags: []string{"-w", "--cwd-root", ".."}, below: "sub"},
		"without hooks": {flags: []string{"-w"}, prepare: func(t *testing.T, dir string) { check.Must(t, os.RemoveAll(dir+"/.git/hooks")) }},
		"with its own configuration": {flags: []string{"-w"}, prepare: func(t *testing.T, dir string) {
			git(t, dir, "config", "extensions.worktreeConfig", "true")
			git(t, dir, "config", "--worktree", "a.b", "c")
		}},
		"with its own configuration, which is missing": {flags: []string{"-w"}, prepare: func(t *testing.T, dir string) {
			git(t, dir, "config", "extensions.worktreeConfig", "true")
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := repository(t)
			if tt.prepare != nil {
				tt.prepare(t, dir)
			}
			check.Must(t, os.MkdirAll(filepath.Join(dir, tt.below), 0o755))
			config := readFile(t, dir+"/.git/config")
			script := `cd "$1"; git config --get user.name || exit 3; echo 1 >f; git add f && git commit -qm second && git checkout -qb other && git status --short && git log --oneline | wc -l;` + plant
			r := harness.Run(t, harness.Options{Dir: filepath.Join(dir, tt.below)}, append(tt.flags, "--env", "GIT_CONFIG_NOSYSTEM=1", "sh", "-c", script, "sh", dir)...)
			r.Expect(t, 0, "exited")
			got := string(r.Stdout)
			check.That(t, strings.HasPrefix(got, "me\n2\n"), "git in the sandbox: %s%s", got, r.Stderr)
			check.Equal(t, readFile(t, dir+"/.git/config"), config, "the configuration is now:\n")
			hooks, _ := filepath.Glob(dir + "/.git/hooks/*")
			check.That(t, len(hooks) == 0 || strings.HasSuffix(strings.Join(hooks, " "), ".sample"), "hooks: %q", hooks)
			git(t, dir, "status", "--short")
			git(t, dir, "commit", "-q", "--allow-empty", "-m", "third")
			_, err := os.Lstat(dir + "/PLANTED")
			check.That(t, err != nil, "git on the host has executed a planted program")
		})
	}
}

// Where parts of a directory belong to another user, a command of root's has exactly the rights of
// the directory's owner there, with and without protection.
func TestProtectOwner(t *testing.T) {
	t.Parallel()
	if !harness.Root() {
		return // only root can change owners
	}
	dir := repository(t)
	check.Must(t, os.Mkdir(dir+"/a", 0o755))
	for _, name := range []string{"a/secret", ".git/config", ".git/config.worktree"} {
		check.Must(t, os.WriteFile(dir+"/"+name, []byte("secret\n"), 0o600))
		check.Must(t, os.Chmod(dir+"/"+name, 0o600))
	}
	check.Must(t, os.Chown(dir, 1234, 1234))
	for _, flags := range [][]string{{"-w"}, {"-w", "--protect", "none"}, {"-w", "--protect", "a/secret"}, {"--bind", "."}} {
		r := harness.Run(t, harness.Options{Dir: dir}, append(flags, "sh", "-c", `cd "$1"; touch ours
cat a/secret .git/config .git/config.worktree; touch a/new .git/new .git/HEAD; chmod 777 a .git; rm -f .git/HEAD`, "sh", dir)...)
		check.That(t, len(r.Stdout) == 0, "%q: it has read %s", flags, r.Stdout)
		for _, name := range []string{"a/new", ".git/new"} {
			if _, err := os.Lstat(dir + "/" + name); err == nil {
				t.Errorf("%q: it has made %s", flags, name)
				check.Must(t, os.Remove(dir+"/"+name))
			}
		}
		for _, name := range []string{"ours", ".git/HEAD"} {
			_, err := os.Lstat(dir + "/" + name)
			check.That(t, err == nil, "%q: %v", flags, err)
		}
	}
}

func readFile(t *testing.T, name string) string {
	t.Helper()
	data := harness.ReadFile(t, name)
	return string(data)
}
