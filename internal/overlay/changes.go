// Package overlay reads what a sandbox has written over a directory of the host (room.Overlay):
// it compares the layer with the original, shows the difference, and makes it there.
//
// A command has written the layer, and may be writing to it at the moment: nothing in it is
// trusted. Both trees are walked by descriptors, one name at a time and without following any
// link; only regular files are read, and no more of them than they had when they were opened.
// The kernel makes no redirects and follows none in such an overlay (mount option userxattr,
// overlayfs.rst), so what is in the layer at a path is what the sandbox sees there.
package overlay

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

// Kind is what has become of a path.
type Kind string

// Kinds of a [Change].
const (
	Added   Kind = "added"
	Changed Kind = "changed" // what it holds, where it leads, or what it is
	Deleted Kind = "deleted"
	Mode    Kind = "mode" // nothing but its permissions
)

// Type is what there is at a path.
type Type string

// Types of what is at a path. The last is a device, a FIFO or a socket, which is never applied.
const (
	File      Type = "file"
	Directory Type = "directory"
	Link      Type = "link"
	Other     Type = "other"
)

// Change is one path at which layer and original differ. What is below a directory that was
// deleted is part of that change.
type Change struct {
	Path string `json:"path"` // relative to the overlay; "." is the directory itself
	Kind Kind   `json:"change"`
	Type Type   `json:"type"`           // now; of what was deleted, before
	Was  Type   `json:"was,omitempty"`  // Changed: before, if it was something else
	Size int64  `json:"size,omitempty"` // of a file, now
	// Permissions, and not of links.
	Mode    string `json:"mode,omitempty"` // now
	WasMode string `json:"was_mode,omitempty"`
	Target  string `json:"target,omitempty"` // of a link
	Same    string `json:"same,omitempty"`   // of a file: the first path of the same (hard link)
	// Conflict says that the original has changed, or come into being, since the sandbox began.
	Conflict bool `json:"conflict,omitempty"`

	mode uint32
}

// Tree is an overlay that is looked at.
type Tree struct {
	Layer  *os.File  // its directory
	Source *os.File  // the original's
	Since  time.Time // conflicts are counted from here
}

// Bounds of what is looked at.
const (
	maxEntries = 1 << 20
	maxDepth   = 512
	maxName    = 4096 // of a path, in bytes (path_resolution(7))
)

// errTooMany is made when it is needed, as a package that every start links has to.
func errTooMany() error {
	return &result.Error{Code: "too-large", Message: fmt.Sprintf("the layer has more than %d entries", maxEntries)}
}

// Changes returns how the layer differs, parents first and by name. warnings are about what
// could not be read.
func (t *Tree) Changes() (list []Change, warnings []error, err error) {
	w := walker{since: t.Since, left: maxEntries, seen: map[inode]string{}}
	up, err := reopen(t.Layer)
	if err != nil {
		return nil, nil, err
	}
	low, err := reopen(t.Source)
	if err != nil {
		unix.Close(up)
		return nil, nil, err
	}
	var ust, lst unix.Stat_t
	if unix.Fstat(up, &ust) == nil && unix.Fstat(low, &lst) == nil && permissions(&ust) != permissions(&lst)&0o777 {
		w.add(Change{Path: ".", Kind: Mode, Type: Directory, WasMode: octal(permissions(&lst)), Conflict: w.later(&lst)}, &ust)
	}
	err = w.directory(up, low, ".", 0)
	return w.changes, w.warnings, err
}

type inode struct{ dev, ino uint64 }

type walker struct {
	since    time.Time
	left     int // entries that may still be looked at
	seen     map[inode]string
	changes  []Change
	warnings []error
}

// reopen opens a directory anew, so that it is read from its beginning.
func reopen(dir *os.File) (int, error) {
	return unix.Openat(int(dir.Fd()), ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
}

func openDir(dir int, name string) (int, error) {
	return unix.Openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
}

func permissions(st *unix.Stat_t) uint32 { return st.Mode & 0o777 }

func octal(mode uint32) string { return fmt.Sprintf("%04o", mode) }

func typeOf(st *unix.Stat_t) Type {
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		return File
	case unix.S_IFDIR:
		return Directory
	case unix.S_IFLNK:
		return Link
	}
	return Other
}

// later reports whether something of the original has changed since the sandbox began. The kernel
// sets st_ctime at every change of a file, of its name and of what it is linked to (stat(2),
// rename(2)), and no program can set it.
func (w *walker) later(st *unix.Stat_t) bool {
	return st != nil && time.Unix(st.Ctim.Unix()).After(w.since)
}

