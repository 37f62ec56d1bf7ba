package tree

import (
	"context"
	"io/fs"
	"iter"
	"path"
	"slices"
	"strings"

	"github.com/sbxrun/sbxrun/internal/safeopen"
	"golang.org/x/sys/unix"
)

// Walk traverses directories. Its bounds cover everything it reads, and count down.
type Walk struct {
	Entries int // number of entries
	Text    int // bytes of all paths together: a million paths may have 4 KiB each
	Depth   int // levels
	Path    int // bytes of one path

	Files  bool // open regular files as well
	Mounts bool // descend into other mounts

	// Count, unless nil, is called for each directory with the number of names and the bytes of their paths. Its
	// error ends the walk.
	Count func(entries, text int) error

	// As, unless nil, calls a function with another user's rights, to look at files or open them.
	As func(func() error) error
	// Pattern has a path.Match pattern for the names on each of the first levels; other names are
	// skipped. A name that begins with a dot needs a pattern that does.
	Pattern []string
}

// Entry is a name in a directory. It is valid until the next entry.
type Entry struct {
	Dir   int // the directory containing it
	Name  string
	Path  string // path, including the start's
	Depth int    // 0 for entries of the first directory

	Stat   unix.Stat_t
	FD     int    // of a directory, and of a file with Walk.Files; otherwise -1. Closed by the walk
	Target string // of a link

	// Err is the error of looking at it or opening it as a directory. Entries that were just removed are skipped.
	Err error

	Skip bool // may be set to skip the contents
}

// ErrDeep is the Err of a directory that is too deep or whose path is too long.
var ErrDeep error = unix.ENAMETOOLONG

// Below iterates over everything below dir, whose path is at: parents first, in the order of names. An error ends the
// iteration: an exceeded bound, an open directory that cannot be read, or the cause of ctx.
func (w *Walk) Below(ctx context.Context, dir int, at string) iter.Seq2[*Entry, error] {
	return func(yield func(*Entry, error) bool) {
		fd := -1
		err := w.as(func() (err error) {
			fd, err = w.open(dir, ".", unix.O_RDONLY|unix.O_DIRECTORY) // with its own offset
			return err
		})
		if err != nil {
			yield(nil, &fs.PathError{Op: "open", Path: at, Err: err})
			return
		}
		defer unix.Close(fd)
		w.below(ctx, fd, at, 0, yield)
	}
}

// below reports whether to continue.
func (w *Walk) below(ctx context.Context, dir int, at string, depth int, yield func(*Entry, error) bool) bool {
	names, err := w.names(dir, at, depth)
	if err != nil {
		yield(nil, err)
		return false
	}
	together := 1
	if w.As != nil {
		together = lookTogether
	}
	for part := range slices.Chunk(names, together) {
		entries := make([]Entry, len(part))
		for i, name := range part {
			entries[i] = Entry{Dir: dir, Name: name, Path: path.Join(at, name), Depth: depth, FD: -1}
		}
		err := w.as(func() error {
			for i := range entries {
				entries[i].Err = entries[i].look()
			}
			return nil
		})
		if err != nil {
			yield(nil, err)
			return false
		}
		for i := range entries {
			if !w.entry(ctx, &entries[i], yield) {
				return false
			}
		}
	}
	return true
}

// lookTogether is the number of entries for one call of Walk.As. Entries are opened one by one, because
// descriptors are scarce.
const lookTogether = 64

func (w *Walk) entry(ctx context.Context, e *Entry, yield func(*Entry, error) bool) bool {
	if ctx.Err() != nil {
		yield(nil, context.Cause(ctx))
		return false
	}
	if w.opens(e) {
		e.Err = w.as(func() error { return w.openEntry(e) })
	}
	if e.FD >= 0 {
		defer unix.Close(e.FD)
	}
	if Gone(e.Err) {
		return true
	}
	isDir := e.FD >= 0 && Type(&e.Stat) == unix.S_IFDIR
	depth := e.Depth
	if isDir && (depth >= w.Depth || len(e.Path) > w.Path) {
		e.Err = ErrDeep
	}
	if partly := depth < len(w.Pattern)-1; partly {
		return !isDir || w.below(ctx, e.FD, e.Path, depth+1, yield)
	}
	if !yield(e, nil) {
		return false
	}
	return !isDir || e.Skip || e.Err != nil || w.below(ctx, e.FD, e.Path, depth+1, yield)
}

// look calls stat(2) and readlink(2).
func (e *Entry) look() (err error) {
	err = unix.Fstatat(e.Dir, e.Name, &e.Stat, unix.AT_SYMLINK_NOFOLLOW)
	if err == nil && Type(&e.Stat) == unix.S_IFLNK {
		e.Target, err = readlink(e.Dir, e.Name)
	}
	return err
}

// opens reports whether the walk opens an entry.
func (w *Walk) opens(e *Entry) bool {
	kind := Type(&e.Stat)
	return e.Err == nil && (kind == unix.S_IFDIR || kind == unix.S_IFREG && w.Files)
}

func (w *Walk) openEntry(e *Entry) (err error) {
	flags := unix.O_RDONLY
	if Type(&e.Stat) == unix.S_IFDIR {
		flags |= unix.O_DIRECTORY
	}
	if e.FD, err = w.open(e.Dir, e.Name, flags); err != nil {
		e.FD = -1
		return err
	}
	return unix.Fstat(e.FD, &e.Stat) // it may have been replaced
}

func (w *Walk) open(dir int, name string, flags int) (int, error) {
	resolve := uint64(unix.RESOLVE_NO_XDEV)
	if w.Mounts {
		resolve = 0
	}
	return safeopen.Beneath(dir, name, flags, 0, resolve)
}

func (w *Walk) as(f func() error) error {
	if w.As == nil {
		return f()
	}
	return w.As(f)
}

// names returns the matching names in a directory.
func (w *Walk) names(dir int, at string, depth int) (names []string, err error) {
	if depth >= len(w.Pattern) {
		return w.Names(dir, at)
	}
	pattern := w.Pattern[depth]
	if !strings.ContainsAny(pattern, `*?[\`) {
		return []string{pattern}, nil
	}
	all, err := w.Names(dir, at)
	for _, name := range all {
		if ok, _ := path.Match(pattern, name); ok && (name[0] != '.' || pattern[0] == '.') {
			names = append(names, name)
		}
	}
	return names, err
}

// Names returns the sorted names in a directory, and counts them.
func (w *Walk) Names(dir int, at string) ([]string, error) {
	list, err := names(dir, w.Entries)
	if err != nil {
		return nil, &fs.PathError{Op: "read", Path: at, Err: err}
	}
	if list == nil {
		return nil, TooLarge("too many files and directories, reached in %.200q", at)
	}
	text := 0
	for _, name := range list {
		text += len(at) + len(name) + 1
	}
	w.Entries -= len(list)
	if w.Text -= text; w.Text < 0 {
		return nil, TooLarge("the paths of all files are too long in total, reached in %.200q", at)
	}
	if w.Count != nil {
		err = w.Count(len(list), text)
	}
	return list, err
}
