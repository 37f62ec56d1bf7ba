package limits

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// held is a shell that runs its script when it is released, like a sandbox's init. Everything left in its
// group is killed when the test ends.
type held struct {
	*proc.Process
	cmd    *exec.Cmd
	gate   io.WriteCloser
	output bytes.Buffer
}

func hold(t *testing.T, script string) *held {
	t.Helper()
	h := &held{cmd: exec.Command("sh", "-c", "echo >&3; exec 3>&-; read x; "+script)}
	h.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if os.Geteuid() == 0 {
		h.cmd.SysProcAttr.Credential = &syscall.Credential{Uid: 65534, Gid: 65534}
	}
	h.cmd.Dir, h.cmd.Stdout, h.cmd.Stderr = "/", &h.output, &h.output
	var err error
	h.gate, err = h.cmd.StdinPipe()
	check.Must(t, err)
	ready, end := harness.Pipe(t)
	h.cmd.ExtraFiles = []*os.File{end}
	err = h.cmd.Start()
	end.Close()
	check.Must(t, err)
	t.Cleanup(func() { h.kill(); h.Close() })
	h.Process, err = proc.Open(h.cmd.Process.Pid)
	check.Must(t, err)
	// During exec the kernel restores the old stack limit (finalize_exec); init is past that.
	_, err = ready.Read(make([]byte, 1))
	check.Must(t, err)
	return h
}

func (h *held) release(t *testing.T) {
	t.Helper()
	_, err := io.WriteString(h.gate, "\n")
	check.Must(t, err)
}

// kill kills the shell and its descendants, which hold its output open.
func (h *held) kill() {
	if h.cmd.ProcessState == nil {
		_ = unix.Kill(-h.cmd.Process.Pid, unix.SIGKILL)
		_ = h.cmd.Wait()
	}
}

// end returns how the shell ended; it is killed at the deadline.
func (h *held) end(d time.Duration) syscall.WaitStatus {
	_ = h.Wait(time.Now().Add(harness.Scaled(d)))
	h.kill()
	return h.cmd.ProcessState.Sys().(syscall.WaitStatus)
}

func soon() time.Time { return time.Now().Add(harness.Bound) }

func here(t *testing.T) *Machine {
	t.Helper()
	m, err := Detect()
	check.Must(t, err)
	return m
}

// can reports whether limits can be enforced here; otherwise tests expect an error.
func can(m *Machine, controllers ...string) bool {
	best, _ := m.delegated(m.candidate(controllers), controllers)
	for _, c := range controllers {
		if m.v1[c] == "" && (best.dir == "" || !best.has(c)) {
			return false
		}
	}
	return true
}

func id(t *testing.T) string {
	return fmt.Sprintf("test-%s-%d", strings.ReplaceAll(t.Name(), "/", "-"), os.Getpid())
}

// made makes a group, or checks the error and returns nil.
func made(t *testing.T, nest bool, r Request, controllers ...string) *Group {
	t.Helper()
	m := here(t)
	p, err := m.Plan(r, true)
	if !can(m, controllers...) {
		var refused *result.Error
		check.Require(t, errors.As(err, &refused) && refused.Code == "limit" && refused.Hint != "" && !strings.Contains(refused.Message, "\n"),
			"nothing can be made here, and Plan says %#v", err)
		t.Logf("refused: %s; hint: %s", refused.Message, refused.Hint)
		p, err = m.Plan(r, false)
		check.Require(t, err == nil, "best effort is refused: %v", err)
		left := 0
		for _, l := range p.Limits {
			check.That(t, l.Enforced == (l.Reason == "") && l.Enforced == (l.Mechanism != ""), "best effort claims %+v", l)
			if !l.Enforced {
				left++
			}
		}
		check.That(t, left != 0, "best effort claims all of %+v", p.Limits)
		return nil
	}
	check.Require(t, err == nil, "Plan: %#v", err)
	g, err := p.Make(id(t), nest)
	check.Must(t, err)
	t.Logf("%+v in %v", p.Limits, g.Dirs())
	dirs := g.Dirs()
	t.Cleanup(func() {
		empty(t, dirs)
		check.OK(t, g.Remove(soon()))
		for _, dir := range dirs {
			check.That(t, !exists(dir), "%s is left", dir)
		}
	})
	return g
}

