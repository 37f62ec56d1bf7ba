// Package hostfiles recognises files that other programs on the host execute or trust: hooks and
// configuration of git(1), of editors, coding agents, package managers and shells. A sandboxed command
// with write access to such a file can run a program on the host.
//
// Source code does not count: a build or a test runs it, and a review covers it.
package hostfiles

import (
	"path"
	"strings"
	"sync"
	"unicode"
)

// names are files and directories that are trusted in every directory, with their content. A name with a
// slash is the end of a path, and * is an extension.
var names = set(`
	.gitconfig .gitmodules .hg/hgrc .hg/hgrc-not-shared .hg/sharedpath .githooks .husky .lefthook lefthook.yml .lefthook.yml lefthook-local.yml .lefthook-local.yml .pre-commit-config.yaml .config/git
	.vscode .idea .zed .devcontainer .devcontainer.json *.code-workspace .exrc .vimrc .nvimrc .nvim.lua .dir-locals.el .dir-locals-2.el .helix
	.claude .claude.json .mcp.json .cursor .codex .gemini .opencode opencode.json .continue .windsurf .aider.conf.yml .roo .kiro .qwen .amazonq .crush.json crush.json
	.envrc .env .mise .mise.toml mise.toml .mise.local.toml mise.local.toml .config/mise .config/mise.toml .gdbinit .lldbinit .pylintrc .ripgreprc .tmux.conf .Rprofile .Renviron .ghci .irbrc .pryrc .bazelrc
	package.json .npmrc .yarn .yarnrc .yarnrc.yml .pnpmfile.cjs .pnp.cjs .cargo rust-toolchain rust-toolchain.toml .bundle .mvn .venv/bin venv/bin pyvenv.cfg node_modules/.bin
	conftest.py sitecustomize.py usercustomize.py *.pth
	.profile .bashrc .bash_profile .bash_login .bash_logout .bash_aliases .zshrc .zshenv .zprofile .zlogin .zlogout
	.ssh .netrc .local/bin .config/fish .config/autostart .config/systemd .config/environment.d`)

// gitData are the names in a repository that hold data alone. All others are trusted, because git(1) reads
// configuration, hooks, and commands of an unfinished rebase from them.
var gitData = set(`objects refs logs reftable packed-refs index shallow description lfs gc.log
	HEAD FETCH_HEAD ORIG_HEAD MERGE_HEAD CHERRY_PICK_HEAD REVERT_HEAD AUTO_MERGE COMMIT_EDITMSG MERGE_MSG MERGE_MODE MERGE_RR SQUASH_MSG TAG_EDITMSG
	info/exclude info/refs info/sparse-checkout`)

// set returns a function that reports whether a folded name is among the words. The function builds its table on the
// first call.
func set(words string) func(name string) bool {
	table := sync.OnceValue(func() map[string]bool {
		m := map[string]bool{}
		for word := range strings.FieldsSeq(words) {
			m[fold(word)] = true
			if dir, _, ok := strings.Cut(word, "/"); ok {
				m[fold(dir)+"/"] = true // for a link to the directory
			}
		}
		return m
	})
	return func(name string) bool { return table()[name] }
}

// Type is the type of a file.
type Type int

// Types of files.
const (
	File Type = iota
	Directory
	Link
)

// Trusted reports whether a program on the host executes or trusts the file at a path.
func Trusted(name string, is Type) bool {
	parts := strings.Split(name, "/")
	inGit := false
	for i, part := range parts {
		last := i == len(parts)-1
		if isGit(fold(part)) {
			inGit = true
			if last && fold(part) != ".git" && fold(part) != "git~1" {
				return false // a bare repository
			}
			if inGitDir(parts[i+1:], is) {
				return true
			}
			continue
		}
		part = fold(part)
		if names(part) || names("*"+path.Ext(part)) || i > 0 && names(fold(parts[i-1])+"/"+part) {
			return true
		}
		if last && is == Link && names(part+"/") { // which may lead to a directory with such a name in it
			return true
		}
		// git(1) takes a directory with HEAD, objects and refs for a repository, and reads its config.
		if last && !inGit && parts[i] == "HEAD" {
			return true
		}
	}
	return false
}

// Top returns the prefix that [Trusted] needs before the paths in a directory: the directory's name if it is trusted
// itself, or its path in a repository; "" otherwise. repository is true if the directory is a repository.
func Top(dir string, repository bool) string {
	if repository {
		return ".git"
	}
	parts := strings.Split(dir, "/")
	for i, part := range parts {
		if fold(part) == ".git" {
			return path.Join(parts[i:]...)
		}
	}
	base, parent := path.Base(dir), path.Base(path.Dir(dir))
	switch {
	case names(fold(base)):
		return base
	case names(fold(parent) + "/" + fold(base)):
		return path.Join(parent, base)
	}
	return ""
}

// isGit reports whether a name belongs to a repository: .git, its short name on FAT, or a bare NAME.git.
func isGit(name string) bool { return strings.HasSuffix(name, ".git") || name == "git~1" }

// inGitDir reports whether a path in a repository is trusted. The repository itself is not, unless it is a
// file or a link, which names another one. Every link is: git(1) follows it when it writes FETCH_HEAD or a
// log, and so would write names of branches, which the command chooses, to any file.
func inGitDir(parts []string, is Type) bool {
	isDir := is == Directory
	if len(parts) == 0 {
		return !isDir
	}
	if is == Link {
		return true
	}
	first := fold(parts[0])
	switch {
	case gitData(first):
		return false
	case len(parts) == 1:
		return first != "info" && first != "worktrees" || !isDir
	case first == "worktrees": // of each linked working tree
		return len(parts) > 2 && inGitDir(parts[2:], is) || len(parts) == 2 && !isDir
	}
	return !gitData(first + "/" + fold(parts[1]))
}

// fold maps names that a file system may treat as equal to a single name: those that differ in case, in characters
// that Unicode ignores, or in dots and spaces at the end.
func fold(name string) string {
	name = strings.Map(func(r rune) rune {
		if unicode.In(r, unicode.Cf, unicode.Other_Default_Ignorable_Code_Point, unicode.Variation_Selector) {
			return -1
		}
		return unicode.ToLower(unicode.ToUpper(r))
	}, name)
	return strings.TrimRight(name, ". ")
}
