package tests

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

var endSignals = []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT}

// A signal to sbxrun ends everything at once, and the exit code names it. With a grace period the command gets the same
// signal, and a second one kills it.
func TestSignal(t *testing.T) {
	t.Parallel()
	for _, sig := range endSignals {
		t.Run(unix.SignalName(sig), func(t *testing.T) {
			t.Parallel()
			end := func(p *harness.Process) {
				t.Helper()
				sent := time.Now()
				p.Signal(sig)
				r := p.Wait().Expect(t, 128+int(sig), "canceled")
				harness.Within(t, "the end", r.Ended.Sub(sent), 0, 200*time.Millisecond)
			}
			p := harness.Start(t, harness.Options{}, "/fixtures/tree-daemon")
			p.WaitOutput("ready 2\n")
			end(p)
			p = harness.Start(t, harness.Options{}, "--grace", "50s", "/fixtures/term-swallow")
			p.WaitOutput("ready 1\n")
			p.Signal(sig)
			p.WaitOutput("got " + unix.SignalName(sig) + "\n")
			end(p)
		})
	}
}

// A signal during the grace period after a deadline ends it.
func TestSignalAfterDeadline(t *testing.T) {
	t.Parallel()
	p, _ := harness.InTime(t, 800*time.Millisecond, "ready 1\n", func(timeout string) *harness.Process {
		return harness.Start(t, harness.Options{}, "--timeout", timeout, "--grace", "50s", "/fixtures/term-swallow")
	})
	p.WaitOutput("got SIGTERM\n")
	sent := time.Now()
	p.Signal(syscall.SIGINT)
	p.Signal(syscall.SIGINT)
	r := p.Wait().Expect(t, 124, "timeout")
	harness.Within(t, "the end", r.Ended.Sub(sent), 0, 200*time.Millisecond)
}

// A signal ends everything at any moment of the set-up of a run and of an exec.
func TestSignalEarly(t *testing.T) {
	// Not in parallel, so that an orphan is not blamed on another test.
	b := harness.NewState(t).Sandbox(harness.Options{})
	for i := range 80 {
		start := func() *harness.Process { return harness.Start(t, harness.Options{}, "/fixtures/tree-sleep") }
		if i%2 == 1 {
			start = func() *harness.Process { return b.StartExec(harness.Options{}, nil, "/fixtures/tree-sleep") }
		}
		p := start()
		time.Sleep(time.Duration(i) * 120 * time.Microsecond) // vary the moment
		p.Signal(syscall.SIGTERM)
		if r := p.Wait(); r.Signal != syscall.SIGTERM { // otherwise there was no handler yet, and no process
			r.Expect(t, 128+15, "canceled")
		}
	}
}

// Signals that the caller ignores, as with nohup(1), stay ignored, except SIGTERM and SIGQUIT as with timeout(1).
func TestSignalIgnored(t *testing.T) {
	t.Parallel()
	for sig, listened := range map[syscall.Signal]bool{syscall.SIGHUP: false, syscall.SIGINT: false, syscall.SIGTERM: true, syscall.SIGQUIT: true} {
		t.Run(unix.SignalName(sig), func(t *testing.T) {
			t.Parallel()
			start := func(timeout string) *harness.Process {
				return harness.Start(t, harness.Options{Wrap: []string{"sh", "-c", `trap '' HUP INT TERM QUIT; exec "$@"`, "-"}},
					"--timeout", timeout, "/fixtures/tree-sleep")
			}
			if listened {
				p := start("600")
				p.WaitOutput("ready 2\n")
				p.Signal(sig)
				p.Wait().Expect(t, 128+int(sig), "canceled")
			} else {
				p, _ := harness.InTime(t, time.Second, "ready 2\n", start)
				p.Signal(sig)
				p.Wait().Expect(t, 124, "timeout")
			}
		})
	}
}

// sbxrun ... | head -1 ends when head exits.
func TestOutputClosed(t *testing.T) {
	t.Parallel()
	closing := []string{"bash", "-c", `"$@" | head -1; exit ${PIPESTATUS[0]}`, "-"}
	r := harness.Run(t, harness.Options{Wrap: closing}, "--timeout", harness.Deadline(20*time.Second).String(), "/fixtures/out-flood")
	r.Expect(t, 128+13, "signaled") // the command's own SIGPIPE
	harness.Within(t, "the run", r.Elapsed, 0, 2*time.Second)
	check.That(t, string(r.Stdout) == "y\n", "stdout %q", r.Stdout)
}

