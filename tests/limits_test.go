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

	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// enforced reports whether sbxrun can enforce these limits on this machine, by its own detection. If not, enforced tests
// that the flags fail with a reason, and that with --limits best-effort the command runs and the report names the limit.
func enforced(t *testing.T, r limits.Request, flags ...string) bool {
	t.Helper()
	machine, err := limits.Detect()
	check.Must(t, err)
	if _, err := machine.Plan(r, true); err == nil {
		return true
	}
	run := harness.Run(t, harness.Options{}, append(flags, "touch", "/tmp/it-ran")...).Expect(t, 125, "start-failed")
	e := run.Report.Error
	check.That(t, !run.Report.Started && e != nil && e.Code == "limit" && e.Hint != "" && strings.Contains(e.Message, "cannot be enforced here: "), "refused with %s", run.Report.Raw())
	run = harness.Run(t, harness.Options{}, append(flags, "--limits", "best-effort", "echo", "ran")...).Expect(t, 0, "exited")
	left := 0
	for _, l := range run.Report.Limits {
		if !l.Enforced {
			left++
		}
	}
	check.That(t, left != 0 && string(run.Stdout) == "ran\n", "best effort: stdout %q, report %s", run.Stdout, run.Report.Raw())
	return false
}

// hit asserts that a limit was enforced, and reports whether it was hit.
func hit(t *testing.T, r *harness.Report, name string) bool {
	t.Helper()
	for _, l := range r.Limits {
		if l.Name == name {
			check.That(t, l.Enforced, "%s is not enforced: %s", name, r.Raw())
			return l.Hit
		}
	}
	t.Errorf("no limit %s in %s", name, r.Raw())
	return false
}

const hog = "x = bytearray(200 << 20); print(len(x))"

// Running out of memory is a cause of its own, whether the kernel kills the command or its child.
func TestLimitMemory(t *testing.T) {
	t.Parallel()
	if !enforced(t, limits.Request{Memory: 64 << 20}, "--memory", "64M") {
		return
	}
	for _, command := range [][]string{
		{"python3", "-c", hog},
		{"sh", "-c", `python3 -c "$1"; sleep 600`, "sh", hog},
		{"sh", "-c", `head -c 200M /dev/zero >/tmp/x; sleep 600`}, // /tmp is memory
	} {
		r := harness.Run(t, harness.Options{}, append([]string{"--memory", "64M", "--tmp-size", "1G", "--timeout", "600"}, command...)...).Expect(t, 137, "oom")
		check.That(t, hit(t, r.Report, "memory") && len(r.Stdout) == 0 && strings.Contains(string(r.Stderr), "out of memory (--memory 64M)"),
			"stdout %q, stderr %q, %s", r.Stdout, r.Stderr, r.Report.Raw())
		peak := r.Report.Usage.MemoryPeak
		check.That(t, peak <= 64<<20 && (peak == 0 || peak >= 60<<20), "memory_peak_bytes is %d", peak)
	}
	// A command that stays below its limit ends normally.
	r := harness.Run(t, harness.Options{}, "--memory", "256M", "python3", "-c", "x = bytearray(100 << 20); print(len(x))").Expect(t, 0, "exited")
	check.That(t, !hit(t, r.Report, "memory"), "%s", r.Report.Raw())
	// So does one that gets SIGKILL for another reason.
	r = harness.Run(t, harness.Options{}, "--memory", "256M", "sh", "-c", "kill -9 $$")
	check.That(t, r.ExitCode == 137 && r.Report.Cause != "oom" && !hit(t, r.Report, "memory"), "%s", r.Report.Raw())
}

