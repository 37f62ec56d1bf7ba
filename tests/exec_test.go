package tests

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// The caller's stdin reaches the command to its last byte and its end, and a command need not read it.
func TestExecStdin(t *testing.T) {
	t.Parallel()
	b := harness.NewState(t).Sandbox(harness.Options{})
	r := b.Exec(harness.Options{}, nil, "bash", "-c", "read -t 20 x; echo $?").Out(t, "1\n")
	harness.Within(t, "end of file", r.Elapsed, 0, 100*time.Millisecond)
	data := strings.Repeat("0123456789abcde\n", 3<<16)
	b.Exec(harness.Options{Stdin: strings.NewReader(data)}, nil, "cat").Expect(t, 0, "exited").Out(t, data)
	b.Exec(harness.Options{Stdin: strings.NewReader(data)}, nil, "true").Expect(t, 0, "exited")
}

// An exec has no privileges, whoever has started the sandbox, and only descriptors 0, 1 and 2.
func TestExecPrivileges(t *testing.T) {
	t.Parallel()
	b := harness.NewState(t).Sandbox(harness.Options{})
	b.Exec(harness.Options{}, nil, "/fixtures/probe-privileges").Exits(t, 0)
	var extra []*os.File
	for range 7 {
		f, err := os.Open("/")
		check.Must(t, err)
		defer f.Close()
		extra = append(extra, f)
	}
	for _, flags := range [][]string{nil, {"--json"}, {"--tty"}, {"--timeout", "600", "--grace", "1"}} {
		b.Exec(harness.Options{ExtraFiles: extra}, flags, "/fixtures/probe-fds").Exits(t, 0)
	}
	// The same as the sandbox's own command, including limits and masks.
	same := `grep -E '^(Cap|NoNewPrivs|Seccomp|Groups|Uid|Gid|Sig(Blk|Ign|Cgt)|Umask)' /proc/self/status; ulimit -a`
	own := harness.NewState(t).Sandbox(harness.Options{}, "sh", "-c", same)
	own.Ended()
	want := own.State.Run("logs", own.ID).Stdout
	got := b.Exec(harness.Options{}, nil, "sh", "-c", same).Stdout
	check.That(t, string(want) == string(got) && len(want) != 0, "of the sandbox's command:\n%s\nof an exec:\n%s", want, got)
}

// exec --json prints one object with both streams.
func TestExecJSON(t *testing.T) {
	t.Parallel()
	b := harness.NewState(t).Sandbox(harness.Options{})
	harness.Longer(t, time.Second, func(timeout time.Duration) bool {
		r := b.Exec(harness.Options{}, []string{"--json", "--timeout", timeout.String()}, "sh", "-c", `printf 'to \001 out'; echo to err >&2; sleep 600`)
		rep, err := harness.ParseReport(r.Stdout)
		check.Must(t, err)
		check.Require(t, r.ExitCode == 124 && rep.Cause == "timeout" && rep.Stdout != nil && rep.Stderr != nil, "exit code %d: %s", r.ExitCode, r.Stdout)
		return *rep.Stdout == "to \x01 out" && *rep.Stderr == "to err\n"
	})
	// Errors are JSON too.
	r := b.State.Run("exec", "--json", "nobody", "true")
	rep, err := harness.ParseReport(r.Stdout)
	check.Must(t, err)
	check.That(t, r.ExitCode == 125 && rep.Cause == "start-failed" && rep.Error.Code == "no-such-sandbox", "exit code %d: %s", r.ExitCode, r.Stdout)
}

// exec accepts a name, an ID or an ID prefix, with and without --; all other arguments are the command's.
func TestExecWords(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{}, "--name", "box")
	for _, word := range []string{"box", b.ID, b.ID[:8]} {
		for _, command := range [][]string{{"echo", "--timeout", "x"}, {"--", "echo", "--timeout", "x"}} {
			s.Run(append([]string{"exec", word}, command...)...).Exits(t, 0).Out(t, "--timeout x\n")
		}
	}
	for _, args := range [][]string{{}, {"box"}, {"box", "--"}, {"--timeout", "-1", "box", "true"}, {"nobody", "true"}, {"--no-such-flag", "box", "true"}, {"../box", "true"}} {
		s.Run(append([]string{"exec"}, args...)...).Exits(t, 125).ErrLines(t, 1)
	}
	long := strings.Repeat("x", 100_000)
	check.Equal(t, string(b.Exec(harness.Options{}, nil, "sh", "-c", `echo ${#1} "<$2>" "$3"`, "-", long, "", "a\nb").Stdout), fmt.Sprintf("%d <> a\nb\n", len(long)))
}

