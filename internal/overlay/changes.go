package overlay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/hostfiles"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/tree"
)

// Bounds of a comparison.
const (
	maxEntries = 1 << 20
	maxText    = 64 << 20 // bytes of all paths, which are in memory several times
	maxDepth   = 512
	maxName    = unix.PathMax - unix.NAME_MAX - 1 // of a directory's path, so that its files can be opened (path_resolution(7))
)

// comparison is a comparison of the layers with the original.
type comparison struct {
	ctx context.Context
	*Tree
	walk  tree.Walk // shared by all walks
	first map[tree.Inode]string
	layer int // the current layer
	// settled has the paths of this layer and those above it. The value is true if they hide the path in
	// layers below.
	settled   map[string]bool
	conflicts map[string]bool // replaced directories, found in a layer above
	changes   []Change
	warnings  []error
}

func (t *Tree) comparison(ctx context.Context) *comparison {
	return &comparison{ctx: ctx, Tree: t, walk: tree.Walk{Entries: cmp.Or(t.Entries, maxEntries), Text: cmp.Or(t.Text, maxText), Depth: maxDepth, Path: maxName, Count: t.Count}, first: map[tree.Inode]string{}, settled: map[string]bool{}, conflicts: map[string]bool{}}
}

// Changes returns the differences between the layers and the original, parents first. The warnings are about
// paths left out, mostly of type [Unread]. It returns the cause of ctx when that is done.
func (t *Tree) Changes(ctx context.Context) (list []Change, warnings []error, err error) {
	w := t.comparison(ctx)
	low := proc.Descriptor(t.Source)
	var ust, lst unix.Stat_t
	if err := unix.Fstat(low, &lst); err != nil {
		return nil, nil, err
	}
	t.owner = lst.Uid
	if unix.Fstat(proc.Descriptor(t.Layers[0]), &ust) == nil && permissions(&ust) != permissions(&lst)&0o777 {
		w.add(Change{Path: ".", Kind: Mode, Type: Directory, WasMode: octal(permissions(&lst)), Conflict: w.later(&lst) || w.replaced}, &ust)
	}
	for i, layer := range t.Layers {
		w.layer = i
		err := w.compare(proc.Descriptor(layer), low)
		if ctx.Err() != nil {
			err = &result.Error{Code: "diff", Message: "comparison interrupted: " + context.Cause(ctx).Error()}
		}
		if err != nil {
			return nil, nil, err
		}
	}
	if len(t.Layers) > 1 {
		slices.SortStableFunc(w.changes, func(a, b Change) int { return comparePaths(a.Path, b.Path) })
	}
	return w.changes, w.warnings, nil
}

// comparePaths orders paths as a walk does: a directory's contents directly after it.
func comparePaths(a, b string) int {
	switch {
	case a == b:
		return 0
	case a == ".":
		return -1
	case b == ".":
		return 1
	}
	for i := range min(len(a), len(b)) {
		switch {
		case a[i] == b[i]:
		case a[i] == '/':
			return -1
		case b[i] == '/':
			return 1
		default:
			return cmp.Compare(a[i], b[i])
		}
	}
	return cmp.Compare(len(a), len(b))
}

