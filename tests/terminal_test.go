package tests

import (
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// screen is a terminal with sbxrun --tty in the foreground of its session.
type screen struct {
	t      *testing.T
	ptmx   *os.File
	tty    *os.File // our descriptor, to read the terminal's state
	before *unix.Termios
	p      *harness.Process

	mu   sync.Mutex
	text []byte
}

func newScreen(t *testing.T, size *pty.Winsize, args ...string) *screen {
	t.Helper()
	return screenOf(t, size, func(o harness.Options) *harness.Process {
		return harness.Start(t, o, append([]string{"--tty"}, args...)...)
	})
}

// newExecScreen returns a terminal with sbxrun exec --tty.
func newExecScreen(t *testing.T, b *harness.Sandbox, flags []string, command ...string) *screen {
	t.Helper()
	return screenOf(t, nil, func(o harness.Options) *harness.Process {
		return b.StartExec(o, append([]string{"--tty"}, flags...), command...)
	})
}

func screenOf(t *testing.T, size *pty.Winsize, start func(harness.Options) *harness.Process) *screen {
	t.Helper()
	ptmx, tty, err := pty.Open()
	check.Must(t, err)
	t.Cleanup(func() {
		ptmx.Close()
		tty.Close()
	})
	if size != nil {
		check.Must(t, pty.Setsize(ptmx, size))
	}
	s := &screen{t: t, ptmx: ptmx, tty: tty}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("on the terminal: %.2000q", s.shows())
		}
	})
	s.before = s.state()
	s.p = start(harness.Options{
		Stdin: tty, Stdout: tty, Stderr: tty,
		Env:  []string{"TERM=xterm"},
		Attr: &syscall.SysProcAttr{Setsid: true, Setctty: true},
	})
	go func() {
		buf := make([]byte, 4096)
		for {
			n, err := ptmx.Read(buf)
			s.mu.Lock()
			s.text = append(s.text, buf[:n]...)
			s.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	return s
}

func (s *screen) state() *unix.Termios {
	s.t.Helper()
	state, err := unix.IoctlGetTermios(int(s.tty.Fd()), unix.TCGETS)
	check.Must(s.t, err)
	return state
}

func (s *screen) shows() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return string(s.text)
}

func (s *screen) waitFor(text string) {
	s.t.Helper()
	for deadline := time.Now().Add(harness.Bound); !strings.Contains(s.shows(), text); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			s.t.Errorf("no %q on the terminal: %.500q", text, s.shows())
			s.p.Signal(syscall.SIGTERM)
			s.p.Wait()
			s.t.FailNow()
		}
	}
}

func (s *screen) typeIn(text string) {
	s.t.Helper()
	_, err := io.WriteString(s.ptmx, text)
	check.Must(s.t, err)
}

// restored asserts that the terminal is as before sbxrun.
func (s *screen) restored() {
	s.t.Helper()
	check.NoDiff(s.t, cmp.Diff(s.before, s.state()), "the terminal's state was not restored (-before +after)")
}

// The command has a controlling terminal on descriptors 0, 1 and 2. The outer terminal is then in raw mode, and it
// is restored at the end.
func TestTerminalIsReal(t *testing.T) {
	t.Parallel()
	s := newScreen(t, nil, "sh", "-c", `test -t 0 && test -t 1 && test -t 2 && (: </dev/tty) && echo all of it; read line; echo "<$line>"; exit 3`)
	s.waitFor("all of it\r\n")
	check.That(t, s.state().Lflag&(unix.ICANON|unix.ECHO|unix.ISIG) == 0, "the outer terminal is not in raw mode")
	s.typeIn("word\r")
	s.p.Wait().Expect(t, 3, "exited")
	s.waitFor("<word>\r\n")
	// The inner terminal echoes it once.
	n := strings.Count(s.shows(), "word")
	check.That(t, n == 2, "%q", s.shows())
	s.restored()
}

