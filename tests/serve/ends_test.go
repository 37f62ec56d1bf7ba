package serve

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
	"golang.org/x/sys/unix"
)

// What would take minutes ends with the sandbox, or with the server.

// endsBy is far less than the diff and the grace period take.
const endsBy = time.Minute

// slowDiff creates a session whose diff compares two sparse files for many minutes, and starts it.
func slowDiff(t *testing.T, flags ...string) (s *server, path string, status <-chan int) {
	t.Helper()
	const size = 4 << 40
	dir, config := app(t)
	check.Must(t, os.WriteFile(filepath.Join(dir, "large"), nil, 0o644))
	check.Must(t, os.Truncate(filepath.Join(dir, "large"), size))
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

// A server that is shutting down cancels what still runs after drain_timeout: a diff, and a grace period.
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
	proof := harness.Scaled(time.Second)
	s := serve(t, fmt.Sprintf("places = 1\nproof_timeout = %q\n[tenant]\nqueue = 0\n", proof))
	call := api.Call{Argv: []string{"sleep", "4321"}, TimeoutMS: result.Milliseconds(harness.Bound)}
	id := s.status(http.MethodPost, "/v1/calls", call, http.StatusAccepted).ID
	s.busy(1, "sleep 4321")
	var payload int
	for _, pid := range harness.Descendants(s.cmd.Process.Pid) {
		if line, _ := os.ReadFile(filepath.Join("/proc", itoa(pid), "cmdline")); string(line) == "sleep\x004321\x00" { // it may have exited
			payload = pid
		}
	}
	// A process from outside, in the command's PID namespace, keeps init from exiting until its parent reaps it.
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
	check.Must(t, err)
	stdout, err := cmd.StdoutPipe()
	check.Must(t, err)
	done, err := harness.StartCommand(cmd)
	check.Must(t, err)
	reap := func() {
		stdin.Close()
		_ = cmd.Wait() // it was told to end
		done()
	}
	if line, err := bufio.NewReader(stdout).ReadString('\n'); line != "entered\n" {
		reap()
		t.Fatalf("could not enter: %q, %v", line, err)
	}
	c := s.status(http.MethodDelete, "/v1/calls/"+id, nil, 200)
	check.Require(t, c.Failure != nil && c.Failure.Code == api.Unproven && c.Report != nil && c.Report.TeardownT != nil, "%+v", c)
	harness.Within(t, "the teardown", time.Duration(*c.Report.TeardownT*float64(time.Millisecond)), proof, 2*proof)
	kept := func() int {
		var st api.Status
		_, b := s.ask(http.MethodGet, "/v1/status", nil)
		check.Must(t, json.Unmarshal(b, &st))
		return st.Machine.Kept
	}
	check.Equal(t, kept(), 1)
	s.refuses(api.Busy, http.MethodPost, "/v1/run", sh("true"))
	reap()
	harness.Until(t, harness.Bound, "the place", func() bool { return kept() == 0 })
	s.want("/v1/run", "echo again", "again\n")
}

// The calls of a stopped server end at their deadlines and are reported as timeouts.
func TestStopped(t *testing.T) {
	t.Parallel()
	const calls = 3
	s := serve(t, fmt.Sprintf("[rooms]\nmin = %d\nmax = %[1]d\n", calls))
	s.warm(calls)
	call := sh("trap '' TERM; setsid sleep 4329 & sleep 4329; true")
	call.TimeoutMS = result.Milliseconds(harness.Deadline(3 * time.Second)) // all begin, and the server is stopped, before
	answers := make(chan string, calls)
	for range calls {
		go func() {
			_, b, _, err := s.try(t.Context(), http.MethodPost, "/v1/run", call)
			answers <- fmt.Sprintf("%s, %v", b, err)
		}()
	}
	s.busy(2*calls, "sleep 4329")
	check.Must(t, s.cmd.Process.Signal(unix.SIGSTOP))
	defer func() { _ = s.cmd.Process.Signal(unix.SIGCONT) }() // if the test fails before it has gone on
	s.without("sleep 4329")
	check.Must(t, s.cmd.Process.Signal(unix.SIGCONT))
	for range calls {
		a := <-answers
		check.That(t, strings.Contains(a, `"cause":"timeout"`) && strings.Contains(a, `"verdict":"proven"`) && strings.Contains(a, `"room":"warm"`), "%s", a)
	}
}