// empty kills all processes in the test's own cgroups.
func empty(t *testing.T, dirs []string) {
	t.Helper()
	harness.Until(t, harness.Scaled(10*time.Second), fmt.Sprintf("the end of all processes in %v", dirs), func() bool {
		left := 0
		for _, dir := range dirs {
			procs, _ := os.ReadFile(dir + "/cgroup.procs")
			inside, _ := os.ReadFile(dir + "/" + leaf + "/cgroup.procs")
			procs = append(procs, inside...)
			for _, f := range strings.Fields(string(procs)) {
				pid, _ := strconv.Atoi(f)
				if pid > 1 && pid != os.Getpid() {
					_ = unix.Kill(pid, unix.SIGKILL)
					left++
				}
			}
		}
		return left == 0
	})
}

func limit(t *testing.T, limits []result.Limit, name string) result.Limit {
	t.Helper()
	for _, l := range limits {
		if l.Name == name {
			return l
		}
	}
	t.Fatalf("no limit %s in %+v", name, limits)
	return result.Limit{}
}

func add(t *testing.T, g *Group, h *held) {
	t.Helper()
	check.Must(t, move(g, h))
}

// move moves an existing process to the group.
func move(g *Group, h *held) error {
	for _, dir := range g.join {
		if err := write(dir+"/cgroup.procs", strconv.Itoa(h.PID)); err != nil && !h.Exited() {
			return fmt.Errorf("%s: %w", dir, err)
		}
	}
	return g.Throttle()
}

func TestMemoryHog(t *testing.T) {
	g := made(t, false, Request{Memory: 64 << 20}, "memory")
	if g == nil {
		return
	}
	h := hold(t, "head -c 200M /dev/zero | tail -n 1 | wc -c; sleep 60")
	add(t, g, h)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	events := g.Watch(ctx)
	check.That(t, !g.OOMKilled() && !limit(t, g.Limits(0), "memory").Hit, "hit before anything ran")
	h.release(t)
	start := time.Now()
	select {
	case e := <-events:
		check.That(t, e == OOM, "event %q", e)
	case <-time.After(harness.Scaled(20 * time.Second)):
		t.Fatal("nobody tells of the kill")
	}
	t.Logf("told after %v", time.Since(start))
	peak := g.Usage().MemoryPeak
	check.That(t, g.OOMKilled() && limit(t, g.Limits(0), "memory").Hit, "not hit: %+v", g.Limits(0))
	known := g.number("memory", "memory.peak", "", "memory.max_usage_in_bytes", "") > 0
	check.That(t, !known || peak >= 50<<20 && peak <= 64<<20, "peak %d", peak)
	t.Logf("usage %+v", g.Usage())
}

// A process in a cgroup below a v1 cgroup without the OOM killer is killed nevertheless.
func TestMemoryKillsBelowWhatWaits(t *testing.T) {
	m := here(t)
	if m.v1["memory"] == "" {
		return // v2 has no such setting
	}
	above := m.v1["memory"] + "/" + Prefix + id(t)
	check.Must(t, os.Mkdir(above, 0o755))
	t.Cleanup(func() { _ = RemoveDirs([]string{above}, soon()) })
	check.Must(t, write(above+"/memory.oom_control", "1"))
	m.v1["memory"] = above
	p, err := m.Plan(Request{Memory: 64 << 20}, true)
	check.Must(t, err)
	g, err := p.Make(id(t), false)
	check.Must(t, err)
	h := hold(t, "exec tail -n 1 /dev/zero")
	add(t, g, h)
	h.release(t)
	ws := h.end(5 * time.Second)
	check.That(t, g.OOMKilled(), "ended with %v, none was killed for want of memory", ws)
	check.OK(t, g.Remove(soon()))
}

// OOMKilled reports the OOM kill of the command itself without an event.
func TestMemoryKillIsCounted(t *testing.T) {
	g := made(t, false, Request{Memory: 64 << 20, MemorySwap: 64 << 20}, "memory")
	if g == nil {
		return
	}
	h := hold(t, "exec tail -n 1 /dev/zero")
	add(t, g, h)
	h.release(t)
	ws := h.end(20 * time.Second)
	check.That(t, ws.Signal() == unix.SIGKILL && g.OOMKilled(), "ended with %v, counted %v, %s", ws, g.OOMKilled(), h.output.String())
	l := g.Limits(unix.SIGKILL)
	check.That(t, limit(t, l, "memory").Hit && limit(t, l, "memory-swap").Hit, "%+v", l)
}