// Data waiting in connections counts as memory, also with cgroup v1, which counts it separately.
func TestMemoryOfConnections(t *testing.T) {
	t.Parallel()
	machine, err := limits.Detect()
	check.Must(t, err)
	if plan, err := machine.Plan(limits.Request{Memory: 64 << 20}, true); err != nil || !strings.HasPrefix(plan.Limits[0].Mechanism, "cgroup v1") {
		return
	}
	const fill = `
import socket
listener = socket.create_server(("127.0.0.1", 0), backlog=100)
pairs, sent = [(socket.create_connection(listener.getsockname()), listener.accept()[0]) for i in range(60)], 0
for a, b in pairs:
    a.setblocking(False)
    try:
        while True: sent += a.send(bytes(65536))
    except BlockingIOError: pass
print(sent >> 20)
`
	r := harness.Run(t, harness.Options{}, "--memory", "64M", "--timeout", "600", "python3", "-c", fill).Expect(t, 0, "exited")
	sent, err := strconv.Atoi(strings.TrimSpace(string(r.Stdout)))
	check.That(t, err == nil && sent <= 70, "MiB on their way: %s", r.Stdout)
}

// A fork bomb gets EAGAIN, and ends at the deadline.
func TestLimitForkBomb(t *testing.T) {
	t.Parallel()
	if !enforced(t, limits.Request{Pids: 32}, "--pids", "32") {
		return
	}
	var r *harness.Result
	harness.Longer(t, 2*time.Second, func(timeout time.Duration) bool {
		r = harness.Run(t, harness.Options{}, "--pids", "32", "--timeout", timeout.String(), "bash", "-c", ":(){ :|:& };: ; sleep 600").Expect(t, 124, "timeout")
		return hit(t, r.Report, "pids") && strings.Contains(string(r.Stderr), "Resource temporarily unavailable")
	})
	peak := r.Report.Usage.PidsPeak
	check.That(t, peak <= 32, "pids_peak is %d", peak)
	harness.Within(t, "the teardown", time.Duration(*r.Report.TeardownMS*1e6), 0, time.Second)
	// Exactly as many processes as allowed; two are the sandbox's own.
	r = harness.Run(t, harness.Options{}, "--pids", "10", "bash", "-c", "for i in 1 2 3 4 5 6 7; do sleep 600 & done; jobs -p").Expect(t, 0, "exited")
	check.That(t, !hit(t, r.Report, "pids"), "%s", r.Report.Raw())
}

// A hard limit above the caller's own is refused, unless the caller may raise it.
func TestLimitAboveOwn(t *testing.T) {
	t.Parallel()
	var own unix.Rlimit
	check.Must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &own))
	value := strconv.FormatUint(own.Max+1, 10)
	if enforced(t, limits.Request{NoFile: int64(own.Max + 1)}, "--nofile", value) {
		harness.Run(t, harness.Options{}, "--nofile", value, "true").Expect(t, 0, "exited")
	}
}

// Usage is counted once, also when a quota delays init so that the keeper kills the command and init reaps it later.
func TestUsageOnce(t *testing.T) {
	t.Parallel()
	if !enforced(t, limits.Request{CPUs: 0.5}, "--cpus", "0.5") {
		return
	}
	for range 6 {
		r := harness.Run(t, harness.Options{}, "--cpus", "0.5", "--timeout", "1", "sh", "-c", "while :; do :; done & while :; do :; done")
		r.Expect(t, 124, "timeout")
		// A second has at most eleven periods of 0.1 s. Counted twice, it would be up to three quarters of the time.
		used := r.Report.Usage.CPUUserMS + r.Report.Usage.CPUSystemMS
		check.That(t, used <= 0.65*r.Report.DurationMS, "%.0f ms of CPU in %.0f ms", used, r.Report.DurationMS)
	}
}

// Init waits without using the CPU, also after it has reaped a process.
func TestInitWaits(t *testing.T) {
	t.Parallel()
	r := harness.Run(t, harness.Options{}, "--timeout", harness.Deadline(2*time.Second).String(), "sh", "-c", "(sleep 0.1 &); sleep 600").Expect(t, 124, "timeout")
	used := r.Report.Usage.CPUUserMS + r.Report.Usage.CPUSystemMS
	check.That(t, used <= 0.5*r.Report.DurationMS, "%.0f ms of CPU in %.0f ms", used, r.Report.DurationMS)
}

