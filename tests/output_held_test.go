package tests

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// When a process outside the sandbox holds the payload's stdout and stderr open, all processes of
// the sandbox still exit, and sbxrun does not wait for it.

// stranger listens on a Unix socket until the end of the test, and keeps the descriptors that it receives open. If it
// floods, it also writes to them until the other end closes. It announces each receipt on the channel.
func stranger(t *testing.T, address string, floods bool) (received <-chan struct{}) {
	t.Helper()
	l, err := net.Listen("unix", address)
	check.Must(t, err)
	over, got := make(chan struct{}), make(chan struct{}, 100)
	if address[0] == '/' {
		check.Must(t, os.Chmod(address, 0o777))
	}
	t.Cleanup(func() {
		close(over)
		l.Close()
	})
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go receive(conn.(*net.UnixConn), floods, got, over)
		}
	}()
	return got
}

func receive(conn *net.UnixConn, floods bool, got chan<- struct{}, over <-chan struct{}) {
	defer conn.Close()
	var b [1]byte
	control := make([]byte, unix.CmsgSpace(2*4))
	_, n, _, _, err := conn.ReadMsgUnix(b[:], control)
	if err != nil {
		return
	}
	messages, err := unix.ParseSocketControlMessage(control[:n])
	if err != nil || len(messages) == 0 {
		return
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil {
		return
	}
	_, _ = conn.Write(b[:]) // the sender sees it, or is dead
	for _, fd := range fds {
		file := os.NewFile(uintptr(fd), "stranger's")
		defer file.Close()
		if !floods {
			continue
		}
		go func() {
			line := bytes.Repeat([]byte("stranger\n"), 400)
			for {
				if _, err := unix.Write(fd, line); err != nil && err != unix.EINTR {
					return // EPIPE, or EIO on a terminal: the reader is gone
				}
			}
		}()
	}
	got <- struct{}{}
	<-over
}

// sends returns a command that passes its outputs out, prints a line, and exits with 3 or not at all.
func sends(address, end string, mib int) []string {
	return []string{"/fixtures/leave-descriptor", address, end, fmt.Sprint(mib)}
}

// outputs returns the flags with which sbxrun copies the output.
func outputs() map[string][]string {
	return map[string][]string{
		"json":     {"--json"},
		"truncate": {"--output-limit", "truncate", "--max-output", "1G"},
		"tty":      {"--tty"},
	}
}

// soon is the time limit for runs that would last as long as the stranger.
const soon = 5 * time.Second

func TestOutsideHoldsRun(t *testing.T) {
	t.Parallel()
	for _, floods := range []bool{false, true} {
		dir := harness.SharedDir(t)
		stranger(t, dir+"/socket", floods)
		for name, flags := range outputs() {
			args := append(flags, "--bind", dir+":/shared")
			what := fmt.Sprintf("%s, floods %v", name, floods)
			mib := 5
			if floods {
				mib = 0 // its share of the pipe is small
			}
			r := harness.Run(t, harness.Options{}, append(args, sends("/shared/socket", "3", mib)...)...).Expect(t, 3, "exited")
			harness.Within(t, what, r.Elapsed, 0, soon)
			if name == "truncate" && !floods {
				complete(t, r.Stdout, mib)
			}

			r = harness.Run(t, harness.Options{}, append(append([]string{"--timeout", "1"}, args...), sends("/shared/socket", "wait", 0)...)...)
			r.Expect(t, 124, "timeout")
			harness.Within(t, what+": timeout", r.Elapsed, time.Second, time.Second+soon)
		}
	}
}

// complete asserts that all lines of fixtures/leave-descriptor have arrived.
func complete(t *testing.T, out []byte, mib int) {
	t.Helper()
	var want bytes.Buffer
	for i := range mib << 10 {
		fmt.Fprintf(&want, "%01023d\n", i)
	}
	fmt.Fprintf(&want, "sent %d\n", mib<<10)
	check.That(t, bytes.Equal(out, want.Bytes()), "%d bytes, want %d, or others: … %q", len(out), want.Len(), out[max(0, len(out)-100):])
}

// An abstract socket needs no file, only the host's network.
func TestOutsideHoldsAbstract(t *testing.T) {
	t.Parallel()
	address := fmt.Sprintf("@sbxrun-test-held-%d", os.Getpid())
	stranger(t, address, false)
	r := harness.Run(t, harness.Options{}, append([]string{"--json", "--net", "host"}, sends(address, "3", 1)...)...).Expect(t, 3, "exited")
	harness.Within(t, "the run", r.Elapsed, 0, soon)
}

func TestOutsideHoldsExec(t *testing.T) {
	t.Parallel()
	dir := harness.SharedDir(t)
	b := harness.NewState(t).Sandbox(harness.Options{}, "--bind", dir+":/shared")
	for _, floods := range []bool{false, true} {
		name := fmt.Sprintf("socket-%v", floods)
		stranger(t, filepath.Join(dir, name), floods)
		for how, flags := range outputs() {
			r := b.Exec(harness.Options{}, flags, sends("/shared/"+name, "3", 0)...).Expect(t, 3, "exited")
			harness.Within(t, how, r.Elapsed, 0, soon)
			r = b.Exec(harness.Options{}, append([]string{"--timeout", "1"}, flags...), sends("/shared/"+name, "wait", 0)...).Expect(t, 124, "timeout")
			harness.Within(t, how+": timeout", r.Elapsed, time.Second, time.Second+soon)
		}
		d := b.Detach([]string{"--output-limit", "truncate", "--max-output", "1M", "--timeout", "1"}, sends("/shared/"+name, "wait", 0)...)
		begin := time.Now()
		rep := d.Ended()
		check.That(t, rep.Cause == "timeout", "exec --detach: %s", rep.Raw())
		harness.Within(t, "exec --detach", time.Since(begin), 0, time.Second+soon)
	}
}

// A sandbox ends and frees its name while a stranger holds its log pipes, and its logs are complete.
func TestOutsideHoldsSandbox(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	dir := harness.SharedDir(t)
	for _, floods := range []bool{false, true} {
		name := fmt.Sprintf("socket-%v", floods)
		received := stranger(t, filepath.Join(dir, name), floods)
		start := func(end string, mib int) *harness.Sandbox {
			return s.Sandbox(harness.Options{}, append([]string{"--name", "held", "--max-output", "1M", "--bind", dir + ":/shared"}, sends("/shared/"+name, end, mib)...)...)
		}
		b := start("3", 0)
		<-received
		r := s.Run("wait", "held").Exits(t, 3)
		harness.Within(t, "wait", r.Elapsed, 0, soon)
		rec := b.Ended()
		check.That(t, rec.Report.Cause == "exited", "%s", rec.Status)
		out := string(s.Run("logs", b.ID).Stdout)
		check.That(t, floods || out == "sent 0\n", "logs: %q", out)

		b = start("wait", 0)
		<-received
		all := kill(t, s, 0, "--grace", "0", "held")
		check.That(t, len(all) == 1, "kill: %v", all)
		check.Equal(t, b.Ended().Status, "killed")
		r = s.Run("wait", b.ID)
		harness.Within(t, "wait", r.Elapsed, 0, soon)
	}
	// With much output.
	b := s.Sandbox(harness.Options{}, append([]string{"--max-output", "10M", "--bind", dir + ":/shared"}, sends("/shared/socket-false", "3", 5)...)...)
	b.Ended()
	complete(t, s.Run("logs", "--stream", "stdout", b.ID).Stdout, 5)
}

// The command has only descriptors 0, 1 and 2, whatever the caller and sbxrun have open.
func TestDescriptors(t *testing.T) {
	t.Parallel()
	// 3 to 9: files, both ends of a pipe, a directory.
	var extra []*os.File
	open := func(f *os.File, err error) {
		check.Must(t, err)
		t.Cleanup(func() { f.Close() })
		extra = append(extra, f)
	}
	read, write, err := os.Pipe()
	open(read, err)
	open(write, err)
	for _, name := range []string{"/etc/passwd", "/", "/dev/null", "/proc/self/stat", "/etc/hostname"} {
		open(os.Open(name))
	}
	for _, mode := range [][]string{nil, {"--json"}, {"--tty"}, {"--timeout", "600", "--grace", "1"}} {
		harness.Run(t, harness.Options{ExtraFiles: extra}, append(mode, "/fixtures/probe-fds")...).Exits(t, 0)
	}
}

// Neither keeper nor bwrap holds the caller's descriptors.
func TestDescriptorsNotHeld(t *testing.T) {
	t.Parallel()
	read, write, err := os.Pipe()
	check.Must(t, err)
	defer read.Close()
	pipe, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", write.Fd()))
	check.Must(t, err)
	p := harness.Start(t, harness.Options{ExtraFiles: []*os.File{write}}, "sh", "-c", "echo up; exec sleep 600")
	write.Close()
	p.WaitOutput("up\n")
	seen := 0
	for _, pid := range harness.Descendants(p.PID) {
		links, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid)) // none where this user may not inspect it
		for _, link := range links {
			held, _ := os.Readlink(link)
			check.That(t, held != pipe, "process %d holds %s", pid, link)
			seen++
		}
	}
	check.That(t, seen > 0, "the harness is blind")
	p.Signal(unix.SIGTERM)
	p.Wait().Expect(t, 143, "canceled")
}

