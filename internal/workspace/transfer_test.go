package workspace

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/safeopen"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// places are roots that stand for a sandbox's and the host's, with a file next to them that neither may reach.
func places(t testing.TB) (inside *Root, dir string) {
	t.Helper()
	dir = t.TempDir()
	for _, name := range []string{"box", "host"} {
		check.Must(t, os.Mkdir(filepath.Join(dir, name), 0o755))
	}
	write(t, dir+"/secret", "secret")
	fd, err := unix.Open(dir+"/box", unix.O_PATH|unix.O_CLOEXEC, 0)
	check.Must(t, err)
	inside, err = Inside(fd, nil)
	check.Must(t, err)
	t.Cleanup(inside.Close)
	return inside, dir
}

func write(t testing.TB, name, text string) {
	t.Helper()
	check.Must(t, os.MkdirAll(filepath.Dir(name), 0o755))
	check.Must(t, os.WriteFile(name, []byte(text), 0o644))
}

func outside() *Root { return Outside(safeopen.For) }

// carry copies one path.
func carry(t *Transfer, from *Root, name string, to *Root, dest string) error {
	source, err := from.Source(name)
	if err != nil {
		return err
	}
	defer source.Close()
	dir, base, err := to.Target(dest, source, false)
	if err != nil {
		return err
	}
	defer dir.Close()
	return t.Copy(context.Background(), source, dir, base)
}

// While two directories are exchanged with links out of the sandbox, Copy reads only files of the sandbox and
// writes only to the destination.
func TestTransferRaces(t *testing.T) {
	inside, dir := places(t)
	write(t, dir+"/box/t/d/f", "mine")
	write(t, dir+"/box/t/f", "mine")
	links := []string{dir, "../..", dir + "/secret"}
	n := 0
	stop := harness.Meanwhile(func() {
		_ = os.Symlink(links[n%len(links)], dir+"/box/link")
		for _, name := range []string{"t/d", "t/f", "new/d", "new/secret"} {
			_ = unix.Renameat2(unix.AT_FDCWD, dir+"/box/link", unix.AT_FDCWD, dir+"/box/"+name, unix.RENAME_EXCHANGE)
			_ = unix.Renameat2(unix.AT_FDCWD, dir+"/box/link", unix.AT_FDCWD, dir+"/box/"+name, unix.RENAME_EXCHANGE)
		}
		n++
	})
	write(t, dir+"/host/new/d/secret", "theirs")
	write(t, dir+"/host/new/secret", "theirs")
	for i := range 60 {
		to := fmt.Sprintf("%s/host/out%d", dir, i)
		_ = carry(new(Transfer), inside, "/t", outside(), to)
		_ = filepath.WalkDir(to, func(name string, e os.DirEntry, err error) error {
			if err == nil && e.Type().IsRegular() {
				b, err := os.ReadFile(name)
				check.That(t, err != nil || string(b) != "secret", "%s: %q", name, b)
			}
			return nil
		})
		_ = carry(new(Transfer), outside(), dir+"/host/new", inside, "/")
		_ = carry(new(Transfer), outside(), dir+"/host/new/d/.", inside, "/new/d")
	}
	stop()
	b, err := os.ReadFile(dir + "/secret")
	check.That(t, string(b) == "secret", "outside was written to: %q %v", b, err)
	names, err := os.ReadDir(dir)
	check.That(t, err == nil && len(names) == 3, "%v %v", names, err)
}

// A file is copied with its holes, and at most with its initial size. A device does not stop the copy.
func TestTransferFiles(t *testing.T) {
	inside, dir := places(t)
	f, err := os.Create(dir + "/box/sparse")
	check.Must(t, err)
	for _, at := range []int64{0, 5 << 20, 9<<20 - 1} {
		_, err := f.WriteAt([]byte("x"), at)
		check.Must(t, err)
	}
	check.Must(t, f.Truncate(12<<20))
	f.Close()
	big := bytes.Repeat([]byte("0123456789abcdef"), 3<<16)
	write(t, dir+"/box/big", string(big))
	write(t, dir+"/box/empty", "")
	for _, to := range []string{dir + "/host", "/dev/shm"} {
		to, err := os.MkdirTemp(to, "sbxrun-test")
		if err != nil {
			t.Skip(err)
		}
		defer os.RemoveAll(to)
		var all Transfer
		for _, name := range []string{"sparse", "big", "empty"} {
			check.Must(t, carry(&all, inside, "/"+name, outside(), to))
			want, _ := os.ReadFile(dir + "/box/" + name)
			got, err := os.ReadFile(to + "/" + name)
			check.That(t, bytes.Equal(got, want) && err == nil, "%s in %s: %d bytes, want %d, %v", name, to, len(got), len(want), err)
		}
		var st unix.Stat_t
		err = unix.Stat(to+"/sparse", &st)
		check.That(t, err == nil && st.Blocks <= 1<<20/512, "the holes take %d blocks, %v", st.Blocks, err)
		n, _ := all.Done()
		check.That(t, n == 12<<20+int64(len(big)), "%d bytes", n)
		names, _ := os.ReadDir(to)
		check.That(t, len(names) == 3, "left behind: %v", names)
	}
}

