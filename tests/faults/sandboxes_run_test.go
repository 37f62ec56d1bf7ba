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

	"github.com/sbxrun/sbxrun/tests/harness"
)

// This file is how the tests of this package handle sandboxes that live on: each
// test has a state directory of its own, and in the end nothing may be left of
// what was started with it.

// lifetime ends every sandbox of a test, should the test not, and what ends by itself. It is far
// above what a test takes.
const lifetime = "10m"

// estate is a state directory and what belongs to it.
type estate struct {
	t      testing.TB
	marker string // in the environment of every command and payload
	top    string
	state  string   // SBXRUN_STATE_DIR
	out    string   // what the payloads see as /out
	wrap   []string // a command that becomes sbxrun

	mu sync.Mutex
	n  int               // commands so far
	ns map[uint64]string // PID namespaces that were seen, and the handles that keep them
	h  []*os.File
}

func newEstate(t testing.TB) *estate {
	t.Helper()
	top := harness.Dir(t)
	e := &estate{t: t, top: top, state: filepath.Join(top, "state"), out: harness.SharedDir(t), ns: map[uint64]string{},
		marker: fmt.Sprintf("estate-%d-%d", os.Getpid(), time.Now().UnixNano())}
	harness.Must(t, os.Mkdir(e.state, 0o700))
	t.Cleanup(e.finish)
	return e
}

// call is one command in progress: sbxrun, or what starts it.
type call struct {
	pid    int
	begin  time.Time
	end    time.Time // after exited
	cmd    *exec.Cmd
	exited chan struct{}
	files  [2]string // stdout, stderr
}

// said is how a command ended.
type said struct {
	args           []string
	code           int
	signal         syscall.Signal
	stdout, stderr string
	took           time.Duration
}

func (s said) String() string {
	return fmt.Sprintf("%.120q: code %d, signal %d, stdout %.300q, stderr %.500q", s.args, s.code, int(s.signal), s.stdout, s.stderr)
}

var registering sync.Mutex

// begin starts sbxrun. It may be called by several goroutines.
func (e *estate) begin(args ...string) (*call, error) {
	binary := harness.Binary(e.t)
	if len(args) > 0 && args[0] == "kill" {
		args = slices.Concat(args[:1], harness.Proof(), args[1:])
	}
	return e.command(nil, slices.Concat(e.wrap, []string{binary}, args)...)
}

// command starts any command in sbxrun's environment.
func (e *estate) command(adjust func(*exec.Cmd), words ...string) (*call, error) {
	e.mu.Lock()
	e.n++
	name := filepath.Join(e.top, fmt.Sprintf("call-%d", e.n))
	e.mu.Unlock()
	c := &call{files: [2]string{name + ".out", name + ".err"}, exited: make(chan struct{}), cmd: exec.Command(words[0], words[1:]...)}
	c.cmd.Dir = e.out
	c.cmd.Env = []string{"PATH=" + harness.Path, harness.Bwrap(), "HOME=/nonexistent", "LANG=C.UTF-8", "TMPDIR=" + e.top,
		"SBXRUN_STATE_DIR=" + e.state, "SBXRUN_DATA_DIR=" + filepath.Join(e.top, "data"), harness.MarkerName + "=" + e.marker}
	for i, to := range c.files {
		f, err := os.Create(to)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		if i == 0 {
			c.cmd.Stdout = f
		} else {
			c.cmd.Stderr = f
		}
	}
	if adjust != nil {
		adjust(c.cmd)
	}
	c.begin = time.Now()
	done, err := harness.Register(func() (int, error) {
		registering.Lock()
		defer registering.Unlock()
		if err := startBare(c.cmd); err != nil {
			return 0, err
		}
		registered[c.cmd.Process.Pid]++
		return c.cmd.Process.Pid, nil
	})
	if err != nil {
		return nil, err
	}
	c.pid = c.cmd.Process.Pid
	go func() {
		_ = c.cmd.Wait() // shows in ProcessState
		c.end = time.Now()
		registering.Lock()
		unregister(c.pid)
		registering.Unlock()
		done()
		close(c.exited)
	}()
	return c, nil
}

func (c *call) over() bool {
	select {
	case <-c.exited:
		return true
	default:
		return false
	}
}

