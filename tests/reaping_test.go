package tests

import (
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/check"
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
	check.Require(t, strings.HasPrefix(out, "tasks "), "%v", out)
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
	check.Require(t, err == nil, "%v: %s", err, out)
	return out
}

// recycler is PID 1 of a namespace that reuses the lowest free PID (ns_last_pid, proc(5)), so that
// a signal to a remembered PID hits another process. It runs sbxrun's commands alongside short-lived
// bystanders, and checks that all of these survive.
const recycler = `
import os, random, signal, subprocess, sys, threading, time

sbxrun, rounds = sys.argv[1], int(sys.argv[2])
assert os.getpid() == 1
# The namespace's root may set the next pid; sbxrun's caller is to have no more than usual.
caller = ["setpriv", "--ambient-caps=-all", "--inh-caps=-all", sbxrun]
lowest, over, faults, pids, ended = 300, threading.Event(), [], set(), 0

def begin(*args):
    return subprocess.Popen([*caller, *args], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

def finish(p, codes, what):
    out = p.communicate()[0]
    if p.returncode not in codes or b"proven" in out.replace(b"(proven)", b""):
        faults.append(f"{what}: exit code {p.returncode}, want {codes}: {out}")

def call(code, *args):
    finish(begin(*args), [code], args)

def recycle():
    while not over.is_set():
        with open("/proc/sys/kernel/ns_last_pid", "w") as f:
            f.write(str(lowest))
        time.sleep(0.0005)

def strangers():
    global ended
    alive = []
    while not over.is_set() or alive:
        if not over.is_set():
            alive.append(subprocess.Popen(["sleep", "1000"], stdin=subprocess.DEVNULL))
            pids.add(alive[-1].pid)
        if over.is_set() or len(alive) > 12:
            s = alive.pop(random.randrange(len(alive)))
            if s.poll() is not None:
                faults.append(f"the stranger {s.pid} has ended: {s.returncode}")
            s.kill()
            s.wait()
            ended += 1
        time.sleep(0.003)

tree = ["sh", "-c", "for i in 1 2 3 4 5; do setsid sleep 60 & done; exec sleep 60"]

def commands(name):
    for n in range(rounds):
        call(124, "--cwd", "none", "--timeout", "0.05", "--grace", "0", *tree)
        call(3, "--cwd", "none", "sh", "-c", "for i in 1 2 3 4 5; do setsid sleep 60 & done; exit 3")
        # Canceled at some moment, from before it has begun.
        p = begin("--cwd", "none", "--grace", "0", *tree)
        time.sleep(random.random() * 0.04)
        p.send_signal(signal.SIGTERM)
        finish(p, [143, -15], "SIGTERM") # -15: not even begun
        p = begin("--cwd", "none", *tree)
        time.sleep(random.random() * 0.04)
        p.kill()
        finish(p, [-9], "SIGKILL")
        call(0, "start", "--cwd", "none", "--name", name)
        call(124, "exec", "--timeout", "0.05", "--grace", "0", name, *tree)
        p = begin("exec", name, *tree)
        time.sleep(random.random() * 0.04)
        p.kill()
        finish(p, [-9], "SIGKILL of an exec")
        call(0, "kill", "--grace", "0", name)
        call(0, "cleanup")

threads = [threading.Thread(target=commands, args=(f"box{n}",)) for n in range(3)]
others = [threading.Thread(target=recycle), threading.Thread(target=strangers)]
for t in others + threads:
    t.start()
for t in threads:
    t.join()
over.set()
for t in others:
    t.join()

# Those whose sbxrun was killed: their keepers have a moment, and then nobody else to wait for them.
end = time.time() + float(sys.argv[3])
while (left := [p for p in os.listdir("/proc") if p.isdigit() and p != "1"]) and time.time() < end:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        pass
    time.sleep(0.01)
for pid in left:
    try:
        faults.append("left: " + open(f"/proc/{pid}/stat").read())
    except OSError:
        pass
if 3 * ended < 4 * len(pids):
    faults.append(f"the pids are not recycled: {ended} strangers had {len(pids)}")
if faults:
    sys.exit("\n".join(faults[:20]))
print("strangers", ended, "pids", len(pids))
`

// Where PIDs are reused at once, only the intended processes are signalled, and nothing is left.
// SBXRUN_SOAK/2 rounds of three.
func TestRecycledPIDs(t *testing.T) {
	// Not in parallel: it keeps a CPU busy.
	rounds := harness.Soak(t)/2 + 1
	moment := strconv.Itoa(int(harness.Scaled(10 * time.Second).Seconds()))
	bound := time.Minute + time.Duration(rounds)*5*time.Second
	out := asPID1(t, bound, []string{"--keep-caps"}, recycler, harness.Binary(t), strconv.Itoa(rounds), moment)
	check.Require(t, strings.HasPrefix(out, "strangers "), "%v", out)
	t.Log(out)
}