// An exec that comes while bubblewrap still builds the sandbox, when its init sees the host's files, is refused.
func TestExecWhileStarting(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	host := filepath.Join(harness.Dir(t), "of-the-host")
	check.Must(t, os.WriteFile(host, nil, 0o644))
	slow := []string{} // many mounts, which take time
	for i := range 200 {
		slow = append(slow, "--ro-bind", fmt.Sprintf("%s:/mnt/%d", filepath.Dir(host), i))
	}
	for i := range 5 {
		name := fmt.Sprintf("box%d", i)
		entered := make(chan *harness.Result)
		go func() {
			var r *harness.Result
			for tries := 0; tries < 500; tries++ {
				if r = s.Run("exec", name, "sh", "-c", `for f in "$@"; do [ ! -e "$f" ] || echo "$f"; done; echo inside`, "sh", host, "/oldroot", "/newroot", "/root"); r.ExitCode != 125 || strings.Contains(string(r.Stderr), "enter") {
					break
				}
			}
			entered <- r
		}()
		b := s.Sandbox(harness.Options{}, append(slow, "--name", name)...)
		r := <-entered
		check.That(t, r.ExitCode == 0 && string(r.Stdout) == "inside\n", "exit code %d: %q, %q", r.ExitCode, r.Stdout, r.Stderr)
		b.Alive()
	}
}

// A signal to sbxrun exec ends that exec completely, and nothing else.
func TestExecSignal(t *testing.T) {
	t.Parallel()
	b := harness.NewState(t).Sandbox(harness.Options{}, "/fixtures/term-handler")
	w := newWitness(t, b)
	for _, sig := range endSignals {
		p := b.StartExec(harness.Options{}, nil, "/fixtures/tree-daemon")
		p.WaitOutput("ready 2\n")
		sent := time.Now()
		p.Signal(sig)
		r := p.Wait().Expect(t, 128+int(sig), "canceled")
		harness.Within(t, "the end by "+unix.SignalName(sig), r.Ended.Sub(sent), 0, 200*time.Millisecond)
		w.lives(t, unix.SignalName(sig))
	}
	// With a grace period the command gets the signal.
	p := b.StartExec(harness.Options{}, []string{"--grace", "20"}, "/fixtures/term-handler")
	p.WaitOutput("ready 1\n")
	p.Signal(syscall.SIGTERM)
	r := p.Wait().Expect(t, 128+15, "canceled")
	check.That(t, strings.HasSuffix(string(r.Stdout), "cleaned\n"), "stdout %q", r.Stdout)
	w.end(t)
	check.Equal(t, string(b.State.Run("logs", b.ID).Stdout), "ready 1\n", "the sandbox's own command has noticed")
}

// After many execs in a row the sandbox has as many tasks, and its supervisor as many descriptors
// and as much memory, as before. SBXRUN_SOAK=100 makes 500.
func TestExecSoak(t *testing.T) {
	// Not in parallel: it keeps a CPU busy.
	b := harness.NewState(t).Sandbox(harness.Options{})
	measure := func() (tasks, fds int, rss int64) {
		for _, p := range b.Members() {
			tasks += countDir(t, "/proc/%d/task", p.PID)
		}
		return tasks, countDir(t, "/proc/%d/fd", b.Supervisor.PID), b.Supervisor.RSS()
	}
	// Until the supervisor has opened everything that it keeps open.
	for range 8 {
		b.Exec(harness.Options{}, nil, "true").Expect(t, 0, "exited")
	}
	tasks, fds, rss := measure()
	for i := range harness.Soak(t) {
		switch i % 4 {
		case 0:
			b.Exec(harness.Options{}, nil, "sh", "-c", "setsid sleep 600 & exit 3").Expect(t, 3, "exited")
		case 1:
			b.Exec(harness.Options{}, []string{"--timeout", harness.Deadline(150 * time.Millisecond).String()}, "sh", "-c", "setsid sleep 600 & sleep 600").Expect(t, 124, "timeout")
		case 2:
			b.Exec(harness.Options{}, nil, "no-such-command").Expect(t, 127, "start-failed")
		default:
			b.Exec(harness.Options{}, nil, "true").Expect(t, 0, "exited")
		}
		if t.Failed() {
			return
		}
	}
	// The supervisor may still be closing the last connection, and its heap varies.
	harness.Until(t, harness.Bound, fmt.Sprintf("%d tasks, %d descriptors and %d bytes, as before the execs", tasks, fds, rss), func() bool {
		nowTasks, nowFDs, nowRSS := measure()
		return nowTasks == tasks && nowFDs <= fds && nowRSS <= rss+2<<20
	})
}

func countDir(t *testing.T, format string, pid int) int {
	t.Helper()
	entries := harness.ReadDir(t, strings.Replace(format, "%d", strconv.Itoa(pid), 1))
	return len(entries)
}

