package faults

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// lifetime is a deadline that no test reaches. It ends sandboxes that a failed test leaves.
const lifetime = "10m"

// env is a state directory with its sandboxes. Each test has its own, and its last cleanup
// asserts that no process and no record is left.
type env struct {
	traces
	top   string
	state string   // SBXRUN_STATE_DIR
	wrap  []string // a command that executes sbxrun

	mu sync.Mutex
	n  int // commands so far
}

func newEnv(t testing.TB) *env {
	t.Helper()
	top := harness.Dir(t)
	e := &env{traces: newTraces(t), top: top, state: filepath.Join(top, "state")}
	check.Must(t, os.Mkdir(e.state, 0o700))
	t.Cleanup(e.finish)
	return e
}

// begin starts sbxrun. It may be called concurrently.
func (e *env) begin(args ...string) (*harness.Process, error) {
	return e.command(harness.Options{Wrap: e.wrap}, append([]string{harness.Binary(e.t)}, proving(args)...)...)
}

// proving adds [harness.Proof] to a command that has a proof timeout. A later flag overrides it.
func proving(args []string) []string {
	if !slices.Contains([]string{"run", "start", "exec", "kill"}, args[0]) {
		return args
	}
	return slices.Concat(args[:1], harness.Proof(), args[1:])
}

// command starts any command in sbxrun's environment.
func (e *env) command(o harness.Options, words ...string) (*harness.Process, error) {
	e.mu.Lock()
	e.n++
	name := filepath.Join(e.top, fmt.Sprintf("call-%d", e.n))
	e.mu.Unlock()
	o.Dir, o.Bound = e.out, most
	o.Env = append([]string{"TMPDIR=" + e.top, "SBXRUN_STATE_DIR=" + e.state,
		"SBXRUN_DATA_DIR=" + filepath.Join(e.top, "data"), harness.MarkerName + "=" + e.marker}, o.Env...)
	return harness.Launch(e.t, name, o, words...)
}

// wait waits until a command ends, and asserts that it has not crashed as a Go program does.
func (e *env) wait(c *harness.Process) *harness.Result {
	e.t.Helper()
	within(bound, func() bool {
		reapInner()
		return c.Over()
	})
	s := c.Wait()
	for _, what := range []string{"panic:", "goroutine ", "fatal error:", "runtime: "} {
		check.That(e.t, !strings.Contains(string(s.Stderr), what), "it panicked: %v", s)
	}
	return s
}

// do runs sbxrun to its end.
func (e *env) do(args ...string) *harness.Result {
	e.t.Helper()
	c, err := e.begin(args...)
	check.Must(e.t, err)
	return e.wait(c)
}

// ok is do for a command that must succeed.
func (e *env) ok(args ...string) *harness.Result {
	e.t.Helper()
	s := e.do(args...)
	check.Require(e.t, s.ExitCode == 0, "want 0: %v", s)
	return s
}

// refused asserts that sbxrun has failed with one of the codes and one line.
func (e *env) refused(s *harness.Result, codes ...int) {
	e.t.Helper()
	check.That(e.t, slices.Contains(codes, s.ExitCode), "want %v: %v", codes, s)
	oneLine(e.t, s)
}

// startFlags returns the arguments that start a sandbox of the test.
func (e *env) startFlags(flags ...string) []string {
	own := []string{"start", "--json", "--env", harness.MarkerName + "=" + e.marker, "--bind", e.out + ":/out"}
	if !slices.Contains(flags, "--timeout") {
		own = append(own, "--timeout", lifetime)
	}
	return append(own, flags...)
}

// startArgs is startFlags with a payload. Without one the sandbox is idle.
func (e *env) startArgs(flags []string, payload ...string) []string {
	args := e.startFlags(flags...)
	if len(payload) > 0 {
		args = append(append(args, "--"), payload...)
	}
	return args
}

// sandbox is a running sandbox.
type sandbox struct {
	e    *env
	ID   string `json:"id"`
	Name string `json:"name"`
	PID  int    `json:"supervisor_pid"`
	init harness.Identity
}

// started returns the sandbox that start has printed.
func (e *env) started(s *harness.Result) *sandbox {
	e.t.Helper()
	b := &sandbox{e: e}
	err := json.Unmarshal(s.Stdout, b)
	check.Require(e.t, s.ExitCode == 0 && err == nil && b.PID > 1, "no sandbox: %v", s)
	return b
}

// start starts a sandbox.
func (e *env) start(flags []string, payload ...string) *sandbox {
	e.t.Helper()
	box := e.started(e.do(e.startArgs(flags, payload...)...))
	r := box.record()
	check.Require(e.t, r.Init != nil, "started, but without an init in its record")
	box.init = *r.Init
	e.ns.Remember(box.init.PID)
	return box
}

func (b *sandbox) path(name string) string { return filepath.Join(b.e.state, b.ID, name) }

func (b *sandbox) record() (r harness.Record) {
	b.e.t.Helper()
	data := harness.ReadFile(b.e.t, b.path("record.json"))
	check.Must(b.e.t, json.Unmarshal(data, &r))
	return r
}

// strikeSupervisor signals the supervisor, which becomes a child of the test process when its client exits. It reports
// whether the supervisor was alive.
func (b *sandbox) strikeSupervisor(sig unix.Signal) bool { return struck(b.PID, os.Getpid(), sig) }

// struck is [harness.Strike] without the handle.
func struck(pid, parent int, sig unix.Signal) bool {
	target, ok := harness.Strike(pid, parent, sig)
	if ok {
		target.Close()
	}
	return ok
}

