package room

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/hostfiles"
	"github.com/sbxrun/sbxrun/internal/values"
)

// protect adds the mounts that keep paths in writable binds read-only: Policy.Protect, and the hooks
// and the configuration of git repositories, which can name programs that git executes on the host.
//
// Only a mount point itself cannot be renamed or removed, so each directory between the bind and
// the path is bound over itself.
func (p *Policy) protect(workdir string) error {
	binds := slices.Clone(p.Mounts)
	for _, dest := range p.Protect {
		if err := p.protectPath(binds, dest); err != nil {
			return err
		}
	}
	for _, m := range binds {
		if m.Git && m.Kind == ReadWrite {
			if err := p.protectGit(&m, workdir); err != nil {
				return err
			}
		}
	}
	return nil
}

// protectPath protects a path that the user named.
func (p *Policy) protectPath(binds []Mount, dest string) error {
	var in *Mount // the innermost one
	for i := range binds {
		if m := &binds[i]; values.Within(dest, m.Dest) && (in == nil || len(m.Dest) > len(in.Dest)) {
			in = m
		}
	}
	if in == nil || in.Kind != ReadWrite || in.Dest == dest {
		return &result.Error{Code: "usage", Message: fmt.Sprintf("--protect %q: it is not below a directory of the host that the command may write to", dest),
			Hint: "name a path below the directory of -w or --bind"}
	}
	rel := strings.TrimPrefix(dest, in.Dest+"/")
	switch mode, err := in.below(rel).lstat(); {
	case err != nil:
		return protectError(in.below(rel), err.Error(), "create it: only an existing file or directory can be mounted read-only")
	case mode == unix.S_IFLNK:
		return protectError(in.below(rel), "it is a symbolic link", "name the path that it leads to")
	}
	p.readOnly(in, rel)
	return nil
}

// gitConfig are the files of a git directory that name programs to execute.
var gitConfig = []string{"config", "config.worktree"}

// protectGit protects the repository at the top of a bind, and those between it and the working
// directory. A bind of a git directory itself counts, too.
func (p *Policy) protectGit(m *Mount, workdir string) error {
	dirs := []string{"."}
	for dir := workdir; dir != m.Dest && values.Within(dir, m.Dest); dir = path.Dir(dir) {
		dirs = append(dirs, strings.TrimPrefix(dir, m.Dest+"/"))
	}
	for _, dir := range dirs {
		git := path.Join(dir, ".git")
		switch mode, err := m.below(git).lstat(); {
		case err == nil && mode == unix.S_IFLNK:
			return isLink(m.below(git))
		case err == nil && mode == unix.S_IFREG: // it names the directory
			p.readOnly(m, git)
			if err := p.protectNamed(m, git); err != nil {
				return err
			}
			continue
		case err != nil && dir == "." && m.isGit():
			git = "."
		case err != nil:
			continue
		}
		if err := p.protectGitDir(m, git); err != nil {
			return err
		}
	}
	return nil
}

// protectGitDir protects the hooks and the configuration in a git directory.
func (p *Policy) protectGitDir(m *Mount, git string) error {
	for _, name := range append(gitConfig, "hooks") {
		name = path.Join(git, name)
		mode, err := m.below(name).lstat()
		switch {
		case err == nil && mode == unix.S_IFLNK:
			return isLink(m.below(name))
		case err == nil:
			p.readOnly(m, name)
		case path.Base(name) == "config.worktree" && !m.readsWorktreeConfig(git):
		case p.parents(m, name): // the command must not create it; the mount point is an empty file or directory
			missing := Mount{Kind: Empty, Dest: path.Join(m.Dest, name)}
			if path.Base(name) == "hooks" {
				missing.Kind, missing.Size = Tmpfs, 4096
			}
			p.Mounts = append(p.Mounts, missing)
		}
	}
	return nil
}

