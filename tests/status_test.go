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

// Every client can read the exit code from the end until cleanup.
func TestWait(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	dir := harness.SharedDir(t)
	b := s.Sandbox(harness.Options{}, "--name", "job", "--bind", dir+":/out", "sh", "-c", "while [ ! -e /out/go ]; do sleep 0.02; done; exit 42")
	rec := b.Inspect()
	check.That(t, rec.Status == "running" && rec.ExitCode == nil && rec.Report == nil, "%+v", rec)
	one, two := s.Start(harness.Options{}, "wait", "job"), s.Start(harness.Options{}, "wait", "--json", b.ID)
	check.Must(t, os.WriteFile(filepath.Join(dir, "go"), nil, 0o644))
	ended := time.Now()
	for _, p := range []*harness.Process{one, two} {
		r := p.Wait().Exits(t, 42)
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

// The lifetime ends everything including execs, with SIGTERM first if there is a grace period.
func TestLifetime(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	lifetime, begin := harness.Scaled(2*time.Second), time.Now()
	b := s.Sandbox(harness.Options{}, "--timeout", lifetime.String(), "/fixtures/tree-daemon")
	b.Dying = true
	p := b.StartExec(harness.Options{}, nil, "/fixtures/tree-setsid")
	p.WaitOutput("ready 2\n")
	p.Wait().Expect(t, 137, "killed")
	rec := b.Ended()
	harness.Within(t, "the sandbox", time.Since(begin), lifetime, lifetime+300*time.Millisecond)
	check.That(t, rec.Report.Cause == "timeout" && rec.Status == "killed" && *rec.ExitCode == 124 && rec.Report.TimedOut, "%+v", rec.Report)
	check.Equal(t, s.Run("wait", b.ID).ExitCode, 124, "wait: exit code")
	harness.Longer(t, 500*time.Millisecond, func(lifetime time.Duration) bool {
		b := s.Sandbox(harness.Options{}, "--timeout", lifetime.String(), "--grace", "20", "/fixtures/term-handler")
		rec := b.Ended()
		out := string(s.Run("logs", b.ID).Stdout)
		check.That(t, rec.Report.Cause == "timeout" && (out == "" || out == "ready 1\ncleaned\n"), "cause %s, logs %q", rec.Report.Cause, out)
		return out != ""
	})
}

// A sandbox with a running exec is not idle. It ends when none has run for the idle timeout.
func TestIdleTimeout(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	// Long enough for an exec to start.
	idle := harness.Scaled(2 * time.Second)
	b := s.Sandbox(harness.Options{}, "--idle-timeout", idle.String())
	b.Dying = true // the test asserts when it ends; a late look by the harness is not a failure
	begin := time.Now()
	use := idle + time.Second
	r := b.Exec(harness.Options{}, nil, "sleep", strconv.FormatFloat(use.Seconds(), 'f', -1, 64)).Expect(t, 0, "exited")
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
	rec = s.Sandbox(harness.Options{}, "--idle-timeout", "0.5", "sleep", "600").Ended()
	harness.Within(t, "idle", time.Since(begin), 500*time.Millisecond, harness.Scaled(800*time.Millisecond))
	check.That(t, rec.Report.Cause == "idle-timeout", "%+v", rec.Report)
}

// Each of the three probes notices after 500 ms that the sandbox is ready, for all that wait, and
// answers later ones at once.
func TestReady(t *testing.T) {
	t.Parallel()
	const server = `
import socket, time
time.sleep(0.5)
s = socket.create_server(("127.0.0.1", 8123))
open("/tmp/up", "w").close()
print("listening on 8123", flush=True)
time.sleep(600)`
	for _, c := range []struct {
		name  string
		flags []string
	}{
		{"tcp", []string{"--ready-tcp", "8123"}},
		{"exec", []string{"--ready-exec", "test -e /tmp/up"}},
		{"log", []string{"--ready-log", "^listening on [0-9]+$"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := harness.NewState(t)
			begin := time.Now()
			b := s.Sandbox(harness.Options{}, append(c.flags, "--name", "web", "--ready-interval", "0.05", "python3", "-c", server)...)
			b.Busy = true // the probe runs commands
			p := s.Start(harness.Options{}, "wait", "--ready", "web")
			q := s.Start(harness.Options{}, "wait", "--ready", "--timeout", "20", "web")
			for _, p := range []*harness.Process{p, q} {
				p.Wait().Exits(t, 0)
			}
			harness.Within(t, "ready", time.Since(begin), 500*time.Millisecond, harness.Scaled(900*time.Millisecond))
			r := s.Run("wait", "--ready", "--json", "web").Exits(t, 0).OutHas(t, `"ready_at":"2`)
			harness.Within(t, "asked again", r.Elapsed, 0, 50*time.Millisecond)
			rec := b.Inspect()
			check.That(t, rec.Ready != nil && rec.Ready.ReadyAt != "" && rec.Ready.Error == "", "%+v", rec.Ready)
			table := s.Run("ps").Stdout
			check.That(t, strings.Contains(string(table), " ready "), "ps: %s", table)
			b.Alive()
		})
	}
}

// A TCP probe checks the sandbox's ports, not the host's.
func TestReadyNotTheHosts(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	check.Must(t, err)
	defer l.Close()
	port := strconv.Itoa(l.Addr().(*net.TCPAddr).Port)
	b := s.Sandbox(harness.Options{}, "--ready-tcp", port)
	s.Run("wait", "--ready", "--timeout", "0.5", b.ID).Exits(t, 124)
	_, r := s.TrySandbox(harness.Options{}, "--ready-tcp", port, "--net", "host")
	check.That(t, r.ExitCode == 125, "--net host: exit code %d", r.ExitCode)
}

// A log probe finds a line whenever and however it was written.
func TestReadyLog(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	dir := harness.SharedDir(t)
	b := s.Sandbox(harness.Options{}, "--bind", dir+":/go", "sh", "-c",
		`echo early; printf 'in two pie'; while [ ! -e /go/on ]; do sleep 0.02; done; printf 'ces\n'; echo complaint >&2; printf 'no line break'; sleep 600`)
	b.Busy = true
	s.Run("wait", "--log", "^early$", b.ID).Exits(t, 0)
	p := s.Start(harness.Options{}, "wait", "--log", "^in two pieces$", b.ID)
	q := s.Start(harness.Options{}, "wait", "--log", "complaint", b.ID)
	check.Must(t, os.WriteFile(dir+"/on", nil, 0o644))
	for _, p := range []*harness.Process{p, q} {
		p.Wait().Exits(t, 0)
	}
	s.Run("wait", "--log", "^never$", "--timeout", "0.3", b.ID).Exits(t, 124)
	b.Alive()
}

// Eight followers see each line when it is written, in order, and end with the sandbox. Followers
// that exit earlier disturb nothing.
func TestLogFollowers(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	dir := harness.SharedDir(t)
	b := s.Sandbox(harness.Options{}, "--bind", dir+":/go", "--name", "talker", "sh", "-c",
		`for i in 1 2 3; do while [ ! -e /go/$i ]; do sleep 0.02; done; echo line $i; echo error $i >&2; done; exit 4`)
	b.Busy = true
	var followers []*harness.Process
	for range 8 {
		followers = append(followers, s.Start(harness.Options{}, "logs", "-f", "talker"))
	}
	for i := 1; i <= 3; i++ {
		check.Must(t, os.WriteFile(fmt.Sprintf("%s/%d", dir, i), nil, 0o644))
		written := time.Now()
		for _, p := range followers {
			p.WaitOutput(fmt.Sprintf("line %d\n", i))
			p.WaitStderr(fmt.Sprintf("error %d\n", i))
			if i > 1 { // the first time, the followers have to start
				harness.Within(t, "the line", time.Since(written), 0, 200*time.Millisecond)
			}
		}
		if i == 1 {
			followers[0].Signal(unix.SIGINT)
			followers[0].Wait().Exits(t, 128+2)
			followers[1].Signal(unix.SIGKILL)
			followers[1].Wait()
			followers = followers[2:]
			b.Alive()
		}
	}
	for _, p := range followers {
		p.Wait().Exits(t, 0).Out(t, "line 1\nline 2\nline 3\n").Err(t, "error 1\nerror 2\nerror 3\n")
	}
	b.Ended()
	// The same after the end, with and without --follow.
	for _, args := range [][]string{{"logs", "talker"}, {"logs", "-f", "talker"}} {
		s.Run(args...).Exits(t, 0).Out(t, "line 1\nline 2\nline 3\n")
	}
	for _, c := range []struct{ args, stdout, stderr string }{
		{"--stream stdout", "line 1\nline 2\nline 3\n", ""},
		{"--stream stderr", "", "error 1\nerror 2\nerror 3\n"},
		{"--tail 1", "line 3\n", "error 3\n"},
		{"--tail 2 --stream stdout", "line 2\nline 3\n", ""},
		{"--tail 0", "", ""},
		{"--tail 100", "line 1\nline 2\nline 3\n", "error 1\nerror 2\nerror 3\n"},
	} {
		s.Run(append(strings.Fields("logs talker "), strings.Fields(c.args)...)...).Exits(t, 0).Out(t, c.stdout).Err(t, c.stderr)
	}
	for _, args := range []string{"logs", "logs a b", "logs nobody", "logs --tail -1 talker", "logs --tail x talker", "logs --stream stdin talker"} {
		s.Run(strings.Fields(args)...).Exits(t, 125).ErrLines(t, 1)
	}
}

// --max-output keeps the beginning of each stream, reports the total, and does not stop the command.
func TestLogMax(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	const limit = 64 << 10
	b := s.Sandbox(harness.Options{}, "--max-output", "64K", "sh", "-c", "seq 1000000; echo short >&2; exit 3")
	follower := s.Start(harness.Options{}, "logs", "-f", b.ID)
	rec := b.Ended()
	check.That(t, *rec.ExitCode == 3 && rec.Logs.StdoutBytes == 6888896 && rec.Logs.StdoutTruncated && !rec.Logs.StderrTruncated && rec.Logs.StderrBytes == 6, "%+v", rec.Logs)
	var want bytes.Buffer
	for i := 1; want.Len() < limit; i++ {
		fmt.Fprintln(&want, i)
	}
	for _, r := range []*harness.Result{s.Run("logs", b.ID), follower.Wait()} {
		check.That(t, r.ExitCode == 0 && bytes.Equal(r.Stdout, want.Bytes()[:limit]), "exit code %d: %d bytes, and not the head", r.ExitCode, len(r.Stdout))
		check.That(t, strings.Contains(string(r.Stderr), "short\n") && strings.Contains(string(r.Stderr), "stdout is incomplete") && strings.Contains(string(r.Stderr), "6888896"),
			"stderr %q", r.Stderr)
	}
	// The file does not exceed it while the command runs either.
	flood := s.Sandbox(harness.Options{}, "--max-output", "64K", "/fixtures/out-flood")
	harness.Until(t, harness.Bound, "the full log", func() bool {
		st, err := os.Stat(s.Dir + "/" + flood.ID + "/stdout.log")
		return err == nil && st.Size() >= limit
	})
	flood.Exec(harness.Options{}, nil, "true").Expect(t, 0, "exited")
	st, err := os.Stat(s.Dir + "/" + flood.ID + "/stdout.log")
	check.That(t, err == nil && st.Size() <= limit, "%v, %v", st, err)
}
