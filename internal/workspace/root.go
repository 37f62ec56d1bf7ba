package workspace

import (
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/safeopen"
	"github.com/sbxrun/sbxrun/internal/tree"
)

// Root resolves paths, named by a user, of files to copy.
type Root struct {
	fd   int        // of a sandbox's root; -1 for the host's
	user *proc.Cred // nil for this process's own
	host func(name string, flags int) (int, error)
}

// Inside returns a sandbox's root from its descriptor, which it takes over. Paths are resolved as in the sandbox:
// symbolic links are followed, but never lead out of it (openat2(2), RESOLVE_IN_ROOT). Magic links of /proc,
// which could, are not followed. The caller closes it.
func Inside(root int, user *proc.Cred) (*Root, error) {
	if err := proc.AsUser(user, func() error { return nil }); err != nil {
		unix.Close(root)
		return nil, err
	}
	return &Root{fd: root, user: user}, nil
}

// open opens a path as the user.
func (r *Root) open(name string, flags int, resolve uint64) (fd int, err error) {
	err = proc.AsUser(r.user, func() (err error) {
		if r.fd < 0 {
			fd, err = r.host(name, flags)
		} else {
			fd, err = safeopen.InRoot(r.fd, name, flags, resolve)
		}
		return err
	})
	return fd, err
}

// Outside returns the host's root; open resolves its paths.
func Outside(open func(name string, flags int) (int, error)) *Root { return &Root{fd: -1, host: open} }

// Close closes the root. Its sources and directories must no longer be used.
func (r *Root) Close() {
	if r.fd >= 0 {
		unix.Close(r.fd)
	}
}

// Source opens a file or directory for copying.
func (r *Root) Source(name string) (*Source, error) {
	fd, err := r.open(name, reading, 0)
	if err != nil {
		return nil, about(name, err)
	}
	s := &Source{Name: name, dir: &Dir{user: r.user}, fd: fd}
	err = unix.Fstat(fd, &s.st)
	if kind := tree.Type(&s.st); err == nil && kind != unix.S_IFREG && kind != unix.S_IFDIR {
		err = usage("%q is neither a file nor a directory", name)
	}
	if err != nil {
		unix.Close(fd)
		return nil, about(name, err)
	}
	return s, nil
}

// Dir opens a destination directory.
func (r *Root) Dir(name string) (*Dir, error) { return r.dir(name, 0) }

func (r *Root) dir(name string, resolve uint64) (*Dir, error) {
	fd, err := r.open(name, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, resolve)
	if err != nil {
		return nil, about(name, err)
	}
	return &Dir{user: r.user, far: true, file: os.NewFile(uintptr(fd), name)}, nil
}

// Target opens the directory to copy a source into, and returns it with the name of the copy, as in cp(1): below
// an existing directory the source's own name, otherwise the last part of the path. The contents of a
// source called "." or ".." go into the directory itself; then the name is ".".
func (r *Root) Target(name string, source *Source, several bool) (*Dir, string, error) {
	if dir, err := r.Dir(name); err == nil {
		return dir, source.Base(), nil
	} else if several {
		return nil, "", err
	}
	parent, base := path.Split(strings.TrimRight(name, "/"))
	if parent == "" {
		parent = "."
	}
	dir, err := r.Dir(parent)
	if err != nil {
		return nil, "", err
	}
	if strings.HasSuffix(name, "/") && !source.IsDir() {
		dir.Close()
		return nil, "", usage("%q is not a directory", name)
	}
	if r.special(name, dir, base) {
		dir.Close()
		return nil, "", taken(name)
	}
	return dir, base, nil
}

// special reports whether a path leads to a device, a FIFO or a socket or, on the host, to an open file, as
// the link /dev/stdout does. A copy does not replace such a link.
func (r *Root) special(name string, dir *Dir, base string) bool {
	fd, err := r.open(name, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return false // such as a dangling link
	}
	var st unix.Stat_t
	err = unix.Fstat(fd, &st)
	unix.Close(fd)
	if err != nil || special(&st) || r.fd >= 0 {
		return err == nil && special(&st)
	}
	fd, err = unix.Openat2(dir.fd(), base, &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_MAGICLINKS})
	if err == nil {
		unix.Close(fd)
	}
	return err == unix.ELOOP
}

// Base returns the last part of a source's name, or "." if that is not a name.
func (s *Source) Base() string {
	switch base := path.Base(s.Name); base {
	case "..", "/":
		return "."
	default:
		return base
	}
}