// The terminal is restored however sbxrun ends: with --tty, and without when the command makes the caller's terminal raw.
func TestTerminalRestored(t *testing.T) {
	t.Parallel()
	const stays, raw = "trap '' TERM HUP; echo up; while :; do sleep 600; done", "stty raw -echo; echo up; "
	send := func(sig syscall.Signal) func(*screen) { return func(s *screen) { s.p.Signal(sig) } }
	kill := func(s *screen) { s.p.Kill() } // the keeper restores it
	timeout := []string{"--timeout", harness.Scaled(time.Second).String()}
	for name, c := range map[string]struct {
		flags  []string
		script string
		end    func(*screen)
		code   int
		cause  string // "" for a run that is killed
	}{
		"timeout":      {append(timeout, "--tty"), stays, nil, 124, "timeout"},
		"grace":        {append(timeout, "--tty", "--grace", "0.5"), stays, nil, 124, "timeout"},
		"SIGTERM":      {[]string{"--tty"}, stays, send(syscall.SIGTERM), 128 + 15, "canceled"},
		"SIGHUP":       {[]string{"--tty"}, stays, send(syscall.SIGHUP), 128 + 1, "canceled"},
		"SIGQUIT":      {[]string{"--tty"}, stays, send(syscall.SIGQUIT), 128 + 3, "canceled"},
		"SIGKILL":      {[]string{"--tty"}, "echo up; exec sleep 600", kill, 0, ""},
		"raw, exit":    {nil, raw + "exit 3", nil, 3, "exited"},
		"raw, killed":  {nil, raw + "kill -9 $$", nil, 137, "signaled"},
		"raw, timeout": {timeout, raw + "exec sleep 600", nil, 124, "timeout"},
		"raw, SIGTERM": {nil, raw + "exec sleep 600", send(syscall.SIGTERM), 128 + 15, "canceled"},
		"raw, SIGKILL": {nil, raw + "exec sleep 600", kill, 0, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := screenOf(t, nil, func(o harness.Options) *harness.Process {
				return harness.Start(t, o, slices.Concat(c.flags, []string{"sh", "-c", c.script})...)
			})
			s.waitFor("up")
			if c.end != nil {
				c.end(s)
			}
			if r := s.p.Wait(); c.cause != "" {
				r.Expect(t, c.code, c.cause)
			}
			s.restored()
		})
	}
	t.Run("raw, exec", func(t *testing.T) {
		t.Parallel()
		b := harness.NewState(t).Sandbox(harness.Options{})
		s := screenOf(t, nil, func(o harness.Options) *harness.Process { return b.StartExec(o, nil, "sh", "-c", raw+"kill -9 $$") })
		s.p.Wait().Expect(t, 137, "signaled")
		s.restored()
	})
	// Messages appear after that: their lines start at the left.
	for message, args := range map[string][]string{"no-such-command": {"no-such-command"}, "sbxrun: timeout": {"--timeout", "0.5", "sleep", "600"}} {
		t.Run(message, func(t *testing.T) {
			t.Parallel()
			s := newScreen(t, nil, args...)
			s.p.Wait()
			s.waitFor(message)
			s.waitFor("\r\n")
			s.restored()
			check.That(t, !strings.Contains(strings.ReplaceAll(s.shows(), "\r\n", ""), "\n"), "printed in raw mode: %q", s.shows())
		})
	}
}

// sbxrun leaves the terminal alone if by now it belongs to another job or to another command of the pipeline.
func TestTerminalOfOthers(t *testing.T) {
	t.Parallel()
	const command = `"$@" sh -c 'touch /work/up; until [ -e /work/go ]; do sleep 0.05; done'`
	const others = `
import os, signal, sys, termios, time
work = sys.argv[1]
tty = os.open("/dev/tty", os.O_RDWR)
def wait(name):
    while not os.path.exists(work + name):
        time.sleep(0.01)
wait("/up")
if sys.argv[2:]:
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    os.setpgid(0, 0)
    os.tcsetpgrp(tty, os.getpgrp())
mode = termios.tcgetattr(tty)
mode[3] &= ~termios.ECHO
termios.tcsetattr(tty, termios.TCSANOW, mode)
open(work + "/go", "w").close()
wait("/over")
`
	for name, script := range map[string]string{
		"job":      "exec 3<&0\n" + command + ` <&3 & python3 -c "$OTHERS" $WORK job & wait %1; touch $WORK/over; wait`,
		"pipeline": "(" + command + `; touch $WORK/over) | python3 -c "$OTHERS" $WORK`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			work := harness.Dir(t)
			check.Must(t, os.Chmod(work, 0o755))
			s := screenOf(t, nil, func(o harness.Options) *harness.Process {
				o.Env = append(o.Env, "WORK="+work, "OTHERS="+others)
				o.Wrap = []string{"bash", "-c", script, "bash"}
				return harness.Start(t, o, "--bind", work+":/work")
			})
			s.p.Wait()
			want := *s.before
			want.Lflag &^= unix.ECHO
			check.NoDiff(t, cmp.Diff(&want, s.state()), "the terminal was changed (-want +got)")
		})
	}
}