// laterBelow reports the same of anything in a directory of the original's, which is to go as a
// whole; what cannot be read may have changed.
func (w *walker) laterBelow(low int, name string, depth int) bool {
	fd, err := openDir(low, name)
	if err != nil || depth > maxDepth {
		return !errors.Is(err, unix.ENOENT)
	}
	dir := os.NewFile(uintptr(fd), name)
	defer dir.Close()
	names, err := w.names(dir)
	if err != nil {
		return true
	}
	for _, n := range names {
		st := original(fd, n)
		if w.later(st) || st != nil && typeOf(st) == Directory && w.laterBelow(fd, n, depth+1) {
			return true
		}
	}
	return false
}

func (w *walker) warn(name string, err error) {
	const most = 20
	if len(w.warnings) < most && !errors.Is(err, unix.ENOENT) { // which is gone meanwhile
		w.warnings = append(w.warnings, fmt.Errorf("%.200q cannot be read: %w", name, err))
	}
}

// names reads those of a directory, sorted.
func (w *walker) names(dir *os.File) ([]string, error) {
	// No more at once than there may be: a directory can have millions.
	names, err := dir.Readdirnames(w.left + 1)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	if w.left -= len(names); w.left < 0 {
		return nil, errTooMany()
	}
	slices.Sort(names)
	return names, nil
}

// directory compares a directory of the layer with the original's, whose descriptors it closes;
// low is -1 if there is none.
func (w *walker) directory(up, low int, at string, depth int) error {
	dir := os.NewFile(uintptr(up), at)
	defer dir.Close()
	if low >= 0 {
		defer unix.Close(low)
	}
	if depth > maxDepth || len(at) > maxName {
		return &result.Error{Code: "too-large", Message: fmt.Sprintf("directories are nested too deeply, below %.80q", at)}
	}
	names, err := w.names(dir)
	if err != nil {
		return err
	}
	for _, name := range names {
		if name == stagingName && depth == 0 {
			w.warnings = append(w.warnings, fmt.Errorf("%s is left out: the name is sbxrun's own", name))
			continue
		}
		if err := w.entry(up, low, at, name, depth); err != nil {
			return err
		}
	}
	if low < 0 || !opaque(up) {
		return nil
	}
	return w.hidden(low, at, names)
}

// opaque reports whether a directory of the layer hides all that the original has at its place.
func opaque(dir int) bool {
	var value [2]byte
	n, err := unix.Fgetxattr(dir, "user.overlay.opaque", value[:])
	return err == nil && n == 1 && value[0] == 'y'
}

// hidden adds what an opaque directory hides and has nothing of its own in the place of.
func (w *walker) hidden(low int, at string, names []string) error {
	fd, err := openDir(low, ".")
	if err != nil {
		w.warn(at, err)
		return nil
	}
	dir := os.NewFile(uintptr(fd), at)
	defer dir.Close()
	originals, err := w.names(dir)
	if err != nil {
		return err
	}
	for _, name := range originals {
		if _, found := slices.BinarySearch(names, name); !found {
			w.deleted(low, at, name)
		}
	}
	return nil
}

// original looks at a name of the original's; nil if there is none.
func original(low int, name string) *unix.Stat_t {
	var st unix.Stat_t
	if low < 0 || unix.Fstatat(low, name, &st, unix.AT_SYMLINK_NOFOLLOW) != nil {
		return nil
	}
	return &st
}

func (w *walker) deleted(low int, at, name string) {
	if was := original(low, name); was != nil {
		c := Change{Path: path.Join(at, name), Kind: Deleted, Type: typeOf(was), Conflict: w.later(was)}
		if c.Type != Link {
			c.WasMode = octal(permissions(was))
		}
		if c.Type == Directory && !c.Conflict {
			c.Conflict = w.laterBelow(low, name, 0)
		}
		w.changes = append(w.changes, c)
	}
}

