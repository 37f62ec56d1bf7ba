package layers

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/tree"
	"github.com/sbxrun/sbxrun/tests/check"
)

var plenty = Count{Bytes: 1 << 30, Entries: 100000}

func open(t testing.TB, dir string) *os.File {
	t.Helper()
	f, err := os.Open(dir)
	check.Must(t, err)
	t.Cleanup(func() { f.Close() })
	return f
}

func pack(t testing.TB, dir string) ([]byte, Count) {
	t.Helper()
	var b bytes.Buffer
	c, err := Pack(t.Context(), open(t, dir), &b, plenty)
	check.Must(t, err)
	return b.Bytes(), c
}

// listing describes the files in a directory, one per line.
func listing(t testing.TB, dir string) string {
	t.Helper()
	var all strings.Builder
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		rel, _ := filepath.Rel(dir, path)
		fmt.Fprintf(&all, "%q %o %d", rel, st.Mode, st.Rdev)
		if st.Mode&unix.S_IFMT != unix.S_IFCHR {
			fmt.Fprintf(&all, " %d", st.Mtim.Nano())
		}
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			fmt.Fprintf(&all, " %d %q", st.Nlink, b)
		case unix.S_IFLNK:
			target, _ := os.Readlink(path)
			fmt.Fprintf(&all, " %q", target)
		case unix.S_IFDIR:
			var b [8]byte
			n, _ := unix.Lgetxattr(path, tree.OpaqueXattr, b[:])
			fmt.Fprintf(&all, " %q", b[:max(n, 0)])
		}
		all.WriteByte('\n')
		return nil
	})
	check.Must(t, err)
	return all.String()
}

// upper creates an upper layer with all types of entries.
func upper(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	file := func(name, content string, mode os.FileMode) {
		check.Must(t, os.WriteFile(at(name), []byte(content), 0o600), os.Chmod(at(name), mode))
	}
	check.Must(t, os.Mkdir(at("d"), 0o755), os.Mkdir(at("hidden"), 0o700), os.MkdirAll(at("a/b/c"), 0o755))
	file("a/b/c/deep", "deep", 0o640)
	file("plain", "text", 0o644)
	file("run", "#!/bin/sh\n", 0o755)
	file("empty", "", 0o600)
	file("new\nline", "n", 0o644)
	file("bad\xff\xfeutf8", "b", 0o644)
	file(".wh.own", "mine", 0o644)
	file("d/"+strings.Repeat("x", 250), "long", 0o644)
	check.Must(t, os.Link(at("plain"), at("d/second")))
	check.Must(t, os.Symlink("/etc/passwd", at("abs")), os.Symlink("../../..", at("out")), os.Symlink("no\nwhere\xff", at("odd")))
	check.Must(t, unix.Mknod(at("gone"), unix.S_IFCHR, 0), unix.Mknod(at(".wh.too"), unix.S_IFCHR, 0))
	check.Must(t, unix.Setxattr(at("hidden"), tree.OpaqueXattr, []byte("y"), 0))
	file("hidden/inside", "i", 0o400)
	check.Must(t, os.Mkdir(at("closed"), 0o755))
	file("closed/f", "f", 0o444)
	check.Must(t, os.Chmod(at("closed"), 0o555))
	t.Cleanup(func() { _ = os.Chmod(at("closed"), 0o755) })
	when := time.Unix(1_600_000_000, 123456789)
	check.Must(t, os.Chtimes(at("plain"), when, when))
	return dir
}

// A packed and unpacked layer is the same, and packs to the same bytes.
func TestPackUnpack(t *testing.T) {
	dir := upper(t)
	text, c := pack(t, dir)
	check.That(t, c.LeftOut == 0 && c.Bytes == int64(len(text)), "%+v of %d bytes", c, len(text))
	again, _ := pack(t, dir)
	check.That(t, bytes.Equal(again, text), "the same layer packs to other bytes")
	to := t.TempDir()
	got, err := Unpack(bytes.NewReader(text), open(t, to), nil, Count{Bytes: int64(len(text)), Entries: c.Entries})
	check.Must(t, err)
	t.Cleanup(func() { _ = os.Chmod(filepath.Join(to, "closed"), 0o755) })
	check.That(t, got.Entries == c.Entries && got.Bytes == c.Bytes, "%+v, packed %+v", got, c)
	a, b := listing(t, dir), listing(t, to)
	check.That(t, a == b, "packed:\n%s\nunpacked:\n%s", a, b)
	again, _ = pack(t, to)
	check.That(t, bytes.Equal(again, text), "what was unpacked packs to other bytes")
	got, err = Check(bytes.NewReader(text), plenty)
	check.That(t, err == nil && got.Entries == c.Entries, "%+v %v", got, err)
	_, err = Unpack(bytes.NewReader(text), open(t, t.TempDir()), nil, Count{Bytes: int64(len(text)) - 1, Entries: c.Entries})
	check.That(t, result.CodeOf(err) == "damaged", "too many bytes: %v", err)
	_, err = Check(bytes.NewReader(text), Count{Bytes: int64(len(text)), Entries: c.Entries - 1})
	check.That(t, result.CodeOf(err) == "damaged", "too many entries: %v", err)
}

