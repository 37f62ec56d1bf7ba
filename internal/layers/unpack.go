package layers

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/tree"
)

// Unpack makes of a tar the lower layer of an overlay, in an empty directory that nobody else gets
// at. owner is whose files they are to be; nil leaves them this process's. After an error what is in the
// directory is to be removed.
func Unpack(from io.Reader, root *os.File, owner *proc.Cred, most Count) (Count, error) {
	t := &layer{root: int(root.Fd()), owner: owner, parent: -1}
	defer t.leave()
	c, err := read(from, t, most)
	if err == nil {
		err = t.finish()
	}
	return c, err
}

// layer makes one in a directory.
type layer struct {
	root  int
	owner *proc.Cred
	buf   []byte

	// The directory that the last name was in: names come sorted, mostly.
	at     string
	parent int // -1 for none

	// What is set when nothing is made in them any more.
	dirs []directory
	text int // bytes of their names
}

type directory struct {
	name string
	mode uint32
	time time.Time
}

// enter opens the directory that a name is in, beneath the root.
func (t *layer) enter(name string) (dir int, base string, err error) {
	at, base := path.Split(name)
	if at == "" {
		return t.root, base, nil
	}
	if t.parent >= 0 && t.at == at {
		return t.parent, base, nil
	}
	t.leave()
	fd, err := tree.Open(t.root, strings.TrimSuffix(at, "/"), unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return -1, "", misplaced(name, err)
	}
	t.parent, t.at = fd, at
	return fd, base, nil
}

// misplaced words why a name cannot be made: the archive is at fault, or the disk.
func misplaced(name string, err error) error {
	switch err {
	case unix.ENOENT, unix.ENOTDIR, unix.ELOOP, unix.EEXIST, unix.EXDEV, unix.EISDIR, unix.ENAMETOOLONG, unix.EINVAL, unix.EMLINK:
		return refused("%.200q cannot be made: %v", name, err)
	}
	return fmt.Errorf("unpack %.200q: %w", name, err)
}

// leave closes the directory that is remembered.
func (t *layer) leave() {
	if t.parent >= 0 {
		unix.Close(t.parent)
	}
	t.parent = -1
}

// own gives a name to the owner.
func (t *layer) own(dir int, base string) error {
	if t.owner == nil {
		return nil
	}
	return unix.Fchownat(dir, base, int(t.owner.UID), int(t.owner.GID), unix.AT_SYMLINK_NOFOLLOW)
}

func (t *layer) dir(name string, h *tar.Header) error {
	dir, base, err := t.enter(name)
	if err != nil {
		return err
	}
	if err := unix.Mkdirat(dir, base, 0o700); err != nil {
		return misplaced(name, err)
	}
	if t.text += len(name); t.text > maxText {
		return refused("the paths of its directories are too long together")
	}
	t.dirs = append(t.dirs, directory{name, uint32(h.Mode & 0o777), h.ModTime})
	return t.own(dir, base)
}

func (t *layer) file(name string, h *tar.Header, content io.Reader) error {
	dir, base, err := t.enter(name)
	if err != nil {
		return err
	}
	fd, err := tree.Create(dir, base, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL, 0o600)
	if err != nil {
		return misplaced(name, err)
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	if err := t.fill(f, content); err != nil {
		return broken(err)
	}
	if t.owner != nil {
		if err := f.Chown(int(t.owner.UID), int(t.owner.GID)); err != nil {
			return err
		}
	}
	// After the owner, a change of whom may clear bits (chown(2)).
	if err := f.Chmod(fs.FileMode(h.Mode & 0o777)); err != nil {
		return err
	}
	return stamp(dir, base, h.ModTime)
}

// fill writes a file, in which zeros become holes: a sparse file of the sandbox is one again.
func (t *layer) fill(f *os.File, content io.Reader) error {
	if t.buf == nil {
		t.buf = make([]byte, 64<<10)
	}
	var at int64
	for {
		n, err := io.ReadFull(content, t.buf)
		if err != nil && err != io.EOF && err != io.ErrUnexpectedEOF {
			return err
		}
		last := err != nil
		if b := t.buf[:n]; n > 0 && (b[0] != 0 || !bytes.Equal(b[1:], b[:n-1])) {
			if _, err := f.WriteAt(b, at); err != nil {
				return err
			}
		}
		if at += int64(n); last {
			return f.Truncate(at)
		}
	}
}

func (t *layer) symlink(name string, h *tar.Header) error {
	dir, base, err := t.enter(name)
	if err != nil {
		return err
	}
	if err := unix.Symlinkat(h.Linkname, dir, base); err != nil {
		return misplaced(name, err)
	}
	if err := t.own(dir, base); err != nil {
		return err
	}
	return stamp(dir, base, h.ModTime)
}

// link gives a file that is there another name.
func (t *layer) link(name, first string) error {
	fd, err := tree.Open(t.root, first, unix.O_PATH)
	if err != nil {
		return misplaced(first, err)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return refused("%.80q is another name of %.80q, which is no file", name, first)
	}
	dir, base, err := t.enter(name)
	if err != nil {
		return err
	}
	if err := tree.Link(fd, dir, base); err != nil {
		return misplaced(name, err)
	}
	return nil
}

// deleted makes what hides a name: a device 0/0, which everybody may make (mknod(2), Linux 5.8).
func (t *layer) deleted(name string) error {
	dir, base, err := t.enter(name)
	if err != nil {
		return err
	}
	if err := unix.Mknodat(dir, base, unix.S_IFCHR, 0); err != nil {
		return misplaced(name, err)
	}
	return t.own(dir, base)
}

// opaque hides all that is below a directory.
func (t *layer) opaque(name string) error {
	fd := t.root
	if name != "" {
		var err error
		if fd, err = tree.Open(t.root, name, unix.O_RDONLY|unix.O_DIRECTORY); err != nil {
			return misplaced(name, err)
		}
		defer unix.Close(fd)
	}
	if err := unix.Fsetxattr(fd, tree.OpaqueXattr, []byte{'y'}, 0); err != nil {
		return fmt.Errorf("hide what is below %.200q: %w", name, err)
	}
	return nil
}

// finish gives directories their modes and times, those below before those above.
func (t *layer) finish() error {
	for i := len(t.dirs) - 1; i >= 0; i-- {
		d := t.dirs[i]
		dir, base, err := t.enter(d.name)
		if err != nil {
			return err
		}
		if err := unix.Fchmodat(dir, base, d.mode, 0); err != nil { // a directory of ours
			return err
		}
		if err := stamp(dir, base, d.time); err != nil {
			return err
		}
	}
	if t.owner != nil {
		if err := unix.Fchown(t.root, int(t.owner.UID), int(t.owner.GID)); err != nil {
			return err
		}
	}
	return unix.Fchmod(t.root, 0o755)
}

// stamp sets the time of change; the time of access too, so that it is not the present one.
func stamp(dir int, base string, at time.Time) error {
	ts, err := unix.TimeToTimespec(at)
	if err != nil {
		return refused("a time is out of range")
	}
	return unix.UtimesNanoAt(dir, base, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW)
}