// The keeper of a killed sbxrun restores the terminal once: later changes stay, while the sandbox still ends.
func TestTerminalRestoredOnce(t *testing.T) {
	t.Parallel()
	// Only its tracer, a thread, can reap a traced process, so the sandbox stays until the tracer lets go.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	s := newScreen(t, nil, "sh", "-c", "echo up; exec sleep 600")
	s.waitFor("up\r\n")
	keeper, traced := s.p.Role(harness.RoleKeeper), s.p.Role(harness.RolePayload).PID
	if err := unix.PtraceSeize(traced); err != nil {
		t.Logf("nobody here may trace: %v", err)
		s.p.Signal(syscall.SIGTERM)
		s.p.Wait()
		return
	}
	s.p.Kill()
	harness.Until(t, harness.Bound, "the terminal to be restored", func() bool { return cmp.Equal(s.before, s.state()) })
	theirs := *s.before
	theirs.Lflag &^= unix.ECHO
	check.Must(t, unix.IoctlSetTermios(int(s.tty.Fd()), unix.TCSETS, &theirs))
	check.That(t, !keeper.Ended(), "the keeper has ended before")
	// A stop may come first: the inner terminal hangs up at the same time, and a traced process stops for SIGHUP.
	for status := unix.WaitStatus(0x7f); status.Stopped(); {
		_, err := unix.Wait4(traced, &status, unix.WALL, nil)
		check.Must(t, err)
	}
	s.p.Wait() // for the keeper too
	check.NoDiff(t, cmp.Diff(&theirs, s.state()), "the terminal was restored again (-theirs +now)")
}

// The inner terminal has the outer one's size and follows it. The command blocks the signals and waits for them,
// because bash loses a few that come while a child exits, and Python may block in a read after its handler.
func TestTerminalSize(t *testing.T) {
	t.Parallel()
	s := newScreen(t, &pty.Winsize{Rows: 33, Cols: 101}, "python3", "-c", `
import os, signal
signals = {signal.SIGWINCH, signal.SIGINT}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
word = "first"
while True:
    size = os.get_terminal_size(0)
    print(word, size.lines, size.columns, flush=True)
    if signal.sigwait(signals) == signal.SIGINT:
        break
    word = "now"
`)
	s.waitFor("first 33 101\r\n")
	check.Must(t, pty.Setsize(s.ptmx, &pty.Winsize{Rows: 44, Cols: 55}))
	s.waitFor("now 44 55\r\n")
	s.typeIn("\x03")
	s.p.Wait().Expect(t, 0, "exited")
}

// Ctrl-C and Ctrl-\ go to the command, not to sbxrun.
func TestTerminalKeys(t *testing.T) {
	t.Parallel()
	s := newScreen(t, nil, "/fixtures/term-swallow")
	s.waitFor("ready 1\r\n")
	s.typeIn("\x03")
	s.waitFor("got SIGINT\r\n")
	s.typeIn("\x1c")
	s.waitFor("got SIGQUIT\r\n")
	s.p.Signal(syscall.SIGTERM)
	s.p.Wait().Expect(t, 128+15, "canceled")
	s.restored()

	// A command without a handler dies of it.
	s = newScreen(t, nil, "sh", "-c", "echo up; exec sleep 600")
	s.waitFor("up\r\n")
	s.typeIn("\x03")
	s.p.Wait().Expect(t, 128+2, "signaled")
	s.restored()
}

