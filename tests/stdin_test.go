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

	"github.com/sbxrun/sbxrun/tests/harness"
)

// 10 MB in a pipe arrive unchanged.
func TestStdinPipe(t *testing.T) {
	t.Parallel()
	data := bytes.Repeat([]byte("0123456789\n"), 10<<20/11)
	r := harness.Run(t, harness.Options{Stdin: bytes.NewReader(data)}, "/fixtures/in-count")
	r.Expect(t, 0, "exited")
	if want := fmt.Sprintf("bytes %d\nsha256 %x\n", len(data), sha256.Sum256(data)); string(r.Stdout) != want {
		t.Errorf("%q, want %q", r.Stdout, want)
	}
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
			if !bytes.HasPrefix(got, []byte(want[0])) && string(got) != want[len(want)-1] {
				t.Errorf("%s: %s is %q", closed, name, got)
			}
		}
		list, _ := os.ReadFile(dir + "/list")
		for _, own := range []string{"memfd", "report", "args"} {
			if bytes.Contains(list, []byte(own)) {
				t.Errorf("%s: the command has a descriptor of sbxrun's:\n%s", closed, list)
			}
		}
	}
}

// The command can read from a terminal as stdin without --tty, but it is not its controlling
// terminal.
//
// In the background of a shell, the command does not steal what is typed, and no SIGTTIN stops it,
// because it is in its own session.
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
	r := p.Wait()
	r.Expect(t, 0, "exited")
	if string(r.Stdout) != "terminal\ngot typed\n" {
		t.Errorf("%q", r.Stdout)
	}
}
