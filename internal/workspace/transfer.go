package workspace

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"math"
	"path"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/tree"
)

// Transfer copies files, directories and symbolic links between a sandbox and the host, in either direction. It opens
// everything component by component, relative to descriptors, and follows no link on either side. Commands running at
// the same time can only affect which of their own files are copied.
//
// Devices, FIFOs and sockets are skipped. Setuid, setgid and sticky bits, extended attributes and owners are not
// copied, and hard links become separate files. A file gets its name only when it is complete.
type Transfer struct {
	Max Quota
	// except has directories that are not copied: destinations.
	except map[tree.Inode]bool

	bytes, entries atomic.Int64
	LeftOut        LeftOut

	Links   int  // symbolic links that were copied
	Outside Left // links that may lead out of the copied tree
}

// LeftOut counts files that were not copied.
type LeftOut struct {
	Special Left // devices, FIFOs and sockets, and virtual file systems such as /proc
	Denied  Left // unreadable files, and directories that are too deep
}

// Count returns the number of skipped files.
func (l *LeftOut) Count() int { return l.Special.Count + l.Denied.Count }

// Left counts files skipped for one kind of reason.
type Left struct {
	Count int
	First error // reason for the first one
}

// Add counts one more, and keeps the first reason.
func (l *Left) Add(err error) {
	l.Count++
	if l.First == nil {
		l.First = err
	}
}

// Bounds of a tree. Each level takes two descriptors.
const (
	maxTree    = 256
	maxEntries = 1 << 20
)

// Done returns the bytes and entries copied so far. It is safe for concurrent use.
func (t *Transfer) Done() (bytes, entries int64) { return t.bytes.Load(), t.entries.Load() }

// sink is the destination of a Transfer: a directory or an archive.
type sink interface {
	// file copies at most st.Size bytes of in to a file of this name. It adds to moved as it progresses.
	file(ctx context.Context, in int, st *unix.Stat_t, name string, moved *atomic.Int64) error
	link(target string, st *unix.Stat_t, name string) error
	// dir returns the sink for the contents of a directory; the caller closes it.
	dir(st *unix.Stat_t, name string) (sink, error)
	close()
}

// Copy copies source to the name in the directory. When ctx is done it returns the cause; completed files stay.
func (t *Transfer) Copy(ctx context.Context, source *Source, to *Dir, name string) error {
	return t.into(ctx, source, &directory{side: to, fd: to.fd()}, name)
}

func (t *Transfer) into(ctx context.Context, source *Source, to sink, name string) error {
	e := tree.Entry{Name: name, Path: path.Clean(source.Name), FD: source.fd, Stat: source.st}
	below, err := t.entry(ctx, &e, to, 0)
	if below == nil {
		return err
	}
	defer below.close()
	if d, ok := below.(*directory); ok {
		t.exclude(d.fd)
	}
	return about(e.Path, t.below(ctx, t.walk(source.dir).Below(ctx, source.fd, e.Path), below, 0, 1))
}

// walk returns the walk of a Transfer, which crosses mounts.
func (t *Transfer) walk(from *Dir) *tree.Walk {
	return &tree.Walk{Entries: t.maxEntries(), Text: math.MaxInt, Depth: maxTree - 1, Path: math.MaxInt, Files: true, Mounts: true, As: from.as}
}

func (t *Transfer) maxEntries() int { return cmp.Or(t.Max.Entries, maxEntries) }

// below copies the entries of a walk from level first on. above is the number of copied directories above that level.
func (t *Transfer) below(ctx context.Context, entries iter.Seq2[*tree.Entry, error], to sink, first, above int) error {
	sinks := []sink{to} // sinks from the top to the entry's directory
	leave := func(depth int) {
		for ; len(sinks) > depth; sinks = sinks[:len(sinks)-1] {
			sinks[len(sinks)-1].close()
		}
	}
	defer leave(1)
	for e, err := range entries {
		if err != nil {
			return err
		}
		leave(e.Depth - first + 1)
		below, err := t.entry(ctx, e, sinks[e.Depth-first], e.Depth-first+above)
		if err != nil {
			return err
		}
		if below != nil {
			sinks = append(sinks, below)
		}
	}
	return nil
}