// entry compares one name of a directory.
func (w *walker) entry(up, low int, at, name string, depth int) error {
	full := path.Join(at, name)
	var st unix.Stat_t
	if err := unix.Fstatat(up, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		w.warn(full, err)
		return nil
	}
	if whiteout(up, name, &st) {
		w.deleted(low, at, name)
		return nil
	}
	was := original(low, name)
	c := Change{Path: full, Kind: Added, Type: typeOf(&st), Conflict: w.later(was)}
	if was != nil {
		c.Kind = Changed
		if t := typeOf(was); t != c.Type {
			if t == Directory && !c.Conflict {
				c.Conflict = w.laterBelow(low, name, 0)
			}
			c.Was, was = t, nil
		}
	}
	switch {
	case c.Type == Directory:
		return w.below(c, &st, was, up, low, name, depth)
	case c.Type == Link:
		c.Target = readlink(up, name)
		if was != nil && readlink(low, name) == c.Target {
			return nil
		}
	case c.Type == File:
		w.file(&c, &st, was, up, low, name)
	}
	if c.Kind != "" {
		w.add(c, &st)
	}
	return nil
}

// file settles whether a file of the layer holds something else than the original's, which is
// nil if that is none: to be touched is enough for it to be in the layer.
func (w *walker) file(c *Change, st, was *unix.Stat_t, up, low int, name string) {
	if st.Nlink > 1 {
		if first, seen := w.seen[inode{uint64(st.Dev), st.Ino}]; seen {
			c.Same = first
		} else {
			w.seen[inode{uint64(st.Dev), st.Ino}] = c.Path
		}
	}
	if was == nil {
		return
	}
	if permissions(was) != permissions(st) {
		c.WasMode = octal(permissions(was))
	}
	same, err := equal(up, low, name, st.Size, was.Size)
	switch {
	case err != nil:
		w.warn(c.Path, err)
		c.Kind = ""
	case same && c.WasMode == "":
		c.Kind = ""
	case same:
		c.Kind = Mode
	}
}

// below compares a directory, and then what is in it.
func (w *walker) below(c Change, st, was *unix.Stat_t, up, low int, name string, depth int) error {
	sub, err := openDir(up, name)
	if err != nil {
		w.warn(c.Path, err)
		return nil
	}
	original := -1
	if was != nil {
		if original, err = openDir(low, name); err != nil {
			unix.Close(sub)
			w.warn(c.Path, err)
			return nil
		}
		c.Kind = Mode
		c.WasMode = octal(permissions(was))
	}
	if was == nil || permissions(was) != permissions(st) {
		w.add(c, st)
	}
	return w.directory(sub, original, c.Path, depth+1)
}

func (w *walker) add(c Change, st *unix.Stat_t) {
	c.mode = permissions(st)
	if c.Type == File {
		c.Size = st.Size
	}
	if c.Type != Link && c.Type != Other {
		c.Mode = octal(c.mode)
	}
	w.changes = append(w.changes, c)
}

// whiteout reports whether a name in the layer stands for one that was deleted: a character
// device 0/0, or, from Linux 6.7 on, an empty file with an attribute (overlayfs.rst).
func whiteout(dir int, name string, st *unix.Stat_t) bool {
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFCHR:
		return st.Rdev == 0
	case unix.S_IFREG:
		if st.Size != 0 {
			return false
		}
		fd, err := openFile(dir, name)
		if err != nil {
			return false
		}
		defer unix.Close(fd)
		_, err = unix.Fgetxattr(fd, "user.overlay.whiteout", nil)
		return err == nil
	}
	return false
}

// openFile opens a regular file for reading, and nothing else.
func openFile(dir int, name string) (int, error) {
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	var st unix.Stat_t
	if err = unix.Fstat(fd, &st); err == nil && st.Mode&unix.S_IFMT != unix.S_IFREG {
		err = unix.ENOENT // it was replaced meanwhile
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func readlink(dir int, name string) string {
	target := make([]byte, maxName)
	n, err := unix.Readlinkat(dir, name, target)
	if err != nil {
		return ""
	}
	return string(target[:n])
}

// equal compares two files of the same name.
func equal(up, low int, name string, size, was int64) (bool, error) {
	if size != was {
		return false, nil
	}
	a, err := openFile(up, name)
	if err != nil {
		return false, err
	}
	defer unix.Close(a)
	b, err := openFile(low, name)
	if err != nil {
		return false, err
	}
	defer unix.Close(b)
	const piece = 256 << 10
	x, y := make([]byte, piece), make([]byte, piece)
	for at := int64(0); at < size; {
		n, err := unix.Pread(a, x, at)
		m, err2 := unix.Pread(b, y, at)
		if err != nil || err2 != nil {
			return false, cmpErr(err, err2)
		}
		if n = min(n, m); n <= 0 || string(x[:n]) != string(y[:n]) {
			return false, nil
		}
		at += int64(n)
	}
	return true, nil
}

func cmpErr(a, b error) error {
	if a != nil {
		return a
	}
	return b
}
