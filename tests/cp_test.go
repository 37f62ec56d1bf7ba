package tests

import (
	"archive/tar"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// copier runs cp for a sandbox called box in a directory of the test.
type copier struct {
	*testing.T
	s   *harness.State
	dir string
}

func newCopier(t *testing.T, flags ...string) (*copier, *harness.Sandbox) {
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{}, append([]string{"--name", "box", "--cwd", "none"}, flags...)...)
	return &copier{t, s, harness.SharedDir(t)}, b
}

func (c *copier) cp(code int, message string, args ...string) {
	c.Helper()
	if r := c.s.Start(harness.Options{Dir: c.dir}, append([]string{"cp"}, args...)...).Wait(); r.ExitCode != code || !strings.Contains(string(r.Stderr), message) || message == "" && code == 0 && len(r.Stderr) > 0 {
		c.Errorf("cp %q: exit code %d, want %d: %s, want %q", args, r.ExitCode, code, r.Stderr, message)
	}
}

func (c *copier) put(name, text string) {
	c.Helper()
	name = filepath.Join(c.dir, name)
	check.Must(c, os.MkdirAll(filepath.Dir(name), 0o755))
	check.Must(c, os.WriteFile(name, []byte(text), 0o644))
}

func (c *copier) has(name, text string) {
	c.Helper()
	b, err := os.ReadFile(filepath.Join(c.dir, name))
	check.That(c, string(b) == text && err == nil, "%s: %q, %v; want %q", name, b, err, text)
}

// hostileTree creates what a hostile command may leave: links out, a FIFO, a socket, hard links,
// names with newlines and non-UTF-8 bytes, a closed directory, and a deep one.
const hostileTree = `cd /tmp && mkdir t && cd t &&
ln -s /etc abs && ln -s ../../../../../../etc/passwd rel && ln -s self self && ln -s /proc/self/root root &&
mkfifo fifo && echo x > one && ln one two && mkdir closed && chmod 0 closed &&
python3 -c '
import os, socket
open(b"new\nline", "w").write("n"); open(b"\xff\xfe", "w").write("b"); open("a" * 255, "w").write("l")
socket.socket(socket.AF_UNIX).bind("socket")
os.mkdir("deep"); os.chdir("deep")
for i in range(400): os.mkdir("d"); os.chdir("d")
'`

// cp of a hostile command's files reaches nothing outside, and copies the rest.
func TestCpHostile(t *testing.T) {
	t.Parallel()
	c, b := newCopier(t)
	r := b.Exec(harness.Options{}, nil, "sh", "-c", hostileTree)
	check.Require(t, r.ExitCode == 0, "%s", r.Stderr)
	c.put("victim", "kept")
	c.cp(125, "cannot be read", "-r", "box:/tmp/t", "out")
	for name, text := range map[string]string{"one": "x\n", "two": "x\n", "new\nline": "n", "\xff\xfe": "b", strings.Repeat("a", 255): "l"} {
		c.has("out/"+name, text)
	}
	for _, name := range []string{"abs", "rel", "self", "root"} {
		st, err := os.Lstat(filepath.Join(c.dir, "out", name))
		check.That(t, err == nil && st.Mode()&os.ModeSymlink != 0, "%s: %v %v", name, st, err)
	}
	for _, name := range []string{"fifo", "socket", "closed"} {
		_, err := os.Lstat(filepath.Join(c.dir, "out", name))
		check.That(t, err != nil, "%s was copied", name)
	}
	var st unix.Stat_t
	err := unix.Stat(c.dir+"/out/one", &st)
	check.That(t, err == nil && st.Nlink == 1 && int(st.Uid) == os.Geteuid(), "%+v %v", st, err)
	// Again, over links that lead out: they are replaced or refused, not followed.
	check.Must(t, os.Remove(c.dir+"/out/one"))
	check.Must(t, os.Symlink(c.dir+"/victim", c.dir+"/out/one"))
	c.cp(0, "", "box:/tmp/t/one", "out")
	c.has("out/one", "x\n")
	check.Must(t, os.RemoveAll(c.dir+"/out/deep"))
	check.Must(t, os.Symlink(c.dir, c.dir+"/out/deep"))
	c.cp(125, "is not a directory", "-r", "box:/tmp/t/deep", "out")
	c.has("victim", "kept")
	_, err = os.Lstat(c.dir + "/d")
	check.That(t, err != nil, "a link on the host was followed")
	// Into the sandbox, through its links.
	c.cp(125, "read-only file system", "victim", "box:/tmp/t/abs/new")
	c.cp(125, "", "victim", "box:/tmp/t/self/new")
	c.cp(125, "", "victim", "box:/tmp/t/fifo/new")
	c.cp(0, "", "box:/tmp/t/rel", "passwd")
	check.That(t, strings.Contains(readFile(t, c.dir+"/passwd"), "sandbox:x:"), "not the sandbox's")
	c.cp(125, "", "box:/tmp/t/root/etc/passwd", "never")
	c.cp(125, "neither a file nor a directory", "box:/tmp/t/fifo", "never")
	c.cp(125, "", "box:/dev/tty", "never")
}