// Packing drops sockets, named pipes, special bits and attributes, and does not block.
func TestPackDrops(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	check.Must(t, unix.Mkfifo(at("fifo"), 0o600), unix.Mknod(at("socket"), unix.S_IFSOCK|0o600, 0))
	check.Must(t, os.WriteFile(at("setuid"), []byte("x"), 0o755), unix.Chmod(at("setuid"), 0o6755), unix.Setxattr(at("setuid"), "user.other", []byte("v"), 0))
	text, c := pack(t, dir)
	check.That(t, c.LeftOut == 2 && c.Entries == 1, "%+v", c)
	to := t.TempDir()
	_, err := Unpack(bytes.NewReader(text), open(t, to), nil, plenty)
	check.Must(t, err)
	var st unix.Stat_t
	check.Must(t, unix.Lstat(filepath.Join(to, "setuid"), &st))
	check.That(t, st.Mode&0o7777 == 0o755, "mode %o", st.Mode)
	n, err := unix.Lgetxattr(filepath.Join(to, "setuid"), "user.other", nil)
	check.That(t, err != nil, "%d bytes of an attribute", n)
	for _, most := range []Count{{Bytes: 100, Entries: 10}, {Bytes: 1 << 20}} {
		_, err := Pack(t.Context(), open(t, dir), io.Discard, most)
		check.That(t, result.CodeOf(err) == "too-large", "%+v: %v", most, err)
	}
}

// Everything that can be packed can be unpacked: the deepest and longest paths, and extreme times.
func TestPackBounds(t *testing.T) {
	for name, unit := range map[string]string{"deep": "d", "long": strings.Repeat("n", 200)} {
		dir := t.TempDir()
		refused := false
		for n := 1; n < maxDepth+5 && !refused; n++ {
			at := filepath.Join(dir, strings.Repeat(unit+"/", n))
			if len(at)+unix.NAME_MAX >= unix.PathMax {
				break // the longest path that can be created
			}
			check.Must(t, os.Mkdir(at, 0o755), os.WriteFile(at+"/"+strings.Repeat("f", 255), nil, 0o600))
			check.Must(t, unix.UtimesNanoAt(unix.AT_FDCWD, at, []unix.Timespec{{Sec: 1 << 62}, {Sec: 1 << 62}}, 0))
			if unit == "d" && n < maxDepth-5 {
				continue
			}
			var b bytes.Buffer
			c, err := Pack(t.Context(), open(t, dir), &b, plenty)
			if refused = err != nil; refused {
				check.That(t, result.CodeOf(err) == "too-large", "%s: %d: %v", name, n, err)
				continue
			}
			_, err = Unpack(&b, open(t, t.TempDir()), nil, Count{Bytes: c.Bytes, Entries: c.Entries})
			check.Require(t, err == nil, "%s: %d: packed, and not unpacked: %v", name, n, err)
		}
		check.That(t, refused || unit != "d", "%s: not refused", name)
	}
}

