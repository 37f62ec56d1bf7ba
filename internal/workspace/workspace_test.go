package workspace

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/tests/check"
)

// open creates a workspace in a directory with a file that must not be reached.
func open(t testing.TB) (d *Dir, root string) {
	t.Helper()
	root = t.TempDir()
	check.Must(t, os.MkdirAll(filepath.Join(root, "inside"), 0o755))
	check.Must(t, os.WriteFile(filepath.Join(root, "outside"), []byte("secret"), 0o600))
	fd, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	check.Must(t, err)
	d, err = Open(fd, "/inside", nil)
	check.Must(t, err)
	t.Cleanup(func() { d.Close() })
	return d, root
}

func TestClean(t *testing.T) {
	for name, want := range map[string]string{
		"a": "a", "./a": "a", "a/": "a", "a/b": "a/b", ".": ".", "./": ".", "...": "...", "a..b": "a..b",
		"": "", "/": "", "/a": "", "..": "", "../a": "", "a/..": "", "a/../b": "", "a//b": "", "a/./b": "", "a\x00b": "",
		strings.Repeat("a/", 40) + "a": "", strings.Repeat("a", 2000): "",
	} {
		got, err := Clean(name)
		check.That(t, (got == want || err != nil) && (err != nil) == (want == ""), "%.50q: %q, %v", name, got, err)
	}
}

// Links of any kind are not followed.
func TestLinks(t *testing.T) {
	d, root := open(t)
	for name, target := range map[string]string{"abs": filepath.Join(root, "outside"), "rel": "../outside", "dir": root, "self": "self", "proc": "/proc/self/root"} {
		check.Must(t, os.Symlink(target, filepath.Join(root, "inside", name)))
	}
	for _, name := range []string{"abs", "rel", "self", "dir/outside", "dir/inside/new", "proc/etc/passwd"} {
		if f, _, err := d.Get(name); err == nil {
			f.Close()
			t.Errorf("%s was read", name)
		}
		_, err := d.Put(name, strings.NewReader("x"), 10, 0o600)
		check.That(t, err != nil, "%s was written", name)
	}
	b, err := os.ReadFile(filepath.Join(root, "outside"))
	check.That(t, string(b) == "secret" && err == nil, "%q %v", b, err)
	check.OK(t, d.Remove("dir"))
	_, err = os.Stat(filepath.Join(root, "inside"))
	check.That(t, err == nil, "what the link led to was removed")
	check.Must(t, unix.Mkfifo(filepath.Join(root, "inside", "fifo"), 0o600))
	_, _, err = d.Get("fifo")
	check.That(t, result.CodeOf(err) == "usage", "a FIFO: %v", err)
	_, err = d.Put("fifo", strings.NewReader("x"), 10, 0o600)
	check.That(t, result.CodeOf(err) == "usage", "a FIFO: %v", err)
}

func TestPut(t *testing.T) {
	d, root := open(t)
	n, err := d.Put("a/b/c", strings.NewReader("long text"), 100, 0o640)
	check.That(t, n == 9 && err == nil, "%d %v", n, err)
	_, err = d.Put("a/b/c", strings.NewReader("short"), 5, 0o640)
	check.OK(t, err)
	b, _ := os.ReadFile(filepath.Join(root, "inside/a/b/c"))
	check.That(t, string(b) == "short", "%q", b)
	// Its other name keeps its content and permissions.
	file := filepath.Join(root, "inside/a/b/c")
	check.Must(t, errors.Join(os.Chmod(file, 0o751), os.Link(file, file+"2")))
	_, err = d.Put("a/b/c", strings.NewReader("whole"), 5, 0o640)
	check.OK(t, err)
	_, err = d.Put("a/b/c", strings.NewReader("too long"), 5, 0o640)
	check.That(t, result.CodeOf(err) == "too-large", "%v", err)
	broken := errors.New("broken off")
	_, err = d.Put("a/b/c", io.MultiReader(strings.NewReader("x"), iotest.ErrReader(broken)), 5, 0o640)
	check.That(t, err == broken, "%v", err)
	for name, want := range map[string]string{file: "whole", file + "2": "short"} {
		b, err := os.ReadFile(name)
		check.That(t, string(b) == want && err == nil, "%s: %q %v, want %q", name, b, err, want)
		st, err := os.Stat(name)
		check.That(t, err == nil && st.Mode() == 0o751, "%s: %v %v", name, st, err)
	}
	names, err := os.ReadDir(filepath.Dir(file))
	check.That(t, err == nil && len(names) == 2, "left: %v %v", names, err)
	_, err = d.Put("a", strings.NewReader("x"), 5, 0o640)
	check.That(t, result.CodeOf(err) == "usage", "over a directory: %v", err)
	err = d.Remove("a")
	check.That(t, result.CodeOf(err) == "usage", "a directory that is not empty: %v", err)
	err = d.Remove("none")
	check.That(t, result.CodeOf(err) == "no-such-file", "%v", err)
}

