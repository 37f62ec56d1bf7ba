package overlay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/tree"
)

// This file applies changes to the original. Each file is written to a staging directory and then
// replaces the old one in one step: readers see the old file or the new one, even if this
// process is killed. A removed file is moved to the staging directory in one step, too, before its
// contents are deleted.
//
// The kernel resolves every path beneath the original's directory, without following links
// (openat2(2)), when it is needed, because another process may be changing the directory. That process may
// also replace a file between our check and our change. Therefore nothing is overwritten: the old file
// is moved to the staging directory and checked again there, and moved back if it is not the
// expected one.

// Options of [Tree.Apply].
type Options struct {
	Delete bool // also make deletions, and replace directories with files
	All    bool // also make changes that are held back
	Force  bool // ignore changes of the original since the sandbox began
	// Note records the staging directory for [Staging.Sweep], in case this process is killed. It is
	// called first without an identity, before the directory is created.
	Note func(Staging) error
}

// Applied is the result of Apply.
type Applied struct {
	Made []Change
	// Left are deletions without Options.Delete, and devices, FIFOs and sockets, which are never
	// applied.
	Left   []Change
	Held   []Change  // held back
	Unread []*Unread // unreadable files of the layer
	// Litter is true if the staging directory could not be removed.
	Litter bool
}

// Removes reports whether a change removes data of the original that is not kept in the layer.
func (c *Change) Removes() bool { return c.Kind == Deleted || c.Was == Directory }

type applier struct {
	ctx context.Context
	Options
	tree    *Tree
	source  int
	staging int // the staging directory
	n       int
	chown   bool
	owner   unix.Stat_t           // the source, for the owner of new files
	names   map[string]tree.Inode // applied files with several names
	closed  []closedDir
}

// closedDir is a directory whose mode is set at the end.
type closedDir struct {
	path string
	is   unix.Stat_t
	mode uint32
}

// Apply makes changes returned by [Tree.Changes] in the original. If one of them is a conflict, it makes
// none. After an error, including the cause of ctx, it may have made some of them, each one
// completely.
func (t *Tree) Apply(ctx context.Context, list []Change, o Options) (a Applied, err error) {
	var todo []Change
	for _, c := range list {
		switch {
		case c.Type == Other && c.Kind != Deleted || c.Removes() && !o.Delete:
			a.Left = append(a.Left, c)
		case c.Held && !o.All:
			a.Held = append(a.Held, c)
		case c.Conflict && !o.Force:
			return a, c.Refusal()
		default:
			todo = append(todo, c)
		}
	}
	if len(todo) == 0 {
		return a, nil
	}
	x := &applier{ctx: ctx, Options: o, tree: t, source: int(t.Source.Fd()), chown: unix.Geteuid() == 0, names: map[string]tree.Inode{}}
	if err := unix.Fstat(x.source, &x.owner); err != nil {
		return a, err
	}
	var staging Staging
	if err = x.writable(".", x.source); err == nil {
		x.staging, staging, err = stage(x.source, t.Source.Name(), o.Note)
	}
	if err != nil {
		return a, cmp.Or(err, x.close())
	}
	if t.ours == nil {
		t.ours = map[tree.Inode]unix.Stat_t{}
	}
	for _, c := range todo {
		if err = context.Cause(ctx); err == nil {
			err = x.make(&c)
		}
		if u, ok := errors.AsType[*Unread](err); ok {
			a.Unread, err = append(a.Unread, u), nil
			continue
		}
		if err == errGone {
			err = nil
			continue
		}
		if err != nil {
			err = notApplied(c.Path, err)
			break
		}
		a.Made = append(a.Made, c)
	}
	sweepErr := unstage(x.source, x.staging, staging)
	a.Litter = sweepErr != nil
	return a, cmp.Or(err, x.close(), sweepErr)
}

// writable makes a directory of the original writable for its owner until close, as it was in the
// sandbox. Root needs no permission.
func (x *applier) writable(name string, dir int) error {
	var st unix.Stat_t
	err := unix.Fstat(dir, &st)
	if err != nil || x.chown || int(st.Uid) != unix.Geteuid() || st.Mode&0o300 == 0o300 {
		return err
	}
	mode := st.Mode &^ unix.S_IFMT
	if err := tree.Chmod(dir, mode|0o700); err != nil {
		return err
	}
	x.closed = append(x.closed, closedDir{name, st, mode})
	return nil
}

