package tests

import (
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// pid1 is PID 1 of a namespace that waits only for its own children, like many servers in
// containers. It counts all tasks after two runs and after all of them.
const pid1 = `
import os, subprocess, sys, time

sbxrun, runs = sys.argv[1], int(sys.argv[2])
assert os.getpid() == 1

def tasks():
    return sorted(f"{pid}/{task}" for pid in os.listdir("/proc") if pid.isdigit() for task in os.listdir(f"/proc/{pid}/task"))

def run(code, *args):
    r = subprocess.run([sbxrun, "--quiet", *args], stdin=subprocess.DEVNULL, capture_output=True)
    if r.returncode != code:
        sys.exit(f"exit code {r.returncode}, want {code}: {r.stderr}")

def many(what, code, *args):
    for _ in range(runs):
        run(code, *args)
    after = tasks()
    if after != before:
        for task in set(after) - set(before):
            print(open(f"/proc/{task}/stat").read())
        sys.exit(f"{len(before)} tasks before, {len(after)} after {runs} {what}")

run(0, "true")
run(124, "--timeout", "0.05", "sleep", "60")
before = tasks()
many("runs", 0, "true")
many("runs that leave a daemon", 3, "sh", "-c", "setsid sleep 60 & exit 3")
many("timeouts", 124, "--timeout", "0.03", "sh", "-c", "setsid sleep 60 & sleep 60")
many("runs that never start", 127, "/no/such/command")
print("tasks", len(before))
`

// Runs and timeouts under a PID 1 that never reaps leave no task, not even a zombie: SBXRUN_SOAK
// of each.
func TestNeverReaped(t *testing.T) {
	// Not in parallel: it keeps a CPU busy.
	runs := harness.Soak(t)
	bound := harness.Deadline(time.Minute) + time.Duration(runs)*time.Second
	out := asPID1(t, bound, nil, pid1, harness.Binary(t), strconv.Itoa(runs))
	if !strings.HasPrefix(out, "tasks ") {
		t.Fatal(out)
	}
}

// asPID1 runs a Python program as PID 1 of a namespace, and returns its output. For an ordinary
// user it adds a user namespace, made by unshare with the flags in user.
func asPID1(t *testing.T, bound time.Duration, user []string, program string, args ...string) string {
	t.Helper()
	all := []string{"--fork", "--pid", "--mount-proc", "--kill-child"}
	if !harness.Root() {
		all = append(append(all, "--user", "--map-current-user"), user...)
	}
	cmd := exec.Command("unshare", append(append(all, "--", "/usr/bin/python3", "-c", program), args...)...)
	cmd.Dir = harness.Dir(t)
	cmd.Env = append(cmd.Environ(), "SBXRUN_STATE_DIR="+harness.Dir(t)+"/state")
	out, err := harness.Command(t, cmd, bound)
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return out
}
