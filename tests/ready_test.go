package tests

import (
	"net"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

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
time.sleep(60)`
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
			harness.Within(t, "ready", time.Since(begin), 500*time.Millisecond, 900*time.Millisecond)
			r := s.Run("wait", "--ready", "--json", "web")
			check.That(t, r.ExitCode == 0 && strings.Contains(string(r.Stdout), `"ready_at":"2`), "asked again: exit code %d: %s", r.ExitCode, r.Stdout)
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
	port := listenSomewhere(t)
	b := s.Sandbox(harness.Options{}, "--ready-tcp", port)
	r := s.Run("wait", "--ready", "--timeout", "0.5", b.ID)
	check.That(t, r.ExitCode == 124, "exit code %d: %s", r.ExitCode, r.Stderr)
	_, r = s.TrySandbox(harness.Options{}, "--ready-tcp", port, "--net", "host")
	check.That(t, r.ExitCode == 125, "--net host: exit code %d", r.ExitCode)
}

func listenSomewhere(t *testing.T) (port string) {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	harness.Must(t, err)
	t.Cleanup(func() { l.Close() })
	return strconv.Itoa(l.Addr().(*net.TCPAddr).Port)
}

// A sandbox that is never ready, ends first, has no probe or never prints the line is an error.
func TestReadyNever(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	s.Sandbox(harness.Options{}, "--ready-exec=-x 2>/dev/null; true", "--ready-timeout", "20", "--wait-ready") // sh has no such option
	never := s.Sandbox(harness.Options{}, "--name", "never", "--ready-exec", "false", "--ready-interval", "0.2")
	never.Busy = true
	r := s.Run("wait", "--ready", "--timeout", "1", "--json", "never")
	check.That(t, r.ExitCode == 124 && strings.Contains(string(r.Stdout), `"wait-timeout"`), "never: exit code %d: %s", r.ExitCode, r.Stdout)
	harness.Within(t, "never", r.Elapsed, time.Second, 1200*time.Millisecond)
	never.Alive()

	late, r := s.TrySandbox(harness.Options{}, "--ready-log", "x", "--ready-timeout", "0.5", "--wait-ready")
	check.Require(t, late != nil && r.ExitCode == 124 && len(harness.Lines(r.Stderr)) == 1, "--wait-ready: exit code %d: %s", r.ExitCode, r.Stderr)
	late.Alive()
	told := "sbxrun: error: the sandbox " + late.ID + " was not ready within 500ms, and keeps running; see sbxrun logs " + late.ID + ", or end it with sbxrun kill " + late.ID + "\n"
	check.That(t, string(r.Stderr) == told, "--wait-ready: %s, want %s", r.Stderr, told)
	r = s.Run("wait", "--ready", "--json", late.ID)
	check.That(t, r.ExitCode == 124 && strings.Contains(string(r.Stdout), `"not-ready"`) && string(r.Stderr) == told, "asked after: exit code %d: %s", r.ExitCode, r.Stdout)

	ends, r := s.TrySandbox(harness.Options{}, "--ready-tcp", "80", "--wait-ready", "sh", "-c", "sleep 0.3; exit 42")
	check.That(t, ends != nil && r.ExitCode == 125 && strings.Contains(string(r.Stderr), "42"), "ends first, --wait-ready: exit code %d: %s", r.ExitCode, r.Stderr)
	ends = s.Sandbox(harness.Options{}, "--ready-log", "x", "sh", "-c", "sleep 0.3; exit 42")
	for range 2 {
		r = s.Run("wait", "--ready", "--json", ends.ID)
		check.That(t, r.ExitCode == 125 && strings.Contains(string(r.Stdout), `"ended"`) && strings.Contains(string(r.Stderr), "42"),
			"ends first: exit code %d: %s%s", r.ExitCode, r.Stdout, r.Stderr)
	}
	s.Run("wait", "--log", "x", "--json", ends.ID).Exits(t, 125).OutHas(t, `"ended"`).ErrHas(t, "42")
	none := s.Sandbox(harness.Options{})
	s.Run("wait", "--ready", "--json", none.ID).Exits(t, 125).OutHas(t, `"no-probe"`)
}

// A log probe finds a line whenever and however it was written.
func TestReadyLog(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	dir := harness.SharedDir(t)
	b := s.Sandbox(harness.Options{}, "--bind", dir+":/go", "sh", "-c",
		`echo early; printf 'in two pie'; while [ ! -e /go/on ]; do sleep 0.02; done; printf 'ces\n'; echo complaint >&2; printf 'no line break'; sleep 60`)
	b.Busy = true
	s.Run("wait", "--log", "^early$", b.ID).Exits(t, 0)
	p := s.Start(harness.Options{}, "wait", "--log", "^in two pieces$", b.ID)
	q := s.Start(harness.Options{}, "wait", "--log", "complaint", b.ID)
	harness.Must(t, os.WriteFile(dir+"/on", nil, 0o644))
	for _, p := range []*harness.Process{p, q} {
		p.Wait().Exits(t, 0)
	}
	s.Run("wait", "--log", "^never$", "--timeout", "0.3", b.ID).Exits(t, 124)
	b.Alive()
}
