package harness

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// State is a state directory of a test's own. When the test is over all of its
// sandboxes are killed, and it is asserted that
//
//   - nothing of them is left: by PID namespace, by marker, and every supervisor
//     has ended with 0 and was reaped;
//   - after sbxrun cleanup the directory holds its lock and no names, and that
//     is all.
type State struct {
	Dir  string
	Work string // current directory of what is run, unless Options say otherwise
	// Wrap is in front of every sbxrun, for another user's.
	Wrap []string

	T  T
	mu sync.Mutex // for the tests that start many at once
	// Everything that was started in the background.
	sandboxes []*Sandbox
	detached  []*Detached
}

// NewState makes one.
func NewState(t T) *State {
	t.Helper()
	s := &State{Dir: filepath.Join(SharedDir(t), "state"), Work: Dir(t), T: t}
	t.Cleanup(s.finish)
	return s
}

// Sandbox is a sandbox that was started.
type Sandbox struct {
	ID, Name   string
	Marker     string // of its command, and not of its execs
	NS         uint64 // its PID namespace
	Supervisor *Adopted
	Init       *Target // nil if it had ended when the harness looked
	State      *State
	// Busy is set by a test whose command starts and ends processes, so that an
	// exec cannot be asserted to have left no other in the sandbox.
	Busy bool
	// Dying is set by a test that ends the sandbox while execs run.
	Dying bool

	held *os.File // its PID namespace, see Process
	ends bool     // its supervisor was killed by the test
}

// Record is what inspect says, as somebody outside of the project would declare it.
type Record struct {
	ID         string            `json:"id"`
	Name       string            `json:"name"`
	Tags       map[string]string `json:"tags"`
	Argv       []string          `json:"argv"`
	Status     string            `json:"status"`
	Alive      bool              `json:"alive"`
	ExitCode   *int              `json:"exit_code"`
	Supervisor Identity          `json:"supervisor"`
	Init       *Identity         `json:"init"`
	Ready      *struct {
		Probe   string `json:"probe"`
		ReadyAt string `json:"ready_at"`
		Error   string `json:"error"`
	} `json:"ready"`
	Logs *struct {
		StdoutBytes     int64 `json:"stdout_bytes"`
		StderrBytes     int64 `json:"stderr_bytes"`
		StdoutTruncated bool  `json:"stdout_truncated"`
		StderrTruncated bool  `json:"stderr_truncated"`
	} `json:"logs"`
	Report *Report `json:"report"`
}

// Identity is a process in a record.
type Identity struct {
	PID       int    `json:"pid"`
	Namespace uint64 `json:"pid_namespace"`
}

// Run runs a command that only looks or waits, or kills: its arguments as given.
func (s *State) Run(args ...string) *Result {
	s.T.Helper()
	return s.Start(Options{}, args...).Wait()
}

// Start starts such a command. The test must Wait.
func (s *State) Start(o Options, args ...string) *Process {
	s.T.Helper()
	o.Bare, o.others = true, true
	return Start(s.T, s.options(o), args...)
}

func (s *State) options(o Options) Options {
	o.Env = append([]string{"SBXRUN_STATE_DIR=" + s.Dir}, o.Env...)
	o.Wrap = append(slices.Clone(s.Wrap), o.Wrap...)
	if o.Dir == "" {
		o.Dir = s.Work
	}
	return o
}

// Sandbox starts a sandbox, which must succeed: args are start's flags and the
// command, none for an idle one.
func (s *State) Sandbox(o Options, args ...string) *Sandbox {
	s.T.Helper()
	b, r := s.TrySandbox(o, args...)
	if b == nil || r.ExitCode != 0 {
		s.T.Fatalf("start %q: exit code %d: %s", args, r.ExitCode, r.Stderr)
	}
	return b
}

// TrySandbox starts a sandbox; nil if there is none.
func (s *State) TrySandbox(o Options, args ...string) (b *Sandbox, r *Result) {
	s.T.Helper()
	marker := newMarker()
	own := []string{"start", "--json", "--env", MarkerName + "=" + marker, "--env", "FIXTURE_SECONDS=60", "--ro-bind", fixturesBind(s.T)}
	o = s.options(o)
	o.Bare, o.others = true, true
	o.handover = func(stdout string) {
		var said struct {
			ID            string `json:"id"`
			Name          string `json:"name"`
			SupervisorPID int    `json:"supervisor_pid"`
		}
		if stdout == "" || json.Unmarshal([]byte(stdout), &said) != nil {
			return
		}
		b = &Sandbox{ID: said.ID, Name: said.Name, Marker: marker, State: s}
		var err error
		if b.Supervisor, err = Adopt(said.SupervisorPID); err != nil {
			s.T.Errorf("supervisor: %v", err)
			b = nil
		}
	}
	r = Start(s.T, o, append(own, args...)...).Wait()
	if b == nil {
		return nil, r
	}
	s.mu.Lock()
	s.sandboxes = append(s.sandboxes, b)
	s.mu.Unlock()
	b.know()
	return b, r
}

