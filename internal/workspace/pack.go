package workspace

import (
	"archive/tar"
	"io"
	"os"
	"path"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Archive writes what source is as a tar stream, in which it has the name.
func (t *Transfer) Archive(source *Source, w io.Writer, name string) error {
	a := archive{w: tar.NewWriter(w)}
	if err := t.into(source, &a, name); err != nil {
		return err
	}
	return a.w.Close()
}

// archive is a directory in a tar stream.
type archive struct {
	w      *tar.Writer
	prefix string
}

func (a *archive) header(kind byte, st *unix.Stat_t, name string) *tar.Header {
	return &tar.Header{Typeflag: kind, Name: path.Join(a.prefix, name), Mode: int64(st.Mode & 0o777), ModTime: time.Unix(st.Mtim.Unix()), Format: tar.FormatPAX}
}

func (a *archive) file(in int, st *unix.Stat_t, name string, moved *atomic.Int64) error {
	h := a.header(tar.TypeReg, st, name)
	h.Size = st.Size
	if err := a.w.WriteHeader(h); err != nil {
		return err
	}
	fd, err := unix.FcntlInt(uintptr(in), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	n, err := io.CopyN(counted{a.w, moved}, f, h.Size)
	if err == io.EOF { // it has become shorter
		_, err = io.CopyN(a.w, zeros{}, h.Size-n)
	}
	return err
}

func (a *archive) link(target string, st *unix.Stat_t, name string) error {
	h := a.header(tar.TypeSymlink, st, name)
	h.Linkname = target
	return a.w.WriteHeader(h)
}

func (a *archive) dir(st *unix.Stat_t, name string) (sink, error) {
	h := a.header(tar.TypeDir, st, name)
	below := &archive{a.w, h.Name}
	h.Name += "/"
	return below, a.w.WriteHeader(h)
}

func (a *archive) close() {}

// counted counts what is written.
type counted struct {
	io.Writer
	n *atomic.Int64
}

func (c counted) Write(b []byte) (int, error) {
	n, err := c.Writer.Write(b)
	c.n.Add(int64(n))
	return n, err
}

// Unpack unpacks a tar stream into the directory, in which no link is followed. It takes links,
// and what the Max of t allows.
func (t *Transfer) Unpack(r io.Reader, to *Dir) error {
	q := Quota{Bytes: t.Max.Bytes, Entries: maxEntries, Links: true}
	if q.Bytes == 0 {
		q.Bytes = 1 << 60
	}
	return to.unpack(r, q, t)
}
