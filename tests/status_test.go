package tests

import (
	"fmt"
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

// The status follows from the cause, and from the exit code if the command exited by itself.
func TestStatus(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	for _, c := range []struct {
		script, status, cause string
		code                  int
	}{
		{"exit 0", "completed", "exited", 0},
		{"exit 1", "failed", "exited", 1},
		{"exit 130", "failed", "exited", 130},
		{"exit 255", "failed", "exited", 255},
		// The recorded cause is more precise than the code: it has exited by itself.
		{"exit 137", "failed", "exited", 137},
		{"exit 143", "failed", "exited", 143},
		{"exit 124", "failed", "exited", 124},
		{"kill -KILL $$", "failed", "signaled", 137},
		{"kill -TERM $$", "failed", "signaled", 143},
		{"kill -SEGV $$", "failed", "signaled", 139},
	} {
		b := s.Sandbox(harness.Options{}, "sh", "-c", c.script)
		rec := b.Ended()
		if rec.Status != c.status || rec.Report.Cause != c.cause || *rec.ExitCode != c.code {
			t.Errorf("%s: status %s, cause %s, code %d: %.2000s", c.script, rec.Status, rec.Report.Cause, *rec.ExitCode, s.Run("inspect", b.ID).Stdout)
		}
		check.Equal(t, s.Run("wait", b.ID).ExitCode, c.code, "%s: wait exits with", c.script)
	}
	r := s.Run("ps", "--names", "--status", "completed")
	check.That(t, len(harness.Lines(r.Stdout)) == 1, "completed: %s", r.Stdout)
}

// Every client can read the exit code from the end until cleanup.
func TestWait(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	dir := harness.SharedDir(t)
	b := s.Sandbox(harness.Options{}, "--name", "job", "--bind", dir+":/out", "sh", "-c", "while [ ! -e /out/go ]; do sleep 0.02; done; exit 42")
	rec := b.Inspect()
	check.That(t, rec.Status == "running" && rec.ExitCode == nil && rec.Report == nil, "%+v", rec)
	one, two := s.Start(harness.Options{}, "wait", "job"), s.Start(harness.Options{}, "wait", "--json", b.ID)
	harness.Must(t, os.WriteFile(filepath.Join(dir, "go"), nil, 0o644))
	ended := time.Now()
	for _, p := range []*harness.Process{one, two} {
		r := p.Wait()
		check.That(t, r.ExitCode == 42, "wait: exit code %d: %s", r.ExitCode, r.Stderr)
		harness.Within(t, "wait", r.Ended.Sub(ended), 0, 200*time.Millisecond)
	}
	rec = b.Ended()
	check.That(t, rec.Status == "failed" && *rec.ExitCode == 42, "%+v", rec)
	for range 2 {
		s.Run("wait", "job").Exits(t, 42)
	}
	s.Run("cleanup", "--dry-run").Exits(t, 0).OutHas(t, b.ID)
	r := s.Run("cleanup", "--older-than", "1h")
	check.That(t, r.ExitCode == 0 && s.Run("wait", "job").ExitCode == 42, "cleanup --older-than: exit code %d: %s", r.ExitCode, r.Stdout)
	live := s.Sandbox(harness.Options{}, "--name", "live")
	r = s.Run("cleanup")
	check.That(t, r.ExitCode == 0 && strings.Contains(string(r.Stdout), b.ID) && !strings.Contains(string(r.Stdout), live.ID), "cleanup: exit code %d: %s", r.ExitCode, r.Stdout)
	live.Alive()
	s.Run("wait", "--json", "job").Exits(t, 125).OutHas(t, `"no-such-sandbox"`)
}

// wait --timeout gives up and leaves the sandbox alone.
func TestWaitTimeout(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{}, "--name", "box")
	r := s.Run("wait", "--json", "--timeout", "0.5", "box")
	check.That(t, r.ExitCode == 124 && strings.Contains(string(r.Stdout), `"wait-timeout"`) && len(harness.Lines(r.Stderr)) == 1, "exit code %d: %s%s", r.ExitCode, r.Stdout, r.Stderr)
	harness.Within(t, "wait", r.Elapsed, 500*time.Millisecond, 700*time.Millisecond)
	b.Alive()
	// A waiting client that exits disturbs nothing.
	p := s.Start(harness.Options{}, "wait", "box")
	p.Signal(unix.SIGTERM)
	p.Wait()
	b.Alive()
	for _, args := range [][]string{{"wait"}, {"wait", "a", "b"}, {"wait", "nobody"}, {"wait", "--ready", "box"}, {"wait", "--log", "(", "box"}} {
		s.Run(args...).Exits(t, 125).ErrLines(t, 1)
	}
}

// The lifetime ends everything including execs, with SIGTERM first if there is a grace period.
func TestLifetime(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	begin := time.Now()
	lifetime := harness.Deadline(2 * time.Second)
	b := s.Sandbox(harness.Options{}, "--timeout", lifetime.String(), "/fixtures/tree-daemon")
	b.Dying = true
	p := b.StartExec(harness.Options{}, nil, "/fixtures/tree-setsid")
	p.WaitOutput("ready 2\n")
	r := p.Wait()
	r.Expect(t, 137, "killed")
	rec := b.Ended()
	harness.Within(t, "the sandbox", time.Since(begin), lifetime, lifetime+300*time.Millisecond)
	check.That(t, rec.Report.Cause == "timeout" && rec.Status == "killed" && *rec.ExitCode == 124 && rec.Report.TimedOut, "%+v", rec.Report)
	check.Equal(t, s.Run("wait", b.ID).ExitCode, 124, "wait: exit code")
	b = s.Sandbox(harness.Options{}, "--timeout", harness.Deadline(500*time.Millisecond).String(), "--grace", "20", "/fixtures/term-handler")
	rec = b.Ended()
	out := s.Run("logs", b.ID).Stdout
	check.That(t, rec.Report.Cause == "timeout" && string(out) == "ready 1\ncleaned\n", "cause %s, logs %q", rec.Report.Cause, out)
}

