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

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/tree"
)

// Unpack unpacks a tar as the lower layer of an overlay into an empty private directory. The files get
// the owner, unless that is nil. After an error the caller removes the contents of the directory.
func Unpack(from io.Reader, root *os.File, owner *proc.Cred, most Count) (Count, error) {
	t := &layer{root: int(root.Fd()), owner: owner, parent: -1}
	defer t.leave()
	c, err := readPacked(from, t, most)
	if err == nil {
		err = t.finish()
	}
	return c, err
}

// layer unpacks into a directory.
type layer struct {
	root  int
	owner *proc.Cred
	buf   []byte

	// The directory of the previous name, kept open because names usually come sorted.
	at     string
	parent int // -1 for none

	// Directories whose modes and times are set at the end.
	dirs []directory
	text int // bytes of their names
}

type directory struct {
	name string
	mode uint32
	time time.Time
}

// enter opens the parent directory of a name.
func (t *layer) enter(name string) (dir int, base string, err error) {
	if dir, base, err = t.open(name); err != nil {
		err = misplaced(name, err)
	}
	return dir, base, err
}

// open is enter with the system call's error.
func (t *layer) open(name string) (dir int, base string, err error) {
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
		return -1, "", err
	}
	t.parent, t.at = fd, at
	return fd, base, nil
}

// misplaced returns an error for a name that cannot be created: either the archive is invalid, or the disk failed.
func misplaced(name string, err error) error {
	switch err {
	case unix.ENOENT, unix.ENOTDIR, unix.ELOOP, unix.EEXIST, unix.EXDEV, unix.EISDIR, unix.ENAMETOOLONG, unix.EINVAL, unix.EMLINK:
		return refused("cannot create %.200q: %v", name, err)
	}
	return fmt.Errorf("unpack %.200q: %w", name, err)
}

// leave closes the cached directory.
func (t *layer) leave() {
	if t.parent >= 0 {
		unix.Close(t.parent)
	}
	t.parent = -1
}

// own changes the owner of a file.
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
		return refused("the paths of its directories are too long in total")
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
	// After chown(2), which may clear bits.
	if err := f.Chmod(fs.FileMode(h.Mode & 0o777)); err != nil {
		return err
	}
	return stamp(dir, base, h.ModTime)
}

// fill writes a file, with holes for blocks of zeros, so that sparse files stay sparse.
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
	if err := checkTarget(name, h); err != nil {
		return err
	}
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

// link creates another name of an unpacked file.
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
		return refused("%.80q is a hard link to %.80q, which is not a file", name, first)
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

// deleted creates a whiteout: a device 0/0, which every user may create (mknod(2), Linux 5.8).
func (t *layer) deleted(name string) error {
	dir, base, err := t.enter(name)
	if err != nil {
		return err
	}
	if err := unix.Mknodat(dir, base, unix.S_IFCHR, 0); err == unix.EPERM {
		return unsuitable(err)
	} else if err != nil {
		return misplaced(name, err)
	}
	return t.own(dir, base)
}

// unsuitable is the error if a file system cannot record changes to lower layers: overlayfs has no whiteouts of its own,
// and tmpfs has no extended attributes before Linux 6.6.
func unsuitable(err error) error {
	return &result.Error{Code: "data", Message: fmt.Sprintf("the file system of the data directory cannot hold the layers of snapshots (%v)", err),
		Hint: "set SBXRUN_DATA_DIR or --data-dir to a directory on another file system, such as ext4 or XFS", Err: err}
}

// opaque hides everything below a directory.
func (t *layer) opaque(name string) error {
	fd := t.root
	if name != "" {
		var err error
		if fd, err = tree.Open(t.root, name, unix.O_RDONLY|unix.O_DIRECTORY); err != nil {
			return misplaced(name, err)
		}
		defer unix.Close(fd)
	}
	if err := unix.Fsetxattr(fd, tree.OpaqueXattr, []byte{'y'}, 0); err == unix.EOPNOTSUPP {
		return unsuitable(err)
	} else if err != nil {
		return fmt.Errorf("mark %.200q as opaque: %w", name, err)
	}
	return nil
}

// finish sets the modes and times of directories, children first.
func (t *layer) finish() error {
	for i := len(t.dirs) - 1; i >= 0; i-- {
		d := t.dirs[i]
		dir, base, err := t.enter(d.name)
		if err != nil {
			return err
		}
		if err := unix.Fchmodat(dir, base, d.mode, 0); err != nil { // our own directory
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

// stamp sets the modification time, and the access time to the same.
func stamp(dir int, base string, at time.Time) error {
	ts, err := unix.TimeToTimespec(at)
	if err != nil {
		return refused("time out of range")
	}
	return unix.UtimesNanoAt(dir, base, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW)
}