// close sets the final modes of directories. Until then their owner can write to them. An ordinary user
// could otherwise neither move them nor add files.
func (x *applier) close() (err error) {
	for _, d := range slices.Backward(x.closed) { // parents come first
		parent, dirErr := tree.Open(x.source, path.Dir(d.path), unix.O_PATH|unix.O_DIRECTORY)
		if dirErr == nil {
			dirErr = x.chmod(parent, path.Base(d.path), &d.is, d.mode)
			unix.Close(parent)
		}
		if dirErr != nil && err == nil {
			err = notApplied(d.path, dirErr)
		}
	}
	return err
}

func notApplied(name string, err error) error {
	if errors.As(err, new(*result.Error)) {
		return err
	}
	return &result.Error{Code: "apply", Message: fmt.Sprintf("cannot apply %.200q: %v", name, err), Err: err}
}

// conflict returns an error for a change that needs Options.Force.
func conflict(format string, args ...any) *result.Error {
	return &result.Error{Code: "conflict", ExitCode: 1, Message: fmt.Sprintf(format, args...),
		Hint: "see sbxrun diff; name the paths to apply, or use --force to take the sandbox's version"}
}

func changed(name string) *result.Error {
	return conflict("%.200q has changed on the host since the sandbox began", name)
}

func replaced(dir string) *result.Error {
	return conflict("the directory %.200q was replaced on the host since the sandbox began", dir)
}

func foreign(dir string, uid uint32) *result.Error {
	return conflict("the directory %.200q belongs to uid %d, but the overlay's directory to another user", dir, uid)
}

// Refusal returns Apply's error for a conflict.
func (c *Change) Refusal() error {
	if c.why != nil {
		return c.why
	}
	return changed(c.Path)
}

// parent opens the directory of a path, level by level. It returns a conflict if a level is neither the
// compared directory nor one created by Apply: others may write to the original.
func (x *applier) parent(name string) (int, error) {
	fd, err := tree.Open(x.source, ".", unix.O_PATH|unix.O_DIRECTORY)
	if err != nil || path.Dir(name) == "." {
		return fd, err
	}
	at := "."
	for level := range strings.SplitSeq(path.Dir(name), "/") {
		at = path.Join(at, level)
		next, err := tree.Open(fd, level, unix.O_PATH|unix.O_DIRECTORY)
		unix.Close(fd)
		if err != nil {
			return -1, err
		}
		fd = next
		var st unix.Stat_t
		if err = unix.Fstat(fd, &st); err == nil && !x.Force && x.tree.seen[at] != tree.InodeOf(&st) {
			err = replaced(at)
		}
		if err != nil {
			unix.Close(fd)
			return -1, err
		}
	}
	return fd, nil
}

func (x *applier) make(c *Change) error {
	if c.Path == "." {
		return x.chmodDir(c, x.source, ".", nil)
	}
	parent, err := x.parent(c.Path)
	if err != nil {
		return err
	}
	defer unix.Close(parent)
	name := path.Base(c.Path)
	// Check again, because it may have changed since the comparison.
	was := look(parent, name)
	gone := was == nil && (c.Kind == Changed || c.Kind == Mode)
	if !x.Force && (gone || x.tree.later(was) && (c.Kind != Mode || c.Type != Directory)) {
		return changed(c.Path)
	}
	x.n++
	temporary := strconv.Itoa(x.n)
	switch {
	case c.Kind == Mode && c.Type == Directory && !x.Force && x.tree.seen[c.Path] != tree.InodeOf(was):
		return replaced(c.Path)
	case c.Kind == Mode && c.Type == Directory:
		return x.chmodDir(c, parent, name, was)
	case c.Kind == Mode:
		return x.chmod(parent, name, was, c.mode)
	}
	if err := x.writable(path.Dir(c.Path), parent); err != nil {
		return err
	}
	if c.Kind == Deleted {
		return x.remove(c, was, temporary, parent, name)
	}
	if err := x.prepare(c, was, temporary); err != nil {
		return err
	}
	return x.place(c, was, temporary, parent, name)
}