// A sandbox with a running exec is not idle. It ends when none has run for the idle timeout.
func TestIdleTimeout(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	// Long enough for an exec to start.
	idle := harness.Deadline(2 * time.Second)
	b := s.Sandbox(harness.Options{}, "--idle-timeout", idle.String())
	b.Dying = true // the test asserts when it ends; a late look by the harness is not a failure
	begin := time.Now()
	use := idle + time.Second
	r := b.Exec(harness.Options{}, nil, "sleep", strconv.FormatFloat(use.Seconds(), 'f', -1, 64))
	r.Expect(t, 0, "exited")
	rec := b.Ended()
	harness.Within(t, "the sandbox", time.Since(begin), use+idle, r.Ended.Sub(begin)+idle+300*time.Millisecond)
	check.That(t, rec.Report.Cause == "idle-timeout" && rec.Status == "killed", "%+v", rec.Report)
	// The last of overlapping execs counts; logs and ps don't.
	b = s.Sandbox(harness.Options{}, "--idle-timeout", idle.String())
	b.Dying = true
	begin = time.Now()
	one := b.StartExec(harness.Options{}, nil, "sleep", "0.5")
	two := b.StartExec(harness.Options{}, nil, "sleep", "1.5")
	one.Wait()
	ended := two.Wait().Ended
	for ; time.Since(ended) < idle*3/4; time.Sleep(idle / 40) { // if they counted, it would live longer
		s.Run("ps")
		s.Run("logs", b.ID)
	}
	b.Ended()
	harness.Within(t, "the sandbox", time.Since(begin), 1500*time.Millisecond+idle, ended.Sub(begin)+idle+300*time.Millisecond)
	// A sandbox that runs its own command can be idle, too.
	begin = time.Now()
	rec = s.Sandbox(harness.Options{}, "--idle-timeout", "0.5", "sleep", "60").Ended()
	harness.Within(t, "idle", time.Since(begin), 500*time.Millisecond, 800*time.Millisecond)
	check.That(t, rec.Report.Cause == "idle-timeout", "%+v", rec.Report)
}

// Sandboxes do not see each other's files.
func TestSandboxesSeparate(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	one, two := s.Sandbox(harness.Options{}), s.Sandbox(harness.Options{})
	one.Exec(harness.Options{}, nil, "sh", "-c", "head -c 44040192 /dev/zero >/tmp/data; echo x >/tmp/$(hostname)").Expect(t, 0, "exited")
	r := two.Exec(harness.Options{}, nil, "sh", "-c", "ls /tmp/data; df --output=used /tmp | tail -1")
	check.That(t, strings.TrimSpace(string(r.Stdout)) == "0", "the other one's /tmp: %q", r.Stdout)
	check.Equal(t, string(one.Exec(harness.Options{}, nil, "stat", "-c", "%s", "/tmp/data").Stdout), "44040192\n", "its own")
}

// Files have every byte that was written before a kill.
func TestWrittenIsKept(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	for _, grace := range []string{"0", "1"} {
		dir := harness.SharedDir(t)
		b := s.Sandbox(harness.Options{}, "--bind", dir+":/out")
		b.Dying = true
		p := b.StartExec(harness.Options{}, nil, "sh", "-c", "head -c 52428800 /dev/urandom | tee /out/data | sha256sum; exec sleep 60")
		p.WaitOutput("-\n")
		kill(t, s, 0, "--grace", grace, b.ID)
		r := p.Wait()
		r.Expect(t, 137, "killed")
		sum := sha256File(t, dir+"/data")
		check.That(t, fmt.Sprintf("%s  -\n", sum) == string(r.Stdout), "written %s, found %s", r.Stdout, sum)
	}
}

// A sandbox keeps running when no client is attached, and its exit code is known.
func TestNobodyAttached(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	// The client that starts it leads its own session, and both end when it exits.
	b := s.Sandbox(harness.Options{Wrap: []string{"setsid", "--wait"}}, "sh", "-c", "while [ ! -e /tmp/go ]; do sleep 0.02; done; echo done; exit 7")
	b.Busy = true
	follower := s.Start(harness.Options{}, "logs", "-f", b.ID)
	follower.Signal(unix.SIGKILL)
	follower.Wait()
	// A client that dies during its exec ends only that.
	p := b.StartExec(harness.Options{}, nil, "yes")
	p.WaitOutput("y\ny\n")
	p.Kill()
	p.Wait()
	b.Alive()
	b.Dying = true
	b.Exec(harness.Options{}, nil, "touch", "/tmp/go")
	rec := b.Ended()
	check.That(t, *rec.ExitCode == 7 && string(s.Run("logs", b.ID).Stdout) == "done\n", "%+v", rec)
	// A run dies with its client.
	p = harness.Start(t, harness.Options{}, "yes")
	p.WaitOutput("y\ny\n")
	p.Kill()
	p.Wait()
}