// ended waits until the supervisor exits by itself.
func (b *sandbox) ended(limit time.Duration) {
	b.e.t.Helper()
	harness.Until(b.e.t, harness.Scaled(limit), "the end of the supervisor", func() bool { return harness.Exited(b.PID) })
}

// alive asserts that a command can be run in the sandbox.
func (b *sandbox) alive() {
	b.e.t.Helper()
	b.e.do("exec", "--timeout", lifetime, b.ID, "true").Exits(b.e.t, 0)
}

// left returns the processes that are still there: orphans, those with the marker, and those
// in one of the namespaces. Zombies do not count if the test process has to reap them.
func (e *env) left(living ...*sandbox) (found []harness.Proc) {
	skip := map[int]bool{}
	for _, b := range living {
		skip[b.PID] = true
		for _, p := range harness.Below(b.PID) {
			skip[p.PID] = true
		}
	}
	for _, p := range append(orphans(), e.members()...) {
		if skip[p.PID] || harness.Registered(p.PID) || p.State == "Z" && p.Parent == os.Getpid() {
			continue
		}
		skip[p.PID] = true
		found = append(found, p)
	}
	return found
}

// gone asserts that all processes but those of living sandboxes exit within a duration.
func (e *env) gone(limit time.Duration, living ...*sandbox) {
	e.t.Helper()
	var found []harness.Proc
	if !within(limit, func() bool {
		reapZombies(living...) // PID 1 of a room exits only after an init in it was reaped (pid_namespaces(7))
		found = e.left(living...)
		return len(found) == 0
	}) {
		e.t.Errorf("%d processes are left:\n%s", len(found), harness.List(found))
		harness.Sweep(e.t, func() []harness.Proc { return e.left(living...) })
	}
}

// reapZombies reaps the zombies that supervisors and killed processes have left to the test
// process, except those of living sandboxes.
func reapZombies(living ...*sandbox) {
	for _, p := range harness.Orphans() {
		if p.State == "Z" && !slices.ContainsFunc(living, func(b *sandbox) bool { return b.PID == p.PID }) {
			_, _ = unix.Wait4(p.PID, nil, unix.WNOHANG, nil) // a zombie, and ours
		}
	}
}

// reapInner reaps inits and rooms whose ancestors were all killed. PID 1 of a room exits only
// after an init in it was reaped (pid_namespaces(7)), and cleanup waits for that.
func reapInner() {
	for _, pid := range harness.Children(os.Getpid()) {
		if p, ok := harness.ReadProc(pid); ok && p.State == "Z" && p.Parent == os.Getpid() && len(harness.PIDs(pid)) > 1 {
			_, _ = unix.Wait4(pid, nil, unix.WNOHANG, nil) // a zombie, and ours
		}
	}
}

// finish asserts that all processes have exited, and ends those that have not.
func (e *env) finish() {
	e.t.Helper()
	e.gone(settle)
	reapOrphans(e.t)
	e.ns.Close()
}

// cleared asserts that the state directory holds no trace of a sandbox, and that nothing is mounted outside sandboxes.
func (e *env) cleared() {
	e.t.Helper()
	err := filepath.WalkDir(e.state, func(path string, d os.DirEntry, err error) error {
		switch path {
		case e.state, filepath.Join(e.state, "lock"), filepath.Join(e.state, "names"):
		default:
			e.t.Errorf("left in the state directory: %s", strings.TrimPrefix(path, e.state))
		}
		return err
	})
	check.That(e.t, err == nil, "%v", err)
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	check.That(e.t, err == nil && !strings.Contains(string(mounts), e.top), "mounted: %s, %v", mounts, err)
}

// clean ends all sandboxes and removes their records with sbxrun's own commands.
func (e *env) clean() {
	e.t.Helper()
	e.ok("kill", "--all", "--grace", "0")
	e.ok("cleanup")
	e.gone(settle)
	// A supervisor whose client was killed early ends by itself, and may write its record after the first cleanup.
	e.ok("cleanup")
	e.cleared()
}

// bystander is a child of the test process that sbxrun must not touch.
type bystander struct {
	t   testing.TB
	cmd *exec.Cmd
	id  harness.Identity
}

func newBystander(t testing.TB) *bystander {
	t.Helper()
	return newBystanderBy(t, exec.Command("sleep", "600"))
}

// newInit returns a bystander that is PID 1 of a namespace, as every init in a record is.
func newInit(t testing.TB) *bystander {
	t.Helper()
	cmd := exec.Command("sleep", "600")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID}
	if os.Geteuid() != 0 {
		cmd.SysProcAttr.Cloneflags |= unix.CLONE_NEWUSER
	}
	return newBystanderBy(t, cmd)
}

func newBystanderBy(t testing.TB, cmd *exec.Cmd) *bystander {
	t.Helper()
	b := &bystander{t: t, cmd: cmd}
	done, err := harness.StartCommand(cmd)
	check.Must(t, err)
	t.Cleanup(func() {
		_ = b.cmd.Process.Kill() // a test that ends it expects that
		_ = b.cmd.Wait()
		done()
	})
	boot := harness.ReadFile(t, "/proc/sys/kernel/random/boot_id")
	start, ns := harness.Identify(t, cmd.Process.Pid)
	b.id = harness.Identity{PID: cmd.Process.Pid, Start: start, BootID: strings.TrimSpace(string(boot)), Namespace: ns}
	return b
}

// unharmed asserts that no signal has reached the bystander.
func (b *bystander) unharmed() bool {
	b.t.Helper()
	p, ok := harness.ReadProc(b.id.PID)
	if !ok || p.State != "S" && p.State != "R" && p.State != "D" || p.Start != strconv.FormatUint(b.id.Start, 10) {
		b.t.Errorf("a stranger was signalled: %v", p)
		return false
	}
	return true
}