// A shell has job control: Ctrl-Z stops a job, and fg continues it.
func TestTerminalJobControl(t *testing.T) {
	t.Parallel()
	s := newScreen(t, nil, "bash", "--norc", "--noprofile", "-i")
	// Wait for the prompt, when the shell reads the line itself, because the key discards earlier input (NOFLSH,
	// termios(3)).
	s.typeIn("PS1='prom''pt> '\r")
	s.waitFor("prompt> ")
	s.typeIn("sleep 50\r")
	s.waitFor("sleep 50\r\n")
	// Before the job is in the foreground, the key would go to the shell.
	harness.Until(t, harness.Bound, "Ctrl-Z to stop the job", func() bool {
		if slices.ContainsFunc(harness.Below(s.p.PID), func(p harness.Proc) bool { return p.Comm == "sleep" && p.State == "T" }) {
			return true
		}
		s.typeIn("\x1a")
		return false
	})
	// Use its number: if the key comes as the job starts, bash does not call it the current one.
	s.typeIn("jobs | grep -c Stopped | sed s/^/count=/; kill %1; fg %1; exit 6\r")
	s.p.Wait().Expect(t, 6, "exited")
	s.waitFor("count=1\r")
	for _, complaint := range []string{"no job control", "cannot set terminal"} {
		check.That(t, !strings.Contains(s.shows(), complaint), "%q", s.shows())
	}
	s.restored()
}

// The command cannot type into the outer terminal (TIOCSTI).
func TestTerminalIsAnother(t *testing.T) {
	t.Parallel()
	s := newScreen(t, nil, "python3", "-c", `
import fcntl, os, termios
try:
    for c in b"echo injected\n":
        fcntl.ioctl(0, termios.TIOCSTI, bytes([c]))
    print("typed into", os.ttyname(0))
except OSError as e:
    print("refused:", e.strerror)
`)
	s.p.Wait()
	s.typeIn("end\n")
	check.Require(t, s.before.Lflag&unix.ICANON != 0, "the outer terminal does not collect lines")
	buf := make([]byte, 100)
	n, err := s.tty.Read(buf)
	check.Must(t, err)
	check.Equal(t, string(buf[:n]), "end\n", "the outer terminal has")
}

// Output of any size arrives on the terminal to the last byte, despite the command's exit.
func TestTerminalOutputComplete(t *testing.T) {
	t.Parallel()
	const lines = 20000
	// The command waits until everything has been read, because sbxrun leads the session, and the kernel discards a
	// terminal's undelivered output when its session leader exits (tty_vhangup_session).
	s := newScreen(t, nil, "sh", "-c", fmt.Sprintf("seq -f 'line %%.0f' %d; read -r x", lines))
	s.waitFor(fmt.Sprintf("line %d\r\n", lines))
	_, err := s.ptmx.Write([]byte("\r"))
	check.Must(t, err)
	s.p.Wait().Expect(t, 0, "exited")
	n := strings.Count(s.shows(), "\r\n")
	check.That(t, n >= lines, "%d lines, want %d", n, lines)
}

// Every reader of the terminal gets the end of stdin: one that makes it raw, such as bash with readline, and each of
// several.
func TestTerminalEndOfInput(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		stdin, output string
		command       []string
	}{
		{"", "exit", []string{"bash", "--norc", "-i"}},
		{"echo $((6 * 7))\n", "42\r\n", []string{"bash", "--norc", "-i"}},
		{"", "all of it\r\n", []string{"sh", "-c", "cat; cat; cat; echo all of it"}},
		{"no newline", "no newline>", []string{"sh", "-c", "cat; echo '>'"}},
	} {
		harness.Run(t, harness.Options{Stdin: strings.NewReader(tt.stdin)}, append([]string{"--tty"}, tt.command...)...).Expect(t, 0, "exited").OutHas(t, tt.output)
	}
}

// The command's descriptors are in blocking mode, as programs expect of a terminal: otherwise
// reads fail with EAGAIN and long output is truncated.
func TestTerminalBlocks(t *testing.T) {
	t.Parallel()
	s := newScreen(t, nil, "python3", "-c", "import os; print([os.get_blocking(fd) for fd in range(3)])")
	s.p.Wait().Expect(t, 0, "exited")
	s.waitFor("]\r\n")
	check.Equal(t, s.shows(), "[True, True, True]\r\n")
}