// A packed directory can be unpacked again.
func TestPackUnpack(t *testing.T) {
	d, from := open(t)
	for _, name := range []string{"a", "d/b", "d/e/c"} {
		_, err := d.Put(name, strings.NewReader(name), 10, 0o755)
		check.Must(t, err)
	}
	var b bytes.Buffer
	check.Must(t, d.Pack(&b, ".", Quota{Bytes: 1 << 20, Entries: 100}))
	err := d.Pack(&bytes.Buffer{}, ".", Quota{Bytes: 1 << 20, Entries: 4})
	check.That(t, result.CodeOf(err) == "too-large", "%v", err)
	other, root := open(t)
	check.Must(t, other.Unpack(bytes.NewReader(b.Bytes()), Quota{Bytes: 100, Entries: 10}))
	text, err := os.ReadFile(filepath.Join(root, "inside/d/e/c"))
	check.That(t, string(text) == "d/e/c" && err == nil, "%q %v", text, err)
	st, err := os.Stat(filepath.Join(root, "inside/a"))
	check.That(t, err == nil && st.Mode().Perm()&0o100 != 0, "%v %v", st, err)
	check.Must(t, os.Truncate(filepath.Join(from, "inside/a"), 1<<40))
	err = d.Pack(io.Discard, ".", Quota{Bytes: 1 << 20, Entries: 100})
	check.That(t, result.CodeOf(err) == "too-large", "a file of holes: %v", err)
}

// Unpack accepts archives of tar(1) with duplicate files, a FIFO, holes (-S), and a closed directory.
func TestUnpackTar(t *testing.T) {
	d, root := open(t)
	dir := filepath.Join(t.TempDir(), "from")
	check.Must(t, errors.Join(os.MkdirAll(dir+"/closed", 0o700), os.WriteFile(dir+"/a", []byte("text"), 0o600), os.Link(dir+"/a", dir+"/b"),
		os.WriteFile(dir+"/holes", nil, 0o600), os.Truncate(dir+"/holes", 1<<20), unix.Mkfifo(dir+"/fifo", 0o600)))
	stream, err := exec.Command("tar", "-C", dir, "--format=gnu", "-cS", "a", "b", "fifo", "a", "b", "holes", "closed").Output()
	check.Must(t, err)
	var all Transfer
	check.Must(t, d.unpack(bytes.NewReader(stream), Quota{Bytes: 2 << 20, Entries: 10, Links: true}, &all))
	check.That(t, all.LeftOut.Special.Count == 1 && all.LeftOut.Count() == 1, "left out: %v", all.LeftOut)
	names, err := os.ReadDir(root + "/inside")
	check.That(t, err == nil && len(names) == 4, "%v %v", names, err)
	st, err := os.Stat(root + "/inside/holes")
	check.That(t, err == nil && st.Size() == 1<<20, "%v %v", st, err)
	st, err = os.Stat(root + "/inside/closed")
	check.That(t, err == nil && st.Mode().Perm() == 0o700, "%v %v", st, err)
}