// The kernel's OOM killer chooses the command before the keeper, which has to end everything.
func TestOOMScoreOfTheCommand(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{}, "--oom-score-adj", "700", "--timeout", "600", "sh", "-c", "echo up; sleep 600")
	p.WaitOutput("up\n")
	for role, want := range map[int]string{harness.RoleKeeper: "0", harness.RoleRoom: "0", harness.RoleInit: "700", harness.RolePayload: "700"} {
		score, err := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", p.Role(role).PID))
		got := strings.TrimSpace(string(score))
		check.That(t, err == nil && got == want, "role %d: %s, want %s, %v", role, got, want, err)
	}
	p.Signal(unix.SIGTERM)
	p.Wait().Expect(t, 143, "canceled")
}

// --cpus 0.5 grants half a CPU, and nproc and thread pools agree.
func TestLimitCPUs(t *testing.T) {
	t.Parallel()
	if !enforced(t, limits.Request{CPUs: 0.5}, "--cpus", "0.5") {
		return
	}
	deadline := harness.Deadline(2 * time.Second)
	r := harness.Run(t, harness.Options{}, "--cpus", "0.5", "--timeout", deadline.String(), "bash", "-c", "nproc; echo $OMP_NUM_THREADS $GOMAXPROCS; while :; do :; done & while :; do :; done")
	r.Expect(t, 124, "timeout")
	check.That(t, string(r.Stdout) == "1\n1 1\n", "stdout %q, %s", r.Stdout, r.Report.Raw())
	// An upper bound, because a busy machine may grant less.
	used := r.Report.Usage.CPUUserMS + r.Report.Usage.CPUSystemMS
	check.That(t, used <= 0.65*r.Report.DurationMS, "%.0f ms of CPU in %v", used, deadline)
	// Even a busy machine would grant more than this.
	r = harness.Run(t, harness.Options{}, "--cpus", "0.02", "--timeout", deadline.String(), "bash", "-c", "while :; do :; done").Expect(t, 124, "timeout")
	check.That(t, hit(t, r.Report, "cpus"), "%s", r.Report.Raw())
	b := harness.NewState(t).Sandbox(harness.Options{}, "--cpus", "1")
	b.Exec(harness.Options{}, nil, "env", "-u", "OMP_NUM_THREADS", "nproc").Expect(t, 0, "exited").Out(t, "1\n")
	harness.Run(t, harness.Options{}, "--cpus", "1.5", "--env", "OMP_NUM_THREADS=7", "sh", "-c", "echo $OMP_NUM_THREADS $MKL_NUM_THREADS").Expect(t, 0, "exited").Out(t, "7 2\n")
}

// --cpu-time counts the whole tree.
func TestLimitCPUTime(t *testing.T) {
	t.Parallel()
	if !enforced(t, limits.Request{CPUTime: time.Second}, "--cpu-time", "1") {
		return
	}
	r := harness.Run(t, harness.Options{}, "--cpu-time", "0.5", "--timeout", "600", "bash", "-c", "while :; do :; done & while :; do :; done")
	r.Expect(t, 152, "cpu-time")
	check.That(t, hit(t, r.Report, "cpu-time") && strings.Contains(string(r.Stderr), "--cpu-time"), "stderr %q, %s", r.Stderr, r.Report.Raw())
	r = harness.Run(t, harness.Options{}, "--cpu-time", "30", "sh", "-c", "exit 3").Expect(t, 3, "exited")
	check.That(t, !hit(t, r.Report, "cpu-time"), "%s", r.Report.Raw())
}

