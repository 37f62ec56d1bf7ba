package safeopen

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
)

// same reports whether fd is the file at path.
func same(t *testing.T, fd int, path string) bool {
	t.Helper()
	var a, b unix.Stat_t
	check.Must(t, unix.Fstat(fd, &a), unix.Stat(path, &b))
	return a.Dev == b.Dev && a.Ino == b.Ino
}

// Source follows links of the system, and other links only if follow is set.
func TestSource(t *testing.T) {
	top := t.TempDir()
	t.Chdir(top)
	check.Must(t, os.MkdirAll("a/b", 0o755), os.WriteFile("a/b/file", nil, 0o600), os.WriteFile("secret", nil, 0o600),
		os.Symlink("../../secret", "a/b/out"), os.Symlink("a", "dir"), os.Symlink("/proc/self/cwd", "proc"))
	opened, err := os.Open("a/b/file")
	check.Must(t, err)
	defer opened.Close()
	for path, link := range map[string]string{
		"a/b/file": "", top + "/a/b/file": "", "a/b/../b/file": "", "/proc/self/cwd/a/b/file": "", fmt.Sprintf("/dev/fd/%d", opened.Fd()): "",
		"a/b/out": "a/b/out", "dir/b/file": "dir", "dir/": "dir", top + "/dir/b/file": top + "/dir", "/proc/self/cwd/dir/b": "/proc/self/cwd/dir", "proc/a/b/file": "proc",
	} {
		for _, follow := range []bool{false, true} {
			fd, err := Source(follow)(path, unix.O_RDONLY)
			if err == nil {
				unix.Close(fd)
			}
			var e *Error
			want := link != "" && !follow
			check.That(t, (err != nil) == want && (!want || errors.As(err, &e) && e.Link == link), "%q, follow %v: %v", path, follow, err)
		}
	}
	_, err = Source(false)("none", unix.O_RDONLY)
	check.That(t, errors.Is(err, unix.ENOENT), "%v", err)
}

// Open follows the caller's own links through any number of directories.
func TestOpen(t *testing.T) {
	top := t.TempDir()
	t.Chdir(top)
	check.Must(t, os.MkdirAll("a/b", 0o755), os.WriteFile("a/b/file", nil, 0o600), os.WriteFile("none", nil, 0o600),
		os.Symlink("a/b", "relative"), os.Symlink(top+"/a", "absolute"), os.Symlink("../../absolute/b/file", "a/b/chain"),
		os.Symlink("loop", "loop"), os.Symlink("file", "a/b/last"))
	for path, want := range map[string]string{
		"a/b/file": "a/b/file", "relative/file": "a/b/file", "absolute/b/../b//file": "a/b/file", "relative/chain": "a/b/file", "relative/last": "a/b/file",
		top + "/relative/last": "a/b/file", "relative/": "a/b", ".": ".", "/": "/", "/proc/self/cwd/a/b/file": "a/b/file", "/proc/self/exe": "/proc/self/exe",
	} {
		fd, err := Open(path)
		if err != nil {
			t.Errorf("%s: %v", path, err)
			continue
		}
		check.That(t, same(t, fd, want), "%s is not %s", path, want)
		unix.Close(fd)
	}
	for path, want := range map[string]error{"": unix.ENOENT, "no/such": unix.ENOENT, "a/b/file/": unix.ENOTDIR, "a/b/file/x": unix.ENOTDIR, "loop": unix.ELOOP, "relative/last/": unix.ENOTDIR} {
		fd, err := Open(path)
		check.That(t, errors.Is(err, want), "%q: %d, %v; want %v", path, fd, err, want)
	}
	_, err := Dir("relative/last")
	check.That(t, errors.Is(err, unix.ENOTDIR), "a file as a directory: %v", err)
	if fd, err := Dir("relative"); err != nil || !same(t, fd, "a/b") {
		t.Errorf("a directory: %v", err)
	} else {
		unix.Close(fd)
	}
	_, err = For("a/b/file/x", unix.O_RDONLY)
	check.That(t, errors.Is(err, unix.ENOTDIR), "a file as a directory: %v", err)
}

// Open follows as many links as the kernel (path_resolution(7)) and no more.
func TestOpenMany(t *testing.T) {
	t.Chdir(t.TempDir())
	check.Must(t, os.WriteFile("0", nil, 0o600))
	for i := range maxLinks + 1 {
		check.Must(t, os.Symlink(strconv.Itoa(i), strconv.Itoa(i+1)))
	}
	fd, err := Open(strconv.Itoa(maxLinks))
	check.That(t, err == nil && same(t, fd, "0"), "%d links: %v", maxLinks, err)
	unix.Close(fd)
	fd, err = Open(strconv.Itoa(maxLinks + 1))
	check.That(t, errors.Is(err, unix.ELOOP), "%d links: %d, %v", maxLinks+1, fd, err)
}

// Open of a link in /proc opens its target, not the path in its text.
func TestOpenDescriptor(t *testing.T) {
	name := t.TempDir() + "/file"
	f, err := os.Create(name)
	check.Must(t, err)
	defer f.Close()
	check.Must(t, os.Remove(name), os.WriteFile(name+" (deleted)", nil, 0o600))
	path := fmt.Sprintf("/proc/self/fd/%d", f.Fd())
	fd, err := Open(path)
	check.Require(t, err == nil && same(t, fd, path), "%s: %v", path, err)
	unix.Close(fd)
}

// Open follows a user's link in a group-writable directory, as made with umask 002.
func TestOpenGroup(t *testing.T) {
	if os.Geteuid() == 0 {
		return // see TestOpenOthers
	}
	top := t.TempDir()
	check.Must(t, os.Chmod(top, 0o775), os.Mkdir(top+"/dir", 0o755), os.Symlink("dir", top+"/link"))
	fd, err := Open(top + "/link")
	check.OK(t, err)
	unix.Close(fd)
}

// Open rejects links of other users and, for root, links that others could have put there, and names the link.
func TestOpenOthers(t *testing.T) {
	if os.Geteuid() != 0 {
		return // only root can create files of other users
	}
	top := t.TempDir()
	check.Must(t, os.MkdirAll(top+"/dir/sub", 0o755), os.WriteFile(top+"/dir/sub/file", nil, 0o600),
		os.Symlink("sub", top+"/dir/theirs"), os.Lchown(top+"/dir/theirs", 61000, 61000), os.Symlink(".", top+"/dir/mine"),
		os.Mkdir(top+"/open", 0o755), os.Symlink("../dir", top+"/open/link"), os.Chown(top+"/open", 61000, 61000),
		os.Mkdir(top+"/group", 0o755), os.Symlink("../dir", top+"/group/link"), os.Chmod(top+"/group", 0o775),
		os.Mkdir(top+"/sticky", 0o755), os.Symlink("../dir", top+"/sticky/link"), os.Chmod(top+"/sticky", 0o777|os.ModeSticky))
	for path, link := range map[string]string{
		"/dir/sub/file": "", "/dir/mine/sub/file": "", "/sticky/link/sub": "", "/open/../dir/sub": "",
		"/dir/mine/theirs/file": "/dir/theirs", "/dir/theirs": "/dir/theirs", "/open/link/sub": "/open/link", "/group/link": "/group/link",
	} {
		fd, err := Open(top + path)
		var e *Error
		check.That(t, (link != "" || err == nil) && (link == "" || errors.As(err, &e) && strings.HasSuffix(e.Link, link)), "%s: %d, %v; want the link %q named", path, fd, err, link)
	}
}
