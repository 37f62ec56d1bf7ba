package hostfiles

import (
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
)

func TestTrusted(t *testing.T) {
	for _, name := range []string{
		".git/hooks", ".git/hooks/pre-commit", ".git/config", ".git/config.worktree", ".git/commondir", ".git/info/attributes", ".git/modules/a/config",
		".git/rebase-merge/git-rebase-todo", ".git/worktrees/w/commondir", ".git/worktrees/w/config.worktree", "sub/.git", "sub/deep/.git/hooks/x", "bare.git/config",
		"HEAD", "evil/HEAD", ".vscode", ".vscode/tasks.json", ".claude/settings.json", ".mcp.json", ".envrc", "package.json", "a/b/package.json", "conftest.py",
		"tests/conftest.py", "x.code-workspace", "site-packages/x.pth", ".config/git/config", ".husky/_/husky.sh",
		".hg/hgrc", ".Rprofile", ".helix/languages.toml", "sub/rust-toolchain.toml", ".venv/bin/git", "node_modules/.bin/tsc", ".mvn/jvm.config", ".roo/mcp.json", ".config/mise/config.toml",
		// as other file systems have them
		".GIT/config", ".Git/hooks/x", ".g\u200cit/config", ".git./config", ".git /config", "git~1/config", ".vſcode/tasks.json", "PACKAGE.JSON", ".\u00admcp.json",
	} {
		check.That(t, Trusted(name, File), "%q is not trusted", name)
	}
	for _, name := range []string{
		"main.go", "Makefile", "src/config", "hooks/x", ".gitignore", ".gitattributes", ".github/workflows/ci.yml", "git/config", "package-lock.json", "x.git",
		".git/HEAD", ".git/index", ".git/objects/ab/cdef", ".git/refs/heads/HEAD", ".git/logs/HEAD", ".git/info/exclude", ".git/worktrees/w/HEAD", ".git/worktrees/w/index", ".config/other", ".hg/store/x", ".venv/lib/x", "bin/x", "",
	} {
		check.That(t, !Trusted(name, File), "%q is trusted", name)
	}
	for name, want := range map[string]bool{".git": false, "sub/.git": false, ".git/hooks": true, ".git/info": false, ".git/worktrees": false, ".git/worktrees/w": false, ".vscode": true, "src": false} {
		check.That(t, Trusted(name, Directory) == want, "directory %q: want %v", name, want)
	}
	for name, want := range map[string]bool{".git/FETCH_HEAD": true, ".git/logs/HEAD": true, ".git/objects/ab": true, ".git/info": true, "x.git/COMMIT_EDITMSG": true, ".git": true, "src": false, ".hg": true, "sub/.venv": true, ".hg/store": false} {
		check.That(t, Trusted(name, Link) == want, "link %q: want %v", name, want)
	}
}

func TestTop(t *testing.T) {
	for dir, want := range map[string]string{
		"/u/p": "", "/u/p/.git": ".git", "/u/p/.git/hooks": ".git/hooks", "/u/p/.vscode": ".vscode", "/u/.config/git": ".config/git", "/u/.config": "",
		"/u/p.git": "", "/u/p.git/main": "", "/u/p/.claude/worktrees/w": "", "/": "",
	} {
		check.Equal(t, Top(dir, false), want, "%s", dir)
	}
	check.Equal(t, Top("/u/p.git", true), ".git", "a repository")
}