// A command with a memory limit has few descriptors, 1,024 or as many as requested, because the
// kernel does not count the memory behind all of them.
func TestMemoryFiles(t *testing.T) {
	t.Parallel()
	if !enforced(t, limits.Request{Memory: 64 << 20}, "--memory", "64M") {
		return
	}
	few := strconv.FormatInt(limits.Files(1024), 10)
	memory := []string{"--memory", "64M"}
	show := []string{"sh", "-c", "ulimit -Sn; ulimit -Hn"}
	expect := func(what string, r *harness.Result, want string) {
		t.Helper()
		r.Expect(t, 0, "exited")
		check.That(t, string(r.Stdout) == want+"\n"+want+"\n", "%s: %q", what, r.Stdout)
		hit(t, r.Report, "nofile")
	}
	expect("run", harness.Run(t, harness.Options{}, append(memory, show...)...), few)
	expect("--nofile", harness.Run(t, harness.Options{}, append([]string{"--memory", "64M", "--nofile", "2000"}, show...)...), "2000")
	s := harness.NewState(t)
	expect("exec", s.Sandbox(harness.Options{}, memory...).Exec(harness.Options{}, nil, show...), few)
	expect("exec with a limit", s.Sandbox(harness.Options{}).Exec(harness.Options{}, memory, show...), few)
	wide := s.Sandbox(harness.Options{}, "--memory", "64M", "--nofile", "2000")
	expect("exec in a sandbox with --nofile", wide.Exec(harness.Options{}, []string{"--memory", "32M"}, show...), "2000")
}

// A sandbox's limits apply to all its execs together, and an exec's own limits within them. An
// exec that runs out of memory affects nothing else.
func TestLimitSandbox(t *testing.T) {
	t.Parallel()
	if !enforced(t, limits.Request{Memory: 128 << 20, Pids: 24}, "--memory", "128M", "--pids", "24") {
		return
	}
	b := harness.NewState(t).Sandbox(harness.Options{}, "--memory", "128M", "--pids", "24")
	b.Exec(harness.Options{}, nil, "python3", "-c", hog).Expect(t, 137, "oom")
	x := b.Exec(harness.Options{}, []string{"--memory", "32M"}, "sh", "-c", `python3 -c "$1"; sleep 600`, "sh", "x = bytearray(64 << 20)").Expect(t, 137, "oom")
	check.That(t, hit(t, x.Report, "memory"), "%s", x.Report.Raw())
	p := b.StartExec(harness.Options{}, []string{"--pids", "8"}, "bash", "-c", "for i in 1 2 3 4 5 6 7 8 9; do sleep 600 & done; wait")
	p.WaitStderr("Resource temporarily unavailable")
	p.Signal(unix.SIGTERM)
	x = p.Wait().Expect(t, 143, "canceled")
	check.That(t, hit(t, x.Report, "pids") && x.Report.Usage.PidsPeak <= 8, "%s", x.Report.Raw())
	b.Exec(harness.Options{}, []string{"--cpu-time", "0.3"}, "sh", "-c", "while :; do :; done").Expect(t, 152, "cpu-time")
	b.Alive()
	id := b.Inspect().ID
	check.That(t, len(harness.Cgroups(id)) != 0, "the sandbox has no cgroup")
	// While the sandbox is full an exec fails with an error, and leaves nothing.
	full := b.StartExec(harness.Options{}, []string{"--timeout", "600"}, "bash", "-c", "for i in $(seq 40); do sleep 600 & done; wait")
	full.WaitStderr("Resource temporarily unavailable")
	x = b.Exec(harness.Options{}, nil, "true")
	check.That(t, x.ExitCode != 0 && x.Report != nil && !x.Report.Started, "exit code %d, stderr %q", x.ExitCode, x.Stderr)
	full.Signal(unix.SIGTERM)
	full.Wait()
	b.Exec(harness.Options{}, nil, "true").Expect(t, 0, "exited")
}

