package layers

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

// Pack writes the tar of an upper layer, whose directory is upper, which stays the caller's.
func Pack(upper *os.File, to io.Writer, most Limits) (Count, error) {
	p := packer{counted: counted{w: to, left: most.Bytes}, most: most, inodes: map[inode]string{}}
	p.tar = tar.NewWriter(&p.counted)
	fd, err := beneath(int(upper.Fd()), ".", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return p.Count, fmt.Errorf("open the upper layer: %w", err)
	}
	if err = p.directory(fd, "", 0); err == nil {
		err = p.tar.Close()
	}
	p.Bytes = p.counted.n
	return p.Count, err
}

type inode struct{ dev, ino uint64 }

type packer struct {
	Count
	counted counted
	most    Limits
	tar     *tar.Writer
	inodes  map[inode]string // the first name of files that have several
	buf     []byte
}

// counted passes on so many bytes.
type counted struct {
	w       io.Writer
	n, left int64
}

func (c *counted) Write(b []byte) (int, error) {
	if c.left -= int64(len(b)); c.left < 0 {
		return 0, tooLarge("the snapshot would have more than %d bytes", c.n+c.left+int64(len(b)))
	}
	n, err := c.w.Write(b)
	c.n += int64(n)
	return n, err
}

// directory packs what is in a directory, whose descriptor it closes.
func (p *packer) directory(fd int, at string, depth int) error {
	dir := os.NewFile(uintptr(fd), at)
	defer dir.Close()
	if depth > maxDepth || len(at) > maxName-256 {
		return tooLarge("directories are nested too deeply, below %.80q", at)
	}
	if value, err := xattr(fd, opaqueXattr); err != nil {
		return err
	} else if value == "y" {
		if err := p.write(&tar.Header{Typeflag: tar.TypeReg, Name: path.Join(at, opaque)}); err != nil {
			return err
		}
	}
	// No more names at once than there may be: a directory can have millions.
	left := p.most.Entries - p.Entries
	names, err := dir.Readdirnames(left + 1)
	if err != nil && err != io.EOF {
		return fmt.Errorf("read %.80q: %w", at, err)
	}
	if len(names) > left {
		return tooLarge("the snapshot would have more than %d entries", p.most.Entries)
	}
	slices.Sort(names)
	for _, name := range names {
		if err := p.entry(fd, at, name, depth); err != nil {
			return err
		}
	}
	return nil
}

// entry packs one name of a directory.
func (p *packer) entry(dir int, at, name string, depth int) error {
	var st unix.Stat_t
	if err := unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		if gone(err) {
			return nil
		}
		return fmt.Errorf("look at %.80q: %w", path.Join(at, name), err)
	}
	switch full := path.Join(at, name); st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		return p.file(dir, at, name)
	case unix.S_IFDIR:
		fd, err := beneath(dir, name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
		if err != nil {
			return unreadable(full, err)
		}
		if err := p.header(fd, full+"/"); err != nil {
			unix.Close(fd)
			return err
		}
		return p.directory(fd, full, depth+1)
	case unix.S_IFLNK:
		target := make([]byte, maxName+1)
		n, err := unix.Readlinkat(dir, name, target)
		if err != nil || n > maxName {
			return unreadable(full, err)
		}
		return p.write(stamped(&tar.Header{Typeflag: tar.TypeSymlink, Name: full, Linkname: string(target[:n]), Mode: 0o777}, &st))
	case unix.S_IFCHR:
		if st.Rdev == 0 {
			return p.deleted(at, name)
		}
	}
	p.LeftOut++
	return nil
}

// unreadable words why something cannot be packed; nil if it is gone.
func unreadable(name string, err error) error {
	if err == nil || gone(err) {
		return nil
	}
	e := &result.Error{Code: "failed", Message: fmt.Sprintf("cannot read %.200q of the upper layer: %v", name, err), Err: err}
	if errors.Is(err, unix.EACCES) {
		e.Hint = "its mode lets not even its owner read it: chmod u+r it in the sandbox"
	}
	return e
}

// header writes that of a directory.
func (p *packer) header(fd int, name string) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	return p.write(stamped(&tar.Header{Typeflag: tar.TypeDir, Name: name, Mode: int64(st.Mode & 0o777)}, &st))
}

// deleted writes that a name is.
func (p *packer) deleted(at, name string) error {
	h := &tar.Header{Typeflag: tar.TypeReg, Name: path.Join(at, whiteout+name)}
	if strings.HasPrefix(name, whiteout) {
		h.PAXRecords = map[string]string{kind: kindDeleted}
	}
	return p.write(h)
}

// file packs a regular file.
func (p *packer) file(dir int, at, name string) error {
	full := path.Join(at, name)
	fd, err := beneath(dir, name, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return unreadable(full, err)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
		return err // it was replaced meanwhile
	}
	if st.Size == 0 {
		if value, err := xattr(fd, whiteoutXattr); err != nil {
			return err
		} else if value != "" {
			return p.deleted(at, name)
		}
	}
	h := stamped(&tar.Header{Typeflag: tar.TypeReg, Name: full, Size: st.Size, Mode: int64(st.Mode & 0o777)}, &st)
	if strings.HasPrefix(name, whiteout) {
		h.PAXRecords = map[string]string{kind: kindFile}
	}
	if st.Nlink > 1 {
		i := inode{uint64(st.Dev), st.Ino}
		if first, seen := p.inodes[i]; seen {
			h.Typeflag, h.Size, h.Linkname = tar.TypeLink, 0, first
			return p.write(h)
		}
		p.inodes[i] = full
	}
	if st.Size > p.counted.left {
		return tooLarge("the snapshot would have more than %d bytes: %.80q has %d", p.most.Bytes, full, st.Size)
	}
	if err := p.write(h); err != nil {
		return err
	}
	return p.content(fd, full, st.Size)
}

// content copies so many bytes of a file, and zeros where it was cut meanwhile.
func (p *packer) content(fd int, name string, size int64) error {
	if p.buf == nil {
		p.buf = make([]byte, 256<<10)
	}
	for size > 0 {
		b := p.buf[:min(size, int64(len(p.buf)))]
		n, err := unix.Read(fd, b)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return fmt.Errorf("read %.200q of the upper layer: %w", name, err)
		}
		if n == 0 {
			clear(b)
			n = len(b)
		}
		if _, err := p.tar.Write(b[:n]); err != nil {
			return err
		}
		size -= int64(n)
	}
	return nil
}

// write writes a header, unless there are too many.
func (p *packer) write(h *tar.Header) error {
	if p.Entries++; p.Entries > p.most.Entries {
		return tooLarge("the snapshot would have more than %d entries", p.most.Entries)
	}
	h.Format = tar.FormatPAX
	return p.tar.WriteHeader(h)
}

// stamped sets the time of change of what a file holds.
func stamped(h *tar.Header, st *unix.Stat_t) *tar.Header {
	h.ModTime = time.Unix(st.Mtim.Unix())
	return h
}

// xattr is a short attribute; "" if there is none.
func xattr(fd int, name string) (string, error) {
	var b [8]byte
	n, err := unix.Fgetxattr(fd, name, b[:])
	switch err {
	case nil:
		if n == 0 {
			return "y", nil // overlayfs asks of a whiteout only whether it is there
		}
		return string(b[:n]), nil
	case unix.ENODATA, unix.EOPNOTSUPP, unix.ERANGE, unix.EPERM, unix.EACCES:
		return "", nil
	}
	return "", err
}
