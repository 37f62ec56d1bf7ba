package tests

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// 10 MB in a pipe arrive unchanged.
func TestStdinPipe(t *testing.T) {
	t.Parallel()
	data := bytes.Repeat([]byte("0123456789\n"), 10<<20/11)
	r := harness.Run(t, harness.Options{Stdin: bytes.NewReader(data)}, "/fixtures/in-count")
	r.Expect(t, 0, "exited")
	want := fmt.Sprintf("bytes %d\nsha256 %x\n", len(data), sha256.Sum256(data))
	check.That(t, string(r.Stdout) == want, "%q, want %q", r.Stdout, want)
}

// Stdin that is never read, or not completely, delays nothing.
func TestStdinNeverRead(t *testing.T) {
	t.Parallel()
	for _, mode := range [][]string{nil, {"--json"}} {
		args := append(mode, "/fixtures/in-ignore", "0.1")
		r := harness.Run(t, harness.Options{Stdin: bytes.NewReader(make([]byte, 10<<20)), Bound: 20 * time.Second}, args...)
		r.Expect(t, 0, "exited")
		harness.Within(t, "the run", r.Elapsed, 100*time.Millisecond, 300*time.Millisecond)
	}
	r := harness.Run(t, harness.Options{Stdin: bytes.NewReader(make([]byte, 10<<20))}, "head", "-c", "1")
	r.Expect(t, 0, "exited")
}

// A pipe that stays open and silent does not outlive the command.
func TestStdinSilent(t *testing.T) {
	t.Parallel()
	read, write, err := os.Pipe()
	harness.Must(t, err)
	defer write.Close()
	defer read.Close()
	for _, mode := range [][]string{nil, {"--json"}, {"--tty"}} {
		r := harness.Run(t, harness.Options{Stdin: read, Bound: 20 * time.Second}, append(mode, "true")...)
		r.Expect(t, 0, "exited")
	}
}

// sbxrun does not use the numbers of closed standard streams for its own descriptors.
func TestStdinClosed(t *testing.T) {
	t.Parallel()
	for _, closed := range []string{"<&-", "<&- >&-", "<&- >&- 2>&-", ">&- 2>&-"} {
		dir := harness.SharedDir(t)
		r := harness.Run(t, harness.Options{Wrap: []string{"sh", "-c", `exec "$@" ` + closed, "-"}},
			"--bind", dir+":/out", "sh", "-c", "/fixtures/in-count >/out/stdin; /fixtures/probe-fds >/out/fds; ls -l /proc/self/fd >/out/list; exit 5")
		r.Expect(t, 5, "exited")
		for name, want := range map[string][]string{"stdin": {"bytes 0\n", "closed\n"}, "fds": {"none\n"}} {
			got, err := os.ReadFile(dir + "/" + name)
			harness.Must(t, err)
			check.That(t, bytes.HasPrefix(got, []byte(want[0])) || string(got) == want[len(want)-1], "%s: %s is %q", closed, name, got)
		}
		list, _ := os.ReadFile(dir + "/list")
		for _, own := range []string{"memfd", "report", "args"} {
			check.That(t, !bytes.Contains(list, []byte(own)), "%s: the command has a descriptor of sbxrun's:\n%s", closed, list)
		}
	}
}

// The command can read from a terminal as stdin without --tty, but it is not its controlling
// terminal.
//
// As a shell's background job, the command does not steal typed input, and no SIGTTIN stops it, because it is in its own
// session.
func TestStdinBackground(t *testing.T) {
	t.Parallel()
	for _, flags := range [][]string{nil, {"--json"}} {
		ptmx, tty, err := pty.Open()
		harness.Must(t, err)
		defer ptmx.Close()
		defer tty.Close()
		p := harness.Start(t, harness.Options{
			Stdin: tty, Attr: &syscall.SysProcAttr{Setsid: true, Setctty: true}, Wrap: []string{"bash", "-c", `set -m; "$@" & wait $!`, "bash"},
		}, append(flags, "--timeout", "20", "sh", "-c", "read line || exit 7")...)
		_, err = io.WriteString(ptmx, "typed\n")
		harness.Must(t, err)
		if p.Wait().Expect(t, 7, "exited"); t.Failed() {
			return
		}
		got := make([]byte, 100)
		if n, err := unix.Read(int(tty.Fd()), got); err != nil || string(got[:n]) != "typed\n" {
			t.Errorf("%q: the shell has got %q, %v", flags, got[:max(0, n)], err)
		}
	}
}

func TestStdinTerminal(t *testing.T) {
	t.Parallel()
	ptmx, tty, err := pty.Open()
	harness.Must(t, err)
	defer ptmx.Close()
	defer tty.Close()
	p := harness.Start(t, harness.Options{Stdin: tty}, "sh", "-c",
		"test -t 0 && echo terminal; (: </dev/tty) 2>/dev/null && echo controlling; read line && echo got $line")
	p.WaitOutput("terminal\n")
	_, err = io.WriteString(ptmx, "typed\n")
	harness.Must(t, err)
	p.Wait().Expect(t, 0, "exited").Out(t, "terminal\ngot typed\n")
}

// The command shares its stdin, an open file, with sbxrun and its caller. On a terminal or a
// connection that is stdout as well. When the command sets O_NONBLOCK and fills it, sbxrun's
// report is still complete, and the flags are restored for the caller even if the command was
// killed.
func TestSharedOpenFile(t *testing.T) {
	t.Parallel()
	const fill = `
import fcntl, os, time
fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_NONBLOCK | os.O_APPEND)
os.write(2, b"x" * 30000)
for i in range(16): os.write(1, b"x" * 30000)
try:
    while True: os.write(0, b"y" * 1000)
except BlockingIOError: pass
time.sleep(600)
`
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	harness.Must(t, err)
	ours, theirs := os.NewFile(uintptr(pair[0]), "ours"), os.NewFile(uintptr(pair[1]), "theirs")
	defer ours.Close()
	defer theirs.Close()
	before, err := unix.FcntlInt(uintptr(pair[1]), unix.F_GETFL, 0)
	harness.Must(t, err)
	timeout := harness.Deadline(time.Second).String()
	p := harness.Start(t, harness.Options{Stdin: theirs, Stdout: theirs}, "--json", "--timeout", timeout, "python3", "-c", fill)
	ns := p.Namespace()
	harness.Until(t, harness.Bound, "the sandbox's end", func() bool { return len(harness.Members(ns)) == 0 })
	// The test has not read yet, and the report is larger than the socket's buffer.
	read := make(chan []byte, 1)
	go func() {
		text, _ := io.ReadAll(ours) // an error shows in the text
		read <- text
	}()
	r := p.Wait()
	after, err := unix.FcntlInt(uintptr(pair[1]), unix.F_GETFL, 0)
	harness.Must(t, err)
	harness.Must(t, unix.Shutdown(pair[1], unix.SHUT_WR))
	r.Expect(t, 124, "timeout")
	text := <-read
	report, err := harness.ParseReport(text[max(0, bytes.IndexByte(text, '{')):])
	check.That(t, err == nil && report.StdoutBytes != nil && *report.StdoutBytes == 16*30000, "the report is not whole, of %d bytes: %v", len(text), err)
	check.That(t, before == after, "the flags of stdin are %#x, and were %#x", after, before)
}