// know takes hold of what the record names.
func (b *Sandbox) know() {
	rec := b.Inspect()
	if rec.Supervisor.PID != b.Supervisor.PID {
		b.State.T.Errorf("start --json says that the supervisor is %d, inspect %d", b.Supervisor.PID, rec.Supervisor.PID)
	}
	if rec.Init == nil || !rec.Alive {
		return
	}
	init, err := Open(rec.Init.PID)
	if err != nil {
		return // it has ended
	}
	held, err := os.Open(procFile(rec.Init.PID, "ns/pid"))
	var st unix.Stat_t
	if err != nil || unix.Fstat(int(held.Fd()), &st) != nil || st.Ino != rec.Init.Namespace {
		init.Close()
		return // it has just ended, and this is another process by now
	}
	b.NS, b.held, b.Init = st.Ino, held, init
}

// Inspect is the sandbox's record.
func (b *Sandbox) Inspect() Record {
	b.State.T.Helper()
	r := b.State.Run("inspect", b.ID)
	var recs []Record
	if err := json.Unmarshal(r.Stdout, &recs); err != nil || len(recs) != 1 || recs[0].ID != b.ID {
		b.State.T.Fatalf("inspect %s: exit code %d, %v: %.2000s%s", b.ID, r.ExitCode, err, r.Stdout, r.Stderr)
	}
	return recs[0]
}

// Alive asserts that the sandbox lives.
func (b *Sandbox) Alive() {
	b.State.T.Helper()
	if b.Supervisor.Ended() || b.Init == nil || b.Init.Ended() {
		b.State.T.Errorf("the sandbox %s has ended: %.2000s", b.ID, b.State.Run("inspect", b.ID).Stdout)
	}
}

// Ended waits until the sandbox's supervisor has ended, and asserts that nothing
// is left then.
func (b *Sandbox) Ended() Record {
	b.State.T.Helper()
	b.reaped()
	b.gone(time.Now())
	return b.Inspect()
}

func (b *Sandbox) reaped() {
	b.State.T.Helper()
	select {
	case <-b.Supervisor.Reaped():
	case <-time.After(Bound):
		b.State.T.Fatalf("the supervisor of %s still runs after %v", b.ID, Bound)
	}
}

// Exec runs a command in the sandbox to its end, and asserts as [Process.Wait]
// does, and that the sandbox is as before. flags are exec's own.
func (b *Sandbox) Exec(o Options, flags []string, command ...string) *Result {
	b.State.T.Helper()
	return b.StartExec(o, flags, command...).Wait()
}

// StartExec starts a command in the sandbox. The test must Wait.
func (b *Sandbox) StartExec(o Options, flags []string, command ...string) *Process {
	b.State.T.Helper()
	o.inside = b
	args := append(append([]string{"exec"}, flags...), b.ID, "--")
	return Start(b.State.T, b.State.options(o), append(args, command...)...)
}

// members are the processes in the sandbox's own PID namespace, those of execs
// not among them.
func (b *Sandbox) members() map[identity]bool {
	found := map[identity]bool{}
	for _, p := range b.Members() {
		found[identity{p.PID, p.Start}] = true
	}
	return found
}

// Members are the processes in the sandbox's own PID namespace.
func (b *Sandbox) Members() []Proc {
	if b.NS == 0 {
		return nil
	}
	return membersOf(b.NS)
}

// unchanged asserts that an exec has left the sandbox alive, and nothing in its
// own PID namespace. What other execs have there, on their way in, goes by itself.
func (b *Sandbox) unchanged(before map[identity]bool) {
	b.State.T.Helper()
	if b.Dying {
		return
	}
	b.Alive()
	if b.Busy {
		return
	}
	var left []Proc
	if !holdsBy(time.Now().Add(reap), func() bool {
		left = slices.DeleteFunc(b.Members(), func(p Proc) bool { return before[identity{p.PID, p.Start}] })
		return len(left) == 0
	}) {
		b.State.T.Errorf("the exec has left in the sandbox:\n%s", list(left))
	}
}

