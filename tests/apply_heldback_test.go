package tests

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// apply holds back files that programs on the host execute unless they are named, and diff marks
// them.
func TestApplyHeldBack(t *testing.T) {
	t.Parallel()
	dir, s := original(t), harness.NewState(t)
	harness.Must(t, os.MkdirAll(filepath.Join(dir, ".git/hooks"), 0o755))
	harness.Must(t, os.WriteFile(filepath.Join(dir, ".git/config"), []byte("[core]\n"), 0o644))
	harness.Must(t, os.WriteFile(filepath.Join(dir, "script"), []byte("#!/bin/sh\n"), 0o755))
	b := s.Sandbox(harness.Options{Dir: dir}, layer(t, "--name", "agent", "--cwd", "overlay")...)
	execOut(t, b, `mkdir -p .vscode .claude .GIT/hooks nested evil/objects evil/refs
for f in .git/hooks/pre-commit .GIT/hooks/x .vscode/tasks.json .claude/settings.json .mcp.json .envrc package.json sub/package.json conftest.py; do echo x >$f; done
printf '[core]\nfsmonitor = /tmp/evil\n' >.git/config; cp .git/config evil/config; echo 'gitdir: ../evil' >nested/.git; echo 'ref: refs/heads/x' >evil/HEAD
chmod +x .git/hooks/pre-commit; echo '#!/bin/sh' >tool; echo data >.git/index; echo new >file; echo '#!/bin/sh -e' >script; echo >plain; chmod 755 plain
ln -s /etc/passwd out; ln -s ../../x up; ln -s sub/../../y up2; ln -s ../file sub/in`)
	marked := `A .GIT/
A .GIT/hooks/ (held back)
A .GIT/hooks/x (held back)
A .claude/ (held back)
A .claude/settings.json (held back)
A .envrc (held back)
M .git/config (held back)
A .git/hooks/pre-commit (executable) (held back)
A .mcp.json (held back)
A .vscode/ (held back)
A .vscode/tasks.json (held back)
A conftest.py (held back)
A evil/
A evil/HEAD (held back)
A evil/config
A evil/objects/
A evil/refs/
M file
A nested/
A nested/.git (held back)
A out -> /etc/passwd (leads outside)
A package.json (held back)
A plain (executable)
M script
A sub/in -> ../file
A sub/package.json (held back)
A tool (executable)
A up -> ../../x (leads outside)
A up2 -> sub/../../y (leads outside)
M .git/ (1 change of git's data)
`
	if got, _ := text(t, s, 0, "diff", "agent"); got != marked {
		t.Errorf("diff: %s", cmp.Diff(marked, got))
	}
	got, _ := text(t, s, 0, "diff", "--json", "agent", ".git/hooks", "tool", "out")
	check.That(t, strings.Count(got, `"executable":true`) == 2 && strings.Count(got, `"outside":true`) == 1 && !strings.Contains(got, "held_back"), "diff --json: %s", got)
	const held = "A .GIT/hooks/ (held back)\nA .claude/ (held back)\nA .envrc (held back)\nM .git/config (held back)\nA .git/hooks/pre-commit (held back)\nA .mcp.json (held back)\nA .vscode/ (held back)\n" +
		"A conftest.py (held back)\nA evil/HEAD (held back)\nA nested/.git (held back)\nA package.json (held back)\nA sub/package.json (held back)\n" +
		"sbxrun: error: 12 paths, such as \".GIT/hooks\", are held back because programs on the host execute or trust them; see sbxrun diff -p; --all applies them, and naming a path applies that one\n"
	_, stderr := text(t, s, 1, "apply", "agent", "--check")
	check.That(t, strings.HasSuffix(stderr, held), "apply --check: %s", stderr)
	if _, stderr := text(t, s, 1, "apply", "agent"); stderr != held {
		t.Errorf("apply: %s", cmp.Diff(held, stderr))
	}
	holds(t, dir+"/file", "new\n")
	holds(t, dir+"/.git/index", "data\n")
	holds(t, dir+"/.git/config", "[core]\n")
	for _, name := range []string{".vscode", "package.json", ".git/hooks/pre-commit", "sub/package.json", ".GIT/hooks", "nested/.git", "evil/HEAD"} {
		_, err := os.Lstat(filepath.Join(dir, name))
		check.That(t, err != nil, "%s was applied", name)
	}
	// Naming a directory releases its other files, but not those that are held back.
	text(t, s, 1, "apply", "agent", "sub")
	stdout, _ := text(t, s, 1, "apply", "agent", "sub", "--json")
	want := `{"changes":0,"left":0,"held_back":["sub/package.json"],"error":{"code":"held-back",`
	check.That(t, strings.HasPrefix(stdout, want), "apply --json: %s", stdout)
	text(t, s, 0, "apply", "agent", "package.json", ".vscode", filepath.Join(dir, ".git/hooks"))
	holds(t, dir+"/.vscode/tasks.json", "x\n")
	holds(t, dir+"/package.json", "x\n")
	holds(t, dir+"/.git/hooks/pre-commit", "x\n")
	text(t, s, 0, "apply", "agent", "--all")
	holds(t, dir+"/.envrc", "x\n")
	got, _ = text(t, s, 0, "diff", "agent")
	check.That(t, got == "", "after --all: %s", got)
}

