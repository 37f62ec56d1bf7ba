package tests

import (
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// Signals to all processes reach nothing outside: neither sbxrun, nor its caller, nor the caller's
// process group. The deadline holds.
func TestSignalsEverybody(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		kind string
		code int
	}{
		{"stop-group", 124},
		{"stop-all", 124},
		{"kill-group", 137},
		{"kill-all", 124},
		{"stop-parent", 124},
		{"kill-init", 124},
	} {
		t.Run(c.kind, func(t *testing.T) {
			t.Parallel()
			// The caller is a shell in its own process group, with a bystander.
			caller := `sleep 600 >&- 2>&- & "$@"; code=$?
				read -r state </proc/$!/stat; [[ $state == *" S "* ]] && echo bystander lives
				kill $!; wait; echo caller lives; exit $code`
			p, timeout := harness.InTime(t, time.Second, "ready 3\n", func(timeout string) *harness.Process {
				return harness.Start(t, harness.Options{
					Wrap:  []string{"bash", "-c", caller, "-"},
					Attr:  &syscall.SysProcAttr{Setpgid: true},
					Bound: 20 * time.Second,
				}, "--timeout", timeout, "/fixtures/signal-all", c.kind)
			})
			r := p.Wait()
			cause := "timeout"
			if c.code == 137 {
				cause = "signaled"
			}
			r.Expect(t, c.code, cause)
			for _, want := range []string{"bystander lives\n", "caller lives\n"} {
				check.That(t, strings.Contains(string(r.Stdout), want), "no %q in %q", want, r.Stdout)
			}
			if c.code == 124 {
				harness.Within(t, "the run", r.Elapsed, timeout, timeout+300*time.Millisecond)
			}
		})
	}
}

// A fork bomb ends at the deadline, and the host can fork all the time.
func TestForkBomb(t *testing.T) {
	// Not in parallel: it competes for the CPU.
	for _, kind := range []string{"spin", "sleep", "session"} {
		t.Run(kind, func(t *testing.T) {
			p, timeout := harness.InTime(t, 2*time.Second, "ready 101\n", func(timeout string) *harness.Process {
				return harness.Start(t, harness.Options{}, "--timeout", timeout, "--env", "FIXTURE_COUNT=100", "/fixtures/fork-bomb", kind)
			})
			forks := 0
			for running := true; running; forks++ {
				took := harness.HostFork(t)
				check.That(t, took <= time.Second+harness.Slack, "a fork on the host took %v", took)
				select {
				case <-p.Exited():
					running = false
				default:
				}
			}
			r := p.Wait()
			r.Expect(t, 124, "timeout")
			check.That(t, forks >= 2, "the host could fork only %d times meanwhile", forks)
			// With 100 spinning processes sbxrun is scheduled late.
			harness.Within(t, "the run", r.Elapsed, timeout, timeout+time.Second)
		})
	}
}

// A chain of forks, which no single look at /proc can catch, ends at the deadline.
func TestForkChain(t *testing.T) {
	t.Parallel()
	p, timeout := harness.InTime(t, time.Second, "ready 2\n", func(timeout string) *harness.Process {
		return harness.Start(t, harness.Options{}, "--timeout", timeout, "/fixtures/fork-chain")
	})
	r := p.Wait()
	r.Expect(t, 124, "timeout")
	harness.Within(t, "the run", r.Elapsed, timeout, timeout+300*time.Millisecond)
}

// The teardown of many threads, much memory and many stopped sessions takes a limited time, and is
// reported.
func TestBigTeardown(t *testing.T) {
	// Not in parallel: it measures the kernel.
	for _, c := range []struct {
		fixture, ready string
		env            string
	}{
		{"many-threads", "ready 400\n", "FIXTURE_COUNT=400"},
		{"mem-hog", "ready 1024\n", "FIXTURE_MIB=1024"},
		{"many-stopped", "ready 501\n", "FIXTURE_COUNT=500"},
		{"leave-zombies", "ready 201\n", "FIXTURE_COUNT=200"},
	} {
		t.Run(c.fixture, func(t *testing.T) {
			p := harness.Start(t, harness.Options{}, "--timeout", "250", "--env", c.env, "/fixtures/"+c.fixture) // not reached on slow machines either
			p.WaitOutput(c.ready)
			sent := time.Now()
			p.Signal(syscall.SIGTERM)
			r := p.Wait()
			r.Expect(t, 128+15, "canceled")
			const bound = 500 * time.Millisecond
			harness.Within(t, "the end", r.Ended.Sub(sent), 0, bound)
			teardown := time.Duration(*r.Report.TeardownMS * float64(time.Millisecond))
			harness.Within(t, "teardown_ms", teardown, time.Microsecond, r.Ended.Sub(sent))
		})
	}
}