// KillSupervisor kills the supervisor, from where on its keeper is ours to reap.
func (b *Sandbox) KillSupervisor() {
	b.State.T.Helper()
	b.ends = true
	var keepers []*Adopted
	for _, pid := range children(b.Supervisor.PID) {
		a, err := Adopt(pid)
		if err != nil {
			b.State.T.Fatalf("keeper: %v", err)
		}
		keepers = append(keepers, a)
	}
	Must(b.State.T, b.Supervisor.Signal(unix.SIGKILL))
	b.reaped()
	for _, a := range keepers {
		select {
		case <-a.Reaped():
		case <-time.After(settle):
			b.State.T.Fatalf("the keeper of %s still runs %v after its supervisor was killed", b.ID, settle)
		}
		a.Close()
	}
}

// AdoptAll makes everything that belongs to the sandbox now ours to reap, should
// it become our child: what a supervisor that gives up leaves behind.
func (b *Sandbox) AdoptAll() {
	b.State.T.Helper()
	pids := Descendants(b.Supervisor.PID)
	for _, p := range b.Members() {
		pids = append(pids, p.PID)
	}
	for _, pid := range pids {
		if a, err := Adopt(pid); err == nil {
			b.State.T.Cleanup(a.Close)
		}
	}
}

// gone asserts that no process of the sandbox is left, and ends those that are.
func (b *Sandbox) gone(deadline time.Time) {
	b.State.T.Helper()
	goneBy(b.State.T, b.Marker, b.NS, deadline)
}

func goneBy(t T, marker string, ns uint64, deadline time.Time) {
	t.Helper()
	var left []Proc
	if !holdsBy(deadline, func() bool {
		left = find(marker, ns)
		return len(left) == 0
	}) {
		t.Errorf("%d processes are left of a sandbox that has ended:\n%s", len(left), list(left))
		for _, p := range left {
			end(p)
		}
	}
}

// Detached is an exec --detach.
type Detached struct {
	ID         string
	Marker     string
	Supervisor *Adopted
	report     string
	t          T
}

// Detach starts an exec --detach of a command that goes on for a while, and
// returns when sbxrun has.
func (b *Sandbox) Detach(flags []string, command ...string) *Detached {
	t := b.State.T
	t.Helper()
	d := &Detached{Marker: newMarker(), report: filepath.Join(Dir(t), "report.json"), t: t}
	args := append([]string{"exec", "--detach", "--report", d.report, "--env", MarkerName + "=" + d.Marker}, flags...)
	o := b.State.options(Options{Bare: true, others: true})
	o.handover = func(stdout string) {
		d.ID = strings.TrimSpace(stdout)
		// The supervisor is our child, above whatever has the marker.
		var supervisor int
		holdsBy(time.Now().Add(settle), func() bool {
			for _, p := range find(d.Marker, 0) {
				for p.Parent != os.Getpid() && p.Parent > 1 {
					if above, ok := ReadProc(p.Parent); ok {
						p = above
					} else {
						break
					}
				}
				if p.Parent == os.Getpid() {
					supervisor = p.PID
				}
			}
			return supervisor != 0
		})
		var err error
		if d.Supervisor, err = Adopt(supervisor); err != nil {
			t.Fatalf("the supervisor of the detached command: %v", err)
		}
	}
	r := Start(t, o, append(append(args, b.ID, "--"), command...)...).Wait()
	if r.ExitCode != 0 || d.ID == "" || d.Supervisor == nil {
		t.Fatalf("exec --detach: exit code %d: %s%s", r.ExitCode, r.Stdout, r.Stderr)
	}
	b.State.mu.Lock()
	b.State.detached = append(b.State.detached, d)
	b.State.mu.Unlock()
	return d
}

// Ended waits for the end of a detached exec, asserts that nothing of it is left,
// and reads its report.
func (d *Detached) Ended() *Report {
	d.t.Helper()
	d.gone()
	data, err := os.ReadFile(d.report)
	Must(d.t, err)
	r, err := ParseReport(data)
	Must(d.t, err)
	for _, wrong := range r.check() {
		d.t.Errorf("report: %s; it is %.2000s", wrong, data)
	}
	if r.ID != d.ID {
		d.t.Errorf("exec --detach has printed the id %q, and the report says %q", d.ID, r.ID)
	}
	return r
}

func (d *Detached) gone() {
	d.t.Helper()
	select {
	case <-d.Supervisor.Reaped():
	case <-time.After(Bound):
		d.t.Fatalf("the detached command still runs after %v", Bound)
	}
	goneBy(d.t, d.Marker, 0, time.Now())
}

