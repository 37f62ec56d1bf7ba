package overlay

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"os"
	"path"
	"strings"

	"github.com/rogpeppe/go-internal/diff"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

// Select returns the changes at and below these paths, with the directories that they need; all
// for no path.
func Select(list []Change, paths []string) (out []Change) {
	if len(paths) == 0 {
		return list
	}
	within := func(name, dir string) bool {
		return dir == "." || name == dir || strings.HasPrefix(name, dir+"/")
	}
	needed := map[string]bool{}
	for _, c := range list {
		for _, p := range paths {
			if within(c.Path, p) {
				for dir := path.Dir(c.Path); dir != "."; dir = path.Dir(dir) {
					needed[dir] = true
				}
				needed[c.Path] = true
			}
		}
	}
	for _, c := range list {
		if needed[c.Path] && (c.Kind != Mode || matches(c.Path, paths, within)) {
			out = append(out, c)
		}
	}
	return out
}

func matches(name string, paths []string, within func(string, string) bool) bool {
	for _, p := range paths {
		if within(name, p) {
			return true
		}
	}
	return false
}

// Count is how much was changed, as the report has it.
type Count struct {
	Count int   `json:"count"`
	Bytes int64 `json:"bytes"` // of the files that were added and changed
}

// Sum counts changes.
func Sum(list []Change) (n Count) {
	for _, c := range list {
		n.Count++
		if c.Type == File && c.Kind != Deleted && c.Same == "" {
			n.Bytes += c.Size
		}
	}
	return n
}

// maxText bounds a file that a patch shows the text of.
const maxText = 1 << 20

// Patch writes the changes as a patch, as git(1) makes and takes it. Of what is no text, or too
// large, it says that it differs.
func (t *Tree) Patch(to io.Writer, list []Change) error {
	for _, c := range list {
		if err := t.patch(to, &c); err != nil {
			return err
		}
	}
	return nil
}

func (t *Tree) patch(to io.Writer, c *Change) error {
	if c.Kind == Deleted && c.Type == Directory {
		return t.patchBelow(to, c)
	}
	if c.Type == Other || c.Type == Directory || c.Was == Directory {
		return nil // git(1) has no directories
	}
	before, after := text(t.Source, c.Path, c.Kind == Added), text(t.Layer, c.Path, c.Kind == Deleted || c.Kind == Mode)
	if c.Kind == Mode {
		before = after
	}
	a, b := "a/"+c.Path, "b/"+c.Path
	var head bytes.Buffer
	fmt.Fprintf(&head, "diff --git %s %s\n", quoted(a), quoted(b))
	switch {
	case c.Kind == Added:
		fmt.Fprintf(&head, "new file mode %s\n", gitMode(c.Type, c.Mode))
		a = "/dev/null"
	case c.Kind == Deleted:
		fmt.Fprintf(&head, "deleted file mode %s\n", gitMode(c.Type, c.WasMode))
		b = "/dev/null"
	case c.Was != "":
		fmt.Fprintf(&head, "old mode %s\nnew mode %s\n", gitMode(c.Was, c.WasMode), gitMode(c.Type, c.Mode))
	case c.WasMode != "" && c.WasMode != c.Mode:
		fmt.Fprintf(&head, "old mode %s\nnew mode %s\n", gitMode(c.Type, c.WasMode), gitMode(c.Type, c.Mode))
	}
	switch {
	case before == nil || after == nil:
		fmt.Fprintf(&head, "Binary files %s and %s differ\n", quoted(a), quoted(b))
	case string(before) != string(after):
		_, lines, _ := bytes.Cut(diff.Diff(quoted(a), before, quoted(b), after), []byte("\n")) // all but its own headline
		head.Write(lines)
	}
	_, err := to.Write(head.Bytes())
	return err
}

// patchBelow shows the files of a directory that was deleted.
func (t *Tree) patchBelow(to io.Writer, c *Change) error {
	fd, err := beneath(int(t.Source.Fd()), c.Path, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return nil // it is gone
	}
	w := walker{left: maxEntries, seen: map[inode]string{}}
	defer unix.Close(fd)
	dir, err := openDir(fd, ".")
	if err != nil {
		return nil
	}
	sub := os.NewFile(uintptr(dir), c.Path)
	defer sub.Close()
	names, err := w.names(sub)
	if err != nil {
		return err
	}
	for _, name := range names {
		w.deleted(fd, c.Path, name)
	}
	return t.Patch(to, w.changes)
}