// wait waits for a command's end; one that hangs is killed, and fails the test.
func (e *estate) wait(c *call) said {
	e.t.Helper()
	reaping := time.NewTicker(2 * time.Millisecond)
	defer reaping.Stop()
	late := time.After(bound)
	for waiting := true; waiting; {
		select {
		case <-c.exited:
			waiting = false
		case <-reaping.C:
			reapInner()
		case <-late:
			waiting = false
			e.t.Errorf("%.120q still runs after %v; below it:\n%s", c.cmd.Args, bound, stuck(c.pid)+describe(below(c.pid)))
			_ = c.cmd.Process.Kill() // it has just ended
			<-c.exited
		}
	}
	s := said{args: c.cmd.Args, code: c.cmd.ProcessState.ExitCode(), took: c.end.Sub(c.begin)}
	if ws := c.cmd.ProcessState.Sys().(syscall.WaitStatus); ws.Signaled() {
		s.signal = ws.Signal()
	}
	for i, name := range c.files {
		data, err := os.ReadFile(name)
		if err != nil {
			e.t.Errorf("%v", err)
		}
		if i == 0 {
			s.stdout = string(data)
		} else {
			s.stderr = string(data)
		}
	}
	e.unpanicked(s)
	return s
}

// unpanicked asserts that a command has not ended as a Go program does in distress.
func (e *estate) unpanicked(s said) {
	e.t.Helper()
	for _, what := range []string{"panic:", "goroutine ", "fatal error:", "runtime: "} {
		if strings.Contains(s.stderr, what) {
			e.t.Errorf("it panicked: %v", s)
		}
	}
}

// do runs sbxrun to its end.
func (e *estate) do(args ...string) said {
	e.t.Helper()
	c, err := e.begin(args...)
	harness.Must(e.t, err)
	return e.wait(c)
}

// ok is do for what has to succeed.
func (e *estate) ok(args ...string) said {
	e.t.Helper()
	s := e.do(args...)
	if s.code != 0 {
		e.t.Fatalf("want 0: %v", s)
	}
	return s
}

// refused asserts that sbxrun has refused with this code and in one line.
func (e *estate) refused(s said, codes ...int) {
	e.t.Helper()
	if !slices.Contains(codes, s.code) {
		e.t.Errorf("want %v: %v", codes, s)
	}
	outcome{code: s.code, signal: s.signal, stderr: s.stderr}.oneLine(e.t)
}

// startFlags are what every sandbox of a test is started with.
func (e *estate) startFlags(flags ...string) []string {
	own := []string{"start", "--json", "--env", harness.MarkerName + "=" + e.marker, "--bind", e.out + ":/out"}
	if !slices.Contains(flags, "--timeout") {
		own = append(own, "--timeout", lifetime)
	}
	return slices.Concat(own, harness.Proof(), flags)
}

// sandbox is one that runs.
type sandbox struct {
	e    *estate
	ID   string `json:"id"`
	Name string `json:"name"`
	PID  int    `json:"supervisor_pid"`
	// init's identity, from the record.
	init record
	ns   uint64
}

// record is the part of a sandbox's record that is about processes, as somebody
// outside the project would declare it.
type record struct {
	Phase      string    `json:"phase"`
	Supervisor identity  `json:"supervisor"`
	Init       *identity `json:"init"`
	Report     *struct {
		Cause    string `json:"cause"`
		ExitCode int    `json:"exit_code"`
		Started  bool   `json:"started"`
		Teardown struct {
			Verdict string `json:"verdict"`
		} `json:"teardown"`
	} `json:"report"`
}

type identity struct {
	PID    int    `json:"pid"`
	Start  uint64 `json:"start_time"`
	BootID string `json:"boot_id"`
	PIDNS  uint64 `json:"pid_namespace"`
}

// start starts a sandbox; without a payload it idles.
func (e *estate) start(flags []string, payload ...string) *sandbox {
	e.t.Helper()
	args := e.startFlags(flags...)
	if len(payload) > 0 {
		args = append(append(args, "--"), payload...)
	}
	s := e.ok(args...)
	box := &sandbox{e: e}
	if err := json.Unmarshal([]byte(s.stdout), box); err != nil || box.PID <= 1 {
		e.t.Fatalf("no sandbox in %q: %v", s.stdout, err)
	}
	box.init = box.record()
	if box.init.Init == nil {
		e.t.Fatalf("started, but without an init in its record")
	}
	box.ns = e.remember(box.init.Init.PID)
	return box
}