// hostile are archives that a command or another machine may have made.
var hostile = map[string][]tar.Header{
	"absolute":          {{Typeflag: tar.TypeReg, Name: "/new", Size: 1}},
	"leads out":         {{Typeflag: tar.TypeReg, Name: "../new", Size: 1}},
	"leads out below":   {{Typeflag: tar.TypeDir, Name: "d/"}, {Typeflag: tar.TypeReg, Name: "d/../../new", Size: 1}},
	"through a link":    {{Typeflag: tar.TypeSymlink, Name: "l", Linkname: ".."}, {Typeflag: tar.TypeReg, Name: "l/new", Size: 1}},
	"over a link":       {{Typeflag: tar.TypeSymlink, Name: "l", Linkname: "../outside"}, {Typeflag: tar.TypeReg, Name: "l", Size: 1}},
	"directory on link": {{Typeflag: tar.TypeSymlink, Name: "l", Linkname: ".."}, {Typeflag: tar.TypeDir, Name: "l"}},
	"mode of a link":    {{Typeflag: tar.TypeDir, Name: "d"}, {Typeflag: tar.TypeSymlink, Name: "d", Linkname: ".."}},
	"link out":          {{Typeflag: tar.TypeLink, Name: "l", Linkname: "../outside"}},
	"link to a link":    {{Typeflag: tar.TypeSymlink, Name: "s", Linkname: "../outside"}, {Typeflag: tar.TypeLink, Name: "l", Linkname: "s"}},
	"link behind one":   {{Typeflag: tar.TypeSymlink, Name: "s", Linkname: ".."}, {Typeflag: tar.TypeLink, Name: "l", Linkname: "s/outside"}},
	"link to deleted":   {{Typeflag: tar.TypeReg, Name: ".wh.s"}, {Typeflag: tar.TypeLink, Name: "l", Linkname: "s"}},
	"device":            {{Typeflag: tar.TypeBlock, Name: "b", Devmajor: 254}},
	"device 0/0":        {{Typeflag: tar.TypeChar, Name: "c"}},
	"fifo":              {{Typeflag: tar.TypeFifo, Name: "f"}},
	"opaque link":       {{Typeflag: tar.TypeSymlink, Name: "l", Linkname: ".."}, {Typeflag: tar.TypeReg, Name: "l/.wh..wh..opq"}},
	"opaque nowhere":    {{Typeflag: tar.TypeReg, Name: "n/.wh..wh..opq"}},
	"deletes nothing":   {{Typeflag: tar.TypeReg, Name: ".wh."}},
	"deletes itself":    {{Typeflag: tar.TypeReg, Name: ".wh.."}},
	"deletes above":     {{Typeflag: tar.TypeReg, Name: ".wh..."}},
	"deletes with text": {{Typeflag: tar.TypeReg, Name: ".wh.a", Size: 1}},
	"twice":             {{Typeflag: tar.TypeReg, Name: "a"}, {Typeflag: tar.TypeReg, Name: "a"}},
	"no parent":         {{Typeflag: tar.TypeReg, Name: "a/b"}},
	"dots":              {{Typeflag: tar.TypeReg, Name: "a/./b"}},
	"idle":              {{Typeflag: tar.TypeReg, Name: "a//b"}},
	"empty":             {{Typeflag: tar.TypeReg, Name: "./."}},
	"deep":              {{Typeflag: tar.TypeReg, Name: strings.Repeat("d/", maxDepth+1) + "f"}},
	"too long":          {{Typeflag: tar.TypeReg, Name: strings.Repeat("d", maxName+1)}},
	"link without end":  {{Typeflag: tar.TypeSymlink, Name: "l", Linkname: strings.Repeat("d", unix.PathMax)}},
	"global header":     {{Typeflag: tar.TypeXGlobalHeader, Name: "g", PAXRecords: map[string]string{"path": "../new"}}},
}

func archive(headers []tar.Header) []byte {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range headers {
		if h.Format == 0 && h.Typeflag != tar.TypeXGlobalHeader {
			h.Format = tar.FormatPAX
		}
		if err := w.WriteHeader(&h); err != nil {
			panic(err)
		}
		_, _ = w.Write(make([]byte, h.Size))
	}
	_ = w.Close()
	return b.Bytes()
}

// within creates a directory next to files that must not change.
func within(t testing.TB) (inside, root string) {
	t.Helper()
	root = t.TempDir()
	inside = filepath.Join(root, "inside")
	check.Must(t, os.Mkdir(inside, 0o700), os.WriteFile(filepath.Join(root, "outside"), []byte("secret"), 0o600))
	return inside, root
}

func untouched(t testing.TB, root string) {
	t.Helper()
	names, err := os.ReadDir(root)
	check.Must(t, err)
	b, err := os.ReadFile(filepath.Join(root, "outside"))
	info, _ := os.Stat(filepath.Join(root, "outside"))
	check.That(t, len(names) == 2 && string(b) == "secret" && err == nil && info.Mode().Perm() == 0o600, "outside: %v, %q, %v", names, b, err)
	info, err = os.Lstat(root)
	check.That(t, err == nil && info.Mode().Perm()&0o700 == 0o700, "the directory above: %v %v", info.Mode(), err)
}

func TestUnpackHostile(t *testing.T) {
	for name, headers := range hostile {
		t.Run(name, func(t *testing.T) {
			inside, root := within(t)
			_, err := Unpack(bytes.NewReader(archive(headers)), open(t, inside), nil, plenty)
			check.That(t, result.CodeOf(err) == "damaged", "accepted, or not refused in a line: %v", err)
			untouched(t, root)
		})
	}
}

