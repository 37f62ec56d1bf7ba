// Package workspace reads and writes files of a sandbox from outside, while hostile commands may be running there.
//
// Nothing there is trusted. The kernel resolves every path beneath the directory, in one step and without following
// symbolic links (openat2(2), RESOLVE_BENEATH and RESOLVE_NO_SYMLINKS), so there is no race between check and use.
// Only regular files are read and written, as checked with fstat(2) after opening; a FIFO does not block
// (O_NONBLOCK). New files belong to the sandbox's user, and are created with that user's rights (see [proc.AsUser]).
package workspace

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/safeopen"
	"github.com/sbxrun/sbxrun/internal/tree"
)

// Dir is a directory of a sandbox. Its methods are safe for concurrent use.
type Dir struct {
	file *os.File
	user *proc.Cred // nil for this process's own
	far  bool       // whether names may be as deep as the trees of a Transfer
}

// as calls f as the sandbox's user.
func (d *Dir) as(f func() error) error { return proc.AsUser(d.user, f) }

func (d *Dir) fd() int { return proc.Descriptor(d.file) }

// Name returns the path by which it was opened.
func (d *Dir) Name() string { return d.file.Name() }

// Open opens the directory with the absolute path name below root, a descriptor of the sandbox's root
// directory, which it takes over.
func Open(root int, name string, user *proc.Cred) (*Dir, error) {
	defer unix.Close(root)
	d := &Dir{user: user}
	err := proc.AsUser(user, func() error {
		fd, err := safeopen.Beneath(root, strings.TrimPrefix(path.Clean(name), "/"), unix.O_PATH|unix.O_DIRECTORY, 0, 0)
		if err == nil {
			d.file = os.NewFile(uintptr(fd), name)
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open the sandbox's %s: %w", name, err)
	}
	return d, nil
}

func (d *Dir) Close() error { return d.file.Close() }

// open opens a path beneath the directory as the sandbox's user.
func (d *Dir) open(name string, flags int) (f *os.File, err error) {
	err = d.as(func() error {
		fd, err := tree.Open(d.fd(), name, flags)
		if err == nil {
			f = os.NewFile(uintptr(fd), name)
		}
		return err
	})
	if err != nil {
		return nil, explain(name, err)
	}
	return f, nil
}

// parent opens the parent directory of a name, and returns the last part of the name.
func (d *Dir) parent(name string) (*os.File, string, error) {
	dir, base := path.Split(name)
	f, err := d.open(nonEmpty(dir), unix.O_PATH|unix.O_DIRECTORY)
	return f, base, err
}

// Mkdir creates a directory and its parents if they do not exist.
func (d *Dir) Mkdir(name string) error { return d.mkdir(name, 0o755, new(math.MaxInt)) }

// mkdir is Mkdir with a mode. It counts down left for each directory it creates, and fails below 0.
func (d *Dir) mkdir(name string, mode uint32, left *int) error {
	if name == "." {
		return nil
	}
	f, err := d.open(name, unix.O_PATH|unix.O_DIRECTORY)
	if err == nil {
		return f.Close()
	}
	if result.CodeOf(err) != "no-such-file" {
		return err
	}
	dir, base := path.Split(name)
	if err := d.mkdir(nonEmpty(dir), 0o755, left); err != nil {
		return err
	}
	if *left--; *left < 0 {
		return ErrFull
	}
	parent, err := d.open(nonEmpty(dir), unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer parent.Close()
	err = d.as(func() error { return unix.Mkdirat(proc.Descriptor(parent), base, mode) })
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return explain(name, err)
	}
	return nil
}

// ErrFull is the error for too many entries.
var ErrFull = &result.Error{Code: "quota-disk", Message: "the workspace has too many files and directories", Hint: "remove some of them"}

// Reserve creates the parent directories of a name. It is an error if these and the name itself are more new
// entries than left.
func (d *Dir) Reserve(name string, left int) error {
	name, err := d.clean(name)
	if err != nil {
		return err
	}
	f, err := d.open(name, unix.O_PATH)
	if err == nil {
		return f.Close()
	}
	if result.CodeOf(err) != "no-such-file" {
		return err
	}
	if left--; left < 0 {
		return ErrFull
	}
	return d.mkdir(nonEmpty(path.Dir(name)), 0o755, &left)
}

// Link creates a symbolic link or, if hard is set, a hard link to a file beneath the directory. It replaces an
// existing file or link.
func (d *Dir) Link(name, target string, hard bool) error {
	if err := d.Mkdir(nonEmpty(path.Dir(name))); err != nil {
		return err
	}
	parent, base, err := d.parent(name)
	if err != nil {
		return err
	}
	defer parent.Close()
	at := &directory{side: d, fd: proc.Descriptor(parent)}
	if !hard {
		if err := at.link(target, nil, base); err != nil {
			return explain(name, err)
		}
		return nil
	}
	if target, err = d.clean(target); err != nil {
		return err
	}
	from, old, err := d.parent(target)
	if err != nil {
		return err
	}
	defer from.Close()
	err = d.as(func() error {
		temporary := tree.Hidden()
		return at.rename(temporary, base, unix.Linkat(proc.Descriptor(from), old, at.fd, temporary, 0))
	})
	if err != nil {
		return explain(name, err)
	}
	return nil
}

// Fifo creates a FIFO that every user who can reach it may open, and returns an O_PATH descriptor of it.
func (d *Dir) Fifo(name string) (*os.File, error) {
	err := d.as(func() error {
		if err := unix.Mknodat(d.fd(), name, unix.S_IFIFO|0o600, 0); err != nil {
			return err
		}
		return unix.Fchmodat(d.fd(), name, 0o666, 0)
	})
	if err != nil {
		return nil, explain(name, err)
	}
	return d.open(name, unix.O_PATH)
}

// Put writes a file and creates its parent directories. It replaces a file of that name and keeps its permissions. It
// is an error if r has more than size bytes. After an error the old file is still there.
func (d *Dir) Put(name string, r io.Reader, size int64, mode fs.FileMode) (written int64, err error) {
	if name, err = d.clean(name); err != nil {
		return 0, err
	}
	if name == "." {
		return 0, usage("the path does not name a file")
	}
	if err := d.Mkdir(nonEmpty(path.Dir(name))); err != nil {
		return 0, err
	}
	parent, base, err := d.parent(name)
	if err != nil {
		return 0, err
	}
	defer parent.Close()
	at := &directory{side: d, fd: proc.Descriptor(parent)}
	var old *unix.Stat_t
	var out int
	var temporary string
	err = d.as(func() (err error) {
		if old, err = at.regular(base); err == nil {
			out, temporary, err = tree.Begin(at.fd, uint32(mode.Perm()|0o600))
		}
		return err
	})
	if err != nil {
		return 0, about(name, err)
	}
	f := os.NewFile(uintptr(out), name)
	defer f.Close()
	// Not with f's own ReadFrom, so that read and write errors can be told apart.
	written, err = io.Copy(writer{f, name}, io.LimitReader(r, size))
	if err == nil {
		if n, _ := io.ReadFull(r, make([]byte, 1)); n > 0 {
			err = &result.Error{Code: "too-large", Message: fmt.Sprintf("%q is larger than the remaining %d bytes", name, size)}
		}
	}
	end := d.as(func() error {
		if err == nil && old != nil {
			err = unix.Fchmod(out, old.Mode&0o777)
		}
		return at.finish(out, temporary, base, err)
	})
	if err == nil {
		err = about(name, end)
	}
	return written, err
}

// writer writes to a file of the sandbox.
type writer struct {
	f    *os.File
	name string
}

func (w writer) Write(b []byte) (int, error) {
	n, err := w.f.Write(b)
	if err != nil {
		err = explain(w.name, err)
	}
	return n, err
}

// Get opens a file for reading.
func (d *Dir) Get(name string) (*os.File, fs.FileInfo, error) {
	name, err := d.clean(name)
	if err != nil {
		return nil, nil, err
	}
	f, err := d.open(name, unix.O_RDONLY)
	if err != nil {
		return nil, nil, err
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = usage("%q is not a regular file", name)
	}
	if err != nil {
		f.Close()
		return nil, nil, err
	}
	return f, st, nil
}

// Remove removes a file, a link, or an empty directory.
func (d *Dir) Remove(name string) error {
	name, err := d.clean(name)
	if err != nil {
		return err
	}
	if name == "." {
		return usage("cannot remove the workspace itself")
	}
	parent, base, err := d.parent(name)
	if err != nil {
		return err
	}
	defer parent.Close()
	return about(name, d.as(func() error {
		if err := noMount(proc.Descriptor(parent), base); err != nil {
			return err
		}
		err := unix.Unlinkat(proc.Descriptor(parent), base, 0)
		if err == unix.EISDIR {
			err = unix.Unlinkat(proc.Descriptor(parent), base, unix.AT_REMOVEDIR)
		}
		return err
	}))
}