// Dropping page cache to stay below a memory limit is not a hit.
func TestMemoryWithin(t *testing.T) {
	g := made(t, false, Request{Memory: 32 << 20, MemorySwap: -1}, "memory")
	if g == nil {
		return
	}
	file := t.TempDir() + "/f"
	check.Must(t, os.WriteFile(file, make([]byte, 48<<20), 0o644))
	h := hold(t, "cat | wc -c")
	add(t, g, h)
	h.release(t)
	f, err := os.Open(file)
	check.Must(t, err)
	defer f.Close()
	_, err = io.Copy(h.gate, f)
	check.Must(t, err)
	h.gate.Close()
	ws := h.end(20 * time.Second)
	check.That(t, ws == 0 && strings.TrimSpace(h.output.String()) == strconv.Itoa(48<<20), "ended with %v: %s", ws, h.output.String())
	l := limit(t, g.Limits(0), "memory")
	check.That(t, !l.Hit, "%+v", l)
}

func TestForkBomb(t *testing.T) {
	for _, nest := range []bool{false, true} {
		t.Run(fmt.Sprint("nest ", nest), func(t *testing.T) { forkBomb(t, nest) })
	}
}

func forkBomb(t *testing.T, nest bool) {
	g := made(t, nest, Request{Pids: 32}, "pids")
	if g == nil {
		return
	}
	h := hold(t, "i=0; while [ $i -lt 100 ]; do sleep 60 & i=$((i+1)); done; echo all")
	add(t, g, h)
	check.That(t, !limit(t, g.Limits(0), "pids").Hit, "hit before anything ran")
	h.release(t)
	h.end(10 * time.Second)
	out := h.output.String()
	check.That(t, !strings.Contains(out, "all") && strings.Contains(strings.ToLower(out), "fork"), "the bomb says %q", out)
	l := limit(t, g.Limits(0), "pids")
	check.That(t, l.Hit && g.Watch(t.Context()) == nil, "%+v", l)
	peak := g.Usage().PidsPeak
	check.That(t, (peak == 32 || peak == 0) && (peak != 0 || !exists(g.read["pids"]+"/pids.peak")), "peak %d", peak)
}

func TestCPUQuota(t *testing.T) {
	// A quota so small that it is used up in every period, even on a busy machine.
	g := made(t, false, Request{CPUs: 0.05}, "cpu", "cpuacct")
	if g == nil {
		return
	}
	h := hold(t, "while :; do :; done")
	add(t, g, h)
	h.release(t)
	start := time.Now()
	// On a busy machine the process may have to wait before it has used anything.
	harness.Until(t, harness.Scaled(20*time.Second), "a throttled process", func() bool { return limit(t, g.Limits(0), "cpus").Hit })
	for time.Since(start) < 800*time.Millisecond { // eight periods
		time.Sleep(10 * time.Millisecond)
	}
	used, wall := g.cpu(), time.Since(start)
	if g.read["cpuacct"] == "" { // v1's quota does not need cpuacct
		st, err := proc.ReadStat(h.PID)
		check.Must(t, err)
		used, wall = st.CPU.User+st.CPU.System, time.Since(start)
	}
	ratio := used.Seconds() / wall.Seconds()
	t.Logf("%v of CPU in %v: %.2f", used, wall, ratio)
	check.That(t, ratio <= 0.075, "used %.2f of a CPU", ratio)
	cpus := g.Bounds().CPUs
	check.That(t, cpus != nil && cpus.Count() == 1, "CPUs %v", cpus)
}