// compare compares one layer with the original, except paths settled by the layers above.
func (w *comparison) compare(up, low int) error {
	low, err := tree.Open(low, ".", unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	// The originals of the directories down to the entry's. The kernel does not treat a layer's top directory as opaque.
	lows := []original{{dir: low}}
	if w.replaced {
		lows[0].why = replaced(".")
	}
	leave := func(depth int) {
		for ; len(lows) > depth; lows = lows[:len(lows)-1] {
			lows[len(lows)-1].close()
		}
	}
	defer leave(0)
	for e, err := range w.walk.Below(w.ctx, up, "") {
		if err != nil {
			return err
		}
		leave(e.Depth + 1)
		below, err := w.entry(e, lows[e.Depth])
		if err != nil {
			return err
		}
		lows = append(lows, below)
	}
	return nil
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

// later reports whether a file of the original has changed since the sandbox began. The kernel sets
// st_ctime when a file, its name or its link count changes (stat(2), rename(2)), and no program can set
// it. Apply's own changes to another name of the file (hard link) do not count, unless another change
// followed.
func (t *Tree) later(st *unix.Stat_t) bool {
	if st == nil || !time.Unix(st.Ctim.Unix()).After(t.Since) {
		return false
	}
	own, ok := t.ours[tree.InodeOf(st)]
	return !ok || own.Ctim != st.Ctim || !unchanged(&own, st)
}

// earlier is a file that was in a directory of the original before the sandbox began.
type earlier struct {
	path  string // relative to the directory
	inode tree.Inode
}

// earlierBelow lists the contents of a directory of the original that is removed as a whole, parents
// first. complete is false if a file has changed since the sandbox began or cannot be read.
func (w *comparison) earlierBelow(dir int) (list []earlier, complete bool) {
	for e, err := range w.walk.Below(w.ctx, dir, ".") {
		if err != nil || e.Err != nil || w.later(&e.Stat) || typeOf(&e.Stat) == Directory && w.foreign(&e.Stat) {
			return nil, false
		}
		list = append(list, earlier{e.Path, tree.InodeOf(&e.Stat)})
	}
	return list, true
}

// laterBelow reports whether anything in a directory of the original has changed since the sandbox began, or cannot
// be read.
func (w *comparison) laterBelow(low int, name string) bool {
	fd, err := tree.Open(low, name, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err != unix.ENOENT
	}
	defer unix.Close(fd)
	_, complete := w.earlierBelow(fd)
	return !complete
}

// Unread is a file that cannot be read, because its mode closes it to its owner; it is not among the changes.
type Unread struct {
	Path string
	err  error
}

func (u *Unread) Error() string { return fmt.Sprintf("cannot read %.200q: %v", u.Path, u.err) }
func (u *Unread) Unwrap() error { return u.err }

func (w *comparison) warn(name string, err error) {
	const most = 20
	if len(w.warnings) < most && !errors.Is(err, unix.ENOENT) { // removed since
		w.warnings = append(w.warnings, &Unread{name, err})
	}
}

// original is the directory of the original that corresponds to a directory of the layer.
type original struct {
	dir    int  // -1 for none
	hidden bool // hidden by the layer, which shows only its own files
	// why is the conflict of all changes in it, if it or a parent was replaced or is foreign.
	why *result.Error
}

func (o original) close() {
	if o.dir >= 0 {
		unix.Close(o.dir)
	}
}

// look returns the status of a name, or nil.
func (o original) look(name string) *unix.Stat_t { return look(o.dir, name) }

func look(dir int, name string) *unix.Stat_t {
	var st unix.Stat_t
	if dir < 0 || unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW) != nil {
		return nil
	}
	return &st
}

// below opens the subdirectory name of o, whose path is at. copied is true if the layer has a copy of it.
// After an error the result is an empty original.
func (w *comparison) below(o original, name, at string, copied bool) (original, error) {
	if o.dir < 0 {
		return o, nil
	}
	fd, err := tree.Open(o.dir, name, unix.O_RDONLY|unix.O_DIRECTORY)
	below := original{fd, o.hidden, o.why}
	if err != nil {
		return below, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		unix.Close(fd)
		return original{-1, o.hidden, o.why}, err
	}
	w.seen[at] = tree.InodeOf(&st)
	switch {
	case below.why != nil:
	case w.foreign(&st):
		below.why = foreign(at, st.Uid)
	case w.conflicts[at] || w.exchanged(o.dir, fd, &st, copied):
		w.conflicts[at], below.why = true, replaced(at)
	}
	return below, nil
}

// foreign reports whether root must not enter a directory because the original has another owner, who
// can move root's directories there.
func (t *Tree) foreign(st *unix.Stat_t) bool { return t.root && st.Uid != t.owner }

// exchanged reports whether a directory has replaced another one since the sandbox began. The inode number
// that the sandbox saw is not recorded, so it compares times:
//   - a change in a directory sets its st_mtime and st_ctime; moving it sets only st_ctime, as does chmod(2);
//   - a move also changes the parent;
//   - a directory created since cannot be the one that the layer has a copy of.
//
// It misses a move that is followed by a change in the directory. On overlayfs the first change copies the
// directory, which looks like a move.
func (w *comparison) exchanged(parent, dir int, st *unix.Stat_t, copied bool) bool {
	if w.layered || !w.later(st) {
		return false
	}
	if born, ok := tree.Born(dir); ok && born.After(w.Since) {
		return copied
	}
	var above unix.Stat_t
	return st.Ctim != st.Mtim && (unix.Fstat(parent, &above) != nil || w.later(&above))
}

// enter adds the deletions made by an opaque directory of the layer, or one inside an opaque directory, which
// is not marked itself.
func (w *comparison) enter(low *original, up int, at string) error {
	if tree.Opaque(up) {
		low.hidden, w.settled[at] = true, true
	}
	if !low.hidden {
		return nil
	}
	return w.hide(*low, up, at)
}

// hide adds deletions for the names in a directory of the original that are in neither the layer's directory nor the
// same directory of a layer above.
func (w *comparison) hide(low original, up int, at string) error {
	if low.dir < 0 {
		return nil
	}
	names, err := w.walk.Names(low.dir, at)
	if err != nil {
		return err
	}
	for _, name := range names {
		if up >= 0 && look(up, name) != nil {
			continue // compared later
		}
		name, at := name, path.Join(at, name)
		hides, above := w.settled[at]
		switch {
		case !above:
			w.deleted(low, at, name)
		case !hides:
			below, _ := w.below(low, name, at, false)
			err := w.hide(below, -1, at)
			below.close()
			if err != nil {
				return err
			}
		}
	}
	return nil
}

func (w *comparison) deleted(low original, at, name string) {
	if was := low.look(name); was != nil {
		c := Change{Path: at, Kind: Deleted, Type: typeOf(was), Conflict: w.later(was) || low.why != nil, why: low.why}
		if c.Type != Link {
			c.WasMode = octal(permissions(was))
		}
		if c.Type == Directory && !c.Conflict {
			c.Conflict = w.laterBelow(low.dir, name)
		}
		w.changes = append(w.changes, w.judged(c))
	}
}

var hostType = map[Type]hostfiles.Type{Directory: hostfiles.Directory, Link: hostfiles.Link}

// judged sets the members that depend on the path and the target.
func (t *Tree) judged(c Change) Change {
	c.Held = hostfiles.Trusted(path.Join(t.top, c.Path), hostType[c.Type])
	c.Outside = c.Type == Link && c.Kind != Deleted && tree.LeadsOut(strings.Count(c.Path, "/"), c.Target)
	return c
}

// entry compares an entry of the layer with the same name in a directory of the original. For a
// directory it returns the original's, which the caller closes.
func (w *comparison) entry(e *tree.Entry, low original) (below original, err error) {
	none := original{dir: -1}
	if e.Err == tree.ErrDeep {
		return none, tree.TooLarge("directories are nested too deeply, at %.80q", e.Path)
	}
	if e.Err != nil {
		w.settled[e.Path] = true
		w.warn(e.Path, e.Err)
		return none, nil
	}
	if len(w.Layers) > 1 {
		hides, above := w.settled[e.Path]
		e.Skip = hides
		w.settled[e.Path] = hides || tree.Type(&e.Stat) != unix.S_IFDIR
		if above {
			return w.merged(e, low)
		}
	}
	if e.Deletes() {
		w.deleted(low, e.Path, e.Name)
		return none, nil
	}
	was := low.look(e.Name)
	if e.Path == hostfiles.GitIndexName && w.sameIndex(e, was) {
		return none, nil
	}
	c := Change{Path: e.Path, Kind: Added, Type: typeOf(&e.Stat), Target: e.Target, Conflict: w.later(was) || low.why != nil, why: low.why}
	if was == nil {
		c.Conflict = c.Conflict || w.removed(e, low)
	} else {
		c.Kind = Changed
		if t := typeOf(was); t != c.Type {
			if t == Directory && !c.Conflict {
				c.Conflict = w.laterBelow(low.dir, e.Name)
			}
			if c.Was = t; t != Link {
				c.WasMode = octal(permissions(was))
			}
			was = nil
		}
	}
	switch c.Type {
	case Directory:
		return w.directory(c, e, was, low)
	case Link:
		if w.walk.Text -= len(e.Target); w.walk.Text < 0 {
			return none, tree.TooLarge("link targets are too long in total, reached at %.200q", e.Path)
		}
		if w.Count != nil {
			if err := w.Count(0, len(e.Target)); err != nil {
				return none, err
			}
		}
		if was != nil {
			if target, err := tree.Readlink(low.dir, e.Name); err == nil && target == e.Target {
				return none, nil
			}
		}
	case File:
		w.file(&c, e, was, low.dir)
	}
	if c.Kind != "" {
		w.add(c, &e.Stat)
	}
	return none, nil
}

// removed reports whether a file of the layer may have been removed from the original since the sandbox
// began: it is a copy, the original's directory has changed, and no layer of a snapshot has the file. The
// sandbox may also have moved it there; the copy does not show that.
func (w *comparison) removed(e *tree.Entry, low original) bool {
	var st unix.Stat_t
	return low.dir >= 0 && !low.hidden && unix.Fstat(low.dir, &st) == nil && w.later(&st) && w.copied(e)
}

// copied reports whether the layer's entry is a copy from the original rather than from a snapshot.
func (w *comparison) copied(e *tree.Entry) bool {
	if w.layer > 0 || !e.Copied() {
		return false
	}
	for _, layer := range w.Layers[1:] {
		if fd, err := tree.Open(proc.Descriptor(layer), e.Path, unix.O_PATH); err == nil {
			unix.Close(fd)
			return false
		}
	}
	return true
}

// merged enters a directory that a layer above has as well. If this layer has no directory there, its entry
// hides the contents in layers below.
func (w *comparison) merged(e *tree.Entry, low original) (below original, err error) {
	if e.Skip {
		return original{dir: -1}, nil
	}
	below, _ = w.below(low, e.Name, e.Path, false)
	if tree.Type(&e.Stat) == unix.S_IFDIR {
		return below, w.enter(&below, e.FD, e.Path)
	}
	return below, w.hide(below, -1, e.Path)
}

// file sets the kind of change of a file. was is the status of the original's file of that name, or nil. A file that
// was only opened for writing is also in the layer.
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
	same, err := equal(w.ctx, e, low, was.Size)
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

// directory compares a directory. Its contents follow, unless the original's cannot be read.
func (w *comparison) directory(c Change, e *tree.Entry, was *unix.Stat_t, low original) (below original, err error) {
	below = original{-1, low.hidden, low.why}
	if was != nil {
		if below, err = w.below(low, e.Name, e.Path, w.copied(e)); err != nil {
			w.warn(c.Path, err)
			e.Skip = true
			return below, nil
		}
		c.Kind = Mode
		c.WasMode = octal(permissions(was))
	}
	if was == nil || permissions(was) != permissions(&e.Stat) {
		if c.why = below.why; c.why != nil {
			c.Conflict = true
		}
		w.add(c, &e.Stat)
	}
	return below, w.enter(&below, e.FD, c.Path)
}

func (w *comparison) add(c Change, st *unix.Stat_t) {
	c.mode, c.layer = permissions(st), w.layer
	if c.Type == File {
		c.Size = st.Size
	}
	if c.Type != Link && c.Type != Other {
		c.Mode = octal(c.mode)
	}
	w.changes = append(w.changes, w.judged(c))
}

// equal compares a file with the original's file of the same name, whose size is was.
func equal(ctx context.Context, e *tree.Entry, low int, was int64) (bool, error) {
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
		if ctx.Err() != nil {
			return false, context.Cause(ctx) // the walk ends as well
		}
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