// An exec that exits by itself is not reported as out of memory, even if another exec in its sandbox was.
func TestLimitSandboxOthersMemory(t *testing.T) {
	t.Parallel()
	if !enforced(t, limits.Request{Memory: 64 << 20}, "--memory", "64M") {
		return
	}
	b := harness.NewState(t).Sandbox(harness.Options{}, "--memory", "64M")
	for _, code := range []int{0, 3} {
		stdin, end, err := os.Pipe()
		check.Must(t, err)
		p := b.StartExec(harness.Options{Stdin: stdin}, []string{"--timeout", "600"}, "sh", "-c", fmt.Sprint("echo up; read end; exit ", code))
		p.WaitOutput("up")
		b.Exec(harness.Options{}, nil, "python3", "-c", hog).Expect(t, 137, "oom")
		end.Close()
		p.Wait().Expect(t, code, "exited")
		stdin.Close()
	}
}

// When the sandbox's own command runs out of memory, that is the sandbox's cause.
func TestLimitSandboxCommand(t *testing.T) {
	t.Parallel()
	if !enforced(t, limits.Request{Memory: 64 << 20}, "--memory", "64M") {
		return
	}
	b := harness.NewState(t).Sandbox(harness.Options{}, "--memory", "64M", "python3", "-c", hog)
	rec := b.Ended()
	check.That(t, rec.Report != nil && rec.Report.Cause == "oom" && rec.Report.ExitCode == 137, "%+v", rec.Report)
	left := harness.Cgroups(b.ID)
	check.That(t, len(left) == 0, "left %q", left)
}

// When sbxrun is killed, the keeper removes the cgroup; when the keeper is killed too, cleanup does.
func TestLimitKilled(t *testing.T) {
	t.Parallel()
	if !enforced(t, limits.Request{Memory: 64 << 20, Pids: 32}, "--memory", "64M", "--pids", "32") {
		return
	}
	s := harness.NewState(t)
	p := harness.Start(t, harness.Options{}, "--memory", "64M", "--pids", "32", "/fixtures/tree-sleep")
	p.WaitOutput("ready 2\n")
	dirs := cgroupsOf(t, p.Role(harness.RoleInit).PID)
	check.Require(t, len(dirs) != 0, "it has no cgroup")
	p.Kill()
	p.Wait()
	harness.Until(t, harness.Bound, "the cgroups to be gone", func() bool { return !anyExists(dirs) })

	// cleanup removes an empty cgroup that is not open, and no other.
	p = harness.Start(t, harness.Options{}, "--memory", "64M", "--pids", "32", "/fixtures/tree-sleep")
	p.WaitOutput("ready 2\n")
	dirs = cgroupsOf(t, p.Role(harness.RoleInit).PID)
	left := fmt.Sprintf("%s/sbxrun-left-%d", filepath.Dir(dirs[0]), p.PID)
	check.Must(t, os.Mkdir(left, 0o755))
	says := func(what string, args ...string) func() bool {
		return func() bool {
			if !anyExists([]string{left}) {
				return true // root's cleanup in another test has removed it
			}
			for _, line := range harness.Lines(s.Run(append([]string{"cleanup"}, args...)...).Stdout) {
				if strings.HasPrefix(line, what) && strings.HasSuffix(line, left) {
					return true
				}
			}
			return false
		}
	}
	// Not at once, because a new cgroup may be about to be used.
	harness.Until(t, harness.Bound, "the cgroup to be found", says("to go    cgroup", "--dry-run"))
	harness.Until(t, harness.Bound, "the cgroup to be removed", says("removed  cgroup"))
	_, err := os.Stat(left)
	check.That(t, err != nil && len(cgroupsOf(t, p.Role(harness.RoleInit).PID)) == len(dirs), "%v; %q of %q", err, cgroupsOf(t, p.Role(harness.RoleInit).PID), dirs)
	p.Signal(unix.SIGTERM)
	p.Wait().Expect(t, 143, "canceled")
}