// With a quota of 0.1 % of a CPU, Loosen removes it and a killed process dies. The kernel may keep one waiting for seconds
// for another reason, but not three.
func TestTinyQuota(t *testing.T) {
	var ws syscall.WaitStatus
	var took time.Duration
	for range 3 {
		g := made(t, false, Request{CPUs: 0.001}, "cpu")
		if g == nil {
			return
		}
		h := hold(t, "while :; do :; done")
		add(t, g, h)
		h.release(t)
		harness.Until(t, harness.Bound, "a throttled process", func() bool { return limit(t, g.Limits(0), "cpus").Hit })
		start := time.Now()
		check.Must(t, g.Loosen())
		ws, took = h.end(0), time.Since(start)
		if took <= harness.Scaled(time.Second) {
			break
		}
	}
	check.That(t, ws.Signal() == unix.SIGKILL && took <= harness.Scaled(time.Second), "ended with %v after %v", ws, took)
}

func TestCPUTime(t *testing.T) {
	g := made(t, false, Request{CPUTime: 200 * time.Millisecond}, "cpuacct")
	if g == nil {
		return
	}
	h := hold(t, "(while :; do :; done) & while :; do :; done")
	add(t, g, h)
	events := g.Watch(t.Context())
	h.release(t)
	select {
	case e := <-events:
		used := g.cpu()
		t.Logf("told at %v", used)
		check.That(t, e == CPUTime && used >= 200*time.Millisecond && used <= harness.Scaled(400*time.Millisecond) && limit(t, g.Limits(0), "cpu-time").Hit, "%q at %v: %+v", e, used, g.Limits(0))
	case <-time.After(harness.Scaled(10 * time.Second)):
		t.Fatal("never told")
	}
}

func TestKill(t *testing.T) {
	g := made(t, false, Request{Memory: 64 << 20}, "memory")
	if g == nil {
		return
	}
	h := hold(t, "sleep 60 & sleep 60")
	add(t, g, h)
	h.release(t)
	if g.v2 == "" {
		err := g.Kill()
		check.That(t, errors.Is(err, errors.ErrUnsupported), "%v", err)
		return
	}
	check.Must(t, write(g.v2+"/cgroup.freeze", "1"))
	check.OK(t, g.Loosen())
	data, _ := proc.ReadFile(g.v2 + "/cgroup.freeze")
	check.That(t, string(data) == "0\n", "still frozen: %q", data)
	err := g.Remove(time.Now().Add(20 * time.Millisecond))
	check.That(t, errors.Is(err, unix.EBUSY), "removed with processes inside: %v", err)
	check.Must(t, g.Kill())
	check.OK(t, h.Wait(time.Now().Add(harness.Scaled(5*time.Second))))
}

// A process frozen by another program's v1 freezer dies only after Thaw.
func TestFrozenV1(t *testing.T) {
	m := here(t)
	own := m.v1["freezer"]
	if own == "" {
		check.OK(t, m.Thaw(os.Getpid()))
		return
	}
	dir := own + "/" + Prefix + id(t)
	check.Must(t, os.Mkdir(dir, 0o755))
	h := hold(t, "sleep 60")
	t.Cleanup(func() {
		_ = write(dir+"/freezer.state", "THAWED")
		_ = h.Signal(unix.SIGKILL)
		_ = h.Wait(soon())
		check.OK(t, RemoveDirs([]string{dir}, soon()))
	})
	check.Must(t, write(dir+"/cgroup.procs", strconv.Itoa(h.PID)))
	check.Must(t, write(dir+"/freezer.state", "FROZEN"))
	harness.Until(t, harness.Bound, "a frozen process", func() bool { // FREEZING first
		data, _ := proc.ReadFile(dir + "/freezer.state")
		return string(data) == "FROZEN\n"
	})
	_ = h.Signal(unix.SIGKILL)
	err := h.Wait(time.Now().Add(50 * time.Millisecond))
	check.That(t, errors.Is(err, os.ErrDeadlineExceeded), "a frozen process died: %v", err)
	check.OK(t, m.Thaw(h.PID))
	check.OK(t, h.Wait(time.Now().Add(harness.Scaled(10*time.Second))))
}

