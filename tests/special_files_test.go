package tests

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// planted returns a directory in which a payload has run script, and a named pipe outside, target, with its reader.
func planted(t *testing.T, script string) (dir, target string, reader *os.File) {
	t.Helper()
	dir, target = harness.SharedDir(t), filepath.Join(harness.Dir(t), "target")
	check.Must(t, unix.Mkfifo(target, 0o666))
	reader, err := os.OpenFile(target, os.O_RDONLY|unix.O_NONBLOCK, 0)
	check.Must(t, err)
	t.Cleanup(func() { reader.Close() })
	harness.Run(t, harness.Options{}, "--bind", dir+":/out", "sh", "-c", script, "sh", target).Expect(t, 0, "exited")
	return dir, target, reader
}

// sbxrun replaces a link that a payload has left in place of a report, and does not write to the link's target, such as
// a pipe, a device or a descriptor.
func TestReportPlantedLink(t *testing.T) {
	t.Parallel()
	for name, script := range map[string]string{
		"pipe":          `ln -s "$1" /out/r.json`,
		"chain":         `ln -s "$1" /out/x; ln -s x /out/r.json`,
		"device":        `ln -s /dev/null /out/r.json`,
		"descriptor":    `ln -s /proc/self/fd/2 /out/r.json`,
		"stderr":        `ln -s /dev/stderr /out/r.json`,
		"own directory": `mkdir /out/sub; ln -s "$1" /out/sub/x; ln -s sub/x /out/r.json`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir, _, reader := planted(t, script)
			p := harness.Start(t, harness.Options{Bare: true}, "--report", dir+"/r.json", "true")
			p.Wait().Exits(t, 0).Err(t, "")
			if st, err := os.Lstat(dir + "/r.json"); err != nil || !st.Mode().IsRegular() {
				t.Errorf("in its place: %v, %v", st.Mode(), err)
			} else if text, err := os.ReadFile(dir + "/r.json"); err != nil {
				t.Error(err)
			} else if _, err := harness.ParseReport(text); err != nil {
				t.Errorf("the report: %q, %v", text, err)
			}
			got, err := io.ReadAll(reader)
			check.That(t, len(got) == 0 && err == nil, "written to what the link led to: %q, %v", got, err)
		})
	}
}

// As root, sbxrun does not write to a file that a payload has left in place of a named pipe.
func TestReportPlantedPipe(t *testing.T) {
	t.Parallel()
	if !harness.Root() {
		return // files from a sandbox of an ordinary user belong to that user
	}
	dir, _, _ := planted(t, `mkfifo /out/r.json`)
	reader, err := os.OpenFile(dir+"/r.json", os.O_RDONLY|unix.O_NONBLOCK, 0)
	check.Must(t, err)
	defer reader.Close()
	r := harness.Start(t, harness.Options{Bare: true}, "--report", dir+"/r.json", "true").Wait()
	want := fmt.Sprintf("sbxrun: error: cannot write the report to %q: it is not a regular file, and others could have put it there; ", dir+"/r.json")
	check.That(t, r.ExitCode == 125 && strings.HasPrefix(string(r.Stderr), want), "exit code %d, stderr %q; want %q", r.ExitCode, r.Stderr, want)
	got, err := io.ReadAll(reader)
	check.That(t, len(got) == 0 && err == nil, "written to the pipe: %q, %v", got, err)
}

// As root, sbxrun does not follow a link that a payload has left on the way to the report's directory.
func TestReportPlantedDirectory(t *testing.T) {
	t.Parallel()
	if !harness.Root() {
		return // files from a sandbox of an ordinary user belong to that user
	}
	dir, target, _ := planted(t, `ln -s "${1%/*}" /out/sub`)
	r := harness.Start(t, harness.Options{Bare: true}, "--report", dir+"/sub/r.json", "true").Wait()
	want := fmt.Sprintf("%q is a symbolic link that others could have put there; name the path that the link leads to\n", dir+"/sub")
	check.That(t, r.ExitCode == 125 && strings.HasSuffix(string(r.Stderr), want), "exit code %d, stderr %q; want %q", r.ExitCode, r.Stderr, want)
	_, err := os.Lstat(filepath.Join(filepath.Dir(target), "r.json"))
	check.That(t, err != nil, "the report was written where the link leads")
}

// Special files that the caller names still work: a device, and descriptors.
func TestReportSpecial(t *testing.T) {
	t.Parallel()
	harness.Start(t, harness.Options{Bare: true}, "--report", "/dev/null", "true").Wait().Exits(t, 0).Err(t, "")
	for _, place := range []string{"/dev/stderr", "/dev/fd/2", "/proc/self/fd/2", "fd:2"} {
		r := harness.Start(t, harness.Options{Bare: true}, "--report", place, "true").Wait()
		_, err := harness.ParseReport(r.Stderr)
		check.That(t, r.ExitCode == 0 && err == nil, "%s: exit code %d, stderr %q, %v", place, r.ExitCode, r.Stderr, err)
	}
}