// cgroupsOf returns sbxrun's cgroups that a process is in.
func cgroupsOf(t *testing.T, pid int) (dirs []string) {
	t.Helper()
	data := harness.ReadFile(t, fmt.Sprintf("/proc/%d/cgroup", pid))
	seen := map[string]bool{}
	for _, line := range strings.Split(string(data), "\n") {
		_, name, ok := strings.Cut(line, "/sbxrun-")
		id, _, _ := strings.Cut(name, "/")
		if ok && !seen[id] {
			seen[id] = true
			dirs = append(dirs, harness.Cgroups(id)...)
		}
	}
	return dirs
}

func anyExists(paths []string) bool {
	for _, path := range paths {
		if _, err := os.Stat(path); err == nil {
			return true
		}
	}
	return false
}

// A quota of a thousandth of a CPU, or an operator's freeze, does not delay the teardown.
func TestLimitThrottled(t *testing.T) {
	t.Parallel()
	if !enforced(t, limits.Request{CPUs: 0.001, Pids: 64}, "--cpus", "0.001", "--pids", "64") {
		return
	}
	r := harness.Run(t, harness.Options{}, "--cpus", "0.001", "--pids", "64", "--timeout", "1", "bash", "-c", "for i in 1 2 3 4; do while :; do :; done & done; wait")
	r.Expect(t, 124, "timeout")
	harness.Within(t, "the teardown", time.Duration(*r.Report.TeardownMS*1e6), 0, time.Second)
}

func TestLimitFrozen(t *testing.T) {
	t.Parallel()
	if !enforced(t, limits.Request{Pids: 64}, "--pids", "64") {
		return
	}
	p, _ := harness.InTime(t, harness.Scaled(3*time.Second), "ready 2\n", func(timeout string) *harness.Process {
		return harness.Start(t, harness.Options{}, "--pids", "64", "--timeout", timeout, "/fixtures/tree-sleep")
	})
	frozen := freeze(t, p.Role(harness.RoleInit).PID)
	r := p.Wait().Expect(t, 124, "timeout")
	harness.Within(t, "the teardown", time.Duration(*r.Report.TeardownMS*1e6), 0, time.Second)
	t.Logf("frozen by %s; teardown %.1f ms", frozen, *r.Report.TeardownMS)
}

// freeze freezes a sandbox as an operator might: in its v2 cgroup, or in one of the v1 freezer, which is worse.
func freeze(t *testing.T, init int) (by string) {
	t.Helper()
	const freezer = "/sys/fs/cgroup/freezer"
	if unix.Access(freezer, unix.W_OK) == nil {
		dir := fmt.Sprintf("%s/test-%d", freezer, init)
		check.Must(t, os.Mkdir(dir, 0o755))
		t.Cleanup(func() {
			_ = os.WriteFile(dir+"/freezer.state", []byte("THAWED"), 0)
			harness.Until(t, harness.Bound, dir+" to be removed", func() bool { return unix.Rmdir(dir) == nil })
		})
		for _, pid := range append(harness.Descendants(init), init) {
			check.Must(t, os.WriteFile(dir+"/cgroup.procs", []byte(strconv.Itoa(pid)), 0))
		}
		check.Must(t, os.WriteFile(dir+"/freezer.state", []byte("FROZEN"), 0))
		return dir
	}
	for _, dir := range cgroupsOf(t, init) {
		if os.WriteFile(dir+"/cgroup.freeze", []byte("1"), 0) == nil {
			return dir
		}
	}
	t.Fatal("nothing to freeze it with")
	return ""
}

