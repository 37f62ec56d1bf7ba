package tree

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// opened opens a directory and returns a walk with generous bounds.
func opened(t testing.TB, dir string) (int, *Walk) {
	t.Helper()
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	check.Must(t, err)
	t.Cleanup(func() { unix.Close(fd) })
	return fd, &Walk{Entries: 1 << 20, Text: math.MaxInt, Depth: 100, Path: unix.PathMax, Files: true}
}

// seen walks and returns a line for each entry.
func seen(t testing.TB, w *Walk, fd int) (text string, err error) {
	for e, err := range w.Below(t.Context(), fd, "") {
		if err != nil {
			return text, err
		}
		text += fmt.Sprintf("%q %o", e.Path, Type(&e.Stat)>>12)
		if e.Target != "" {
			text += " -> " + e.Target
		}
		if e.Err != nil {
			text += " " + e.Err.Error()
		}
		text += "\n"
	}
	return text, nil
}

// A walk returns entries of every type and name, and does not block.
func TestWalk(t *testing.T) {
	dir := t.TempDir()
	fd, w := opened(t, dir)
	long := strings.Repeat("n", 253) + "\n\xff"
	check.Must(t, os.MkdirAll(dir+"/a/b", 0o755), os.WriteFile(dir+"/a/"+long, []byte("x"), 0o600), os.Symlink("/etc", dir+"/a/link"), unix.Mkfifo(dir+"/fifo", 0o600))
	check.Must(t, unix.Mknod(dir+"/white", unix.S_IFCHR, 0))
	got, err := seen(t, w, fd)
	check.Must(t, err)
	want := fmt.Sprintf("\"a\" 4\n\"a/b\" 4\n\"a/link\" 12 -> /etc\n%q 10\n\"fifo\" 1\n\"white\" 2\n", "a/"+long)
	check.That(t, got == want, "%s, want %s", got, want)
	target, err := Readlink(fd, "a/link")
	check.That(t, target == "/etc", "%q, %v", target, err)
	check.Must(t, os.WriteFile(dir+"/a/sh", nil, 0o600))
	w.Pattern = []string{"a", "[a-m]*"}
	got, err = seen(t, w, fd)
	check.That(t, got == "\"a/b\" 4\n\"a/link\" 12 -> /etc\n", "pattern: %s, %v", got, err)
}

// Readlink does not follow a directory that was replaced by a link.
func TestReadlinkBehind(t *testing.T) {
	dir := t.TempDir()
	check.Must(t, os.MkdirAll(dir+"/in", 0o755), os.Mkdir(dir+"/out", 0o755), os.Symlink("secret", dir+"/out/link"), os.Symlink("../out", dir+"/in/d"))
	fd, _ := opened(t, dir+"/in")
	for _, name := range []string{"d/link", "../out/link"} {
		target, err := Readlink(fd, name)
		check.That(t, err != nil, "%s: read %q", name, target)
		if f, _, err := OpenFile(fd, name); err == nil {
			unix.Close(f)
			t.Errorf("%s: opened", name)
		}
	}
}

// A walk is bounded in entries, text, depth and path length.
func TestBounds(t *testing.T) {
	dir := t.TempDir()
	deep := strings.Repeat("d/", 40)
	check.Must(t, os.MkdirAll(dir+"/"+deep, 0o755))
	for i := range 200 {
		check.Must(t, os.WriteFile(fmt.Sprintf("%s/f%d", dir, i), nil, 0o600))
	}
	fd, plenty := opened(t, dir)
	for name, change := range map[string]func(*Walk){
		"entries": func(w *Walk) { w.Entries = 100 },
		"below":   func(w *Walk) { w.Entries = 220 },
		"text":    func(w *Walk) { w.Text = 500 },
	} {
		w := *plenty
		change(&w)
		_, err := seen(t, &w, fd)
		check.That(t, result.CodeOf(err) == "too-large", "%s: %v", name, err)
		// An exceeded bound stays exceeded.
		_, err = seen(t, &w, fd)
		check.That(t, result.CodeOf(err) == "too-large", "%s: again: %v", name, err)
	}
	for name, change := range map[string]func(*Walk){
		"depth": func(w *Walk) { w.Depth = 20 },
		"path":  func(w *Walk) { w.Path = 40 },
	} {
		w := *plenty
		change(&w)
		got, err := seen(t, &w, fd)
		check.That(t, err == nil && strings.Count(got, unix.ENAMETOOLONG.Error()) == 1 && strings.Count(got, " 4") == 21, "%s: %v, %s", name, err, got)
	}
}