// The limits of single processes are set before the command is executed, and its children inherit them.
func TestProcessLimits(t *testing.T) {
	p, err := here(t).Plan(Request{FSize: 10 << 20, NoFile: 64, Stack: 4 << 20}, true)
	check.Must(t, err)
	g, err := p.Make(id(t), false)
	check.Require(t, err == nil && len(g.Dirs()) == 0, "%v %v", err, g.Dirs())
	seen, end := inRoom(t, g, "ulimit -n; ulimit -f; ulimit -s; ulimit -Hn; exec head -c 11M /dev/zero >/tmp/f")
	got := strings.Join(strings.Fields(seen), " ")
	check.That(t, got == "64 20480 4096 64" && end != nil && end.Signal == unix.SIGXFSZ, "%s, %+v", got, end)
	l := g.Limits(unix.SIGXFSZ)
	check.That(t, limit(t, l, "fsize").Hit && !limit(t, l, "nofile").Hit, "%+v", l)
}

// A limit that only root may set is rejected before the command runs.
func TestMayNotBeSet(t *testing.T) {
	if os.Geteuid() == 0 {
		return // allowed
	}
	nice, adj := -5, -500
	for _, r := range []Request{{Nice: &nice}, {OOMScoreAdj: &adj}} {
		_, err := here(t).Plan(r, true)
		refused, ok := errors.AsType[*result.Error](err)
		check.That(t, ok && refused.Code == "limit", "required: %v", err)
		p, err := here(t).Plan(r, false)
		check.Must(t, err)
		l := p.Limits[0]
		check.That(t, !l.Enforced && l.Reason != "", "best effort: %+v", l)
	}
	hard := unix.Rlimit{}
	check.Must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &hard))
	_, err := here(t).Plan(Request{NoFile: int64(hard.Max) + 1}, true)
	check.That(t, err != nil && strings.Contains(err.Error(), "hard limit"), "%v", err)
}

// inRoom runs a script with the group's bounds and returns its output and how it ended. All its processes
// are in the group's cgroups.
func inRoom(t *testing.T, g *Group, script string) (string, *result.Payload) {
	t.Helper()
	out, in := harness.Pipe(t)
	plan, err := room.Prepare(room.Policy{Command: []string{"sh", "-c", script}, Workdir: "/tmp"}, room.Caller{Bwrap: os.Getenv("SBXRUN_BWRAP"), Path: os.Getenv("PATH"), UID: os.Geteuid(), GID: os.Getegid()})
	check.Must(t, err)
	defer plan.Close()
	plan.Bounds = g.Bounds()
	room, err := plan.Start(t.Context(), [3]*os.File{in, in, in}, nil, false)
	in.Close()
	check.Must(t, err)
	defer room.Close()
	own := harness.ReadFile(t, fmt.Sprintf("/proc/%d/cgroup", room.Init.PID))
	n := bytes.Count(own, []byte(id(t)))
	check.That(t, n == len(g.Dirs()), "it is in %d of %v: %s", n, g.Dirs(), own)
	room.Exec.Release()
	limit := time.Now().Add(harness.Scaled(10 * time.Second))
	select {
	case <-room.Exec.Exited():
	case <-time.After(time.Until(limit)):
		t.Error("the command does not end")
	}
	payload, _, _ := room.Exec.ExitStatus()
	room.Keeper.Kill()
	if _, err := room.Keeper.Empty(limit); err != nil {
		t.Errorf("%v: %v", err, room.Keeper.StartError())
	}
	peak := g.Usage().PidsPeak
	check.That(t, peak <= 5, "%d tasks", peak) // the parent of init, init, sh and cat; 0 if unknown
	check.OK(t, room.Keeper.Reap(limit))
	seen := harness.ReadAll(t, out)
	return string(seen), payload
}

// Processes started by the keeper are in the cgroups from their first moment, and the keeper removes the
// cgroups if no other process does.
func TestBounds(t *testing.T) {
	nice, adj := 7, 500
	g := made(t, true, Request{Memory: 64 << 20, Pids: 10, CPUs: 0.5, Nice: &nice, OOMScoreAdj: &adj}, "memory", "pids", "cpu")
	if g == nil {
		return
	}
	seen, _ := inRoom(t, g, "cat /proc/self/cgroup /proc/self/oom_score_adj; nice; nproc")
	check.That(t, !strings.Contains(seen, id(t)), "inside, it sees where it is: %s", seen)
	check.That(t, strings.HasSuffix(seen, "\n500\n7\n1\n"), "oom_score_adj, niceness and CPUs are not 500, 7 and 1: %s", seen)
	for _, dir := range g.Dirs() {
		check.That(t, !exists(dir), "%s is still there", dir)
	}
}

