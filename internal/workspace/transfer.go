package workspace

import (
	"errors"
	"fmt"
	"path"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

// Transfer copies files, directories and symbolic links between a sandbox and the host, in
// either direction. Everything is opened component by component, by descriptors, and no link
// is followed on either side: what commands do meanwhile decides which of their own files are
// read, and nothing else.
//
// Devices, FIFOs and sockets are left out, and so are setuid, setgid and sticky bits, extended
// attributes and owners. Names of one file become files of their own. A file is complete when it
// gets its name, or it gets none.
type Transfer struct {
	Max Quota
	// Except tells which directory is not copied: the one that is copied into.
	except map[[2]uint64]bool

	bytes, entries atomic.Int64
	LeftOut        LeftOut
}

// LeftOut is what was not copied, although it is there.
type LeftOut struct {
	Special int // devices, FIFOs and sockets, and what is below /proc
	Denied  int // what the sandbox's user may not read, and directories too deep
	First   error
}

func (l *LeftOut) add(count *int, err error) {
	*count++
	if l.First == nil {
		l.First = err
	}
}

// Bounds of a tree. Each level takes two descriptors.
const (
	maxTree    = 256
	maxEntries = 1 << 20
)

// Done returns how many bytes and entries were copied so far. Any goroutine may ask.
func (t *Transfer) Done() (bytes, entries int64) { return t.bytes.Load(), t.entries.Load() }

// sink is where a Transfer copies to: a directory, or an archive.
type sink interface {
	// file copies st.Size bytes of in at most, to a file of this name. It adds to moved as it goes.
	file(in int, st *unix.Stat_t, name string, moved *atomic.Int64) error
	link(target string, st *unix.Stat_t, name string) error
	// dir returns the sink for what is in the directory; the caller closes it.
	dir(st *unix.Stat_t, name string) (sink, error)
	close()
}

// Copy copies what source is, to the name in the directory.
func (t *Transfer) Copy(source *Source, to *Dir, name string) error {
	var st unix.Stat_t
	if err := unix.Fstat(to.fd(), &st); err != nil {
		return explain(name, err)
	}
	return t.into(source, &tree{side: to, fd: to.fd()}, name)
}

func (t *Transfer) into(source *Source, to sink, name string) error {
	if t.Max.Entries == 0 {
		t.Max.Entries = maxEntries
	}
	return t.opened(source.dir, source.fd, &source.st, to, name, path.Clean(source.Name), 0)
}

// opened copies what in is.
func (t *Transfer) opened(from *Dir, in int, st *unix.Stat_t, to sink, name, shown string, depth int) error {
	if t.entries.Add(1) > int64(t.Max.Entries) {
		return tooLarge(fmt.Sprintf("more than %d files and directories", t.Max.Entries))
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		if t.Max.Bytes > 0 && st.Size > t.Max.Bytes-t.bytes.Load() {
			return tooLarge(fmt.Sprintf("%q and what came before are more than %d bytes", shown, t.Max.Bytes))
		}
		return about(shown, to.file(in, st, name, &t.bytes))
	case unix.S_IFDIR:
		return t.directory(from, in, st, to, name, shown, depth)
	}
	t.LeftOut.add(&t.LeftOut.Special, usage("%q is neither a file nor a directory", shown))
	return nil
}

// about makes an error that says which file it is about.
func about(shown string, err error) error {
	if err == nil || errors.As(err, new(*result.Error)) {
		return err
	}
	return explain(shown, err)
}

// virtual reports whether a file system's files are made as they are read, some without an end.
func virtual(kind int64) bool {
	switch kind {
	case unix.PROC_SUPER_MAGIC, unix.SYSFS_MAGIC, unix.CGROUP_SUPER_MAGIC, unix.CGROUP2_SUPER_MAGIC, unix.DEVPTS_SUPER_MAGIC:
		return true
	}
	return false
}

func (t *Transfer) directory(from *Dir, in int, st *unix.Stat_t, to sink, name, shown string, depth int) error {
	var fs unix.Statfs_t
	switch err := unix.Fstatfs(in, &fs); {
	case err != nil:
		return explain(shown, err)
	case virtual(int64(fs.Type)), t.except[[2]uint64{st.Dev, st.Ino}]:
		t.LeftOut.add(&t.LeftOut.Special, usage("%q is not copied", shown))
		return nil
	case depth == maxTree:
		t.LeftOut.add(&t.LeftOut.Denied, usage("%.60q… is more than %d levels deep", shown, maxTree))
		return nil
	}
	below, err := to.dir(st, name)
	if err != nil {
		return about(shown, err)
	}
	defer below.close()
	if d, ok := below.(*tree); ok && depth == 0 {
		t.exclude(d.fd)
	}
	buf := make([]byte, 32<<10)
	for {
		n, err := unix.ReadDirent(in, buf)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return explain(shown, err)
		}
		if n == 0 {
			return nil
		}
		_, _, names := unix.ParseDirent(buf[:n], -1, nil)
		for _, each := range names {
			if err := t.entry(from, in, below, each, path.Join(shown, each), depth+1); err != nil {
				return err
			}
		}
	}
}