// Whatever the stream contains, Unpack writes nothing outside, creates no link or device, and respects the quota.
func FuzzUnpack(f *testing.F) {
	add := func(all ...tar.Header) {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		for _, h := range all {
			if w.WriteHeader(&h) == nil {
				_, _ = w.Write(make([]byte, h.Size))
			}
		}
		_ = w.Close()
		f.Add(b.Bytes())
	}
	add(tar.Header{Typeflag: tar.TypeReg, Name: "a", Size: 10}, tar.Header{Typeflag: tar.TypeDir, Name: "d/"}, tar.Header{Typeflag: tar.TypeReg, Name: "d/b", Size: 600})
	add(tar.Header{Typeflag: tar.TypeSymlink, Name: "l", Linkname: ".."}, tar.Header{Typeflag: tar.TypeReg, Name: "l/new", Size: 1})
	add(tar.Header{Typeflag: tar.TypeReg, Name: "a/b/c/d/e/f/g/h", Size: 1}, tar.Header{Typeflag: tar.TypeDir, Name: "a/b/c/d/e/f/x/y/z"})
	add(tar.Header{Typeflag: tar.TypeReg, Name: "../new", Size: 1})
	add(tar.Header{Typeflag: tar.TypeReg, Name: "/new", Size: 1})
	add(tar.Header{Typeflag: tar.TypeLink, Name: "l", Linkname: "../outside"})
	add(tar.Header{Typeflag: tar.TypeReg, Name: strings.Repeat("x", 300), Size: 1, Format: tar.FormatPAX})
	add(tar.Header{Typeflag: tar.TypeXGlobalHeader, Name: "g", PAXRecords: map[string]string{"path": "../new"}}, tar.Header{Typeflag: tar.TypeReg, Name: "a", Size: 1})
	f.Fuzz(func(t *testing.T, stream []byte) {
		d, root := open(t)
		q := Quota{Bytes: 1000, Entries: 8}
		err := d.Unpack(bytes.NewReader(stream), q)
		check.That(t, err == nil || result.CodeOf(err) != "", "an error without a code: %v", err)
		bytes, entries := int64(0), -3 // existing entries
		err = filepath.WalkDir(root, func(name string, e os.DirEntry, err error) error {
			if err != nil {
				return err
			}
			entries++
			st, err := e.Info()
			if err != nil {
				return err
			}
			rel, _ := filepath.Rel(root, name)
			check.That(t, strings.HasPrefix(rel, "inside") || rel == "." || rel == "outside", "outside: %s", rel)
			check.That(t, (st.IsDir() || st.Mode().IsRegular()) && st.Mode()&(os.ModeSetuid|os.ModeSetgid|os.ModeSticky) == 0, "%s: %v", name, st.Mode())
			if st.Mode().IsRegular() && e.Name() != "outside" {
				bytes += st.Size()
			}
			return nil
		})
		check.That(t, err == nil && bytes <= q.Bytes && entries <= q.Entries, "%d bytes, %d entries, %v", bytes, entries, err)
	})
}

// Unpack stops reading an archive with a million entries at the quota, which counts parent directories, too.
func TestManyEntries(t *testing.T) {
	for name, path := range map[string]string{"in one directory": "f%d", "each in its own": "%d/a/b/c/f"} {
		d, root := open(t)
		r, w := io.Pipe()
		wrote := make(chan int)
		go func() {
			archive := tar.NewWriter(w)
			n := 0
			for ; n < 1_000_000 && archive.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: fmt.Sprintf(path, n)}) == nil; n++ {
			}
			wrote <- n
		}()
		const most = 100
		err := d.Unpack(r, Quota{Bytes: 1 << 20, Entries: most})
		check.That(t, result.CodeOf(err) == "too-large", "%s: %v", name, err)
		r.Close()
		n := <-wrote
		check.That(t, n <= most+1, "%s: %d entries were read", name, n)
		made := -1
		check.Must(t, filepath.WalkDir(filepath.Join(root, "inside"), func(string, os.DirEntry, error) error {
			made++
			return nil
		}))
		check.That(t, made <= most, "%s: %d were made", name, made)
	}
}

// Reserve counts a missing name and its parents as new entries, and an existing name as none.
func TestReserve(t *testing.T) {
	d, _ := open(t)
	for _, test := range []struct {
		name string
		left int
		code string
	}{
		{"a/b/c", 2, "quota-disk"}, {"a/b/c", 2, ""}, {"a/b", 0, ""}, {"a/b/c", 0, "quota-disk"}, {"x", 0, "quota-disk"}, {"../x", 9, "usage"},
	} {
		err := d.Reserve(test.name, test.left)
		check.That(t, result.CodeOf(err) == test.code, "%s, %d: %v", test.name, test.left, err)
	}
}