// Problems that users of other services have reported, by project and number. E2B 1128, a client
// without a time limit of its own, is among the behaviours of clients.
func TestFaults(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]func(*testing.T){
		"codex 4337 and 7852, sandbox-sdk 438, E2B 1881, smolagents 2464": testDeadline,

		"LibreChat agents 251":   testSessionAfterTimeout,
		"E2B 500":                testClientLeaves,
		"E2B 1352 and 1074":      testCallOutput,
		"smolagents 2050":        testServerKilled,
		"OpenSandbox 1206":       testIdleInterpreter,
		"piston 535, dify 15817": testKilledSaysWhy,
		"sandbox-sdk 891":        testOthersLive,
	} {
		t.Run(name, test)
	}
}

// A deadline ends the whole tree in time, a pipe that a child holds and a busy loop delay nothing, and the next call works
// like the first.
func testDeadline(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	a := s.late("/v1/run", sh("trap '' TERM INT; setsid sh -c 'sleep 1000' & (sleep 1000 &) ; python3 -c 'while True: pass' & echo begun; sleep 1000"), time.Second, "begun\n")
	check.That(t, a.Cause == "timeout" && a.ExitCode == 124 && text(a.Stdout) == "begun\n" && a.Duration >= a.TimeoutMS,
		"%s %d after %v of %v ms, %q", a.Cause, a.ExitCode, a.Duration, a.TimeoutMS, text(a.Stdout))
	s.idle()
	s.want("/v1/run", "echo next", "next\n")
}

// A session works after a timeout.
func testSessionAfterTimeout(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	path := s.session(`{}`)
	check.Equal(t, s.late(path+"/exec", sh("echo kept >a; echo; sleep 1000 & sleep 1000"), time.Second, "\n").Cause, "timeout")
	check.Equal(t, text(s.call(path+"/exec", api.Call{Language: "python", Code: "print(open('a').read())"}).Stdout), "kept\n\n")
}

// A killed call reports the cause. Where a limit cannot be enforced, nothing runs.
func testKilledSaysWhy(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	machine, err := limits.Detect()
	check.Must(t, err)
	for _, test := range []struct {
		call   api.Call
		limits api.Limits
		cause  result.Cause
		code   int
		hit    string
	}{
		{sh("yes"), api.Limits{MaxOutput: 10_000, Output: "kill"}, result.OutputLimit, result.ExitOutputLimit, ""},
		{api.Call{Argv: []string{"dd", "if=/dev/zero", "of=a", "bs=100000", "count=1"}}, api.Limits{FSize: 1000}, result.FileSize, 153, ""},
		{api.Call{Argv: []string{"python3", "-c", "x = bytearray(200 << 20)"}}, api.Limits{Memory: 64 << 20}, result.OOM, result.ExitKilled, "memory"},
		{sh("i=0; while [ $i -lt 20 ]; do sleep 1000 & i=$((i+1)); done; exit 3"), api.Limits{Pids: 8}, result.Exited, 2, "pids"},
		{sh("while :; do :; done"), api.Limits{CPUTimeMS: 200}, result.CPUTime, result.ExitCPUTime, ""},
	} {
		test.call.Limits = test.limits
		l := test.limits
		if _, err := machine.Plan(limits.Request{Memory: l.Memory, Pids: l.Pids, CPUTime: time.Duration(l.CPUTimeMS) * time.Millisecond, FSize: l.FSize}, true); err != nil {
			s.refuses(api.Limit, http.MethodPost, "/v1/run", test.call)
			continue
		}
		a := s.run(test.call)
		check.That(t, a.Cause == test.cause && a.ExitCode == test.code, "%+v: %s %d", l, a.Cause, a.ExitCode)
		for _, limit := range a.Limits {
			check.That(t, limit.Name != test.hit || limit.Hit, "%+v: %+v", l, limit)
		}
	}
}

// The end of one session does not affect another.
func testOthersLive(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	var sessions, processes []string
	for range 2 {
		path := s.session(`{}`)
		sessions = append(sessions, path)
		processes = append(processes, path+"/processes/"+s.status(http.MethodPost, path+"/processes", sh("while [ ! -e go ]; do sleep 0.01; done; echo lived"), http.StatusAccepted).ID)
	}
	s.answers(http.StatusOK, "", http.MethodDelete, sessions[0], nil)
	s.call(sessions[1]+"/exec", sh("touch go"))
	c := s.status(http.MethodGet, processes[1]+"?wait_ms=60000", nil, http.StatusOK)
	_, out := s.ask(http.MethodGet, processes[1]+"/output", nil)
	check.That(t, c.Report != nil && c.Report.Cause == result.Exited && string(out) == "lived\n", "%+v, %q", c, out)
}
