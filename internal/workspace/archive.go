package workspace

import (
	"archive/tar"
	"context"
	"errors"
	"io"
	"io/fs"
	"math"
	"path"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/tree"
)

// Quota limits the content of an archive.
type Quota struct {
	Bytes   int64
	Entries int  // including directories created for them
	Links   bool // whether to accept symbolic and hard links, and skip devices and FIFOs
}

// Unpack unpacks a tar stream. It accepts files and directories, and links if the quota allows them, but does
// not follow links. Other types, absolute names, names that lead out, and more than the quota are errors;
// earlier entries stay.
func (d *Dir) Unpack(r io.Reader, q Quota) error { return d.unpack(r, q, new(Transfer)) }

// unpack is Unpack with counts in t.
func (d *Dir) unpack(r io.Reader, q Quota, t *Transfer) error {
	// Bounds the stream itself: headers are bytes too, and a bomb may consist of headers.
	in := &io.LimitedReader{R: r, N: q.Bytes + int64(q.Entries)*2048 + 1<<16}
	archive := tar.NewReader(in)
	for left := q.Entries; ; {
		h, err := archive.Next()
		if err == io.EOF {
			return nil
		}
		if in.N <= 0 {
			return tree.TooLarge("the archive is too large")
		}
		if err != nil {
			return broken(err)
		}
		if h.Typeflag == tar.TypeXGlobalHeader {
			continue
		}
		t.entries.Add(1)
		name, err := d.clean(h.Name)
		if left--; err == nil && left >= 0 {
			err = d.mkdir(nonEmpty(path.Dir(name)), 0o755, &left)
		}
		if left < 0 {
			return tree.TooLarge("the archive has more than %d entries, including parent directories", q.Entries)
		}
		if err != nil {
			return err
		}
		switch {
		case q.Links && h.Typeflag == tar.TypeSymlink:
			err = d.Link(name, h.Linkname, false)
		case q.Links && h.Typeflag == tar.TypeLink:
			err = d.Link(name, h.Linkname, true)
		case h.Typeflag == tar.TypeDir:
			err = d.mkdir(name, uint32(h.Mode)&0o777|0o700, new(math.MaxInt))
		case h.Typeflag == tar.TypeReg, h.Typeflag == tar.TypeGNUSparse, h.Typeflag == 0: // the second is used by tar -S, the third by archives older than POSIX
			if h.Size > q.Bytes {
				return tree.TooLarge("%q and the files before it exceed the allowed size", name)
			}
			var n int64
			n, err = d.Put(name, sound{archive}, q.Bytes, fs.FileMode(h.Mode).Perm())
			q.Bytes -= n
			t.bytes.Add(n)
		case q.Links && (h.Typeflag == tar.TypeChar || h.Typeflag == tar.TypeBlock || h.Typeflag == tar.TypeFifo):
			t.LeftOut.Special.Add(usage("%q is not a file or directory that can be copied", name))
		default:
			err = usage("%q is neither a file nor a directory: links and devices are not allowed", h.Name)
		}
		if err != nil {
			return err
		}
	}
}

// sound converts errors of reading an archive.
type sound struct{ r io.Reader }

func (s sound) Read(b []byte) (int, error) {
	n, err := s.r.Read(b)
	if err != nil && err != io.EOF {
		err = broken(err)
	}
	return n, err
}

func broken(err error) error {
	if e := (*result.Error)(nil); errors.As(err, &e) {
		return err
	}
	return &result.Error{Code: "usage", Message: "not a tar archive: " + err.Error(), Err: err}
}

// Pack writes the files and directories below name as a tar stream. It skips other types and unreadable files.
// More than the quota is an error: files may be sparse, or have many names.
func (d *Dir) Pack(w io.Writer, name string, q Quota) error {
	const header = 10 << 10 // with the longest possible path
	a := tree.NewArchive(w, q.Bytes+int64(q.Entries)*header)
	for e, err := range d.below(name, tree.Walk{Entries: q.Entries, Files: true}) {
		switch {
		case err != nil:
		case tree.Type(&e.Stat) == unix.S_IFDIR:
			err = a.Dir(e.Path, &e.Stat)
		case tree.Type(&e.Stat) == unix.S_IFREG && e.Err == nil:
			err = a.File(e.Path, e.FD, &e.Stat)
		}
		if err != nil {
			return err
		}
	}
	return a.Close()
}

// archive is a directory in a tar stream, as the destination of a Transfer.
type archive struct {
	*tree.Archive
	prefix string
}

// Archive writes source as a tar stream under the given name.
func (t *Transfer) Archive(source *Source, w io.Writer, name string) error {
	a := archive{tree.NewArchive(w, 0), ""}
	if err := t.into(context.Background(), source, &a, name); err != nil {
		return err
	}
	return a.Close()
}

func (a *archive) file(_ context.Context, in int, st *unix.Stat_t, name string, moved *atomic.Int64) error {
	a.Moved = moved
	return a.File(path.Join(a.prefix, name), in, st)
}

func (a *archive) link(target string, st *unix.Stat_t, name string) error {
	return a.Link(path.Join(a.prefix, name), target, st)
}

func (a *archive) dir(st *unix.Stat_t, name string) (sink, error) {
	name = path.Join(a.prefix, name)
	return &archive{a.Archive, name}, a.Dir(name, st)
}

func (a *archive) close() {}

// Unpack unpacks a tar stream into the directory without following links. It accepts links, and as much as Max
// allows.
func (t *Transfer) Unpack(r io.Reader, to *Dir) error {
	q := Quota{Bytes: t.Max.Bytes, Entries: maxEntries, Links: true}
	if q.Bytes == 0 {
		q.Bytes = 1 << 60
	}
	return to.unpack(r, q, t)
}