// finish ends all that the test has started here, and asserts that it has ended.
func (s *State) finish() {
	s.T.Helper()
	if slices.ContainsFunc(s.sandboxes, func(b *Sandbox) bool { return !b.Supervisor.Ended() }) {
		if r := s.Run("kill", "--all", "--grace", "0"); r.ExitCode != 0 {
			s.T.Errorf("kill --all: exit code %d: %s%s", r.ExitCode, r.Stdout, r.Stderr)
		}
	}
	for _, b := range s.sandboxes {
		b.finish()
	}
	for _, d := range s.detached {
		d.gone()
		d.Supervisor.Close()
	}
	if r := s.Run("cleanup"); r.ExitCode != 0 {
		s.T.Errorf("cleanup: exit code %d: %s%s", r.ExitCode, r.Stdout, r.Stderr)
	}
	s.empty()
}

func (b *Sandbox) finish() {
	t := b.State.T
	select {
	case <-b.Supervisor.Reaped():
	case <-time.After(settle):
		t.Errorf("the supervisor of %s still runs %v after it was killed", b.ID, settle)
		_ = b.Supervisor.Signal(unix.SIGKILL) // a failure already
		return
	}
	if ws := b.Supervisor.Status; !b.ends && (!ws.Exited() || ws.ExitStatus() != 0) {
		t.Errorf("the supervisor of %s has ended with wait status %#x", b.ID, ws)
	}
	b.gone(time.Now())
	b.Supervisor.Close()
	if b.Init != nil {
		b.Init.Close()
		b.held.Close()
	}
}

// empty asserts that the state directory is as if it had never been used.
func (s *State) empty() {
	s.T.Helper()
	var found []string
	err := filepath.WalkDir(s.Dir, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		switch name, _ := filepath.Rel(s.Dir, path); name {
		case ".", "lock", "names":
		default:
			found = append(found, name)
		}
		return nil
	})
	if err != nil && !os.IsNotExist(err) {
		s.T.Errorf("state directory: %v", err)
	}
	if len(found) > 0 {
		s.T.Errorf("left in the state directory after cleanup: %q", found)
	}
}

// As is a command that runs another as an unprivileged user, for Wrap. Only root
// can.
func As(uid int) []string {
	id := fmt.Sprint(uid)
	return []string{"setpriv", "--reuid", id, "--regid", id, "--clear-groups"}
}

// Members are the processes in the PID namespace of a run or exec, in the order of
// their pids.
func (p *Process) Members() []Proc {
	p.t.Helper()
	return membersOf(p.Namespace())
}

func membersOf(ns uint64) (found []Proc) {
	pids := allPIDs()
	slices.Sort(pids)
	for _, pid := range pids {
		if pidNamespace(pid) == ns {
			if p, ok := ReadProc(pid); ok {
				found = append(found, p)
			}
		}
	}
	return found
}

// Files is what these files of /proc/PID hold, of the supervisor and everything
// below it that is still there.
func (b *Sandbox) Files(names ...string) (all []string) {
	for _, pid := range append(Descendants(b.Supervisor.PID), b.Supervisor.PID) {
		for _, name := range names {
			if data, err := os.ReadFile(procFile(pid, name)); err == nil {
				all = append(all, string(data))
			}
		}
	}
	return all
}

// RSS is how much memory the process has resident, in bytes; 0 if it has ended.
func (t *Target) RSS() int64 { return memory(t.PID, "VmRSS:") }

// Forget makes the harness not ask for the sandbox again: the test has damaged its
// record.
func (b *Sandbox) Forget() {
	b.finish()
	b.State.mu.Lock()
	defer b.State.mu.Unlock()
	b.State.sandboxes = slices.DeleteFunc(b.State.sandboxes, func(other *Sandbox) bool { return other == b })
}

// Shared is the same directory for somebody else, who is not expected to get into
// it.
func Shared(s *State) *State { return &State{Dir: s.Dir, Work: s.Work, T: s.T} }

// Identify is when a process was started, in clock ticks since boot, and its PID
// namespace.
func Identify(t T, pid int) (start, ns uint64) {
	t.Helper()
	p, ok := ReadProc(pid)
	start, err := strconv.ParseUint(p.Start, 10, 64)
	if ns = pidNamespace(pid); !ok || err != nil || ns == 0 {
		t.Fatalf("process %d cannot be identified", pid)
	}
	return start, ns
}
