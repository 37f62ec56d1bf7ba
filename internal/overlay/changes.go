// Package overlay reads what a sandbox has written over a directory of the host (room.Overlay):
// it compares the layer with the original, shows the difference, and makes it there.
//
// A command has written the layer, and may be writing to it at the moment: nothing in it is
// trusted, and package tree reads it.
// The kernel makes no redirects and follows none in such an overlay (mount option userxattr,
// overlayfs.rst), so what is in the layer at a path is what the sandbox sees there.
package overlay

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/links"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/tree"
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
	maxText    = 256 << 20 // bytes of all paths
	maxDepth   = 512
	maxName    = unix.PathMax - unix.NAME_MAX - 1 // of a directory's path, so that those in it can be opened (path_resolution(7))
)

// Open opens an overlay: its layer, which stays the caller's, and the original at source, whose
// links are followed if others could not have made them (package links).
func Open(layer *os.File, source string, since time.Time) (*Tree, error) {
	place, err := links.Dir(source)
	if err == nil {
		defer unix.Close(place)
		var fd int
		if fd, err = links.Reopen(place, unix.O_RDONLY|unix.O_DIRECTORY); err == nil {
			return &Tree{Layer: layer, Source: os.NewFile(uintptr(fd), source), Since: since}, nil
		}
	}
	return nil, &result.Error{Code: "original", Message: "the original cannot be opened: " + err.Error(), Err: err}
}

// comparison is one look at both trees.
type comparison struct {
	*Tree
	walk     tree.Walk // of both
	first    map[tree.Inode]string
	changes  []Change
	warnings []error
}

func (t *Tree) comparison() *comparison {
	return &comparison{Tree: t, walk: tree.Walk{Entries: maxEntries, Text: maxText, Depth: maxDepth, Path: maxName}, first: map[tree.Inode]string{}}
}