// A copy replaces files and links, but not links that lead out, which for root could be /dev/null or /dev/stdout.
func TestTransferReplaces(t *testing.T) {
	inside, dir := places(t)
	write(t, dir+"/box/f", "new")
	write(t, dir+"/box/d/fifo", "new")
	write(t, dir+"/host/file", "old")
	opened, err := os.Open(dir + "/host/file")
	check.Must(t, err)
	defer opened.Close()
	check.Must(t, errors.Join(os.Mkdir(dir+"/host/d", 0o755), unix.Mkfifo(dir+"/host/fifo", 0o600), unix.Mkfifo(dir+"/host/d/fifo", 0o600),
		os.Symlink("fifo", dir+"/host/to-fifo"), os.Symlink("/dev/null", dir+"/host/to-null"), os.Symlink("file", dir+"/host/to-file"), os.Symlink("none", dir+"/host/to-none"),
		os.Symlink(fmt.Sprintf("/proc/self/fd/%d", opened.Fd()), dir+"/host/to-open")))
	for _, name := range []string{"fifo", "to-fifo", "to-null", "to-open"} {
		err := carry(new(Transfer), inside, "/f", outside(), dir+"/host/"+name)
		check.That(t, result.CodeOf(err) == "usage", "%s: %v", name, err)
		st, err := os.Lstat(dir + "/host/" + name)
		check.That(t, err == nil && !st.Mode().IsRegular(), "%s was replaced: %v", name, err)
	}
	err = carry(new(Transfer), inside, "/d", outside(), dir+"/host")
	check.That(t, result.CodeOf(err) == "usage", "in a tree: %v", err)
	for _, name := range []string{"to-file", "to-none", "file"} {
		check.Must(t, carry(new(Transfer), inside, "/f", outside(), dir+"/host/"+name))
		st, err := os.Lstat(dir + "/host/" + name)
		check.That(t, err == nil && st.Mode().IsRegular(), "%s: %v %v", name, st, err)
	}
	names, err := filepath.Glob(dir + "/host/.sbxrun-*")
	check.That(t, err == nil && len(names) == 0, "left behind: %v %v", names, err)
}

// Bounds are respected, and a copy of a directory into itself ends.
func TestTransferBounds(t *testing.T) {
	inside, dir := places(t)
	write(t, dir+"/box/t/a", "12345")
	write(t, dir+"/box/t/b", "12345")
	err := carry(&Transfer{Max: Quota{Bytes: 9}}, inside, "/t", outside(), dir+"/host/x")
	check.That(t, result.CodeOf(err) == "too-large", "%v", err)
	err = carry(&Transfer{Max: Quota{Entries: 2}}, inside, "/t", outside(), dir+"/host/y")
	check.That(t, result.CodeOf(err) == "too-large", "%v", err)
	check.OK(t, carry(&Transfer{Max: Quota{Entries: 100}}, inside, "/t", outside(), dir+"/box/t"), "into itself")
	check.Must(t, unix.Mkfifo(dir+"/box/fifo", 0o600))
	_, err = inside.Source("/fifo")
	check.That(t, result.CodeOf(err) == "usage", "%v", err)
}

// A tree of the maximum depth can also be copied as a tar stream.
func TestTransferDeep(t *testing.T) {
	inside, dir := places(t)
	deepest := dir + "/box/t" + strings.Repeat("/d", maxTree-1)
	write(t, deepest+"/file", "deep")
	check.Must(t, os.Mkdir(deepest+"/d", 0o755))
	source, err := inside.Source("/t")
	check.Must(t, err)
	defer source.Close()
	var stream bytes.Buffer
	var out, in Transfer
	check.Must(t, out.Archive(source, &stream, "t"))
	to, err := outside().Dir(dir + "/host")
	check.Must(t, err)
	defer to.Close()
	check.Must(t, in.Unpack(&stream, to))
	b, err := os.ReadFile(strings.Replace(deepest, "/box/", "/host/", 1) + "/file")
	check.That(t, string(b) == "deep" && err == nil && out.LeftOut.Denied.Count == 1, "%q %v %+v", b, err, out.LeftOut)
}

// A lease on a file (fcntl(2), F_SETLEASE) prevents the copy of that file only, and impossible times prevent none. The
// first skipped file is recorded for each kind of reason.
func TestTransferLease(t *testing.T) {
	inside, dir := places(t)
	write(t, dir+"/box/d/a", "a")
	write(t, dir+"/box/d/b", "b")
	f, err := os.OpenFile(dir+"/box/d/a", os.O_RDWR, 0)
	check.Must(t, err)
	defer f.Close()
	_, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK)
	check.Must(t, err)
	check.Must(t, unix.UtimesNanoAt(unix.AT_FDCWD, dir+"/box/d/b", []unix.Timespec{{Sec: 1 << 62}, {Sec: 1 << 62}}, 0))
	check.Must(t, unix.Mkfifo(dir+"/box/d/fifo", 0o600))
	var one Transfer
	check.Must(t, carry(&one, inside, "/d", outside(), dir+"/host"))
	b, err := os.ReadFile(dir + "/host/d/b")
	check.That(t, string(b) == "b" && err == nil, "%q, %v", b, err)
	for name, left := range map[string]Left{"fifo": one.LeftOut.Special, "d/a": one.LeftOut.Denied} {
		check.That(t, left.Count == 1 && left.First != nil && strings.Contains(left.First.Error(), name), "%s: %+v", name, left)
	}
	root, err := unix.Open(dir+"/box", unix.O_PATH|unix.O_CLOEXEC, 0)
	check.Must(t, err)
	d, err := Open(root, ".", nil)
	check.Must(t, err)
	defer d.Close()
	n := 0
	check.Must(t, d.List(".", 10, func(e Entry) error {
		n++
		_, err := json.Marshal(e)
		return err
	}))
	check.That(t, n == 4, "%d are listed", n)
	check.Must(t, d.Pack(io.Discard, ".", Quota{Bytes: 1 << 20, Entries: 10}))
}