// run --apply holds back the same files and then turns exit code 0 into another; --apply-all does
// not.
func TestRunApplyHeldBack(t *testing.T) {
	t.Parallel()
	dir := original(t)
	const plants = "mkdir -p .git/hooks; echo x >.git/hooks/pre-commit; echo new >file; rm sub/deep"
	r := harness.Run(t, harness.Options{Dir: dir}, layer(t, "--cwd", "overlay", "--apply", "sh", "-c", plants)...)
	r.Expect(t, 74, "exited")
	if r.Report.Value("error.code") != "held-back" || !strings.Contains(string(r.Stderr), `".git/hooks" is held back`) || !strings.Contains(string(r.Stderr), "--apply-all applies it\n") {
		t.Errorf("%s %s", r.Report.Value("error.code"), r.Stderr)
	}
	holds(t, dir+"/file", "new\n")
	_, err := os.Lstat(dir + "/.git/hooks")
	check.That(t, err != nil, "the hook was applied")
	harness.Run(t, harness.Options{Dir: dir}, layer(t, "--cwd", "overlay", "--apply-all", "sh", "-c", plants)...).Expect(t, 0, "exited")
	holds(t, dir+"/.git/hooks/pre-commit", "x\n")
	holds(t, dir+"/sub/deep", "deep\n")
}

// apply holds back all links in git's directory, because git on the host writes to their targets.
func TestApplyHeldBackGitLinks(t *testing.T) {
	t.Parallel()
	dir := original(t)
	harness.Must(t, os.MkdirAll(filepath.Join(dir, ".git/logs"), 0o755))
	harness.Must(t, os.WriteFile(filepath.Join(dir, ".git/logs/HEAD"), nil, 0o644))
	r := harness.Run(t, harness.Options{Dir: dir}, layer(t, "--cwd", "overlay", "--apply", "sh", "-c",
		"ln -sf ../../file .git/logs/HEAD; ln -s ../file .git/FETCH_HEAD; ln -s ../.. .git/objects; ln -s file link; echo data >.git/index")...)
	r.Expect(t, 74, "exited")
	check.That(t, strings.Contains(string(r.Stderr), `3 paths, such as ".git/FETCH_HEAD", are held back`), "%s", r.Stderr)
	for name, want := range map[string]bool{".git/logs/HEAD": false, ".git/FETCH_HEAD": false, ".git/objects": false, "link": true} {
		st, err := os.Lstat(filepath.Join(dir, name))
		link := err == nil && st.Mode()&os.ModeSymlink != 0
		check.That(t, link == want, "%s is a link: %v", name, link)
	}
	holds(t, dir+"/.git/index", "data\n")
}

// apply holds files back if the overlay's directory itself is a repository or a trusted directory.
func TestApplyHeldBackTop(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ dir, script, held string }{
		{"bare", "mkdir hooks; echo x >hooks/post-update; echo data >index", "hooks"},
		{"p/.git/hooks", "echo x >pre-commit", "pre-commit"},
		{"p/.vscode", "echo x >tasks.json", "tasks.json"},
	} {
		dir := filepath.Join(original(t), tt.dir)
		harness.Must(t, os.MkdirAll(dir, 0o755))
		if tt.dir == "bare" {
			harness.Must(t, os.Mkdir(filepath.Join(dir, "objects"), 0o755))
			harness.Must(t, os.Mkdir(filepath.Join(dir, "refs"), 0o755))
			harness.Must(t, os.WriteFile(filepath.Join(dir, "HEAD"), []byte("ref: refs/heads/x\n"), 0o644))
		}
		r := harness.Run(t, harness.Options{Dir: dir}, layer(t, "--cwd", "overlay", "--apply", "sh", "-c", tt.script)...)
		r.Expect(t, 74, "exited")
		_, err := os.Lstat(filepath.Join(dir, tt.held))
		check.That(t, err != nil, "%s: %s was applied", tt.dir, tt.held)
	}
}