// The same when sbxrun writes the output: it must not die of SIGPIPE before the sandbox has ended
// and the report is written.
func TestOutputClosedTerminal(t *testing.T) {
	// Not in parallel, so that an orphan is not blamed on another test.
	closing := []string{"bash", "-c", `"$@" | head -1; exit ${PIPESTATUS[0]}`, "-"}
	r := harness.Run(t, harness.Options{Wrap: closing}, "--tty", "--timeout", "1", "/fixtures/out-flood")
	check.Require(t, r.Report != nil, "exit code %d without a report", r.ExitCode)
	harness.Within(t, "the run", r.Elapsed, 0, 1500*time.Millisecond)
}

// When the terminal is closed, the kernel sends SIGHUP to its session leader.
func TestTerminalClosed(t *testing.T) {
	t.Parallel()
	for _, mode := range [][]string{nil, {"--tty"}} {
		ptmx, tty, err := pty.Open()
		check.Must(t, err)
		dir := harness.SharedDir(t)
		p := harness.Start(t, harness.Options{
			Stdin: tty, Stdout: tty, Stderr: tty,
			Attr: &syscall.SysProcAttr{Setsid: true, Setctty: true},
		}, append(mode, "--bind", dir+":/out", "sh", "-c", "echo up >/out/up; exec sleep 600")...)
		tty.Close()
		harness.Until(t, harness.Bound, "the command", func() bool {
			_, err := os.Stat(dir + "/up")
			return err == nil
		})
		closed := time.Now()
		ptmx.Close()
		r := p.Wait().Expect(t, 128+1, "canceled")
		harness.Within(t, "the end", r.Ended.Sub(closed), 0, 200*time.Millisecond)
	}
}

// A command that kills itself with SIGKILL is reported as signaled, not as killed with its
// sandbox, also when the processes around it are delayed.
func TestKillsItself(t *testing.T) {
	t.Parallel()
	var all sync.WaitGroup
	defer all.Wait()
	const atOnce = 6
	for range atOnce {
		all.Go(func() {
			for range harness.Soak(t)*2/atOnce + 1 {
				r := harness.Run(t, harness.Options{}, "sh", "-c", "kill -9 $$")
				check.That(t, r.ExitCode == 137 && r.Report != nil && r.Report.Cause == "signaled", "exit code %d: %s", r.ExitCode, r.Report.Raw())
			}
		})
	}
}

// SIGQUIT ends every command with 131 and without a goroutine trace.
func TestQuit(t *testing.T) {
	t.Parallel()
	quit := func(p *harness.Process) {
		t.Helper()
		p.Signal(syscall.SIGQUIT)
		p.Wait().Exits(t, 131).Err(t, "")
	}
	// A run that waits for a slot does not handle signals yet.
	s := harness.NewState(t)
	o := harness.Options{Env: []string{"SBXRUN_STATE_DIR=" + s.Dir}, Bare: true}
	holder := harness.Start(t, o, "--max-parallel", "1", "sh", "-c", "echo up; exec sleep 600")
	holder.WaitOutput("up\n")
	p := harness.Start(t, o, "--max-parallel", "1", "--on-pressure", "wait", "true")
	harness.Until(t, harness.Bound, "the run in the queue", func() bool { return queued(t, s.Dir) == 1 })
	quit(p)
	quit(holder)

	// Commands that wait for a sandbox.
	b := s.Sandbox(harness.Options{}, "--name", "long")
	waits := func(p *harness.Process, object string) {
		t.Helper()
		harness.Until(t, harness.Bound, object, func() bool {
			links, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", p.PID))
			check.Must(t, err)
			for _, link := range links {
				if target, err := os.Readlink(link); err == nil && strings.Contains(target, object) {
					return true
				}
			}
			return false
		})
	}
	p = s.Start(harness.Options{}, "wait", "long")
	waits(p, "pidfd")
	quit(p)
	p = s.Start(harness.Options{}, "logs", "--follow", "long")
	waits(p, "inotify")
	quit(p)
	b.Alive()

	// The supervisor treats SIGQUIT as a request to end the sandbox.
	check.Must(t, syscall.Kill(b.Supervisor.PID, syscall.SIGQUIT))
	b.Ended()
}

// 10 MB in a pipe arrive unchanged.
func TestStdinPipe(t *testing.T) {
	t.Parallel()
	data := bytes.Repeat([]byte("0123456789\n"), 10<<20/11)
	r := harness.Run(t, harness.Options{Stdin: bytes.NewReader(data)}, "/fixtures/in-count").Expect(t, 0, "exited")
	want := fmt.Sprintf("bytes %d\nsha256 %x\n", len(data), sha256.Sum256(data))
	check.That(t, string(r.Stdout) == want, "%q, want %q", r.Stdout, want)
}