// A directory that was removed after it was opened has no entries (getdents(2): ENOENT).
func TestRemovedMeanwhile(t *testing.T) {
	dir := t.TempDir()
	check.Must(t, os.Mkdir(dir+"/a", 0o755), os.Mkdir(dir+"/b", 0o755))
	fd, w := opened(t, dir)
	n := 0
	for e, err := range w.Below(t.Context(), fd, "") {
		check.Must(t, err)
		check.Must(t, os.Remove(filepath.Join(dir, e.Name)))
		n++
	}
	check.That(t, n == 2, "%d entries", n)
}

// A walk skips entries removed before it reaches them. A cancelled walk returns one error and leaks no descriptors.
func TestWalkRemovedEntries(t *testing.T) {
	dir := t.TempDir()
	check.Must(t, os.Mkdir(dir+"/a", 0o755), os.Mkdir(dir+"/b", 0o755), os.WriteFile(dir+"/c", nil, 0o600))
	fd, w := opened(t, dir)
	before, err := os.ReadDir("/proc/self/fd")
	check.Must(t, err)
	got := ""
	for e, err := range w.Below(t.Context(), fd, "") {
		check.Must(t, err)
		if got += e.Name; e.Name == "a" {
			check.Must(t, os.Remove(dir+"/b"))
		}
	}
	check.That(t, got == "ac", "%q", got)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for e, err := range w.Below(ctx, fd, "") {
		check.That(t, e == nil && errors.Is(err, context.Canceled), "%+v, %v", e, err)
		break
	}
	after, err := os.ReadDir("/proc/self/fd")
	check.That(t, err == nil && len(after) <= len(before), "%d descriptors, and %d after: %v", len(before), len(after), err)
}

// A file with a lease gives an error at once.
func TestLease(t *testing.T) {
	dir := t.TempDir()
	check.Must(t, os.WriteFile(dir+"/a", nil, 0o600), os.WriteFile(dir+"/b", nil, 0o600))
	f, err := os.OpenFile(dir+"/a", os.O_RDWR, 0)
	check.Must(t, err)
	defer f.Close()
	_, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK)
	check.Require(t, err == nil, "lease: %v", err)
	fd, w := opened(t, dir)
	begin := time.Now()
	got, err := seen(t, w, fd)
	check.That(t, err == nil && got == fmt.Sprintf("\"a\" 10 %v\n\"b\" 10\n", unix.EAGAIN), "%v, %s", err, got)
	took := time.Since(begin)
	check.That(t, took <= 10*time.Second, "took %v", took) // lease-break-time is 45 s
}

// ModTime clamps times that JSON cannot represent.
func TestModTime(t *testing.T) {
	for sec, year := range map[int64]int{math.MinInt64: 0, -1 << 40: 0, 0: 1970, 1 << 38: 9999, math.MaxInt64: 9999} {
		at := ModTime(&unix.Stat_t{Mtim: unix.Timespec{Sec: sec, Nsec: 1}})
		check.That(t, at.Year() == year, "%d: %v", sec, at)
		_, err := at.MarshalJSON()
		check.That(t, err == nil, "%d: %v", sec, err)
	}
}

