package room

import (
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/hostfiles"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/values"
)

// linkPath adds the symbolic links of a path, if it leads to a visible directory of the host: with /home -> /var/home,
// for example, a program may use either path.
func (p *Plan) linkPath(name string) {
	const maxLinks = 40
	v := view(slices.Clip(p.ops))
	done, todo := "/", strings.Split(name, "/")
	for n := 0; len(todo) > 0; todo = todo[1:] {
		if todo[0] == ".." {
			done = path.Dir(done)
			continue
		}
		next := path.Join(done, todo[0])
		target, err := os.Readlink(next)
		if err != nil {
			done = next
			continue
		}
		if n++; n > maxLinks {
			return
		}
		if src, dst := v.linkBelow(target, next, todo[1:]); dst != "" {
			v = append(v, op{kind: opSymlink, src: src, dst: dst})
		}
		if path.IsAbs(target) {
			done = "/"
		}
		todo = append([]string{""}, append(strings.Split(target, "/"), todo[1:]...)...)
	}
	if m := v.mountOf(done); m.src != "" && m.kind != opRoot {
		p.ops = v
	}
}

// linkBelow returns the link that leads from dst to target, a link's target on the host. If bwrap creates dst, such as
// /home as the parent of the sandbox's home, the link is below it, on the way to rest. It returns no dst if something
// else is there.
func (v view) linkBelow(target, dst string, rest []string) (src, at string) {
	src, at = target, dst
	if v.own(at) && !path.IsAbs(src) {
		src = path.Dir(dst) + "/" + target
	}
	for ; v.own(at); rest = rest[1:] {
		if _, linked := v.link(at); linked || len(rest) == 0 || rest[0] == ".." {
			return "", ""
		}
		src, at = src+"/"+rest[0], path.Join(at, rest[0])
	}
	parent := path.Dir(at)
	switch m := v.mountOf(at); {
	case m.kind == opRoot:
		var st unix.Stat_t
		if !v.own(parent) || v.merged(parent) && unix.Lstat(v.hostPath(at), &st) != unix.ENOENT {
			return "", ""
		}
	case m.src != "", m.kind == opProc, m.kind == opDev:
		return "", ""
	}
	return src, at
}

// sameDirectory reports whether two paths lead to the same directory; a relative path starts at the current directory.
func sameDirectory(a, b string) bool {
	var x, y unix.Stat_t
	return path.IsAbs(a) && unix.Stat(a, &x) == nil && unix.Stat(b, &y) == nil && x.Dev == y.Dev && x.Ino == y.Ino
}

// searchable reports whether the mode of a directory lets an identity without supplementary groups enter it.
func searchable(st fs.FileInfo, cred *proc.Cred) bool {
	sys, ok := st.Sys().(*syscall.Stat_t)
	switch perm := st.Mode().Perm(); {
	case ok && sys.Uid == cred.UID:
		return perm&0o100 != 0
	case ok && sys.Gid == cred.GID:
		return perm&0o010 != 0
	default:
		return perm&0o001 != 0
	}
}