// gitMode is a mode as git(1) has it.
func gitMode(t Type, mode string) string {
	switch {
	case t == Link:
		return "120000"
	case strings.ContainsAny(mode, "1357"):
		return "100755"
	}
	return "100644"
}

// text is what a file holds, or where a link leads; nil if that is no text. Nothing is none.
func text(root *os.File, name string, nothing bool) []byte {
	if nothing {
		return []byte{}
	}
	dir, err := beneath(int(root.Fd()), path.Dir(name), unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return nil
	}
	defer unix.Close(dir)
	fd, err := openFile(dir, path.Base(name))
	if err == unix.ELOOP {
		return []byte(readlink(dir, path.Base(name)))
	}
	if err != nil {
		return nil
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxText+1))
	if err != nil || len(b) > maxText || bytes.IndexByte(b, 0) >= 0 {
		return nil
	}
	if b == nil {
		b = []byte{}
	}
	return b
}

// quoted is a name as git(1) writes it: what a terminal would obey, or a reader take for the end
// of the name, in octal.
func quoted(name string) string {
	var b strings.Builder
	plain := true
	for i := range len(name) {
		switch c := name[i]; {
		case c == '"' || c == '\\':
			plain = false
			b.WriteByte('\\')
			b.WriteByte(c)
		case c < ' ' || c >= 0x7f:
			plain = false
			fmt.Fprintf(&b, "\\%03o", c)
		default:
			b.WriteByte(c)
		}
	}
	if plain {
		return name
	}
	return `"` + b.String() + `"`
}

// maxTar bounds the files in a tar: a file of the layer can claim to be larger than any disk.
const maxTar = 64 << 30

// Tar writes the changes as a layer of an OCI image: what is added or changed, and for what is
// deleted an empty file .wh.NAME. All belongs to user 0.
func (t *Tree) Tar(to io.Writer, list []Change) error {
	w := tar.NewWriter(to)
	left := int64(maxTar)
	for _, c := range list {
		h := &tar.Header{Name: c.Path, Mode: int64(c.mode), Typeflag: tar.TypeReg}
		switch {
		case c.Kind == Deleted:
			h.Name, h.Mode = path.Join(path.Dir(c.Path), ".wh."+path.Base(c.Path)), 0
		case c.Type == Directory:
			h.Typeflag, h.Name = tar.TypeDir, c.Path+"/"
		case c.Type == Link:
			h.Typeflag, h.Linkname, h.Mode = tar.TypeSymlink, c.Target, 0o777
		case c.Type == Other:
			continue
		case c.Same != "":
			h.Typeflag, h.Linkname = tar.TypeLink, c.Same
		default:
			var err error
			if left, err = t.tarFile(w, h, left); err != nil {
				return err
			}
			continue
		}
		if err := w.WriteHeader(h); err != nil {
			return err
		}
	}
	return w.Close()
}

func (t *Tree) tarFile(w *tar.Writer, h *tar.Header, left int64) (int64, error) {
	dir, err := beneath(int(t.Layer.Fd()), path.Dir(h.Name), unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return left, fmt.Errorf("%.200q: %w", h.Name, err)
	}
	defer unix.Close(dir)
	fd, err := openFile(dir, path.Base(h.Name))
	if err != nil {
		return left, fmt.Errorf("%.200q: %w", h.Name, err)
	}
	f := os.NewFile(uintptr(fd), h.Name)
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return left, err
	}
	h.Size, h.ModTime = st.Size(), st.ModTime()
	if left -= h.Size; left < 0 {
		return left, &result.Error{Code: "too-large", Message: fmt.Sprintf("the changes are larger than %d bytes, with %.200q", int64(maxTar), h.Name)}
	}
	if err := w.WriteHeader(h); err != nil {
		return left, err
	}
	n, err := io.Copy(w, io.LimitReader(f, h.Size))
	if err == nil && n < h.Size { // it was cut meanwhile
		_, err = io.CopyN(w, zeros{}, h.Size-n)
	}
	return left, err
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) {
	clear(b)
	return len(b), nil
}
