package tests

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

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
			for running := true; running; {
				begin := time.Now()
				runHere(t, exec.Command("/bin/true"))
				harness.Within(t, "a fork on the host", time.Since(begin), 0, time.Second)
				select {
				case <-p.Exited():
					running = false
				default:
				}
			}
			r := p.Wait().Expect(t, 124, "timeout")
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
	r := p.Wait().Expect(t, 124, "timeout")
	harness.Within(t, "the run", r.Elapsed, timeout, timeout+300*time.Millisecond)
}

// The teardown of many threads, much memory and many stopped sessions takes a limited time, and is reported.
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
			r := p.Wait().Expect(t, 128+15, "canceled")
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
	r := harness.Run(t, harness.Options{}, "python3", "-c", "x = b'x' * (200 << 20)").Expect(t, 0, "exited")
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

// Every command runs under sbxrun's own init, which nothing inside can see into, trace or signal.

// A payload that attacks its PID 1 achieves nothing, and ends with sbxrun.
func TestPayloadTakesOverNothing(t *testing.T) {
	t.Parallel()
	for _, kill := range []struct {
		name string
		end  func(*harness.Process)
	}{
		{"deadline", func(*harness.Process) {}},
		{"SIGKILL of sbxrun", func(p *harness.Process) { p.Kill() }},
	} {
		p, _ := harness.InTime(t, 2*time.Second, "done\n", func(timeout string) *harness.Process {
			return harness.Start(t, harness.Options{}, "--timeout", timeout, "/fixtures/takeover")
		})
		kill.end(p)
		r := p.Wait()
		check.Equal(t, string(r.Stdout), "done\n", "%s: it could", kill.name)
	}
}

// The same for an ordinary user, whose init has the same UID. With --oom-score-adj, as with
// limits, init has its own memory instead of the keeper's; both are hidden.
func TestInitIsHidden(t *testing.T) {
	t.Parallel()
	o := harness.Options{Bare: true}
	if harness.Root() {
		o.Wrap = harness.As(23456)
	}
	for _, flags := range [][]string{nil, {"--oom-score-adj", "500"}} {
		args := append(flags, "--cwd", "none", "sh", "-c", "ls /proc/1/fd; cat /proc/1/environ; readlink /proc/1/exe; exit 7")
		harness.Start(t, o, args...).Wait().Exits(t, 7).Out(t, "")
	}
}

// Limits that bubblewrap could not work under apply only to the payload.
func TestSmallLimits(t *testing.T) {
	t.Parallel()
	for range 5 {
		r := harness.Run(t, harness.Options{}, "--nofile", "3", "--fsize", "1", "--stack", "64K", "/bin/true")
		check.That(t, r.ExitCode == 0 || r.ExitCode == 127, "exit code %d, %s", r.ExitCode, r.Stderr) // the loader may need another descriptor
		harness.Run(t, harness.Options{}, "--fsize", "1K", "sh", "-c", "ulimit -f").Expect(t, 0, "exited")
	}
}

// An exec's deadline counts from the start of its command. Entering has its own limit.
func TestExecVeryShortTimeout(t *testing.T) {
	t.Parallel()
	b := harness.NewState(t).Sandbox(harness.Options{})
	for i := range 60 {
		timeout := fmt.Sprintf("0.00%d", 1+i%9)
		b.Exec(harness.Options{}, []string{"--timeout", timeout}, "sleep", "600").Expect(t, 124, "timeout")
	}
}

// jobState returns the state of a process as ps(1) shows it.
func jobState(pid int) string {
	p, _ := harness.ReadProc(pid)
	return p.State
}

// job starts a process as a shell does, in a process group that its parent can continue.
var job = &syscall.SysProcAttr{Setpgid: true}