// Changes returns how the layer differs, parents first. warnings are about what could not be read.
func (t *Tree) Changes() (list []Change, warnings []error, err error) {
	w := t.comparison()
	up, low := proc.Descriptor(t.Layer), proc.Descriptor(t.Source)
	var ust, lst unix.Stat_t
	if unix.Fstat(up, &ust) == nil && unix.Fstat(low, &lst) == nil && permissions(&ust) != permissions(&lst)&0o777 {
		w.add(Change{Path: ".", Kind: Mode, Type: Directory, WasMode: octal(permissions(&lst)), Conflict: w.later(&lst)}, &ust)
	}
	if low, err = tree.Open(low, ".", unix.O_RDONLY|unix.O_DIRECTORY); err != nil {
		return nil, nil, err
	}
	lows := []int{low} // the directories of the original, down to that of the entry; -1 where there is none
	leave := func(depth int) {
		for ; len(lows) > depth; lows = lows[:len(lows)-1] {
			if fd := lows[len(lows)-1]; fd >= 0 {
				unix.Close(fd)
			}
		}
	}
	defer leave(0)
	if err := w.hidden(up, low, ""); err != nil {
		return nil, nil, err
	}
	for e, err := range w.walk.Below(up, "") {
		if err != nil {
			return nil, nil, err
		}
		leave(e.Depth + 1)
		if e.Path == stagingName {
			w.warnings = append(w.warnings, fmt.Errorf("%s is left out: the name is sbxrun's own", stagingName))
			e.Skip = true
			continue
		}
		below, err := w.entry(e, lows[e.Depth])
		if err != nil {
			return nil, nil, err
		}
		lows = append(lows, below)
	}
	return w.changes, w.warnings, nil
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
func (t *Tree) later(st *unix.Stat_t) bool {
	return st != nil && time.Unix(st.Ctim.Unix()).After(t.Since)
}

// laterBelow reports the same of anything in a directory of the original's, which is to go as a
// whole; what cannot be read may have changed.
func (w *comparison) laterBelow(low int, name string) bool {
	fd, err := tree.Open(low, name, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err != unix.ENOENT
	}
	defer unix.Close(fd)
	for e, err := range w.walk.Below(fd, name) {
		if err != nil || e.Err != nil || w.later(&e.Stat) {
			return true
		}
	}
	return false
}

func (w *comparison) warn(name string, err error) {
	const most = 20
	if len(w.warnings) < most && !errors.Is(err, unix.ENOENT) { // which is gone meanwhile
		w.warnings = append(w.warnings, fmt.Errorf("%.200q cannot be read: %w", name, err))
	}
}

// hidden adds what a directory of the layer hides, if it is opaque, and has nothing of its own in the
// place of.
func (w *comparison) hidden(up, low int, at string) error {
	if low < 0 || !tree.Opaque(up) {
		return nil
	}
	names, err := w.walk.Names(low, at)
	if err != nil {
		return err
	}
	for _, name := range names {
		if original(up, name) == nil {
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

func (w *comparison) deleted(low int, at, name string) {
	if was := original(low, name); was != nil {
		c := Change{Path: path.Join(at, name), Kind: Deleted, Type: typeOf(was), Conflict: w.later(was)}
		if c.Type != Link {
			c.WasMode = octal(permissions(was))
		}
		if c.Type == Directory && !c.Conflict {
			c.Conflict = w.laterBelow(low, name)
		}
		w.changes = append(w.changes, c)
	}
}

// entry compares an entry of the layer with that of the same name in a directory of the original's;
// -1 is none. Of a directory it returns the original's, which the caller closes.
func (w *comparison) entry(e *tree.Entry, low int) (below int, err error) {
	if e.Err == tree.ErrDeep {
		return -1, tree.TooLarge("directories are nested too deeply, at %.80q", e.Path)
	}
	if e.Err != nil {
		w.warn(e.Path, e.Err)
		return -1, nil
	}
	if e.Deletes() {
		w.deleted(low, path.Dir(e.Path), e.Name)
		return -1, nil
	}
	was := original(low, e.Name)
	c := Change{Path: e.Path, Kind: Added, Type: typeOf(&e.Stat), Target: e.Target, Conflict: w.later(was)}
	if was != nil {
		c.Kind = Changed
		if t := typeOf(was); t != c.Type {
			if t == Directory && !c.Conflict {
				c.Conflict = w.laterBelow(low, e.Name)
			}
			c.Was, was = t, nil
		}
	}
	switch c.Type {
	case Directory:
		return w.directory(c, e, was, low)
	case Link:
		if was != nil {
			if target, err := tree.Readlink(low, e.Name); err == nil && target == e.Target {
				return -1, nil
			}
		}
	case File:
		w.file(&c, e, was, low)
	}
	if c.Kind != "" {
		w.add(c, &e.Stat)
	}
	return -1, nil
}

// file settles whether a file of the layer holds something else than the original's, which is
// nil if that is none: to be touched is enough for it to be in the layer.
func (w *comparison) file(c *Change, e *tree.Entry, was *unix.Stat_t, low int) {
	st := &e.Stat
	if st.Nlink > 1 {
		if first, seen := w.first[tree.InodeOf(st)]; seen {
			c.Same = first
		} else {
			w.first[tree.InodeOf(st)] = c.Path
		}
	}
	if was == nil {
		return
	}
	if permissions(was) != permissions(st) {
		c.WasMode = octal(permissions(was))
	}
	same, err := equal(e, low, was.Size)
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

// directory compares a directory. What is in it comes next, unless the original's is not to be read.
func (w *comparison) directory(c Change, e *tree.Entry, was *unix.Stat_t, low int) (below int, err error) {
	below = -1
	if was != nil {
		if below, err = tree.Open(low, e.Name, unix.O_RDONLY|unix.O_DIRECTORY); err != nil {
			w.warn(c.Path, err)
			e.Skip = true
			return -1, nil
		}
		c.Kind = Mode
		c.WasMode = octal(permissions(was))
	}
	if was == nil || permissions(was) != permissions(&e.Stat) {
		w.add(c, &e.Stat)
	}
	return below, w.hidden(e.FD, below, c.Path)
}

func (w *comparison) add(c Change, st *unix.Stat_t) {
	c.mode = permissions(st)
	if c.Type == File {
		c.Size = st.Size
	}
	if c.Type != Link && c.Type != Other {
		c.Mode = octal(c.mode)
	}
	w.changes = append(w.changes, c)
}

// equal compares a file with the original's of the same name, which had so many bytes.
func equal(e *tree.Entry, low int, was int64) (bool, error) {
	size := e.Stat.Size
	if size != was {
		return false, nil
	}
	a, _, err := tree.OpenFile(e.Dir, e.Name)
	if err != nil {
		return false, err
	}
	defer unix.Close(a)
	b, _, err := tree.OpenFile(low, e.Name)
	if err != nil {
		return false, err
	}
	defer unix.Close(b)
	const piece = 256 << 10
	x, y := make([]byte, piece), make([]byte, piece)
	for at := int64(0); at < size; {
		n, err := unix.Pread(a, x, at)
		m, err2 := unix.Pread(b, y, at)
		if err := cmp.Or(err, err2); err != nil {
			return false, err
		}
		if n = min(n, m); n <= 0 || string(x[:n]) != string(y[:n]) {
			return false, nil
		}
		at += int64(n)
	}
	return true, nil
}
