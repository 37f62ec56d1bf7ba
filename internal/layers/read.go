package layers

import (
	"archive/tar"
	"errors"
	"io"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/tree"
)

// Check reads a tar as Unpack does, without unpacking it. Only Unpack detects duplicate and
// missing names.
func Check(from io.Reader, most Count) (Count, error) { return readPacked(from, nothing{}, most) }

// maker handles the entries of a tar. Names are clean; file must read the content to its end.
type maker interface {
	dir(name string, h *tar.Header) error
	file(name string, h *tar.Header, content io.Reader) error
	symlink(name string, h *tar.Header) error
	link(name, first string) error
	deleted(name string) error
	opaque(dir string) error
}

func readPacked(from io.Reader, to maker, most Count) (Count, error) {
	return read(from, most, refused("more than the announced %d bytes", most.Bytes), func(h *tar.Header, content io.Reader) error { return entry(h, content, to) })
}

// read reads a tar to its end. over is the error for more bytes than allowed, in the tar or in its files, which can be larger
// if they are sparse.
func read(from io.Reader, most Count, over error, entry func(*tar.Header, io.Reader) error) (c Count, err error) {
	in := &limited{r: from, left: most.Bytes, over: over}
	archive := tar.NewReader(in)
	for {
		h, err := archive.Next()
		if err == io.EOF {
			// Data after the end of the archive is part of the hash, and counts.
			_, err := io.Copy(io.Discard, in)
			c.Bytes = in.n
			return c, err
		}
		if err != nil {
			return c, broken(err)
		}
		if c.Entries++; c.Entries > most.Entries {
			return c, tooMany(most.Entries)
		}
		if c.Content += h.Size; h.Size < 0 || c.Content < 0 || c.Content > most.Bytes {
			return c, over
		}
		if err := entry(h, archive); err != nil {
			return c, err
		}
	}
}

func tooMany(most int) error { return refused("more than %d entries", most) }

// entry handles the entry of one header.
func entry(h *tar.Header, content io.Reader, to maker) error {
	if path.Clean(h.Name) == "." && h.Typeflag == tar.TypeDir {
		return nil // the top directory, which other tools list
	}
	name, err := cleanName(h.Name)
	if err != nil {
		return err
	}
	dir, base := path.Split(name)
	switch h.Typeflag {
	case tar.TypeDir:
		return to.dir(name, h)
	case tar.TypeSymlink:
		return to.symlink(name, h)
	case tar.TypeLink:
		first, err := cleanName(h.Linkname)
		if err != nil {
			return err
		}
		return to.link(name, first)
	case tar.TypeReg:
	default:
		return refused("%.80q is neither a file nor a directory nor a link", name)
	}
	hidden, special := strings.CutPrefix(base, tree.Whiteout)
	switch {
	case !special || h.PAXRecords[tree.Kind] == tree.KindFile:
		return to.file(name, h, content)
	case h.Size != 0:
		return refused("%.80q is a deletion with content", name)
	case base == tree.OpaqueMarker && h.PAXRecords[tree.Kind] == "":
		return to.opaque(strings.TrimSuffix(dir, "/"))
	}
	if err := checkHidden(name, hidden); err != nil {
		return err
	}
	return to.deleted(dir + hidden)
}

// checkHidden checks the name that a deletion hides.
func checkHidden(name, hidden string) error {
	if hidden == "" || hidden == "." || hidden == ".." {
		return refused("%.80q is a deletion without a name", name)
	}
	return nil
}

// checkTarget checks the target of a symbolic link.
func checkTarget(name string, h *tar.Header) error {
	if h.Linkname == "" || len(h.Linkname) >= unix.PathMax || strings.ContainsRune(h.Linkname, 0) {
		return refused("link %.80q has an invalid target %.80q", name, h.Linkname)
	}
	return nil
}

// limited returns an error when there is more to read than allowed.
type limited struct {
	r       io.Reader
	n, left int64
	over    error
}

func (l *limited) Read(b []byte) (int, error) {
	n, err := l.r.Read(b)
	l.n += int64(n)
	if l.left -= int64(n); l.left < 0 {
		return 0, l.over
	}
	return n, err
}

func broken(err error) error {
	if errors.Is(err, tar.ErrHeader) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, tar.ErrFieldTooLong) || errors.Is(err, tar.ErrInsecurePath) {
		return refused("not a tar: %v", err)
	}
	return err
}

type nothing struct{}

func (nothing) dir(string, *tar.Header) error            { return nil }
func (nothing) symlink(name string, h *tar.Header) error { return checkTarget(name, h) }
func (nothing) link(string, string) error                { return nil }
func (nothing) deleted(string) error                     { return nil }
func (nothing) opaque(string) error                      { return nil }
func (nothing) file(_ string, _ *tar.Header, r io.Reader) error {
	_, err := io.Copy(io.Discard, r)
	return broken(err)
}
