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
func Check(from io.Reader, most Count) (Count, error) { return read(from, nothing{}, most) }

// maker handles the entries of a tar. Names are clean; file must read the content to its end.
type maker interface {
	dir(name string, h *tar.Header) error
	file(name string, h *tar.Header, content io.Reader) error
	symlink(name string, h *tar.Header) error
	link(name, first string) error
	deleted(name string) error
	opaque(dir string) error
}

// read reads a tar to its end.
func read(from io.Reader, to maker, most Count) (c Count, err error) {
	in := &limited{r: from, left: most.Bytes}
	archive := tar.NewReader(in)
	var content int64 // sparse files can be larger than the tar
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
			return c, refused("more than %d entries", most.Entries)
		}
		if content += h.Size; h.Size < 0 || content < 0 || content > most.Bytes {
			return c, refused("files of more than %d bytes", most.Bytes)
		}
		if err := entry(h, archive, to); err != nil {
			return c, err
		}
	}
}

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
		if h.Linkname == "" || len(h.Linkname) >= unix.PathMax || strings.ContainsRune(h.Linkname, 0) {
			return refused("link %.80q has an invalid target %.80q", name, h.Linkname)
		}
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
	case hidden == "" || hidden == "." || hidden == "..":
		return refused("%.80q is a deletion without a name", name)
	}
	return to.deleted(dir + hidden)
}

// limited returns an error when there is more to read than allowed.
type limited struct {
	r       io.Reader
	n, left int64
	over    error // for more; nil for the default
}

func (l *limited) Read(b []byte) (int, error) {
	n, err := l.r.Read(b)
	l.n += int64(n)
	if l.left -= int64(n); l.left < 0 {
		if l.over != nil {
			return 0, l.over
		}
		return 0, refused("more bytes than announced")
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

func (nothing) dir(string, *tar.Header) error     { return nil }
func (nothing) symlink(string, *tar.Header) error { return nil }
func (nothing) link(string, string) error         { return nil }
func (nothing) deleted(string) error              { return nil }
func (nothing) opaque(string) error               { return nil }
func (nothing) file(_ string, _ *tar.Header, r io.Reader) error {
	_, err := io.Copy(io.Discard, r)
	return broken(err)
}
