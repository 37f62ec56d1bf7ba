package tests

import (
	"bufio"
	stdjson "encoding/json"
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// decode parses the JSON output of a command.
func decode(t *testing.T, r *harness.Result, into any) {
	t.Helper()
	err := stdjson.Unmarshal(r.Stdout, into)
	check.Require(t, err == nil, "%v: %.2000s%s", err, r.Stdout, r.Stderr)
}

// killed is an element of the output of kill --json.
type killed struct {
	ID        string `json:"id"`
	Status    string `json:"status"`
	Already   bool   `json:"already_ended"`
	Verdict   string `json:"verdict"`
	ExitCode  *int   `json:"exit_code"`
	Survivors []struct {
		PID  int    `json:"pid"`
		Comm string `json:"comm"`
	} `json:"survivors"`
	Error *struct {
		Code string `json:"code"`
	} `json:"error"`
}

// kill runs kill --json, which must exit with the code.
func kill(t *testing.T, s *harness.State, code int, args ...string) []killed {
	t.Helper()
	all, _ := timedKill(t, s, code, args...)
	return all
}

func timedKill(t *testing.T, s *harness.State, code int, args ...string) ([]killed, time.Duration) {
	t.Helper()
	r := s.Run(append([]string{"kill", "--json"}, args...)...).Exits(t, code)
	var all []killed
	decode(t, r, &all)
	return all, r.Elapsed
}

// kill --signal reaches all processes, including execs, and does not wait for those that exit.
func TestKillSignal(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{}, "sh", "-c", "trap 'echo main got USR1; exit 0' USR1; echo up; while :; do sleep 0.05; done")
	b.Busy, b.Dying = true, true
	r := s.Run("wait", "--log", "up", b.ID)
	check.Require(t, r.ExitCode == 0, "%s", r.Stderr)
	p := b.StartExec(harness.Options{}, nil, "bash", "-c", "trap 'echo exec got USR1; exit 3' USR1; echo up; while :; do sleep 0.05; done")
	p.WaitOutput("up\n")
	_, took := timedKill(t, s, 0, "--signal", "USR1", "--grace", "20", b.ID)
	harness.Within(t, "the end", took, 0, 300*time.Millisecond)
	rec := b.Ended()
	check.That(t, rec.Report.Cause == "killed" && rec.Status == "killed", "%+v", rec)
	out := s.Run("logs", b.ID).Stdout
	check.That(t, strings.HasSuffix(string(out), "main got USR1\n"), "main: %q", out)
	r = p.Wait()
	r.Expect(t, 137, "killed") // however it handled the signal
	check.That(t, r.Report.Payload == nil || r.Report.Payload.ExitCode == nil || strings.HasSuffix(string(r.Stdout), "exec got USR1\n"), "exec: %q", r.Stdout)
}

// A command that ignores SIGTERM dies after the default grace period.
func TestKillTermIgnored(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{}, "sh", "-c", `trap "" TERM; echo up; while :; do sleep 0.02; done`)
	s.Run("wait", "--log", "up", b.ID)
	k, took := timedKill(t, s, 0, b.ID)
	harness.Within(t, "kill", took, 5*time.Second, 5500*time.Millisecond)
	check.That(t, k[0].Status == "killed" && k[0].ExitCode != nil && *k[0].ExitCode == 137 && k[0].Verdict == "proven", "%+v", k)
	b.Ended()
}

// In an idle sandbox, execs get the full grace period even if the sandbox's deadline is earlier.
func TestKillIdle(t *testing.T) {
	t.Parallel()
	timeout := harness.Scaled(2 * time.Second)
	b := harness.NewState(t).Sandbox(harness.Options{}, "--timeout", timeout.String(), "--grace", "0")
	b.Dying = true
	p := b.StartExec(harness.Options{}, nil, "sh", "-c", fmt.Sprintf("trap 'sleep %f; echo cleaned; exit' TERM; echo up; while :; do sleep 0.02; done", timeout.Seconds()+1))
	p.WaitOutput("up\n")
	kill(t, b.State, 0, "--grace", (timeout + time.Minute).String(), b.ID)
	r := p.Wait()
	check.That(t, strings.HasSuffix(string(r.Stdout), "cleaned\n"), "exec: %q", r.Stdout)
	rec := b.Ended()
	check.That(t, rec.Report.Cause == "killed", "%+v", rec)
}