// Archives of other tools are accepted if they are layers.
func TestUnpackOthers(t *testing.T) {
	inside, _ := within(t)
	_, err := Unpack(bytes.NewReader(archive([]tar.Header{{Typeflag: tar.TypeDir, Name: "./"}, {Typeflag: tar.TypeDir, Name: "d/", Mode: 0o7777}, {Typeflag: tar.TypeReg, Name: "d/f", Size: 3, Mode: 0o6711, Uid: 5}, {Typeflag: tar.TypeReg, Name: "d/.wh..wh..opq"}, {Typeflag: tar.TypeReg, Name: "d/.wh.x"}})), open(t, inside), nil, plenty)
	check.Must(t, err)
	text := listing(t, inside)
	for _, want := range []string{`"d" 40777 `, `"d/f" 100711 `, `"d/x" 20000 0`, `"y"`} {
		check.That(t, strings.Contains(text, want), "no %s in\n%s", want, text)
	}
}

func TestZstd(t *testing.T) {
	for _, size := range []int{0, 1, frameSize, 3*frameSize + 5} {
		text := make([]byte, size)
		_, _ = rand.Read(text[:size/2])
		var b bytes.Buffer
		w, err := NewWriter(&b)
		check.Must(t, err)
		for rest := text; len(rest) > 0; {
			n := min(len(rest), 100_003)
			_, err := w.Write(rest[:n])
			check.Must(t, err)
			rest = rest[n:]
		}
		sum, n, err := w.Close()
		check.Must(t, err)
		check.That(t, n == int64(b.Len()), "%d bytes of %d", n, b.Len())
		r, err := NewReader(&b)
		check.Must(t, err)
		got, err := io.ReadAll(r)
		r.Close()
		check.That(t, bytes.Equal(got, text) && err == nil && r.Sum() == sum, "%d bytes back of %d, %v, %s and %s", len(got), size, err, r.Sum(), sum)
	}
	w, err := NewWriter(full{})
	check.Must(t, err)
	for err == nil {
		_, err = w.Write(make([]byte, 1<<20))
	}
	_, _, err = w.Close()
	check.That(t, errors.Is(err, unix.ENOSPC), "a full disk: %v", err)
	r, err := NewReader(strings.NewReader("\x28\xb5\x2f\xfd no such thing"))
	check.Must(t, err)
	_, err = io.ReadAll(r)
	check.That(t, result.CodeOf(err) == "damaged", "%v", err)
	r.Close()
}

type full struct{}

func (full) Write([]byte) (int, error) { return 0, unix.ENOSPC }

// Whatever the stream contains, Unpack writes nothing outside, creates no device but 0/0, and respects the bounds.
func FuzzUnpack(f *testing.F) {
	for _, headers := range hostile {
		f.Add(archive(headers))
	}
	text, _ := pack(f, upper(f))
	f.Add(text)
	f.Fuzz(func(t *testing.T, stream []byte) {
		inside, root := within(t)
		c, err := Unpack(bytes.NewReader(stream), open(t, inside), nil, Count{Bytes: 1 << 16, Entries: 64})
		check.That(t, c.Entries <= 65, "%+v %v", c, err)
		untouched(t, root)
		_ = filepath.WalkDir(inside, func(path string, d fs.DirEntry, err error) error {
			var st unix.Stat_t
			check.That(t, unix.Lstat(path, &st) != nil || st.Mode&0o7000 == 0 && st.Rdev == 0 && st.Size <= 1<<16, "%s: mode %o, device %d, %d bytes", path, st.Mode, st.Rdev, st.Size)
			if d != nil && d.IsDir() {
				_ = os.Chmod(path, 0o700)
			}
			return nil
		})
	})
}

// Packing ends when its context is done, also within a file.
func TestPackEnds(t *testing.T) {
	dir := t.TempDir()
	check.Must(t, os.WriteFile(filepath.Join(dir, "file"), make([]byte, 8<<20), 0o600))
	ctx, cancel := context.WithCancel(t.Context())
	out := &canceling{cancel: cancel}
	_, err := Pack(ctx, open(t, dir), out, plenty)
	check.That(t, errors.Is(err, context.Canceled) && out.n <= 1<<20, "%v, after %d bytes", err, out.n)
}

// canceling cancels a context at the first write.
type canceling struct {
	cancel func()
	n      int
}

func (c *canceling) Write(b []byte) (int, error) {
	c.n += len(b)
	c.cancel()
	return len(b), nil
}
