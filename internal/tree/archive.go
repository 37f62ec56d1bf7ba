package tree

import (
	"archive/tar"
	"fmt"
	"io"
	"path"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Archive writes a tree as a tar stream. All files belong to user 0; setuid, setgid and sticky
// bits and extended attributes are left out.
//
// The archive of a layer follows the OCI image specification (layer.md): an empty file .wh.NAME
// stands for a deletion, and a file .wh..wh..opq in a directory hides the contents of that directory
// in lower layers. It keeps hard links.
type Archive struct {
	Entries int           // so far
	Moved   *atomic.Int64 // counts the bytes of files

	w     *tar.Writer
	to    bounded
	files map[Inode]string // in a layer: the first name of files with several names
	text  int              // bytes of those names
	holes int64
	buf   []byte
}

// Names in the archive of a layer.
const (
	Whiteout     = ".wh."
	OpaqueMarker = ".wh..wh..opq"
	// Kind tells whether a name that itself begins with .wh. is a file or a deletion. Other tools take
	// both for deletions.
	Kind        = "SBXRUN.kind"
	KindFile    = "file"
	KindDeleted = "deleted"
)

// Bounds of an archive.
const (
	maxHoles = 64 << 30 // zeros written for holes: a file without blocks can claim 8 EiB
	maxLinks = 64 << 20 // bytes of names; beyond that, hard links become copies
)

// NewArchive returns an archive of at most most bytes; 0 means no limit.
func NewArchive(to io.Writer, most int64) *Archive {
	a := &Archive{Moved: new(atomic.Int64), to: bounded{w: to, most: most}}
	a.w = tar.NewWriter(&a.to)
	return a
}

// NewLayer returns the archive of a layer.
func NewLayer(to io.Writer, most int64) *Archive {
	a := NewArchive(to, most)
	a.files = map[Inode]string{}
	return a
}

// bounded forwards at most most bytes.
type bounded struct {
	w       io.Writer
	n, most int64
}

func (b *bounded) Write(p []byte) (int, error) {
	if b.most > 0 && b.n+int64(len(p)) > b.most {
		return 0, TooLarge("the archive would exceed %d bytes", b.most)
	}
	n, err := b.w.Write(p)
	b.n += int64(n)
	return n, err
}

// Bytes returns the number of bytes written.
func (a *Archive) Bytes() int64 { return a.to.n }

// Close completes the archive. It does not close the writer.
func (a *Archive) Close() error { return a.w.Close() }

func (a *Archive) header(kind byte, name string, st *unix.Stat_t) *tar.Header {
	h := &tar.Header{Typeflag: kind, Name: name, Format: tar.FormatPAX}
	if st != nil {
		h.Mode, h.ModTime = int64(st.Mode&0o777), ModTime(st)
	}
	return h
}

func (a *Archive) write(h *tar.Header) error {
	a.Entries++
	return a.w.WriteHeader(h)
}

func (a *Archive) Dir(name string, st *unix.Stat_t) error {
	return a.write(a.header(tar.TypeDir, name+"/", st))
}

func (a *Archive) Link(name, target string, st *unix.Stat_t) error {
	h := a.header(tar.TypeSymlink, name, st)
	h.Linkname, h.Mode = target, 0o777
	return a.write(h)
}

// Deleted writes the deletion of a name in a layer.
func (a *Archive) Deleted(name string) error {
	dir, base := path.Split(name)
	h := a.header(tar.TypeReg, dir+Whiteout+base, nil)
	if strings.HasPrefix(base, Whiteout) {
		h.PAXRecords = map[string]string{Kind: KindDeleted}
	}
	return a.write(h)
}

// Opaque marks a directory of a layer as hiding the contents of lower layers.
func (a *Archive) Opaque(dir string) error {
	return a.write(a.header(tar.TypeReg, path.Join(dir, OpaqueMarker), nil))
}

// File writes a file with the status st: at most st.Size bytes, padded with zeros if the file was truncated.
func (a *Archive) File(name string, fd int, st *unix.Stat_t) error {
	h := a.header(tar.TypeReg, name, st)
	if a.files != nil {
		if strings.HasPrefix(path.Base(name), Whiteout) {
			h.PAXRecords = map[string]string{Kind: KindFile}
		}
		// A file with one name may have the inode number of a removed file.
		first, seen := a.files[InodeOf(st)]
		switch {
		case st.Nlink < 2:
		case seen:
			h.Typeflag, h.Linkname = tar.TypeLink, first
			return a.write(h)
		case a.text+len(name) <= maxLinks:
			a.files[InodeOf(st)], a.text = name, a.text+len(name)
		}
	}
	if a.holes += max(0, st.Size-st.Blocks*512); a.holes > maxHoles {
		return TooLarge("%.200q, of %d bytes, consists mostly of holes, which an archive would contain as zeros", name, st.Size)
	}
	if a.to.most > 0 && st.Size > a.to.most-a.to.n {
		return TooLarge("the archive would exceed %d bytes: %.200q has %d", a.to.most, name, st.Size)
	}
	h.Size = st.Size
	if err := a.write(h); err != nil {
		return err
	}
	if err := a.content(fd, h.Size); err != nil {
		return fmt.Errorf("pack %.200q: %w", name, err)
	}
	return nil
}

func (a *Archive) content(fd int, size int64) error {
	if a.buf == nil {
		a.buf = make([]byte, 256<<10)
	}
	for at := int64(0); at < size; {
		b := a.buf[:min(size-at, int64(len(a.buf)))]
		n, err := unix.Pread(fd, b, at)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		if n == 0 {
			clear(b)
			n = len(b)
		}
		if _, err := a.w.Write(b[:n]); err != nil {
			return err
		}
		at += int64(n)
		a.Moved.Add(int64(n))
	}
	return nil
}

// Opaque reports whether a directory of an overlay's layer hides the directory below it (mount option
// userxattr, Linux 5.11; Documentation/filesystems/overlayfs.rst).
func Opaque(dir int) bool {
	var value [2]byte
	n, err := unix.Fgetxattr(dir, OpaqueXattr, value[:])
	return err == nil && n == 1 && value[0] == 'y'
}

// OpaqueXattr is the attribute of an opaque directory.
const OpaqueXattr = "user.overlay.opaque"

// Copied reports whether the kernel copied a file of the layer up from below, because a program wrote to it. The
// kernel marks copied files, and no program in the sandbox can set or remove the mark.
func (e *Entry) Copied() bool {
	_, err := unix.Lgetxattr(fmt.Sprintf("/proc/self/fd/%d/%s", e.Dir, e.Name), CopiedXattr, nil)
	return err == nil
}

// CopiedXattr is the attribute of a file that was copied up.
const CopiedXattr = "user.overlay.origin"

// Deletes reports whether an entry of an overlay's layer stands for a deletion: a character device 0/0, or, since
// Linux 6.7, an empty file with an attribute. If e.FD is -1, an empty file is opened for that.
func (e *Entry) Deletes() bool {
	switch {
	case Type(&e.Stat) == unix.S_IFCHR:
		return e.Stat.Rdev == 0
	case Type(&e.Stat) != unix.S_IFREG || e.Stat.Size != 0:
		return false
	}
	fd := e.FD
	if fd < 0 {
		var err error
		if fd, _, err = OpenFile(e.Dir, e.Name); err != nil {
			return false
		}
		defer unix.Close(fd)
	}
	_, err := unix.Fgetxattr(fd, "user.overlay.whiteout", nil)
	return err == nil
}