// A later kill with a shorter grace period takes effect.
func TestKillTwice(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{}, "/fixtures/term-swallow")
	s.Run("wait", "--log", "ready 1", b.ID)
	patient := s.Start(harness.Options{}, "kill", "--grace", "50", b.ID)
	s.Run("wait", "--log", "got SIGTERM", "--timeout", harness.Bound.String(), b.ID).Exits(t, 0)
	_, took := timedKill(t, s, 0, "--grace", "0", b.ID)
	harness.Within(t, "the second kill", took, 0, 200*time.Millisecond)
	patient.Wait().Exits(t, 0)
	b.Ended()
}

// All sandboxes share one grace period.
func TestKillAll(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	var all []*harness.Sandbox
	for range 3 {
		all = append(all, s.Sandbox(harness.Options{}, "--tag", "job=7", "bash", "-c", "sleep 120 & wait"))
	}
	// And with commands that ignore SIGTERM.
	for range 3 {
		b := s.Sandbox(harness.Options{}, "--tag", "job=7", "/fixtures/term-ignore")
		s.Run("wait", "--log", "ready", b.ID)
		all = append(all, b)
	}
	other := s.Sandbox(harness.Options{}, "--tag", "job=8")
	r := s.Run("kill", "--all", "--tag", "job=7", "--grace", "1")
	harness.Within(t, "kill --all", r.Elapsed, time.Second, 1300*time.Millisecond)
	check.That(t, r.ExitCode == 0 && strings.Contains(string(r.Stdout), "6 killed\n"), "exit code %d: %s%s", r.ExitCode, r.Stdout, r.Stderr)
	for _, b := range all {
		b.Ended()
	}
	other.Alive()
	s.Run("kill", "--all").Exits(t, 0).OutHas(t, "1 killed\n")
	s.Run("kill", "--all").Exits(t, 0).Out(t, "0 killed, looked in "+s.Dir+"\n")
}

// A process that has entered from outside and is not reaped by its parent keeps init from exiting.
// kill reports it as unproven in time and names it, and as proven after the parent's end.
func TestKillEnteredFromOutside(t *testing.T) {
	t.Parallel()
	t.Run("SupervisorWaits", func(t *testing.T) {
		t.Parallel()
		enteredFromOutside(t, "20")
	})
	t.Run("SupervisorGivesUp", func(t *testing.T) {
		t.Parallel()
		enteredFromOutside(t, "0.5")
	})
}

func enteredFromOutside(t *testing.T, proofTimeout string) {
	t.Helper()
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{}, "--proof-timeout", proofTimeout)
	// The parent, in the test's namespace, joins the sandbox's, starts a process there and never waits for it.
	script := `
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
uid = int(sys.argv[2])
if uid:
    os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
fd = os.pidfd_open(int(sys.argv[1]))
if libc.setns(fd, 0x10000000 | 0x20000000):
    sys.exit("setns: " + os.strerror(ctypes.get_errno()))
if os.fork() == 0:
    os.execv("/bin/sleep", ["sleep", "50"])
print("entered", flush=True)
sys.stdin.read()`
	uid := "0"
	if harness.Root() {
		uid = "65534"
	}
	cmd := exec.Command("/usr/bin/python3", "-c", script, fmt.Sprint(b.Init.PID), uid)
	stdin, err := cmd.StdinPipe()
	check.Must(t, err)
	stdout, err := cmd.StdoutPipe()
	check.Must(t, err)
	done, err := harness.StartCommand(cmd)
	check.Must(t, err)
	line, err := bufio.NewReader(stdout).ReadString('\n')
	check.That(t, line == "entered\n", "could not enter: %q, %v", line, err)
	harness.Until(t, harness.Bound, "the process", func() bool { return len(b.Members()) == 2 })
	// When its parent exits it becomes our child; so does the keeper if the supervisor gives up.
	b.AdoptAll()

	k, took := timedKill(t, s, 123, "--grace", "0", "--proof-timeout", "1", b.ID)
	harness.Within(t, "kill", took, 500*time.Millisecond, 3500*time.Millisecond)
	check.That(t, len(k) == 1 && k[0].Verdict == "unproven" && len(k[0].Survivors) != 0, "%+v", k)
	stdin.Close()
	_ = cmd.Wait() // it was told to end
	done()
	harness.Until(t, harness.Bound, "init's end", b.Init.Ended)
	harness.Until(t, harness.Bound, "init to be reaped", func() bool { return len(b.Members()) == 0 })
	b.Ended()
	k = kill(t, s, 0, b.ID)
	check.That(t, len(k) == 1 && k[0].Already && k[0].Verdict == "proven" && len(k[0].Survivors) == 0, "after all: %+v", k)
}
