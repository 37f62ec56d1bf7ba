package layers

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/tests/check"
)

// again reads the same bytes again and again.
type again struct {
	text []byte
	at   int
}

func (a *again) Read(p []byte) (int, error) {
	n := copy(p, a.text[a.at:])
	a.at = (a.at + n) % len(a.text)
	return n, nil
}

// Endless layers are refused at the limits for entries, for bytes, and for the list of deletions. Directories that a layer
// does not list count as entries.
func TestPlainBounds(t *testing.T) {
	deep := archive([]tar.Header{{Typeflag: tar.TypeReg, Name: strings.Repeat("d/", 90) + "f"}})
	entry := func(name string) []byte { return archive([]tar.Header{{Typeflag: tar.TypeReg, Name: name}})[:512] }
	for name, tt := range map[string]struct {
		text []byte
		most Count
		want string
	}{
		"entries":   {entry("f"), Count{Bytes: 1 << 40, Entries: 1000}, "more than 1000 entries"},
		"bytes":     {entry("f"), Count{Bytes: 1 << 20, Entries: 1 << 30}, "more bytes unpacked than allowed"},
		"deep":      {deep, Count{Bytes: 1 << 20, Entries: 50}, "more than 50 entries"},
		"deletions": {entry(".wh." + strings.Repeat("x", 90)), Count{Bytes: 1 << 40, Entries: 1 << 30}, "too many deletions"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Plain(&again{text: tt.text}, open(t, t.TempDir()), io.Discard, nil, tt.most)
			check.That(t, (result.CodeOf(err) == "damaged" || result.CodeOf(err) == "too-large") && strings.Contains(err.Error(), tt.want), "%v", err)
		})
	}
	for most, want := range map[int]string{90: "damaged", 91: ""} {
		c, err := Plain(bytes.NewReader(deep), open(t, t.TempDir()), io.Discard, nil, Count{Bytes: 1 << 20, Entries: most})
		check.That(t, result.CodeOf(err) == want && c.Entries == 91, "%d entries of at most %d: %v", c.Entries, most, err)
	}
}

// FuzzPlain unpacks two layers and merges them: nothing appears outside of their directories, nothing has more rights
// than a layer may give, and the same layers give the same tree.
func FuzzPlain(f *testing.F) {
	f.Add(archive([]tar.Header{{Typeflag: tar.TypeReg, Name: "a/b", Mode: 0o7777}, {Typeflag: tar.TypeSymlink, Name: "l", Linkname: ".."}, {Typeflag: tar.TypeLink, Name: "h", Linkname: "a/b"}}),
		archive([]tar.Header{{Typeflag: tar.TypeReg, Name: "l/x"}, {Typeflag: tar.TypeReg, Name: ".wh.h"}, {Typeflag: tar.TypeReg, Name: "a/.wh..wh..opq"}, {Typeflag: tar.TypeLink, Name: "g", Linkname: "a/b"}}))
	f.Add(archive([]tar.Header{{Typeflag: tar.TypeDir, Name: "d/"}, {Typeflag: tar.TypeSymlink, Name: "d", Linkname: "/"}}), archive([]tar.Header{{Typeflag: tar.TypeDir, Name: "d/"}, {Typeflag: tar.TypeReg, Name: "d/f"}}))
	f.Fuzz(func(t *testing.T, lower, upper []byte) {
		top := t.TempDir()
		build := func(name string) (string, bool) {
			dir := filepath.Join(top, name)
			for _, sub := range []string{"", "/root", "/0", "/1"} {
				check.Must(t, os.Mkdir(dir+sub, 0o755))
			}
			root := open(t, dir+"/root")
			for i, text := range [][]byte{lower, upper} {
				layer := open(t, dir+"/"+string(rune('0'+i)))
				var changes bytes.Buffer
				if _, err := Plain(bytes.NewReader(text), layer, &changes, nil, Count{Bytes: 1 << 16, Entries: 64}); err != nil {
					return "", false
				}
				if err := Merge(root, layer, &changes, nil); err != nil {
					check.Require(t, result.CodeOf(err) == "damaged", "%v", err)
					return "", false
				}
			}
			return dir + "/root", true
		}
		one, ok := build("one")
		two, same := build("two")
		check.Require(t, ok == same, "the same layers were accepted once")
		names, err := filepath.Glob(top + "/*")
		check.Require(t, err == nil && len(names) == 2, "outside are %v", names)
		if !ok {
			return
		}
		a, b := listing(t, one), listing(t, two)
		check.Require(t, a == b, "the trees differ:\n%s\n%s", a, b)
		check.Must(t, filepath.WalkDir(one, func(path string, _ os.DirEntry, err error) error {
			var st unix.Stat_t
			if err == nil {
				err = unix.Lstat(path, &st)
			}
			kind := st.Mode & unix.S_IFMT
			check.That(t, err != nil || st.Mode&0o7000 == 0 && (kind == unix.S_IFDIR || kind == unix.S_IFREG || kind == unix.S_IFLNK) && (kind != unix.S_IFDIR || st.Mode&0o700 == 0o700),
				"%q has mode %o", path, st.Mode)
			return err
		}))
	})
}

// A file of a layer can have as many names as its file system allows: the tree of an image has copies of it then.
func TestManyLinks(t *testing.T) {
	const links = 33_000 // ext4 allows 65,000
	layer, root := t.TempDir(), t.TempDir()
	check.Must(t, os.WriteFile(layer+"/0", []byte("x"), 0o640))
	for i := 1; i < links; i++ {
		check.Must(t, os.Link(layer+"/0", fmt.Sprint(layer, "/", i)))
	}
	check.Must(t, Merge(open(t, root), open(t, layer), strings.NewReader(""), nil))
	names, err := os.ReadDir(root)
	check.Must(t, err)
	files := map[uint64]int{}
	for _, name := range names {
		var st unix.Stat_t
		check.Must(t, unix.Lstat(filepath.Join(root, name.Name()), &st))
		check.Require(t, st.Mode == unix.S_IFREG|0o640 && st.Size == 1, "%s has mode %o and %d bytes", name.Name(), st.Mode, st.Size)
		files[st.Ino]++
	}
	check.That(t, len(names) == links && len(files) <= 2, "%d names of %d files", len(names), len(files))
}