// prepare creates the new file in the staging directory.
func (x *applier) prepare(c *Change, was *unix.Stat_t, temporary string) error {
	switch c.Type {
	case Directory:
		if err := unix.Mkdirat(x.staging, temporary, 0o700); err != nil {
			return err
		}
		if err := x.give(x.staging, temporary, nil); err != nil {
			return err
		}
		if made := look(x.staging, temporary); made != nil {
			x.tree.seen[c.Path] = tree.InodeOf(made)
		}
		return x.chmodDir(c, x.staging, temporary, nil)
	case Link:
		if err := unix.Symlinkat(c.Target, x.staging, temporary); err != nil {
			return err
		}
		return x.give(x.staging, temporary, was)
	}
	if first, ok := x.names[c.Same]; ok && x.link(c.Same, first, temporary) == nil {
		return nil
	}
	return x.file(c, was, temporary)
}

// link creates another name of a file that was applied before.
func (x *applier) link(first string, is tree.Inode, temporary string) error {
	fd, err := tree.Open(x.source, first, unix.O_PATH)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || tree.InodeOf(&st) != is {
		return cmp.Or(err, error(unix.ESTALE))
	}
	return tree.Link(fd, x.staging, temporary)
}

// errGone means that the running sandbox has removed or replaced the file.
var errGone = errors.New("removed from the layer")

