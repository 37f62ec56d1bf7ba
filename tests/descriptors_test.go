package tests

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// The command has only descriptors 0, 1 and 2, whatever the caller and sbxrun have open.
func TestDescriptors(t *testing.T) {
	t.Parallel()
	// 3 to 9: files, both ends of a pipe, a directory.
	var extra []*os.File
	open := func(f *os.File, err error) {
		harness.Must(t, err)
		t.Cleanup(func() { f.Close() })
		extra = append(extra, f)
	}
	read, write, err := os.Pipe()
	open(read, err)
	open(write, err)
	for _, name := range []string{"/etc/passwd", "/", "/dev/null", "/proc/self/stat", "/etc/hostname"} {
		open(os.Open(name))
	}
	for _, mode := range [][]string{nil, {"--json"}, {"--tty"}, {"--timeout", "30", "--grace", "1"}} {
		harness.Run(t, harness.Options{ExtraFiles: extra}, append(mode, "/fixtures/probe-fds")...).Exits(t, 0)
	}
}

// Neither keeper nor bwrap holds the caller's descriptors: a pipe that all others have closed ends
// while the run goes on.
func TestDescriptorsNotHeld(t *testing.T) {
	t.Parallel()
	read, write, err := os.Pipe()
	harness.Must(t, err)
	defer read.Close()
	p := harness.Start(t, harness.Options{ExtraFiles: []*os.File{write}}, "sh", "-c", "echo up; read x")
	write.Close()
	p.WaitOutput("up\n")
	p.Wait().Expect(t, 1, "exited") // reading from /dev/null fails
	n, err := read.Read(make([]byte, 1))
	check.That(t, n == 0 && err != nil, "%d, %v", n, err)
}

// With too few descriptors, at any limit, sbxrun prints one line with a hint and does not crash
// with a Go trace.
func TestFewDescriptors(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{})
	const enough = 64 // run and room have their own pipes, and each copied file of /etc takes two
	for limit := 3; limit <= enough; limit++ {
		wrap := []string{"sh", "-c", fmt.Sprintf(`ulimit -n %d && exec "$@"`, limit), "sh"}
		run := harness.Run(t, harness.Options{Wrap: wrap}, "sh", "-c", "setsid sleep 60 & exit 7")
		check.That(t, run.ExitCode == 7 || run.ExitCode == 125 && limit != enough, "%d descriptors: exit code %d, stderr %.300q", limit, run.ExitCode, run.Stderr)
		if limit > 24 {
			continue // enough for the others
		}
		for _, args := range [][]string{{"true"}, {"ps"}, {"exec", b.ID, "true"}} {
			r := s.Start(harness.Options{Wrap: wrap}, args...).Wait()
			clear := bytes.Count(r.Stderr, []byte("\n")) == 1 && bytes.Contains(r.Stderr, []byte("ulimit -n"))
			check.That(t, r.ExitCode == 0 || r.ExitCode == 125 && clear, "%d descriptors, %q: exit code %d, stderr %.300q", limit, args, r.ExitCode, r.Stderr)
		}
	}
}

// One command cannot use up the resources that the kernel counts per user: an ordinary user's other sandboxes still run.
// sbxrun reserves some descriptors in flight. It cannot reserve watches, so that error has a hint.
func TestUserExhausted(t *testing.T) {
	const most = 60000 // watches
	for _, kind := range []string{"descriptors", "watches"} {
		s := harness.NewState(t)
		// Low, to leave enough for tests of other packages.
		few := harness.Options{Wrap: []string{"sh", "-c", `ulimit -n 6000 && exec "$@"`, "sh"}}
		idle := s.Sandbox(few)
		hostile := harness.Start(t, few, "--timeout", "60", "/fixtures/user-exhaust", kind, fmt.Sprint(most))
		hostile.WaitOutput("ready ")
		scarce := os.Getuid() != 0 && kind == "watches" && maxWatches(t) < most
		for _, args := range [][]string{{"true"}, {"exec", idle.ID, "true"}} {
			r := s.Start(few, args...).Wait()
			clear := bytes.Count(r.Stderr, []byte("\n")) == 1 && bytes.Contains(r.Stderr, []byte("sysctl fs.epoll.max_user_watches"))
			check.That(t, (scarce || r.ExitCode == 0) && (!scarce || r.ExitCode == 125 && clear), "%s, %q: exit code %d, stderr %.300q", kind, args, r.ExitCode, r.Stderr)
		}
		// What started before ends as usual.
		hostile.Signal(unix.SIGTERM)
		hostile.Wait().Expect(t, 143, "canceled")
	}
}

func maxWatches(t *testing.T) int {
	text, err := os.ReadFile("/proc/sys/fs/epoll/max_user_watches")
	harness.Must(t, err)
	n, err := strconv.Atoi(strings.TrimSpace(string(text)))
	harness.Must(t, err)
	return n
}

// sbxrun's output fits the caller's limit on file sizes, or the error names that limit.
func TestFewBytes(t *testing.T) {
	t.Parallel()
	for _, blocks := range []int{0, 1, 8, 64} { // of 512 bytes
		wrap := []string{"sh", "-c", fmt.Sprintf(`ulimit -f %d && exec "$@"`, blocks), "sh"}
		r := harness.Start(t, harness.Options{Bare: true, Wrap: wrap}, "--cwd", "none", "true").Wait()
		check.That(t, r.ExitCode == 0 || r.ExitCode == 125 && len(harness.Lines(r.Stderr)) == 1 && strings.Contains(string(r.Stderr), "ulimit -f"),
			"%d blocks: exit code %d: %q", blocks, r.ExitCode, r.Stderr)
	}
}