// With too few descriptors, at any limit, sbxrun prints one line with a hint and does not crash with a Go trace.
func TestFewDescriptors(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{})
	const enough = 64 // run and room have their own pipes, and each copied file of /etc takes two
	// The kernel counts the unreceived descriptors of all processes of the user, including other tests (unix(7)).
	alone := func(run func() *harness.Result) (r *harness.Result) {
		harness.Until(t, harness.Bound, "fewer unreceived descriptors", func() bool {
			r = run()
			return !bytes.Contains(r.Stderr, []byte("unreceived descriptors"))
		})
		return r
	}
	for limit := 3; limit <= enough; limit++ {
		wrap := []string{"sh", "-c", fmt.Sprintf(`ulimit -n %d && exec "$@"`, limit), "sh"}
		run := alone(func() *harness.Result {
			return harness.Run(t, harness.Options{Wrap: wrap}, "sh", "-c", "setsid sleep 600 & exit 7")
		})
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
	for limit := 10; limit <= 72; limit += 4 {
		var started *harness.Sandbox
		r := alone(func() (r *harness.Result) {
			started, r = s.TrySandbox(harness.Options{Wrap: []string{"sh", "-c", fmt.Sprintf(`ulimit -n %d && exec "$@"`, limit), "sh"}}, "--name", "few")
			return r
		})
		clear := bytes.Count(r.Stderr, []byte("\n")) == 1 && !bytes.Contains(r.Stderr, []byte("exited before reporting"))
		check.That(t, r.ExitCode == 0 || r.ExitCode == 125 && clear && limit < 72, "%d descriptors, start: exit code %d, stderr %.300q", limit, r.ExitCode, r.Stderr)
		if started != nil {
			kill(t, s, 0, "--grace", "0", "few")
			started.Ended()
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
		hostile := harness.Start(t, few, "--timeout", "600", "/fixtures/user-exhaust", kind, fmt.Sprint(most))
		hostile.WaitOutput("ready ")
		available, err := strconv.Atoi(strings.TrimSpace(readFile(t, "/proc/sys/fs/epoll/max_user_watches")))
		check.Must(t, err)
		scarce := os.Getuid() != 0 && kind == "watches" && available < most
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