// Stdin that is never read, or not completely, delays nothing.
func TestStdinNeverRead(t *testing.T) {
	t.Parallel()
	for _, mode := range [][]string{nil, {"--json"}} {
		args := append(mode, "/fixtures/in-ignore", "0.1")
		r := harness.Run(t, harness.Options{Stdin: bytes.NewReader(make([]byte, 10<<20)), Bound: 20 * time.Second}, args...).Expect(t, 0, "exited")
		harness.Within(t, "the run", r.Elapsed, 100*time.Millisecond, 300*time.Millisecond)
	}
	harness.Run(t, harness.Options{Stdin: bytes.NewReader(make([]byte, 10<<20))}, "head", "-c", "1").Expect(t, 0, "exited")
}

// A pipe that stays open and silent does not outlive the command.
func TestStdinSilent(t *testing.T) {
	t.Parallel()
	read, write, err := os.Pipe()
	check.Must(t, err)
	defer write.Close()
	defer read.Close()
	for _, mode := range [][]string{nil, {"--json"}, {"--tty"}} {
		harness.Run(t, harness.Options{Stdin: read, Bound: 20 * time.Second}, append(mode, "true")...).Expect(t, 0, "exited")
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
			got := harness.ReadFile(t, dir+"/"+name)
			check.That(t, bytes.HasPrefix(got, []byte(want[0])) || string(got) == want[len(want)-1], "%s: %s is %q", closed, name, got)
		}
		list, _ := os.ReadFile(dir + "/list")
		for _, own := range []string{"memfd", "report", "args"} {
			check.That(t, !bytes.Contains(list, []byte(own)), "%s: the command has a descriptor of sbxrun's:\n%s", closed, list)
		}
	}
}

// The command can read from a terminal as stdin without --tty, but it is not its controlling terminal.
//
// As a shell's background job, the command does not steal typed input, and no SIGTTIN stops it, because it is in its own
// session.
func TestStdinBackground(t *testing.T) {
	t.Parallel()
	for _, flags := range [][]string{nil, {"--json"}} {
		ptmx, tty, err := pty.Open()
		check.Must(t, err)
		defer ptmx.Close()
		defer tty.Close()
		p := harness.Start(t, harness.Options{
			Stdin: tty, Attr: &syscall.SysProcAttr{Setsid: true, Setctty: true}, Wrap: []string{"bash", "-c", `set -m; "$@" & wait $!`, "bash"},
		}, append(flags, "--timeout", "600", "sh", "-c", "read line || exit 7")...)
		_, err = io.WriteString(ptmx, "typed\n")
		check.Must(t, err)
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
	check.Must(t, err)
	defer ptmx.Close()
	defer tty.Close()
	p := harness.Start(t, harness.Options{Stdin: tty}, "sh", "-c",
		"test -t 0 && echo terminal; (: </dev/tty) 2>/dev/null && echo controlling; read line && echo got $line")
	p.WaitOutput("terminal\n")
	_, err = io.WriteString(ptmx, "typed\n")
	check.Must(t, err)
	p.Wait().Expect(t, 0, "exited").Out(t, "terminal\ngot typed\n")
}

// The command shares its stdin, an open file, with sbxrun and its caller. On a terminal or a connection that is stdout
// as well. When the command sets O_NONBLOCK and fills it, sbxrun's report is still complete, and the flags are restored
// for the caller even if the command was killed.
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
	harness.Longer(t, harness.Scaled(time.Second), func(timeout time.Duration) bool { return sharedOpenFile(t, timeout.String(), fill) })
}

// sharedOpenFile reports whether the command has filled the file before its deadline.
func sharedOpenFile(t *testing.T, timeout, fill string) bool {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	check.Must(t, err)
	ours, theirs := os.NewFile(uintptr(pair[0]), "ours"), os.NewFile(uintptr(pair[1]), "theirs")
	defer ours.Close()
	defer theirs.Close()
	before, err := unix.FcntlInt(uintptr(pair[1]), unix.F_GETFL, 0)
	check.Must(t, err)
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
	check.Must(t, err)
	check.Must(t, unix.Shutdown(pair[1], unix.SHUT_WR))
	r.Expect(t, 124, "timeout")
	text := <-read
	report, err := harness.ParseReport(text[max(0, bytes.IndexByte(text, '{')):])
	check.Require(t, err == nil && report.StdoutBytes != nil, "the report is not whole, of %d bytes: %v", len(text), err)
	check.That(t, before == after, "the flags of stdin are %#x, and were %#x", after, before)
	return *report.StdoutBytes == 16*30000 && bytes.Contains(text, []byte("yyy"))
}
