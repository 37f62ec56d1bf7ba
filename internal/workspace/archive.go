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

// Quota is how much an archive may bring.
type Quota struct {
	Bytes   int64
	Entries int  // with the directories that are made for those in them
	Links   bool // symbolic and hard links are taken, too, and devices and FIFOs left out
}

// Unpack writes what a tar stream has. Only files and directories are taken, and links if the
// quota says so, which are not followed: anything else, a name that is absolute or leads out, and
// more than the quota are errors, and what came before them stays.
func (d *Dir) Unpack(r io.Reader, q Quota) error { return d.unpack(r, q, new(Transfer)) }

// unpack counts in t.
func (d *Dir) unpack(r io.Reader, q Quota, t *Transfer) error {
	// Counted as it comes: headers are bytes too, and a bomb may be all headers.
	in := &io.LimitedReader{R: r, N: q.Bytes + int64(q.Entries)*2048 + 1<<16}
	archive := tar.NewReader(in)
	for left := q.Entries; ; {
		h, err := archive.Next()
		if err == io.EOF {
			return nil
		}
		if in.N <= 0 {
			return tree.TooLarge("the archive is too long")
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
			return tree.TooLarge("the archive has more than %d entries, with the directories above them", q.Entries)
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
		case h.Typeflag == tar.TypeReg, h.Typeflag == tar.TypeGNUSparse, h.Typeflag == 0: // the second is of tar -S; the zero byte is what archives before POSIX have of a file
			if h.Size > q.Bytes {
				return tree.TooLarge("%q and what came before are more than may be brought", name)
			}
			var n int64
			n, err = d.Put(name, sound{archive}, q.Bytes, fs.FileMode(h.Mode).Perm())
			q.Bytes -= n
			t.bytes.Add(n)
		case q.Links && (h.Typeflag == tar.TypeChar || h.Typeflag == tar.TypeBlock || h.Typeflag == tar.TypeFifo):
			t.LeftOut.Special.Add(usage("%q is neither a file nor a directory to copy", name))
		default:
			err = usage("%q is neither a file nor a directory: links and devices are not taken", h.Name)
		}
		if err != nil {
			return err
		}
	}
}

// sound words what is wrong with an archive.
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
	return &result.Error{Code: "usage", Message: "the archive cannot be read as tar: " + err.Error(), Err: err}
}

// Pack writes the files and directories below one as a tar stream. What is neither, and what cannot
// be read, is left out. More than the quota is an error: files may be holes, or have many names.
func (d *Dir) Pack(w io.Writer, name string, q Quota) error {
	const header = 10 << 10 // with a path as long as it can be
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

// archive is a directory in a tar stream, as a Transfer copies to it.
type archive struct {
	*tree.Archive
	prefix string
}

// Archive writes what source is as a tar stream, in which it has the name.
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

// Unpack unpacks a tar stream into the directory, in which no link is followed. It takes links,
// and what the Max of t allows.
func (t *Transfer) Unpack(r io.Reader, to *Dir) error {
	q := Quota{Bytes: t.Max.Bytes, Entries: maxEntries, Links: true}
	if q.Bytes == 0 {
		q.Bytes = 1 << 60
	}
	return to.unpack(r, q, t)
}