// An exec's own limits are below the sandbox's; without any, it joins the sandbox's cgroups.
func TestExecWithin(t *testing.T) {
	m := here(t)
	if !can(m, "memory", "pids") {
		made(t, false, Request{Memory: 1 << 30, Pids: 100}, "memory", "pids")
		return
	}
	make := func(m *Machine, r Request, id string, nest bool) *Group {
		p, err := m.Plan(r, true)
		check.Must(t, err)
		g, err := p.Make(id, nest)
		check.Must(t, err)
		t.Cleanup(func() {
			check.OK(t, g.Remove(soon()))
		})
		return g
	}
	sandbox := make(m, Request{Memory: 64 << 20, Pids: 20}, id(t), true)
	first := hold(t, "sleep 60")
	add(t, sandbox, first)
	joins := make(m.Within(sandbox.Dirs()), Request{}, "exec-1", false)
	second := hold(t, "sleep 60")
	add(t, joins, second)
	same := func(a, b *held) bool {
		x, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", a.PID))
		y, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", b.PID))
		return bytes.Equal(x, y)
	}
	check.That(t, same(first, second) && len(joins.Dirs()) == 0, "an exec without limits is not where the sandbox is")
	limited := make(m.Within(sandbox.Dirs()), Request{Pids: 5}, "exec-2", false)
	third := hold(t, "i=0; while [ $i -lt 10 ]; do sleep 60 & i=$((i+1)); done")
	add(t, limited, third)
	third.release(t)
	harness.Until(t, harness.Scaled(5*time.Second), "a fork that fails", func() bool { return limit(t, limited.Limits(0), "pids").Hit })
	for _, dir := range limited.Dirs() {
		check.That(t, strings.Contains(dir, Prefix+id(t)+"/"+Prefix+"exec-2"), "%s is not within the sandbox's", dir)
	}
	dirs := append(limited.Dirs(), sandbox.Dirs()...)
	_ = first.Signal(unix.SIGKILL)
	_ = second.Signal(unix.SIGKILL)
	empty(t, dirs)
}

// Leftovers finds a cgroup whose owner is dead, and not one with an owner or a process.
func TestLeftovers(t *testing.T) {
	g := made(t, false, Request{Pids: 10}, "pids")
	if g == nil {
		return
	}
	m := here(t)
	find := func() (n int) {
		for _, l := range m.Leftovers() {
			if l.ID == id(t) {
				n++
			}
		}
		return n
	}
	check.Equal(t, find(), 0)
	for _, n := range g.nodes {
		unix.Close(n.lock) // as after a crash
	}
	h := hold(t, "sleep 60")
	add(t, g, h)
	check.Equal(t, find(), 0)
	h.end(0)
	// A concurrent cleanup may remove them first.
	removed := func() bool {
		return !slices.ContainsFunc(g.Dirs(), func(dir string) bool { _, err := os.Lstat(dir); return err == nil })
	}
	harness.Until(t, young+harness.Scaled(10*time.Second), "all of its cgroups", func() bool { return find() == len(g.nodes) || removed() })
	check.OK(t, RemoveDirs(g.Dirs(), soon()))
	check.Equal(t, find(), 0)
	g.nodes = nil
}

// A group that could not be removed has no owner and no descriptor any more. Leftovers finds it when it is
// empty, even while the process that made it is alive.
func TestRemoveInVain(t *testing.T) {
	g := made(t, false, Request{Pids: 10}, "pids")
	if g == nil {
		return
	}
	h := hold(t, "sleep 60")
	add(t, g, h)
	for _, n := range g.nodes {
		check.That(t, Owned(n.dir), "nobody owns %s", n.dir)
	}
	before := harness.Descriptors(t)
	err := g.Remove(time.Now().Add(20 * time.Millisecond))
	check.Require(t, errors.Is(err, unix.EBUSY), "want EBUSY, got %v", err)
	for _, n := range g.nodes {
		check.That(t, !Owned(n.dir), "somebody owns %s", n.dir)
	}
	after := harness.Descriptors(t)
	check.That(t, after <= before-len(g.nodes), "%d descriptors of %d, with %d cgroups", after, before, len(g.nodes))
}