// The command line and environment of sbxrun exec are never visible in the sandbox, however fast
// its command looks while 50 execs enter.
func TestExecSecrets(t *testing.T) {
	t.Parallel()
	const scanner = `
import os, sys
key, token = sys.argv[1][::-1].encode(), sys.argv[2][::-1].encode()
me, seen, rounds = str(os.getpid()), set(), 0
while not os.path.exists("/tmp/stop"):
    for pid in os.listdir("/proc"):
        if not pid.isdigit() or pid == me:
            continue
        for name in ("cmdline", "environ"):
            try:
                data = open(f"/proc/{pid}/{name}", "rb").read()
            except OSError:
                continue
            if key in data or token in data and name == "cmdline":
                print("found in", name, "of", pid, repr(data[:300]), flush=True)
            if token in data and name == "environ":
                seen.add(pid)
    rounds += 1
    if rounds == 1:
        print("looking", flush=True)
print("saw", len(seen), flush=True)
`
	// The token is in command lines, where TestSecretNotInCommandLines looks for secret.
	key, token := "k3y"+secret, "t0ken"+reversed(secret)
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{Env: []string{"API_KEY=" + key}}, "--max-output", "64K", "python3", "-c", scanner, reversed(key), reversed(token))
	s.Run("wait", "--log", "looking", b.ID)
	var wg sync.WaitGroup
	for range 5 {
		wg.Go(func() {
			for range 10 {
				p := b.StartExec(harness.Options{Env: []string{"API_KEY=" + key}}, []string{"--env", "TOKEN=" + token}, "true")
				p.Wait().Expect(t, 0, "exited")
			}
		})
	}
	wg.Wait()
	b.Dying = true
	// Nor are they in the sandbox's own processes or the supervisor's.
	files := b.Files("cmdline", "environ")
	check.That(t, len(files) >= 2, "the harness is blind")
	for _, file := range files {
		check.That(t, !strings.Contains(file, key), "%.500q", file)
	}
	b.Exec(harness.Options{}, nil, "touch", "/tmp/stop")
	b.Ended()
	out := string(s.Run("logs", b.ID).Stdout)
	// It does not even see the execs.
	check.That(t, out == "looking\nsaw 0\n", "%.2000s", out)
}

func reversed(s string) string {
	b := []byte(s)
	for i, j := 0, len(b)-1; i < j; i, j = i+1, j-1 {
		b[i], b[j] = b[j], b[i]
	}
	return string(b)
}

// Execs of one sandbox neither see nor reach each other's processes, although they have the same user.
func TestExecsApart(t *testing.T) {
	t.Parallel()
	b := harness.NewState(t).Sandbox(harness.Options{}, "sleep", "600")
	w := newWitness(t, b)
	r := b.Exec(harness.Options{}, nil, "python3", "-c", `
import os
for pid in range(1, 3000):
    if pid not in (1, os.getpid()):
        try:
            os.kill(pid, 9)
            print("could signal", pid)
        except ProcessLookupError:
            pass
print(sorted(int(p) for p in os.listdir("/proc") if p.isdigit()))`)
	r.Expect(t, 0, "exited")
	check.That(t, string(r.Stdout) == "[1, 2]\n", "%q", r.Stdout)
	// kill(-1) reaches only itself.
	b.Exec(harness.Options{}, []string{"--timeout", "1"}, "/fixtures/signal-all", "kill-all").Expect(t, 124, "timeout")
	w.end(t)
	b.Alive()
}

// hostileMain attacks every process that appears in the sandbox, as fast as it can.
const hostileMain = `
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
what, me = sys.argv[1], os.getpid()
PTRACE_ATTACH, PTRACE_SEIZE, PTRACE_DETACH = 16, 0x4206, 17
print("at it", flush=True)
known = set()
while True:
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) in (1, me):
            continue
        pid = int(name)
        try:
            if what == "kill":
                os.kill(pid, 9)
            elif what == "stop":
                os.kill(pid, 19)
            elif what == "trace-wait":
                if libc.ptrace(PTRACE_ATTACH, pid, None, None) == 0:
                    os.waitpid(pid, 0x40000000)
            elif what == "trace" and libc.ptrace(PTRACE_SEIZE, pid, None, None) == 0:
                print("traces", pid, flush=True)
        except OSError:
            pass
    if what == "trace-wait":
        try:
            while os.waitpid(-1, 1 | 0x40000000)[0]:
                pass
        except OSError:
            pass
`

// A sandbox whose own command attacks every visible process does not see the execs, although it has the same user.
func TestExecHostileMain(t *testing.T) {
	t.Parallel()
	for _, what := range []string{"kill", "stop", "trace-wait"} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			s := harness.NewState(t)
			b := s.Sandbox(harness.Options{}, "python3", "-c", hostileMain, what)
			s.Run("wait", "--log", "at it", b.ID)
			var wg sync.WaitGroup
			for range 3 {
				wg.Go(func() {
					for range 2 {
						p := b.StartExec(harness.Options{}, []string{"--timeout", harness.Deadline(500 * time.Millisecond).String()}, "/fixtures/tree-setsid")
						r := p.Wait() // asserts the proof, and that all processes have exited
						harness.Within(t, "the exec", r.Elapsed, 500*time.Millisecond, time.Second)
						r.Expect(t, 124, "timeout")
					}
				})
			}
			wg.Wait()
			k, took := timedKill(t, s, 0, "--grace", "0", b.ID)
			harness.Within(t, "kill", took, 0, 300*time.Millisecond)
			check.That(t, k[0].Verdict == "proven", "%+v", k)
		})
	}
}