// A caller that may use real-time scheduling or a lower niceness does not pass that on, because
// the command could starve sbxrun.
func TestLimitPriority(t *testing.T) {
	t.Parallel()
	o := harness.Options{Wrap: []string{"prlimit", "--rtprio=50:50", "--nice=40:40"}}
	if harness.Run(t, harness.Options{Bare: true, Wrap: o.Wrap}, "--help").ExitCode != 0 {
		o.Wrap = nil // without the right to raise the limits, keep the machine's
	}
	const use = `
import os, resource
print(resource.getrlimit(resource.RLIMIT_RTPRIO), resource.getrlimit(resource.RLIMIT_NICE))
for f in (lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))), (lambda: os.nice(-1)):
    try: f()
    except PermissionError: print("refused")
`
	harness.Run(t, o, "python3", "-c", use).Expect(t, 0, "exited").Out(t, "(0, 0) (0, 0)\nrefused\nrefused\n")
}

// The command of a caller with real-time scheduling has none, because it could starve sbxrun.
func TestLimitScheduling(t *testing.T) {
	t.Parallel()
	o := harness.Options{Wrap: []string{"chrt", "--fifo", "1"}}
	if harness.Run(t, harness.Options{Bare: true, Wrap: o.Wrap}, "--help").ExitCode != 0 {
		o.Wrap = nil // without the right to use it
	}
	const show = "import os; print(os.sched_getscheduler(0) == os.SCHED_OTHER)"
	harness.Run(t, o, "python3", "-c", show).Expect(t, 0, "exited").Out(t, "True\n")
	b := harness.NewState(t).Sandbox(o)
	b.Exec(o, nil, "python3", "-c", show).Exits(t, 0).Out(t, "True\n")
}

// A command may not queue all signals that the kernel lets its user queue.
func TestLimitQueuedSignals(t *testing.T) {
	t.Parallel()
	o := harness.Options{Wrap: []string{"prlimit", "--sigpending=8000:8000"}}
	const show = "import resource; print(resource.getrlimit(resource.RLIMIT_SIGPENDING))"
	harness.Run(t, o, "python3", "-c", show).Expect(t, 0, "exited").Out(t, "(6976, 6976)\n")
	b := harness.NewState(t).Sandbox(o)
	b.Exec(o, nil, "python3", "-c", show).Exits(t, 0).Out(t, "(6976, 6976)\n")
}

// A hard limit of 0 on core dumps, common on hardened machines, does not prevent a run, although
// only root may raise it.
func TestCoreDumpsForbidden(t *testing.T) {
	t.Parallel()
	none := harness.Options{Wrap: []string{"sh", "-c", `ulimit -c 0; exec "$@"`, "sh"}}
	harness.Start(t, none, "sh", "-c", "exit 3").Wait().Expect(t, 3, "exited")
	b := harness.NewState(t).Sandbox(none)
	b.Exec(none, nil, "sh", "-c", "exit 4").Exits(t, 4)
}

// With a limit on address space or data a command either runs or is refused in one line with 125, and Go's
// runtime never fails with a stack trace.
func TestAddressSpace(t *testing.T) {
	t.Parallel()
	run := func(option string, mib, enough int) {
		limit := harness.Options{Bare: true, Wrap: []string{"sh", "-c", "ulimit " + option + ` "$0" && exec "$@"`, strconv.Itoa(mib << 10)}}
		for _, args := range [][]string{{"true"}, {"serve", "--check-config", "--listen", "unix:/nonexistent/socket"}} {
			r := harness.Run(t, limit, args...)
			lines := harness.Lines(r.Stderr)
			refused := r.ExitCode == 125 && len(lines) == 1 && strings.HasPrefix(lines[0], "sbxrun: error: ") && len(r.Stdout) == 0
			check.That(t, r.ExitCode == 0 || refused && mib < enough, "ulimit %s %d MiB, %q: exit code %d, stdout %.100q, stderr %.500q", option, mib, args, r.ExitCode, r.Stdout, r.Stderr)
		}
	}
	for _, mib := range []int{50, 300, 600, 700, 750, 800, 1000, 1100, 1150, 1200, 1250, 1500, 1600, 2000} {
		run("-v", mib, 1600)
	}
	for _, mib := range []int{1, 20, 40, 60, 100, 200} {
		run("-d", mib, 100)
	}
}
