package workspace

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

// Quota is how much an archive may bring.
type Quota struct {
	Bytes   int64
	Entries int
	Links   bool // symbolic and hard links are taken, too
}

// Unpack writes what a tar stream has. Only files and directories are taken, and links if the
// quota says so, which are not followed: a device, a name that is absolute or leads out, and
// more than the quota are errors, and what came before them stays.
func (d *Dir) Unpack(r io.Reader, q Quota) error { return d.unpack(r, q, new(Transfer)) }

// unpack counts in t.
func (d *Dir) unpack(r io.Reader, q Quota, t *Transfer) error {
	// Counted as it comes: headers are bytes too, and a bomb may be all headers.
	in := &io.LimitedReader{R: r, N: q.Bytes + int64(q.Entries)*2048 + 1<<16}
	archive := tar.NewReader(in)
	for entries := 0; ; {
		h, err := archive.Next()
		if err == io.EOF {
			return nil
		}
		if in.N <= 0 {
			return tooLarge("the archive is too long")
		}
		if err != nil {
			return broken(err)
		}
		if h.Typeflag == tar.TypeXGlobalHeader {
			continue
		}
		t.entries.Add(1)
		if entries++; entries > q.Entries {
			return tooLarge(fmt.Sprintf("the archive has more than %d entries", q.Entries))
		}
		name, err := Clean(h.Name)
		if err != nil {
			return err
		}
		switch {
		case q.Links && h.Typeflag == tar.TypeSymlink:
			err = d.Link(name, h.Linkname, false)
		case q.Links && h.Typeflag == tar.TypeLink:
			err = d.Link(name, h.Linkname, true)
		case h.Typeflag == tar.TypeDir:
			err = d.Mkdir(name)
		case h.Typeflag == tar.TypeReg, h.Typeflag == 0: // the zero byte is what archives before POSIX have of a file
			if h.Size > q.Bytes {
				return tooLarge(fmt.Sprintf("%q and what came before are more than may be brought", name))
			}
			var n int64
			n, err = d.Put(name, sound{archive}, q.Bytes, fs.FileMode(h.Mode).Perm())
			q.Bytes -= n
			t.bytes.Add(n)
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

func tooLarge(message string) error { return &result.Error{Code: "too-large", Message: message} }

// Pack writes the files and directories below one as a tar stream. What is neither is left
// out.
func (d *Dir) Pack(w io.Writer, name string, entries int) error {
	archive := tar.NewWriter(w)
	err := d.List(name, entries, func(e Entry) error {
		h := &tar.Header{Name: e.Path, Mode: int64(e.mode), ModTime: e.ModTime, Format: tar.FormatPAX}
		switch e.Type {
		case "directory":
			h.Typeflag, h.Name = tar.TypeDir, e.Path+"/"
			return archive.WriteHeader(h)
		case "file":
		default:
			return nil
		}
		f, st, err := d.Get(e.Path)
		if err != nil {
			return nil // it was removed or replaced meanwhile, or may not be read
		}
		defer f.Close()
		h.Typeflag, h.Size = tar.TypeReg, st.Size()
		if err := archive.WriteHeader(h); err != nil {
			return err
		}
		n, err := io.CopyN(archive, f, h.Size)
		if errors.Is(err, io.EOF) { // it has shrunk
			_, err = io.CopyN(archive, zeros{}, h.Size-n)
		}
		return err
	})
	if err != nil {
		return err
	}
	return archive.Close()
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) {
	clear(b)
	return len(b), nil
}