// entry copies an entry and returns the sink for its contents. above is the number of copied directories above it.
func (t *Transfer) entry(ctx context.Context, e *tree.Entry, to sink, above int) (below sink, err error) {
	if t.entries.Add(1) > int64(t.maxEntries()) {
		return nil, tree.TooLarge("more than %d files and directories", t.maxEntries())
	}
	switch {
	case e.Err == tree.ErrDeep:
		t.LeftOut.Denied.Add(usage("%.60q… is more than %d levels deep", e.Path, maxTree))
		return nil, nil
	case e.Err == unix.EACCES || e.Err == unix.EPERM || e.Err == unix.EAGAIN:
		t.LeftOut.Denied.Add(explain(e.Path, e.Err))
		return nil, nil
	case e.Err != nil:
		return nil, explain(e.Path, e.Err)
	}
	var on unix.Statfs_t
	if e.FD >= 0 {
		if err := unix.Fstatfs(e.FD, &on); err != nil {
			return nil, explain(e.Path, err)
		}
	}
	switch kind := tree.Type(&e.Stat); {
	case kind == unix.S_IFREG && !virtual(int64(on.Type)): // whose files have no known size
		if t.Max.Bytes > 0 && e.Stat.Size > t.Max.Bytes-t.bytes.Load() {
			return nil, tree.TooLarge("%q and the files before it exceed %d bytes", e.Path, t.Max.Bytes)
		}
		return nil, unwritten(e.Path, to.file(ctx, e.FD, &e.Stat, e.Name, &t.bytes))
	case kind == unix.S_IFLNK:
		if err := to.link(e.Target, &e.Stat, e.Name); err != nil {
			return nil, unwritten(e.Path, err)
		}
		if t.Links++; above == 0 || tree.LeadsOut(above-1, e.Target) {
			t.Outside.Add(fmt.Errorf("%q leads to %q", e.Path, e.Target))
		}
		return nil, nil
	case kind == unix.S_IFDIR && !virtual(int64(on.Type)) && !t.except[tree.InodeOf(&e.Stat)]:
		below, err = to.dir(&e.Stat, e.Name)
		return below, unwritten(e.Path, err)
	}
	e.Skip = true // for a directory
	t.LeftOut.Special.Add(usage("%q is not a file or directory that can be copied", e.Path))
	return nil, nil
}

// about converts an error about a file to a [*result.Error] that names it.
func about(shown string, err error) error {
	if err == nil || errors.As(err, new(*result.Error)) {
		return err
	}
	return explain(shown, err)
}

// unwritten converts an error of writing a copy.
func unwritten(shown string, err error) error {
	switch err {
	case unix.ENOENT, unix.EACCES, unix.EPERM, unix.EROFS:
		return &result.Error{Code: "usage", Message: fmt.Sprintf("cannot write the copy of %q: %v", shown, err), Err: err}
	}
	return about(shown, err)
}

// virtual reports whether a file system generates the contents of files on reading. Some of these files are endless.
func virtual(kind int64) bool {
	switch kind {
	case unix.PROC_SUPER_MAGIC, unix.SYSFS_MAGIC, unix.CGROUP_SUPER_MAGIC, unix.CGROUP2_SUPER_MAGIC, unix.DEVPTS_SUPER_MAGIC:
		return true
	}
	return false
}

// exclude prevents a Transfer from copying a directory into itself.
func (t *Transfer) exclude(fd int) {
	var st unix.Stat_t
	if unix.Fstat(fd, &st) == nil {
		if t.except == nil {
			t.except = map[tree.Inode]bool{}
		}
		t.except[tree.InodeOf(&st)] = true
	}
}

// reading are flags for opening foreign files: a FIFO does not block, and a terminal does not become the
// controlling one.
const reading = unix.O_RDONLY | unix.O_NONBLOCK | unix.O_NOCTTY | unix.O_CLOEXEC

// Source is an open file or directory to copy.
type Source struct {
	Name string
	dir  *Dir
	fd   int
	st   unix.Stat_t
}

// IsDir reports whether it is a directory.
func (s *Source) IsDir() bool { return s.st.Mode&unix.S_IFMT == unix.S_IFDIR }

func (s *Source) Close() { unix.Close(s.fd) }