// Remove removes directories deeper than any path and closed directories, and does not follow links.
func TestRemove(t *testing.T) {
	dir := t.TempDir()
	check.Must(t, os.WriteFile(dir+"/kept", nil, 0o600), os.Mkdir(dir+"/top", 0o755))
	at, _ := opened(t, dir+"/top")
	for i := range 5000 {
		check.Must(t, unix.Mkdirat(at, "d", 0o755))
		if i%1000 == 0 {
			check.Must(t, unix.Symlinkat(dir, at, "link"), unix.Linkat(unix.AT_FDCWD, dir+"/kept", at, "hard", 0))
			check.Must(t, unix.Mkdirat(at, "closed", 0o755), unix.Mkdirat(at, "closed/in", 0), unix.Fchmodat(at, "closed", 0, 0))
		}
		next, err := unix.Openat(at, "d", unix.O_PATH|unix.O_CLOEXEC, 0)
		check.Must(t, err)
		if i > 0 {
			unix.Close(at)
		}
		at = next
	}
	unix.Close(at)
	fd, _ := opened(t, dir)
	check.Must(t, Remove(fd, "top"), Remove(fd, "top"))
	entries, err := os.ReadDir(dir)
	check.That(t, err == nil && len(entries) == 1, "%v, %v", entries, err)
	err = Remove(fd, "kept/name")
	check.That(t, err == unix.ENOTDIR, "a missing directory: %v", err)
}

// read returns the entries of an archive.
func read(t testing.TB, b []byte) (text string) {
	t.Helper()
	r := tar.NewReader(bytes.NewReader(b))
	for {
		h, err := r.Next()
		if err == io.EOF {
			return text
		}
		check.Must(t, err)
		content, err := io.ReadAll(r)
		check.Must(t, err)
		text += fmt.Sprintf("%c %q %q %s\n", h.Typeflag, h.Name, h.Linkname, content)
	}
}

// An archive contains a file with its original size, whether it has grown or was truncated. A file that
// consists of holes does not become a flood of zeros.
func TestArchive(t *testing.T) {
	dir := t.TempDir()
	check.Must(t, os.WriteFile(dir+"/a", []byte("longer"), 0o600), os.Link(dir+"/a", dir+"/b"))
	fd, _ := opened(t, dir)
	f, st, err := OpenFile(fd, "a")
	check.Must(t, err)
	defer unix.Close(f)
	for _, size := range []int64{3, 8} {
		st.Size, st.Blocks = size, 8
		var b bytes.Buffer
		a := NewLayer(&b, 1<<20)
		check.Must(t, a.File("a", f, &st), a.File(".wh.b", f, &st), a.Close())
		got, want := read(t, b.Bytes()), fmt.Sprintf("0 \"a\" \"\" %.*s\n1 \".wh.b\" \"a\" \n", size, "longer\x00\x00")
		check.That(t, got == want && a.Entries == 2 && a.Bytes() == int64(b.Len()), "%q, want %q", got, want)
	}
	// Both names were removed, and a new file has the inode number, as can happen on ext4.
	var b bytes.Buffer
	a := NewLayer(&b, 1<<20)
	other := st
	other.Nlink = 1
	check.Must(t, a.File("a", f, &st), a.File("other", f, &other), a.Close())
	got, want := read(t, b.Bytes()), "0 \"a\" \"\" longer\x00\x00\n0 \"other\" \"\" longer\x00\x00\n"
	check.That(t, got == want, "%q, want %q", got, want)
	err = NewLayer(io.Discard, 1000).File("a", f, &unix.Stat_t{Size: 1001, Blocks: 2})
	check.That(t, result.CodeOf(err) == "too-large", "large: %v", err)
	err = NewArchive(io.Discard, 0).File("a", f, &unix.Stat_t{Size: math.MaxInt64})
	check.That(t, result.CodeOf(err) == "too-large", "holes: %v", err)
}