// The report contains the memory that the command has used.
func TestMemoryIsReported(t *testing.T) {
	t.Parallel()
	r := harness.Run(t, harness.Options{}, "python3", "-c", "x = b'x' * (200 << 20)")
	r.Expect(t, 0, "exited")
	got := r.Report.Usage.MaxRSSBytes >> 20
	check.That(t, got >= 200 && got <= 260, "%d MiB reported, want a little more than 200", got)
}

// A nested sandbox dies with the outer one, or fails cleanly.
func TestNestedSandboxes(t *testing.T) {
	t.Parallel()
	inside := filepath.Dir(harness.Binary(t))
	for _, tool := range []string{"unshare", "bwrap", "sbxrun"} {
		t.Run(tool, func(t *testing.T) {
			t.Parallel()
			p, timeout := harness.InTime(t, 1500*time.Millisecond, "nested "+tool+": ", func(timeout string) *harness.Process {
				return harness.Start(t, harness.Options{}, "--timeout", timeout, "--ro-bind", inside+":/mnt/sbxrun", "--workdir", "/tmp",
					"/fixtures/nested", tool, "/mnt/sbxrun/sbxrun")
			})
			r := p.Wait()
			if strings.Contains(string(r.Stdout), "refused") {
				r.Expect(t, 1, "exited")
				return
			}
			r.Expect(t, 124, "timeout")
			harness.Within(t, "the run", r.Elapsed, timeout, timeout+300*time.Millisecond)
		})
	}
}

// Process names that mislead parsers of /proc change nothing.
func TestOddNames(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"paren", "newline", "bytes", "empty"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			p, _ := harness.InTime(t, time.Second, "ready 2\n", func(timeout string) *harness.Process {
				return harness.Start(t, harness.Options{}, "--timeout", timeout, "/fixtures/odd-name", kind)
			})
			p.Wait().Expect(t, 124, "timeout")
		})
	}
}

// PTRACE_TRACEME makes init the tracer, which neither ends nor stops the command.
func TestTraceMe(t *testing.T) {
	t.Parallel()
	const begin = "import ctypes, os, signal, sys\nif ctypes.CDLL(None).ptrace(0, 0, 0, 0): sys.exit(99)\n"
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{})
	for _, c := range []struct {
		name, then, cause string
		code              int
	}{
		{"a signal that is handled", "signal.signal(signal.SIGUSR1, lambda *a: sys.exit(7)); os.kill(os.getpid(), signal.SIGUSR1); signal.pause()", "exited", 7},
		{"a signal that kills", "os.kill(os.getpid(), signal.SIGUSR1); signal.pause()", "signaled", 138},
		{"exec", "os.execv('/bin/sh', ['sh', '-c', 'exit 8'])", "exited", 8},
		{"its child", "pid = os.fork()\nif pid: os._exit(9)\nos.kill(os.getpid(), signal.SIGUSR1)", "exited", 9},
	} {
		for name, r := range map[string]*harness.Result{
			"run":  harness.Run(t, harness.Options{}, "python3", "-c", begin+c.then),
			"exec": b.Exec(harness.Options{}, nil, "python3", "-c", begin+c.then),
		} {
			check.That(t, r.ExitCode == c.code && r.Report != nil && string(r.Report.Cause) == c.cause, "%s, %s: exit code %d, %+v: %s", name, c.name, r.ExitCode, r.Report, r.Stderr)
		}
	}
	r := harness.Run(t, harness.Options{}, "--timeout", harness.Deadline(time.Second).String(), "python3", "-c", begin+"os.kill(os.getpid(), signal.SIGSTOP)")
	r.Expect(t, 124, "timeout")
}