// currentDirectory adds a mount of the caller's current directory, or of CwdRoot above it, at the same path, and
// returns the payload's working directory. Unless the policy requests it, nothing is added if a mount shows the
// directory already. It is an error if the directory contains too much, or if the sandbox has its own directory
// there.
func currentDirectory(p *Policy, home string) (workdir string, err error) {
	asked := p.Cwd != "" || p.CwdRoot != ""
	switch {
	case p.Cwd == CwdNone && p.Workdir == "":
		return Home, nil
	case p.Cwd == CwdNone, p.Workdir != "" && !asked:
		return p.Workdir, nil
	}
	var st unix.Stat_t
	dir, err := unix.Getwd()
	if err == nil {
		err = unix.Stat(dir, &st)
	}
	if err == nil && unix.Access(".", unix.X_OK) == unix.EACCES {
		return "", cwdError("", "working directory %q cannot be entered by uid %d", dir, os.Geteuid())
	}
	if err != nil || !path.IsAbs(dir) {
		return "", cwdError("", "the current directory cannot be used: it was removed, or cannot be reached")
	}
	if workdir = p.Workdir; workdir == "" {
		workdir = dir
	}
	what, shown := "the current directory", dir
	if p.CwdRoot != "" {
		what = "--cwd-root"
		if shown, err = aboveDirectory(p.CwdRoot, dir); err != nil {
			return "", err
		}
	}
	for _, m := range p.Mounts {
		if values.Within(shown, m.Dest) && !asked && m.Dest != "/" {
			return workdir, nil
		}
	}
	for _, own := range []string{"/proc", "/dev", "/sys", "/run", "/var/run", "/etc"} {
		if values.Within(shown, own) {
			return "", cwdError("", "%s %q is not shown by default", what, shown)
		}
	}
	if p.rootMount() == nil && OfSystem(shown) {
		switch p.Cwd {
		case CwdOverlay:
			return "", cwdError("--overlay DIR shows a writable view anyway", "%s %q belongs to the system, which is read-only in a sandbox", what, shown)
		case CwdReadWrite:
			return "", cwdError("--bind DIR makes it writable anyway", "%s %q belongs to the system, which is read-only in a sandbox", what, shown)
		}
		return workdir, nil // visible anyway
	}
	switch shown {
	case "/tmp", "/var/tmp":
		return "", cwdError("--ro-bind . shows this one", "%s is %s, and the sandbox has its own", what, shown)
	case "/":
		return "", cwdError("--ro-bind NAME shows a file or a directory", "%s is /, which contains the whole host", what)
	}
	if h := hostfiles.HomeWithin(shown, home); h != "" {
		const some = "--ro-bind NAME shows a file or a directory of it"
		if h == shown {
			return "", cwdError(some, "%s %q is a home directory, with its keys and tokens", what, shown)
		}
		return "", cwdError(some, "%s %q holds home directories, such as %q", what, shown, h)
	}
	// The parent directories may have been renamed since the kernel reported the path, so open the directory relative to
	// the current one.
	up := strings.Repeat("../", depth(dir)-depth(shown))
	m := Mount{Kind: ReadOnly, Source: shown, Here: path.Join(".", up), Dest: shown}
	switch p.Cwd {
	case CwdReadWrite:
		m.Kind, m.Git = ReadWrite, p.Git
	case CwdOverlay:
		m.Kind, m.Upper = Overlaid, p.CwdUpper
	}
	for _, other := range p.Mounts {
		if other.Dest == m.Dest {
			return "", &result.Error{Code: "usage", Message: fmt.Sprintf("%s %q has a mount of its own", what, shown), Hint: "leave out -w or --cwd, or that mount"}
		}
	}
	p.Mounts = append(p.Mounts, m)
	return workdir, nil
}

// cwdError is the error for a directory that cannot be shown. Its hint begins with the remedy that always works.
func cwdError(hint, format string, args ...any) error {
	e := &result.Error{Code: "workdir", Message: fmt.Sprintf(format, args...), Hint: "--cwd none starts in an empty directory"}
	if hint != "" {
		e.Hint += "; " + hint
	}
	return e
}

// aboveDirectory returns the real path of root, which may be relative to dir and has to
// be at or above it.
func aboveDirectory(root, dir string) (string, error) {
	if !path.IsAbs(root) {
		root = path.Join(dir, root)
	}
	real, err := filepath.EvalSymlinks(root)
	if err == nil && !values.Within(dir, real) {
		err = fmt.Errorf("the current directory %q is not below it", dir)
	}
	if err != nil {
		return "", &result.Error{Code: "usage", Message: fmt.Sprintf("--cwd-root %q: %v", root, err), Hint: "name a directory above the current one, such as --cwd-root ..", Err: err}
	}
	return real, nil
}

// checkWorkdir checks, as far as possible from outside, that the payload can enter its working directory.
func checkWorkdir(v view, dir string, cred *proc.Cred) error {
	e := &result.Error{Code: "workdir", Hint: "--ro-bind or --bind the directory, or name an existing one with --workdir"}
	host, err := v.resolve(dir)
	opened := v.opened(host)
	switch st, serr := os.Stat(opened); {
	case err != nil && v.layered(dir):
		return nil // the command's chdir reports a missing one
	case err != nil:
		e.Message = fmt.Sprintf("working directory %q does not exist in the sandbox", dir)
		e.Err = err
		if now, wdErr := unix.Getwd(); wdErr == nil && !v.rooted() && (sameDirectory(dir, ".") || values.Within(dir, now)) {
			e.Hint = "--cwd ro shows the current directory"
		}
	case host == "" && !v.isCopy(dir):
		return nil // the sandbox's own
	case host == "":
		e.Message = fmt.Sprintf("working directory %q is not a directory", dir)
	case serr != nil:
		e.Message, e.Err = fmt.Sprintf("working directory %q: %v", dir, serr), serr
	case st.Mode()&fs.ModeDir == 0:
		e.Message = fmt.Sprintf("working directory %q is not a directory", dir)
	case cred != nil && !searchable(st, v.identity(host, cred)):
		e.Message = fmt.Sprintf("working directory %q cannot be entered by uid %d, the user of root's sandboxes", dir, cred.UID)
		e.Hint = "-w, or --bind for another directory, gives it the owner's rights, including write access; --cwd none starts in an empty directory"
	case cred == nil && unix.Access(opened, unix.X_OK) == unix.EACCES:
		e.Message, e.Hint = fmt.Sprintf("working directory %q cannot be entered by uid %d", dir, os.Geteuid()), "chmod it; or --cwd none starts in an empty directory"
	default:
		return nil
	}
	return e
}