// WriteNew writes a complete file or none, and replaces nothing.
func TestWriteNew(t *testing.T) {
	dir := t.TempDir()
	text := func(f *os.File) error { _, err := f.WriteString("text"); return err }
	for name, want := range map[string]error{"new": nil, "link": unix.EEXIST, "dir": unix.EEXIST, "none/new": unix.ENOENT, "dir/": unix.EISDIR} {
		_ = os.Mkdir(dir+"/dir", 0o755)
		_ = os.Symlink("nowhere", dir+"/link")
		err := WriteNew(dir+"/"+name, text)
		check.That(t, errors.Is(err, want), "%s: %v, want %v", name, err, want)
	}
	failed := errors.New("failed")
	err := WriteNew(dir+"/failed", func(f *os.File) error { return errors.Join(text(f), failed) })
	check.That(t, errors.Is(err, failed), "%v", err)
	names, err := os.ReadDir(dir)
	b, readErr := os.ReadFile(dir + "/new")
	check.That(t, err == nil && len(names) == 3 && string(b) == "text" && readErr == nil, "%v %v, %q %v", names, err, b, readErr)
}

// Large files are copied by the kernel, within a file system and between two; small ones are not.
func TestSpan(t *testing.T) {
	dir := t.TempDir()
	elsewhere, err := os.MkdirTemp("/dev/shm", "sbxrun-test-")
	check.Must(t, err)
	defer os.RemoveAll(elsewhere)
	text := bytes.Repeat([]byte("0123456789abcdef"), 20_000)
	for _, tt := range []struct {
		dir         string
		size        int
		first, last int // ways
	}{{dir, 320_000, inFileSystem, inFileSystem}, {elsewhere, 320_000, inFileSystem, inKernel}, {dir, 1000, byUs, byUs}} {
		check.Must(t, os.WriteFile(dir+"/in", text[:tt.size], 0o600))
		in, err := os.Open(dir + "/in")
		check.Must(t, err)
		out, err := os.Create(tt.dir + "/out")
		check.Must(t, err)
		var moved atomic.Int64
		way, err := span(t.Context(), int(out.Fd()), int(in.Fd()), 0, int64(tt.size), &moved)
		check.That(t, err == nil && way >= tt.first && way <= tt.last && moved.Load() == int64(tt.size), "%s, %d: by way %d, %d, %v", tt.dir, tt.size, way, moved.Load(), err)
		check.Must(t, in.Close(), out.Close())
		b, err := os.ReadFile(tt.dir + "/out")
		check.That(t, bytes.Equal(b, text[:tt.size]) && err == nil, "%s: %d bytes, %v", tt.dir, len(b), err)
	}
}

// Concurrent removals of the same directory succeed, as of volume rm and cleanup.
func TestRemoveTogether(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	fd, _ := opened(t, dir)
	for range 20 {
		for i := range 4 {
			check.Must(t, os.MkdirAll(fmt.Sprintf("%s/tree/%d/a/b/c/d", dir, i), 0o755))
		}
		failed := make(chan error)
		for range 4 {
			go func() { failed <- Remove(fd, "tree") }()
		}
		for range 4 {
			check.Must(t, <-failed)
		}
	}
}

// A file whose holes change during the copy is copied.
func TestFillHoles(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if shm, err := os.MkdirTemp("/dev/shm", "sbxrun-test"); err == nil { // tmpfs, as in most sandboxes
		dir = shm
		defer os.RemoveAll(shm)
	}
	const size, piece = 16 << 20, 64 << 10
	in, err := os.Create(dir + "/in")
	check.Must(t, err)
	defer in.Close()
	check.Must(t, in.Truncate(size))
	defer harness.Meanwhile(func() {
		for at := int64(0); at < size; at += piece {
			_, _ = in.WriteAt([]byte("x"), at)
		}
		for at := int64(0); at < size; at += piece {
			_ = unix.Fallocate(int(in.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, at, piece)
		}
	})()
	for range 100 {
		from, err := os.Open(dir + "/in") // with its own offset
		check.Must(t, err)
		out, err := os.Create(dir + "/out")
		check.Must(t, err)
		var st, copied unix.Stat_t
		check.Must(t, unix.Fstat(int(from.Fd()), &st))
		check.Must(t, Fill(context.Background(), int(out.Fd()), int(from.Fd()), &st, new(atomic.Int64)), unix.Fstat(int(out.Fd()), &copied))
		check.That(t, copied.Size == size, "%d bytes", copied.Size)
		from.Close()
		out.Close()
	}
}