// protectNamed reads a file .git, which contains the path of a git directory, and protects that directory if
// it is below m. In a linked working tree, the file commondir leads to the configuration.
func (p *Policy) protectNamed(m *Mount, git string) error {
	dir, ok := m.named(path.Dir(git), git, "gitdir: ")
	if !ok || !m.has(path.Join(dir, "HEAD")) {
		return nil
	}
	file := path.Join(dir, "commondir")
	if mode, err := m.below(file).lstat(); err != nil {
		return p.protectGitDir(m, dir)
	} else if mode == unix.S_IFLNK {
		return isLink(m.below(file))
	}
	p.readOnly(m, file)
	if name := path.Join(dir, "config.worktree"); m.has(name) {
		p.readOnly(m, name)
	}
	common, ok := m.named(dir, file, "")
	if !ok || !m.has(path.Join(common, "objects")) {
		return nil
	}
	return p.protectGitDir(m, common)
}

// named reads a path from a file of git(1), see [hostfiles.GitFile]. The result is relative to m; not ok if it is not below that.
func (m *Mount) named(dir, file, prefix string) (name string, ok bool) {
	at := m.below(file)
	name, ok = hostfiles.GitFile(cmp.Or(at.Here, at.Source), path.Join(m.Source, dir), prefix)
	if !ok || name == m.Source || !values.Within(name, m.Source) {
		return "", false
	}
	return strings.TrimPrefix(name, strings.TrimSuffix(m.Source, "/")+"/"), true
}

// has reports whether there is something at a path below m.
func (m *Mount) has(name string) bool {
	_, err := m.below(name).lstat()
	return err == nil
}

// readsWorktreeConfig reports whether git reads config.worktree in this git directory:
// its config sets extensions.worktreeConfig, perhaps to false. Without a config that can be read, git reads neither.
func (m *Mount) readsWorktreeConfig(git string) bool {
	const most = 1 << 20
	config := m.below(path.Join(git, "config"))
	fd, err := unix.Open(cmp.Or(config.Here, config.Source), unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	f := os.NewFile(uintptr(fd), config.Source)
	defer f.Close()
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		return false
	}
	text, err := io.ReadAll(io.LimitReader(f, most))
	return err != nil || len(text) == most || bytes.Contains(bytes.ToLower(text), []byte("worktreeconfig"))
}

// readOnly mounts a path of a bind read-only, unless there is a mount already.
func (p *Policy) readOnly(m *Mount, name string) {
	if p.parents(m, name) {
		ro := m.below(name)
		ro.Kind, ro.Owned = ReadOnly, true
		p.Mounts = append(p.Mounts, ro)
	}
}

// parents binds each directory between a bind and a path in it over itself. It reports whether the
// path is still to be mounted: it may have a mount of the user's, or lie in a read-only one.
func (p *Policy) parents(m *Mount, name string) bool {
	for i, c := range name + "/" {
		if c != '/' {
			continue
		}
		at := m.below(name[:i])
		if n := slices.IndexFunc(p.Mounts, func(other Mount) bool { return other.Dest == at.Dest }); n >= 0 {
			if i == len(name) || p.Mounts[n].Kind != ReadWrite {
				return false
			}
		} else if i < len(name) {
			p.Mounts = append(p.Mounts, at)
		}
	}
	return true
}

// below returns a bind of a path in a bind, at the same place.
func (m *Mount) below(name string) Mount {
	b := Mount{Kind: m.Kind, Source: path.Join(m.Source, name), Dest: path.Join(m.Dest, name), In: m.Dest}
	if m.Here != "" {
		b.Here = path.Join(m.Here, name)
	}
	return b
}

// lstat returns the type of the source, as in stat(2), without following a link.
func (m Mount) lstat() (mode uint32, err error) {
	var st unix.Stat_t
	err = unix.Lstat(cmp.Or(m.Here, m.Source), &st)
	return st.Mode & unix.S_IFMT, err
}

// isGit reports whether the source is a git directory.
func (m *Mount) isGit() bool {
	return m.has("HEAD") && m.has("objects") && m.has("refs")
}

func protectError(m Mount, cause, hint string) error {
	return &result.Error{Code: "protect", Message: fmt.Sprintf("cannot protect %q: %s", m.Source, cause), Hint: hint}
}

// isLink is the error for a link in a git directory, which the command could replace.
func isLink(m Mount) error {
	return protectError(m, "it is a symbolic link", "--protect none leaves git hooks and configuration writable")
}
