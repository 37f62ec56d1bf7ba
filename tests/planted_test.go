package tests

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// planted is a directory in which a payload has left what script makes. target is a named
// pipe outside, which the test reads.
func planted(t *testing.T, script string) (dir, target string, reader *os.File) {
	t.Helper()
	dir, target = harness.SharedDir(t), filepath.Join(harness.Dir(t), "target")
	harness.Must(t, unix.Mkfifo(target, 0o666))
	reader, err := os.OpenFile(target, os.O_RDONLY|unix.O_NONBLOCK, 0)
	harness.Must(t, err)
	t.Cleanup(func() { reader.Close() })
	harness.Run(t, harness.Options{}, "--bind", dir+":/out", "sh", "-c", script, "sh", target).Expect(t, 0, "exited")
	return dir, target, reader
}

// A link that a payload has left where the report of a later run goes is replaced by the
// report: nothing is written to what it leads to, a pipe, a device or a descriptor.
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
			if r := p.Wait(); r.ExitCode != 0 || len(r.Stderr) != 0 {
				t.Errorf("exit code %d, stderr %q", r.ExitCode, r.Stderr)
			}
			if st, err := os.Lstat(dir + "/r.json"); err != nil || !st.Mode().IsRegular() {
				t.Errorf("in its place: %v, %v", st.Mode(), err)
			} else if text, err := os.ReadFile(dir + "/r.json"); err != nil {
				t.Error(err)
			} else if _, err := harness.ParseReport(text); err != nil {
				t.Errorf("the report: %q, %v", text, err)
			}
			if got, err := io.ReadAll(reader); len(got) != 0 || err != nil {
				t.Errorf("written to what the link led to: %q, %v", got, err)
			}
		})
	}
}

// What a payload has left in place of a named pipe is not written to, when root can tell.
func TestReportPlantedPipe(t *testing.T) {
	t.Parallel()
	if !harness.Root() {
		t.Skip("what a sandbox of an ordinary user makes is that user's")
	}
	dir, _, _ := planted(t, `mkfifo /out/r.json`)
	reader, err := os.OpenFile(dir+"/r.json", os.O_RDONLY|unix.O_NONBLOCK, 0)
	harness.Must(t, err)
	defer reader.Close()
	r := harness.Start(t, harness.Options{Bare: true}, "--report", dir+"/r.json", "true").Wait()
	want := fmt.Sprintf("sbxrun: error: cannot write the report to %q: it is not a regular file, and others could have put it there; ", dir+"/r.json")
	if r.ExitCode != 125 || !strings.HasPrefix(string(r.Stderr), want) {
		t.Errorf("exit code %d, stderr %q; want %q", r.ExitCode, r.Stderr, want)
	}
	if got, err := io.ReadAll(reader); len(got) != 0 || err != nil {
		t.Errorf("written to the pipe: %q, %v", got, err)
	}
}

// Nor is a link that a payload has left on the way to the report's directory followed by
// root.
func TestReportPlantedDirectory(t *testing.T) {
	t.Parallel()
	if !harness.Root() {
		t.Skip("what a sandbox of an ordinary user makes is that user's")
	}
	dir, target, _ := planted(t, `ln -s "${1%/*}" /out/sub`)
	r := harness.Start(t, harness.Options{Bare: true}, "--report", dir+"/sub/r.json", "true").Wait()
	want := fmt.Sprintf("%q is a symbolic link that others could have put there; name the path that is meant\n", dir+"/sub")
	if r.ExitCode != 125 || !strings.HasSuffix(string(r.Stderr), want) {
		t.Errorf("exit code %d, stderr %q; want %q", r.ExitCode, r.Stderr, want)
	}
	if _, err := os.Lstat(filepath.Join(filepath.Dir(target), "r.json")); err == nil {
		t.Error("the report was written where the link leads")
	}
}

// The caller's own words still work: a device, and the names of descriptors.
func TestReportSpecial(t *testing.T) {
	t.Parallel()
	r := harness.Start(t, harness.Options{Bare: true}, "--report", "/dev/null", "true").Wait()
	if r.ExitCode != 0 || len(r.Stderr) != 0 {
		t.Errorf("/dev/null: exit code %d, stderr %q", r.ExitCode, r.Stderr)
	}
	for _, place := range []string{"/dev/stderr", "/dev/fd/2", "/proc/self/fd/2", "fd:2"} {
		r := harness.Start(t, harness.Options{Bare: true}, "--report", place, "true").Wait()
		if _, err := harness.ParseReport(r.Stderr); r.ExitCode != 0 || err != nil {
			t.Errorf("%s: exit code %d, stderr %q, %v", place, r.ExitCode, r.Stderr, err)
		}
	}
}