func (x *applier) file(c *Change, was *unix.Stat_t, temporary string) error {
	in, st, err := tree.OpenFile(proc.Descriptor(x.tree.Layers[c.layer]), c.Path)
	switch {
	case err == unix.EACCES:
		return &Unread{c.Path, err}
	case tree.Gone(err):
		return errGone
	case err != nil:
		return err
	}
	defer unix.Close(in)
	out, err := unix.Openat(x.staging, temporary, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	defer unix.Close(out)
	if err := tree.Fill(x.ctx, out, in, &st, new(atomic.Int64)); err != nil {
		return err
	}
	if err := x.give(out, "", was); err != nil {
		return err
	}
	if err := unix.Fchmod(out, c.mode); err != nil { // after chown, and without setuid
		return err
	}
	if st.Nlink > 1 && c.Same == "" {
		var made unix.Stat_t
		if err := unix.Fstat(out, &made); err != nil {
			return err
		}
		x.names[c.Path] = tree.InodeOf(&made)
	}
	return unix.Fsync(out)
}

// give copies the owner of the previous file or the source.
func (x *applier) give(dir int, name string, was *unix.Stat_t) error {
	if !x.chown {
		return nil
	}
	if was == nil {
		was = &x.owner
	}
	return unix.Fchownat(dir, name, int(was.Uid), int(was.Gid), unix.AT_SYMLINK_NOFOLLOW|unix.AT_EMPTY_PATH)
}

// place moves the prepared file to its path.
func (x *applier) place(c *Change, was *unix.Stat_t, temporary string, parent int, name string) error {
	isDir := was != nil && was.Mode&unix.S_IFMT == unix.S_IFDIR
	switch {
	case c.Type == Directory && isDir: // created by another process
		if !x.Force && x.tree.foreign(was) {
			return foreign(c.Path, was.Uid)
		}
		x.tree.seen[c.Path] = tree.InodeOf(was)
		x.closed = slices.DeleteFunc(x.closed, func(d closedDir) bool { return d.path == c.Path })
		return unix.Unlinkat(x.staging, temporary, unix.AT_REMOVEDIR)
	case was == nil && (!x.Force || c.Type == Directory):
		return x.fill(c, temporary, parent, name)
	case isDir && !x.Delete:
		return unix.EISDIR
	case x.Force && !isDir && c.Type != Directory:
		return unix.Renameat(x.staging, temporary, parent, name)
	}
	return x.exchange(c, was, temporary, parent, name)
}

// fill moves the prepared file to a free name.
func (x *applier) fill(c *Change, temporary string, parent int, name string) error {
	err := unix.Renameat2(x.staging, temporary, parent, name, unix.RENAME_NOREPLACE)
	if err == unix.EEXIST {
		return changed(c.Path)
	}
	return incapable(err)
}

// maxExchanges bounds how often another process may interfere, each time within microseconds.
const maxExchanges = 100

// exchange swaps the prepared file with the old one in one step (renameat2(2), RENAME_EXCHANGE). If the file that
// comes out is not the expected one, another process has put it there, so it is swapped back, until the file that
// comes out is the one that the previous swap put in.
func (x *applier) exchange(c *Change, was *unix.Stat_t, temporary string, parent int, name string) error {
	put := look(x.staging, temporary)
	if put == nil {
		return unix.ENOENT
	}
	for n := range maxExchanges {
		err := x.move(was, temporary, parent, name, unix.RENAME_EXCHANGE)
		if err == unix.EXDEV && n == 0 {
			if err := x.clear(c, was, parent, name); err != nil {
				return err
			}
			return x.fill(c, temporary, parent, name)
		}
		if err != nil {
			return incapable(err)
		}
		if n == 0 {
			if done, err := x.discard(was, x.staging, temporary); done || err != nil {
				return err
			}
		}
		got := look(x.staging, temporary)
		if n > 0 && got != nil && tree.InodeOf(got) == tree.InodeOf(was) {
			return changed(c.Path)
		}
		was, put = put, got
	}
	return x.save(c, temporary, parent)
}

// move moves a file to the staging directory, or exchanges it with one there. It opens a directory that is
// closed to its owner, because rename(2) writes to it.
func (x *applier) move(was *unix.Stat_t, temporary string, parent int, name string, flags uint) error {
	err := unix.Renameat2(parent, name, x.staging, temporary, flags)
	if err != unix.EACCES || typeOf(was) != Directory {
		return err
	}
	fd, err := tree.OpenOwn(parent, name)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	was.Mode = st.Mode
	return unix.Renameat2(parent, name, x.staging, temporary, flags)
}

// clear removes a directory in place. If the original is itself on overlayfs, as in a container, directories
// of its lower layers cannot be moved (EXDEV, without the option redirect_dir).
func (x *applier) clear(c *Change, was *unix.Stat_t, parent int, name string) error {
	if typeOf(was) != Directory {
		return unix.EXDEV
	}
	done, err := x.discard(was, parent, name)
	if err == nil && !done {
		err = changed(c.Path)
	}
	return err
}

// discard removes a file that was moved away if it is the expected one, and reports whether it
// was.
func (x *applier) discard(was *unix.Stat_t, dir int, name string) (bool, error) {
	got := look(dir, name)
	switch {
	case x.Force:
		return true, tree.Remove(dir, name)
	case !unchanged(was, got):
		return false, nil
	case typeOf(got) != Directory:
		return removed(x.tree.unlink(dir, name, got))
	}
	return x.discardDir(was, dir, name)
}

// unchanged reports whether got is still the file was. It does not compare st_ctime, which the move has
// changed.
func unchanged(was, got *unix.Stat_t) bool {
	return got != nil && tree.InodeOf(got) == tree.InodeOf(was) && got.Mode == was.Mode && got.Uid == was.Uid && got.Gid == was.Gid && got.Size == was.Size && got.Mtim == was.Mtim
}

// discardDir removes a directory with everything that was in it when the sandbox began, and nothing else.
// A process that has it open, or resolved a path through it before the move, may still create files in it.
// The directory is then not removed, and goes back with its remaining contents.
func (x *applier) discardDir(was *unix.Stat_t, dir int, name string) (bool, error) {
	top, err := tree.OpenOwn(dir, name)
	if err != nil {
		return false, err
	}
	defer unix.Close(top)
	if st := look(top, "."); st == nil || tree.InodeOf(st) != tree.InodeOf(was) {
		return false, nil
	}
	list, complete := x.tree.comparison(context.Background()).earlierBelow(top) // not interrupted: the directory must be removed or moved back
	if !complete {
		return false, nil
	}
	for _, e := range slices.Backward(list) { // parents come first
		if done, err := x.discardEntry(top, e); !done || err != nil {
			return false, err
		}
	}
	return removed(unix.Unlinkat(dir, name, unix.AT_REMOVEDIR))
}

func (x *applier) discardEntry(top int, e earlier) (bool, error) {
	dir, err := tree.OpenOwn(top, path.Dir(e.path))
	if err != nil {
		return removed(err)
	}
	defer unix.Close(dir)
	name := path.Base(e.path)
	switch st := look(dir, name); {
	case st == nil:
		return true, nil
	case tree.InodeOf(st) != e.inode:
		return false, nil
	case typeOf(st) == Directory:
		return removed(unix.Unlinkat(dir, name, unix.AT_REMOVEDIR))
	case x.tree.later(st): // changed by another process since it was listed
		return removed(unix.Unlinkat(dir, name, 0))
	default:
		return removed(x.tree.unlink(dir, name, st))
	}
}

// unlink removes a name of a file that is not a directory and still has the status was.
func (t *Tree) unlink(dir int, name string, was *unix.Stat_t) error {
	if was.Nlink < 2 {
		return unix.Unlinkat(dir, name, 0)
	}
	fd, err := tree.Open(dir, name, unix.O_PATH)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.Unlinkat(dir, name, 0); err != nil {
		return err
	}
	t.remember(fd, was)
	return nil
}

// remember records our own change of a file for [Tree.later]. If another process has changed the file as
// well, it stays a conflict.
func (t *Tree) remember(fd int, was *unix.Stat_t) {
	var st unix.Stat_t
	if unix.Fstat(fd, &st) == nil && unchanged(was, &st) {
		t.ours[tree.InodeOf(&st)] = st
	}
}

// removed interprets the error of a removal: it returns true if the file is gone, and false if
// a directory is not empty.
func removed(err error) (bool, error) {
	switch err {
	case nil, unix.ENOENT:
		return true, nil
	case unix.ENOTEMPTY, unix.EEXIST:
		return false, nil
	}
	return false, err
}

// remove removes a path with everything below it.
func (x *applier) remove(c *Change, was *unix.Stat_t, temporary string, parent int, name string) error {
	var err error = unix.ENOENT // already removed
	if was != nil {
		err = x.move(was, temporary, parent, name, 0)
	}
	switch err {
	case nil:
	case unix.ENOENT:
		return nil
	case unix.EXDEV:
		return x.clear(c, was, parent, name)
	default:
		return err
	}
	if done, err := x.discard(was, x.staging, temporary); done || err != nil {
		return err
	}
	if unix.Renameat2(x.staging, temporary, parent, name, unix.RENAME_NOREPLACE) == nil {
		return changed(c.Path)
	}
	return x.save(c, temporary, parent)
}

// save keeps a file that was moved away and cannot go back, because its name is taken again.
func (x *applier) save(c *Change, temporary string, parent int) error {
	name := tree.Hidden()
	if err := unix.Renameat(x.staging, temporary, parent, name); err != nil {
		return err
	}
	e := changed(c.Path)
	e.Message += fmt.Sprintf(", and keeps changing: a version that was there for a moment is now %s in the same directory", name)
	return e
}

// incapable describes the error of file systems without such renames (NFS and some in user space: renameat2(2)).
func incapable(err error) error {
	if err == unix.EINVAL {
		return &result.Error{Code: "apply", Message: "the directory's file system cannot exchange two files atomically (renameat2(2))", Hint: "write the changes as an archive instead: sbxrun diff --tar"}
	}
	return err
}

// chmodDir sets a directory's permissions but keeps it usable for its owner until close.
func (x *applier) chmodDir(c *Change, dir int, name string, was *unix.Stat_t) error {
	x.closed = slices.DeleteFunc(x.closed, func(d closedDir) bool { return d.path == c.Path })
	if err := x.chmod(dir, name, was, c.mode|0o700); err != nil || c.mode&0o700 == 0o700 {
		return err
	}
	if is := look(dir, name); is != nil {
		x.closed = append(x.closed, closedDir{c.Path, *is, c.mode})
	}
	return nil
}

// chmod sets the permissions of a file or a directory without opening it, and without following a
// link.
func (x *applier) chmod(dir int, name string, was *unix.Stat_t, mode uint32) error {
	fd, err := tree.Open(dir, name, unix.O_PATH)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if t := typeOf(&st); t != File && t != Directory {
		return errors.New("no longer a file")
	}
	if was != nil && tree.InodeOf(&st) != tree.InodeOf(was) {
		return errors.New("replaced by another process")
	}
	same := was != nil && unchanged(was, &st)
	if err := tree.Chmod(fd, mode); err != nil {
		return err
	}
	if typeOf(&st) == Directory {
		// Otherwise the next comparison would consider it moved there ([comparison.exchanged]).
		_ = unix.UtimesNanoAt(dir, name, []unix.Timespec{{Nsec: unix.UTIME_OMIT}, {Nsec: unix.UTIME_NOW}}, unix.AT_SYMLINK_NOFOLLOW)
	}
	if same && st.Nlink > 1 && typeOf(&st) == File {
		st.Mode = st.Mode&unix.S_IFMT | mode
		x.tree.remember(fd, &st)
	}
	return nil
}