// --env-file reads a descriptor that is a pipe, as the shell creates for <(command). A signal ends
// the wait for its end.
func TestEnvFileDescriptor(t *testing.T) {
	t.Parallel()
	read, write, err := os.Pipe()
	check.Must(t, err)
	defer write.Close()
	_, err = write.WriteString("A=1\n")
	check.Must(t, err)
	p := harness.Start(t, harness.Options{Bare: true, ExtraFiles: []*os.File{read}}, "--env-file", "/dev/fd/3", "sh", "-c", "echo $A")
	write.Close()
	p.Wait().Exits(t, 0).Out(t, "1\n")

	read, write, err = os.Pipe()
	check.Must(t, err)
	defer write.Close()
	p = harness.Start(t, harness.Options{Bare: true, ExtraFiles: []*os.File{read}}, "--env-file", "/dev/fd/3", "true")
	read.Close()
	harness.Until(t, harness.Bound, "the end after SIGINT", func() bool {
		p.Signal(unix.SIGINT)
		select {
		case <-p.Exited():
			return true
		default:
			return false
		}
	})
	// The signal may come before sbxrun handles it.
	r := p.Wait()
	check.That(t, r.Signal == unix.SIGINT || r.ExitCode == 125 && strings.Contains(string(r.Stderr), "interrupted by a signal"), "exit code %d, stderr %q", r.ExitCode, r.Stderr)
}

// A directory as a standard stream would lead out of the sandbox, and is refused.
func TestDirectoryAsStream(t *testing.T) {
	t.Parallel()
	dir, err := os.Open(harness.Dir(t))
	check.Must(t, err)
	defer dir.Close()
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{})
	for _, args := range [][]string{{"ls", "/proc/self/fd/0/.."}, {"--json", "ls", "/proc/self/fd/0/.."}, {"exec", b.ID, "ls", "/proc/self/fd/0/.."}} {
		r := s.Start(harness.Options{Stdin: dir}, args...).Wait()
		want := "sbxrun: error: stdin is a directory, from which the command could reach all files of the host; "
		check.That(t, r.ExitCode == 125 && strings.HasPrefix(string(r.Stderr), want), "%q: exit code %d, stdout %.100q, stderr %q", args, r.ExitCode, r.Stdout, r.Stderr)
	}
	s.Start(harness.Options{Stderr: dir}, "ls", "/proc/self/fd/2/..").Wait().Exits(t, 125).Out(t, "")
}

// long is a process that claims 64 MiB of its memory as arguments.
const long = `import ctypes, struct, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.sbrk.restype = ctypes.c_void_p
size = 64 << 20
start = libc.mmap(None, ctypes.c_size_t(size), 3, 0x4022, -1, ctypes.c_long(0))
stat = open("/proc/self/stat").read().rsplit(")", 1)[1].split()
field = lambda n: int(stat[n - 3])
map = struct.pack("<11QQIi", field(26), field(27), field(45), field(46), field(47), libc.sbrk(0), field(28), start, start + size, field(50), field(51), 0, 0, -1)
print("said" if libc.prctl(35, 14, map, len(map), 0) == 0 else "refused", flush=True)
time.sleep(600)
`

// cleanup reads only the beginning of other processes' command lines.
func TestCleanupLongCommandLine(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{}, "python3", "-c", long)
	harness.Until(t, harness.Bound, "the command", func() bool { return p.Output() != "" })
	if p.Output() != "said\n" {
		t.Logf("%s: this kernel has no PR_SET_MM_MAP", p.Output())
	}
	s := harness.NewState(t)
	c := s.Start(harness.Options{}, "cleanup", "--dry-run")
	var peak int64
	for running := true; running; {
		select {
		case <-c.Exited():
			running = false
		case <-time.After(5 * time.Millisecond):
			peak = max(peak, c.PeakRSS())
		}
	}
	r := c.Wait()
	check.That(t, r.ExitCode == 0 && peak <= maxRSS, "exit code %d, %d bytes resident", r.ExitCode, peak)
	p.Signal(unix.SIGTERM)
	p.Wait()
}

// forger leaves five zombies with sbxrun's name in its sandbox.
const forger = `import ctypes, os, time
libc = ctypes.CDLL(None)
for _ in range(5):
    pid = os.fork()
    if pid == 0:
        libc.prctl(15, b"sbxrun", 0, 0, 0)
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
print("up", flush=True)
time.sleep(600)
`

// Zombies in a sandbox don't count as sbxrun's own, whatever their name.
func TestForgedZombies(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{}, "python3", "-c", forger)
	p.WaitOutput("up\n")
	r := harness.NewState(t).Run("cleanup", "--dry-run")
	needle := fmt.Sprintf("only its parent %d ", p.Role(harness.RolePayload).PID)
	check.That(t, r.ExitCode == 0 && !strings.Contains(string(r.Stdout), needle), "exit code %d, %s", r.ExitCode, r.Stdout)
	p.Signal(unix.SIGTERM)
	p.Wait()
}