// Ctrl-Z stops the command together with sbxrun, and fg continues both.
func TestSuspend(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{Attr: job}, "--timeout", "600", "python3", "-u", "-c",
		"import time; print('up')\nwhile True: print(time.time_ns()); time.sleep(0.02)") // no vfork(2), which delays a stop
	p.WaitOutput("up\n")
	payload := p.Role(harness.RolePayload)
	for range 3 {
		p.Signal(unix.SIGTSTP)
		harness.Until(t, harness.Bound, "both to stop", func() bool { return jobState(p.PID) == "T" && jobState(payload.PID) == "T" })
		p.Signal(unix.SIGCONT)
		before := p.Output()
		harness.Until(t, harness.Bound, "both to go on", func() bool { return jobState(p.PID) != "T" && len(p.Output()) > len(before)+40 })
	}
	p.Signal(unix.SIGTERM)
	p.Wait().Expect(t, 128+int(unix.SIGTERM), "canceled")
}

// Ctrl-Z stops nothing if no shell could continue it, or if the caller ignores it.
func TestSuspendNobodyToContinue(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{Attr: &syscall.SysProcAttr{Setsid: true}}, "--timeout", "600", "sh", "-c", "echo up; sleep 0.5; exit 7")
	p.WaitOutput("up\n")
	p.Signal(unix.SIGTSTP)
	p.Wait().Expect(t, 7, "exited")

	p = harness.Start(t, harness.Options{Attr: job, Wrap: []string{"sh", "-c", `trap '' TSTP; exec "$@"`, "-"}}, "--timeout", "600", "sh", "-c", "echo up; sleep 0.5; exit 7")
	p.WaitOutput("up\n")
	p.Signal(unix.SIGTSTP)
	p.Wait().Expect(t, 7, "exited")
}

// When sbxrun was stopped past the deadline, a command that exited in time has not timed out.
func TestStoppedExitInTime(t *testing.T) {
	t.Parallel()
	for _, sig := range []syscall.Signal{unix.SIGSTOP, unix.SIGTSTP} {
		read, write, err := os.Pipe()
		check.Must(t, err)
		defer read.Close()
		defer write.Close()
		timeout := harness.Scaled(1500 * time.Millisecond)
		p := harness.Start(t, harness.Options{Attr: job, Stdin: read}, "--timeout", timeout.String(), "sh", "-c", "echo up; read line; exit 7")
		p.WaitOutput("up\n")
		begin := time.Now()
		payload := p.Role(harness.RolePayload)
		p.Signal(sig)
		if sig == unix.SIGTSTP {
			// The command is stopped too, so sbxrun must continue soon.
			harness.Until(t, harness.Bound, "it to stop", func() bool { return jobState(p.PID) == "T" })
			write.Close()
			p.Signal(unix.SIGCONT)
			p.Wait().Expect(t, 7, "exited")
			continue
		}
		harness.Until(t, harness.Bound, "it to stop", func() bool { return harness.Stopped(p.PID) })
		write.Close()
		harness.Until(t, harness.Bound, "the payload's end", payload.Ended)
		harness.Until(t, harness.Bound, "the deadline", func() bool { return time.Since(begin) > timeout+200*time.Millisecond })
		p.Signal(unix.SIGCONT)
		p.Wait().Expect(t, 7, "exited")
	}
}

// The deadline of an idle sandbox with a stopped process holds: its supervisor or its keeper ends
// it, and both report a timeout.
func TestStoppedRoomDeadline(t *testing.T) {
	t.Parallel()
	b := harness.NewState(t).Sandbox(harness.Options{}, "--timeout", harness.Scaled(2*time.Second).String())
	b.Dying = true
	check.Must(t, b.Supervisor.Signal(unix.SIGSTOP))
	harness.Until(t, harness.Bound, "the room's end", func() bool { return len(harness.Members(b.NS)) == 0 })
	check.Must(t, b.Supervisor.Signal(unix.SIGCONT))
	r := b.Ended().Report
	check.That(t, r != nil && r.Cause == "timeout" && r.ExitCode == 124, "%+v", r)
}