// remember notes a PID namespace, and keeps its inode from being used again.
func (e *estate) remember(pid int) uint64 {
	if pid <= 1 {
		return 0
	}
	held, err := os.Open(fmt.Sprintf("/proc/%d/ns/pid", pid))
	if err != nil {
		return 0 // it has ended, or does not belong to us
	}
	var mine, its unix.Stat_t
	if unix.Stat("/proc/self/ns/pid", &mine) != nil || unix.Fstat(int(held.Fd()), &its) != nil || its.Ino == mine.Ino {
		held.Close()
		return 0
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if _, known := e.ns[its.Ino]; known {
		held.Close()
		return its.Ino
	}
	e.ns[its.Ino] = fmt.Sprintf("below %d", pid)
	e.h = append(e.h, held)
	return its.Ino
}

func (b *sandbox) path(name string) string { return filepath.Join(b.e.state, b.ID, name) }

func (b *sandbox) record() (r record) {
	b.e.t.Helper()
	data, err := os.ReadFile(b.path("record.json"))
	harness.Must(b.e.t, err)
	harness.Must(b.e.t, json.Unmarshal(data, &r))
	return r
}

// strike sends a signal to a process that is a child of a certain other one, and
// says whether it lived. The pidfd comes first and the look second.
func strike(pid, parent int, sig unix.Signal) (target *harness.Target, hit bool) {
	if pid <= 1 {
		return nil, false
	}
	target, err := harness.Open(pid)
	if err != nil {
		return nil, false
	}
	p, ok := harness.ReadProc(pid)
	if !ok || p.Parent != parent || p.State == "Z" || p.State == "X" || target.Signal(sig) != nil {
		target.Close()
		return nil, false
	}
	return target, true
}

// strikeSupervisor is strike for the supervisor, a child of the test's as soon as
// its client has ended.
func (b *sandbox) strikeSupervisor(sig unix.Signal) (*harness.Target, bool) {
	return strike(b.PID, os.Getpid(), sig)
}

// ended waits for the supervisor's own end.
func (b *sandbox) ended(within time.Duration) {
	b.e.t.Helper()
	b.e.until(harness.Scaled(within), "the end of the supervisor", func() bool { return zombie(b.PID) })
}

// until waits for a condition.
func (e *estate) until(within time.Duration, what string, holds func() bool) bool {
	e.t.Helper()
	for begin := time.Now(); !holds(); pause(begin) {
		if time.Since(begin) > within {
			e.t.Errorf("waited %v in vain for %s", within, what)
			return false
		}
	}
	return true
}

// alive asserts that a command can be run in the sandbox.
func (b *sandbox) alive() {
	b.e.t.Helper()
	if s := b.e.do("exec", "--timeout", lifetime, b.ID, "true"); s.code != 0 {
		b.e.t.Errorf("the sandbox does not live any more: %v", s)
	}
}

// wrote says whether a payload has made a file.
func (e *estate) wrote(name string) bool {
	_, err := os.Stat(filepath.Join(e.out, name))
	return err == nil
}

// left is what still is of an estate: everything below the test that it did not
// start itself, what has the marker, and what is in one of the namespaces. The
// zombies whose parent is the test do not count: nobody else can collect them.
func (e *estate) left(living ...*sandbox) (found []harness.Proc) {
	skip := map[int]bool{}
	for _, b := range living {
		skip[b.PID] = true
		for _, p := range below(b.PID) {
			skip[p.PID] = true
		}
	}
	registering.Lock()
	mine := map[int]bool{os.Getpid(): true}
	for pid := range registered {
		mine[pid] = true
	}
	registering.Unlock()
	add := func(p harness.Proc) {
		if skip[p.PID] || mine[p.PID] || p.State == "Z" && p.Parent == os.Getpid() {
			return
		}
		skip[p.PID] = true
		found = append(found, p)
	}
	for _, p := range orphans() {
		add(p)
	}
	for _, p := range e.members() {
		add(p)
	}
	return found
}

// members are the processes with the marker, or in one of the namespaces.
func (e *estate) members() []harness.Proc {
	e.mu.Lock()
	defer e.mu.Unlock()
	return marked(e.marker, func(inode uint64) bool { return e.ns[inode] != "" })
}

// rememberAll notes the PID namespaces of a family.
func (e *estate) rememberAll(pids [roles]int) {
	for _, pid := range pids[roleRoom:] {
		e.remember(pid)
	}
}

// gone asserts that nothing is left but the living: soon, for what ends by itself.
func (e *estate) gone(within time.Duration, living ...*sandbox) {
	e.t.Helper()
	var found []harness.Proc
	for deadline := time.Now().Add(within); ; time.Sleep(time.Millisecond) {
		if found = e.left(living...); len(found) == 0 {
			break
		}
		if time.Now().After(deadline) {
			e.t.Errorf("%d processes are left:\n%s", len(found), describe(found))
			sweep(e.t, func() []harness.Proc { return e.left(living...) })
			break
		}
		// The PID 1 of a room has not ended before an init in it that has come to us is
		// reaped (pid_namespaces(7)).
		reapZombies(living...)
	}
}

// reapZombies collects what ended supervisors, and killed ones, have left to the
// test, so far, and nothing of the living.
func reapZombies(keep ...*sandbox) {
	for _, p := range strays() {
		if p.State == "Z" && !slices.ContainsFunc(keep, func(b *sandbox) bool { return b.PID == p.PID }) {
			_, _ = unix.Wait4(p.PID, nil, unix.WNOHANG, nil) // it is a zombie, and ours
		}
	}
}

// reapInner collects inits and rooms that have come to the test because all above them was
// killed. A room's PID 1 has not ended before an init in it is reaped
// (pid_namespaces(7)), and so neither has who waits for that, as cleanup does.
func reapInner() {
	for _, pid := range childrenOf(os.Getpid()) {
		if p, ok := harness.ReadProc(pid); ok && p.State == "Z" && p.Parent == os.Getpid() && len(pidsOf(pid)) > 1 {
			_, _ = unix.Wait4(pid, nil, unix.WNOHANG, nil) // it is a zombie, and ours
		}
	}
}

// finish is the end of every test with sandboxes: nothing is left, and what is all
// the same is ended, so that no other test suffers.
func (e *estate) finish() {
	e.t.Helper()
	e.gone(settle)
	reapStrays(e.t)
	for _, h := range e.h {
		h.Close()
	}
}

// cleared asserts that the state directory holds no trace of a sandbox, and that nothing is mounted
// outside of them.
func (e *estate) cleared() {
	e.t.Helper()
	err := filepath.WalkDir(e.state, func(path string, d os.DirEntry, err error) error {
		switch path {
		case e.state, filepath.Join(e.state, "lock"), filepath.Join(e.state, "names"):
		default:
			e.t.Errorf("left in the state directory: %s", strings.TrimPrefix(path, e.state))
		}
		return err
	})
	if err != nil {
		e.t.Errorf("%v", err)
	}
	if mounts, err := os.ReadFile("/proc/self/mountinfo"); err != nil || strings.Contains(string(mounts), e.top) {
		e.t.Errorf("mounted: %s, %v", mounts, err)
	}
}

// clean ends all sandboxes and removes their records, by sbxrun's own commands.
func (e *estate) clean() {
	e.t.Helper()
	e.ok("kill", "--all", "--grace", "0")
	e.ok("cleanup")
	e.gone(settle)
	// A supervisor whose start has died before it was there ends by itself, and its record
	// may have come after the first.
	e.ok("cleanup")
	e.cleared()
}

// bystander is a process that sbxrun has no business with: a child of the test.
type bystander struct {
	t   testing.TB
	cmd *exec.Cmd
	id  identity
}

func newBystander(t testing.TB) *bystander {
	t.Helper()
	return newBystanderBy(t, exec.Command("sleep", "600"))
}

// newInit is one that is PID 1 of a namespace, as all are that a record can name as inits.
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
	done, err := harness.Register(func() (int, error) {
		registering.Lock()
		defer registering.Unlock()
		if err := b.cmd.Start(); err != nil {
			return 0, err
		}
		registered[b.cmd.Process.Pid]++
		return b.cmd.Process.Pid, nil
	})
	harness.Must(t, err)
	t.Cleanup(func() {
		_ = b.cmd.Process.Kill() // it has ended: seen before
		_ = b.cmd.Wait()
		registering.Lock()
		unregister(b.cmd.Process.Pid)
		registering.Unlock()
		done()
	})
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	harness.Must(t, err)
	p, ok := harness.ReadProc(b.cmd.Process.Pid)
	if !ok {
		t.Fatal("the bystander has ended")
	}
	begun, err := strconv.ParseUint(p.Start, 10, 64)
	harness.Must(t, err)
	b.id = identity{PID: p.PID, Start: begun, BootID: strings.TrimSpace(string(boot)), PIDNS: namespace(t, p.PID)}
	return b
}

// unharmed asserts that nobody has signalled the bystander.
func (b *bystander) unharmed() bool {
	b.t.Helper()
	p, ok := harness.ReadProc(b.id.PID)
	if !ok || p.State != "S" && p.State != "R" && p.State != "D" || p.Start != strconv.FormatUint(b.id.Start, 10) {
		b.t.Errorf("a stranger was signalled: %v", p)
		return false
	}
	return true
}