// cp does not wait for a file with a lease (fcntl(2), F_SETLEASE: open(2) blocks for 45 s; without the filter a command
// can have one), for a FIFO, or for the end of a file that grows all the time.
func TestCpStalled(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{}, "--name", "box", "--cwd", "none", "--seccomp", "off", "--wait-ready", "--ready-log", "held", "python3", "-c", `
import fcntl, os, signal
signal.signal(signal.SIGIO, signal.SIG_IGN)
os.mkdir("d"); os.mkfifo("d/fifo"); open("d/other", "w").write("x")
f = open("d/leased", "w+"); f.write("text"); f.flush()
fcntl.fcntl(f, fcntl.F_SETLEASE, fcntl.F_WRLCK)
g = open("d/grows", "w"); g.write("y" * 1000000); g.flush()
print("held", flush=True)
for i in range(200000000): g.write("y"); i % 100 or g.flush()
signal.pause()`)
	b.Busy = true
	c := &copier{t, s, harness.SharedDir(t)}
	begin := time.Now()
	c.cp(125, "F_SETLEASE", "box:d/leased", "never")
	c.cp(125, "cannot be read", "-r", "box:d", "out")
	c.has("out/other", "x")
	st, err := os.Stat(c.dir + "/out/grows")
	check.That(t, err == nil && st.Size() >= 1000000, "%v %v", st, err)
	took := time.Since(begin)
	check.That(t, took <= harness.Scaled(10*time.Second), "it took %v", took)
}

// On a terminal cp shows its progress when it takes a while, and removes that line at the end.
func TestCpProgress(t *testing.T) {
	t.Parallel()
	c, _ := newCopier(t)
	r, w, err := os.Pipe()
	check.Must(t, err)
	defer w.Close()
	on := screenOf(t, nil, func(o harness.Options) *harness.Process {
		o.Stdin, o.Stdout, o.Attr = r, nil, nil
		return c.s.Start(o, "cp", "-", "box:")
	})
	r.Close()
	archive := tar.NewWriter(w)
	check.Must(t, archive.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "first", Size: 3000, Mode: 0o644}))
	_, err = archive.Write(make([]byte, 3000))
	check.Must(t, err)
	check.Must(t, archive.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "second", Size: 1, Mode: 0o644}))
	on.waitFor("2 copied, 2.9K, ")
	_, err = archive.Write([]byte("x"))
	check.Must(t, err)
	check.Must(t, archive.Close())
	check.Must(t, w.Close())
	on.p.Wait().Exits(t, 0)
	harness.Until(t, harness.Bound, "the line to be removed", func() bool { return strings.HasSuffix(on.shows(), "/s\r\x1b[K") })
	shown := on.shows()
	check.That(t, strings.HasPrefix(shown, "\r\x1b[K") && !strings.Contains(shown, "\n"), "%q", shown)
}
