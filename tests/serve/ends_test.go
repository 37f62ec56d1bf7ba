package serve

import (
	"bufio"
	"encoding/json"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// What would take minutes ends with the sandbox, or with the server.

// endsBy is far less than the diff and the grace period take.
const endsBy = time.Minute

// slowDiff creates a session whose diff compares two sparse files for many minutes, and starts it.
func slowDiff(t *testing.T, flags ...string) (s *server, path string, status <-chan int) {
	t.Helper()
	const size = 4 << 40
	dir, config := app(t)
	harness.Must(t, os.WriteFile(filepath.Join(dir, "large"), nil, 0o644))
	harness.Must(t, os.Truncate(filepath.Join(dir, "large"), size))
	s = serve(t, "drain_timeout = \"1s\"\n"+config, flags...)
	path = s.session(`{"overlay":{"name":"app","path":"/work"}}`)
	s.want(path+"/exec", "cd /work && rm large && truncate -s 4T large && echo made", "made\n")
	answered := make(chan int, 1)
	go func() {
		status, _, _, _ := s.try(t.Context(), http.MethodGet, path+"/diff", nil) // 0 if the server has exited
		answered <- status
	}()
	harness.Until(t, harness.Bound, "the diff to begin", func() bool { return s.reads(filepath.Join(dir, "large")) })
	return s, path, answered
}

// reads reports whether the server has a file open.
func (s *server) reads(name string) bool {
	all, _ := filepath.Glob(filepath.Join("/proc", itoa(s.cmd.Process.Pid), "fd/*")) // the pattern is valid
	for _, fd := range all {
		if to, err := os.Readlink(fd); err == nil && to == name {
			return true
		}
	}
	return false
}

// The end of a session cancels its diff.
func TestSessionEndsDiff(t *testing.T) {
	t.Parallel()
	s, path, status := slowDiff(t)
	begun := time.Now()
	s.answers(200, `"verdict":"proven"`, http.MethodDelete, path, nil)
	got := <-status
	check.That(t, got == http.StatusGone, "the diff: %d", got)
	took := time.Since(begun)
	check.That(t, took <= endsBy, "the end took %v", took)
}

// A server that is shutting down cancels what still runs after drain_timeout: a diff, and a grace
// period.
func TestDrainEnds(t *testing.T) {
	t.Parallel()
	t.Run("diff", func(t *testing.T) {
		t.Parallel()
		s, _, _ := slowDiff(t)
		begun := time.Now()
		s.end()
		took := time.Since(begun)
		check.That(t, took <= endsBy, "the end took %v", took)
	})
	t.Run("grace period", func(t *testing.T) {
		t.Parallel()
		const grace = 600_000
		s := serve(t, "drain_timeout = \"1s\"\n[call]\nmax_timeout = \"20m\"\nmax_grace = \"20m\"\n")
		call := sh("trap '' TERM; echo ready; while :; do sleep 0.1; done")
		call.TimeoutMS, call.GraceMS = grace, grace
		id := s.status(http.MethodPost, "/v1/calls", call, http.StatusAccepted).ID
		harness.Until(t, harness.Bound, "the trap", func() bool { return s.status(http.MethodGet, "/v1/calls/"+id, nil, 200).StdoutBytes > 0 })
		begun := time.Now()
		s.end()
		took := time.Since(begun)
		check.That(t, took <= endsBy, "the end took %v", took)
	})
}

// A call with an unproven end keeps its slot until its survivors have exited.
func TestSurvivorsKeepPlace(t *testing.T) {
	t.Parallel()
	s := serve(t, "places = 1\n[tenant]\nqueue = 0\n")
	call := api.Call{Argv: []string{"sleep", "4321"}, TimeoutMS: 3000}
	id := s.status(http.MethodPost, "/v1/calls", call, http.StatusAccepted).ID
	s.busy(1, "sleep 4321")
	var payload int
	for _, pid := range harness.Descendants(s.cmd.Process.Pid) {
		if line, _ := os.ReadFile(filepath.Join("/proc", itoa(pid), "cmdline")); string(line) == "sleep\x004321\x00" { // it may have exited
			payload = pid
		}
	}
	// A process from outside, in the command's PID namespace, keeps init from exiting until its
	// parent reaps it.
	script := `
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
uid = int(sys.argv[2])
if uid:
    os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
fd = os.pidfd_open(int(sys.argv[1]))
if libc.setns(fd, 0x10000000 | 0x20000000):
    sys.exit("setns: " + os.strerror(ctypes.get_errno()))
if os.fork() == 0:
    os.execv("/bin/sleep", ["sleep", "600"])
print("entered", flush=True)
sys.stdin.read()
os.wait()`
	uid := "0"
	if harness.Root() {
		uid = "65534"
	}
	cmd := exec.Command("/usr/bin/python3", "-c", script, itoa(payload), uid)
	stdin, err := cmd.StdinPipe()
	harness.Must(t, err)
	stdout, err := cmd.StdoutPipe()
	harness.Must(t, err)
	done, err := harness.StartCommand(cmd)
	harness.Must(t, err)
	reap := func() {
		stdin.Close()
		_ = cmd.Wait() // it was told to end
		done()
	}
	if line, err := bufio.NewReader(stdout).ReadString('\n'); line != "entered\n" {
		reap()
		t.Fatalf("could not enter: %q, %v", line, err)
	}
	var c api.CallStatus
	harness.Until(t, harness.Bound, "the call's end", func() bool {
		c = s.status(http.MethodGet, "/v1/calls/"+id, nil, 200)
		return c.State == api.Over
	})
	check.That(t, c.Failure != nil && c.Failure.Code == api.Unproven, "%+v", c)
	kept := func() int {
		var st api.Status
		_, b := s.ask(http.MethodGet, "/v1/status", nil)
		harness.Must(t, json.Unmarshal(b, &st))
		return st.Machine.Kept
	}
	check.Equal(t, kept(), 1)
	s.refuses(api.Busy, http.MethodPost, "/v1/run", sh("true"))
	reap()
	harness.Until(t, harness.Bound, "the place", func() bool { return kept() == 0 })
	s.want("/v1/run", "echo again", "again\n")
}