// exclude keeps a Transfer from copying into itself.
func (t *Transfer) exclude(fd int) {
	var st unix.Stat_t
	if unix.Fstat(fd, &st) == nil {
		if t.except == nil {
			t.except = map[[2]uint64]bool{}
		}
		t.except[[2]uint64{st.Dev, st.Ino}] = true
	}
}

// entry copies an entry of a directory.
func (t *Transfer) entry(from *Dir, parent int, to sink, name, shown string, depth int) error {
	var st unix.Stat_t
	in, target := -1, ""
	err := from.as(func() (err error) {
		if err = unix.Fstatat(parent, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return err
		}
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFLNK:
			target, err = readlink(parent, name)
		case unix.S_IFREG, unix.S_IFDIR:
			// What it is now; in the meantime it may have become something else.
			if in, err = unix.Openat(parent, name, reading|unix.O_NOFOLLOW, 0); err == nil {
				err = unix.Fstat(in, &st)
			}
		}
		return err
	})
	if in >= 0 {
		defer unix.Close(in)
	}
	switch {
	case err == unix.ENOENT || err == unix.ELOOP || err == unix.EINVAL || err == unix.ENXIO:
		return nil // removed or replaced meanwhile
	case err == unix.EACCES || err == unix.EPERM:
		t.entries.Add(1)
		t.LeftOut.add(&t.LeftOut.Denied, explain(shown, err))
		return nil
	case err != nil:
		return explain(shown, err)
	case target != "":
		if t.entries.Add(1) > int64(t.Max.Entries) {
			return tooLarge(fmt.Sprintf("more than %d files and directories", t.Max.Entries))
		}
		return about(shown, to.link(target, &st, name))
	}
	return t.opened(from, in, &st, to, name, shown, depth)
}

// reading is how what others have made is opened: a FIFO keeps nobody waiting, and a terminal
// does not become ours.
const reading = unix.O_RDONLY | unix.O_NONBLOCK | unix.O_NOCTTY | unix.O_CLOEXEC

func readlink(dir int, name string) (string, error) {
	b := make([]byte, 4096) // PATH_MAX
	n, err := unix.Readlinkat(dir, name, b)
	if err != nil {
		return "", err
	}
	return string(b[:n]), nil
}

// Source is a file or a directory that was opened to be copied.
type Source struct {
	Name string
	dir  *Dir
	fd   int
	st   unix.Stat_t
}

// IsDir reports whether it is a directory.
func (s *Source) IsDir() bool { return s.st.Mode&unix.S_IFMT == unix.S_IFDIR }

// Size is that of a file.
func (s *Source) Size() int64 {
	if s.IsDir() {
		return 0
	}
	return s.st.Size
}

// Close gives it up.
func (s *Source) Close() { unix.Close(s.fd) }

// look finds out what it is, and closes what cannot be copied.
func (s *Source) look() error {
	err := unix.Fstat(s.fd, &s.st)
	if err != nil {
		err = explain(s.Name, err)
	} else if kind := s.st.Mode & unix.S_IFMT; kind != unix.S_IFREG && kind != unix.S_IFDIR {
		err = usage("%q is neither a file nor a directory", s.Name)
	}
	if err != nil {
		unix.Close(s.fd)
	}
	return err
}
