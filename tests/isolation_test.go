package tests

import (
	"fmt"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

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

// A sandbox's command and its execs see only their own processes, and cannot attack others.
func TestCommandsOfASandboxApart(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{}, "/fixtures/takeover")
	s.Run("wait", "--log", "^done$", b.ID)
	b.Busy = true
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			r := b.Exec(harness.Options{}, nil, "sh", "-c", "echo /proc/[0-9]* $(cat /proc/1/comm)")
			out := string(r.Stdout)
			check.That(t, out == "/proc/1 /proc/2 /proc/3 sbxrun-init\n" || out == "/proc/1 /proc/2 sbxrun-init\n", "an exec sees %s", out)
			r = b.Exec(harness.Options{}, []string{"--timeout", "1"}, "/fixtures/takeover")
			out = string(r.Stdout)
			check.That(t, out == "done\n" || out == "", "an exec could %s", out)
		})
	}
	wg.Wait()
	check.Equal(t, string(s.Run("logs", b.ID).Stdout), "done\n", "the sandbox's own command could")
}

// Limits that bubblewrap could not work under apply only to the payload.
func TestSmallLimits(t *testing.T) {
	t.Parallel()
	for range 20 {
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
		r := b.Exec(harness.Options{}, []string{"--timeout", timeout}, "sleep", "60")
		r.Expect(t, 124, "timeout")
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
	p := harness.Start(t, harness.Options{Attr: job}, "--timeout", "30", "python3", "-u", "-c",
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
	p := harness.Start(t, harness.Options{Attr: &syscall.SysProcAttr{Setsid: true}}, "--timeout", "30", "sh", "-c", "echo up; sleep 0.5; exit 7")
	p.WaitOutput("up\n")
	p.Signal(unix.SIGTSTP)
	p.Wait().Expect(t, 7, "exited")

	p = harness.Start(t, harness.Options{Attr: job, Wrap: []string{"sh", "-c", `trap '' TSTP; exec "$@"`, "-"}}, "--timeout", "30", "sh", "-c", "echo up; sleep 0.5; exit 7")
	p.WaitOutput("up\n")
	p.Signal(unix.SIGTSTP)
	p.Wait().Expect(t, 7, "exited")
}

// When sbxrun was stopped past the deadline, a command that exited in time has not timed out.
func TestStoppedExitInTime(t *testing.T) {
	t.Parallel()
	for _, sig := range []syscall.Signal{unix.SIGSTOP, unix.SIGTSTP} {
		p, timeout := harness.InTime(t, 1500*time.Millisecond, "up\n", func(timeout string) *harness.Process {
			return harness.Start(t, harness.Options{Attr: job}, "--timeout", timeout, "sh", "-c", "echo up; sleep 0.3; exit 7")
		})
		begin := time.Now()
		p.Signal(sig)
		if sig == unix.SIGTSTP {
			// The command is stopped too, so sbxrun must continue soon.
			harness.Until(t, harness.Bound, "it to stop", func() bool { return jobState(p.PID) == "T" })
			p.Signal(unix.SIGCONT)
			p.Wait().Expect(t, 7, "exited")
			continue
		}
		payload := p.Role(harness.RolePayload)
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
	b := harness.NewState(t).Sandbox(harness.Options{}, "--timeout", harness.Deadline(2*time.Second).String())
	b.Dying = true
	harness.Must(t, b.Supervisor.Signal(unix.SIGSTOP))
	harness.Until(t, harness.Bound, "the room's end", func() bool { return len(harness.Members(b.NS)) == 0 })
	harness.Must(t, b.Supervisor.Signal(unix.SIGCONT))
	r := b.Ended().Report
	check.That(t, r != nil && r.Cause == "timeout" && r.ExitCode == 124, "%+v", r)
}
