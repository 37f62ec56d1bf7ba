package harness

import (
	"encoding/json"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
)

type Sandbox struct {
	ID, Name   string
	Marker     string // of its command; its execs have others
	NS         uint64 // PID namespace of its room
	commandNS  uint64 // PID namespace of its command, 0 without one
	Supervisor *Adopted
	Init       *Target // nil if it had exited when the harness looked
	State      *State
	// Busy is set by a test whose command creates and ends processes all the time. Execs then
	// don't compare the sandbox's processes before and after.
	Busy bool
	// Dying is set by a test that ends the sandbox while execs run.
	Dying bool

	seen    Namespaces
	ends    bool // the test has killed its supervisor
	orphans bool // see AdoptAll
}

// Record is the output of inspect as a user would declare it.
type Record struct {
	ID         string            `json:"id"`
	Name       string            `json:"name"`
	Tags       map[string]string `json:"tags"`
	Argv       []string          `json:"argv"`
	Status     string            `json:"status"`
	Phase      string            `json:"phase"` // in record.json only
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
	Start     uint64 `json:"start_time"` // in clock ticks since boot
	BootID    string `json:"boot_id"`
	Namespace uint64 `json:"pid_namespace"`
}

// know opens handles for the processes in the record.
func (b *Sandbox) know() {
	rec := b.Inspect()
	check.That(b.State.T, rec.Supervisor.PID == b.Supervisor.PID, "start --json says that the supervisor is %d, inspect %d", b.Supervisor.PID, rec.Supervisor.PID)
	if rec.Init == nil || !rec.Alive {
		return
	}
	init, err := Open(rec.Init.PID)
	if err != nil {
		return // it has exited
	}
	if b.seen.Remember(rec.Init.PID) != rec.Init.Namespace {
		init.Close()
		return // it has just exited, and this is another process
	}
	b.NS, b.Init = rec.Init.Namespace, init
	for range 10 { // Children may miss one
		if b.commandNS = commandNS(b.Supervisor.PID); b.commandNS != 0 || len(rec.Argv) == 0 {
			break
		}
	}
}

// commandNS returns the PID namespace of a sandbox's own command, 0 without one: that of the child
// of the init below the supervisor's keeper.
func commandNS(supervisor int) uint64 {
	for _, keeper := range Children(supervisor) {
		for _, init := range Children(keeper) {
			p, ok := ReadProc(init)
			for _, payload := range Children(init) {
				if ok && p.Comm == "sbxrun-init" {
					return Namespace(payload)
				}
			}
		}
	}
	return 0
}

func (b *Sandbox) Inspect() Record {
	b.State.T.Helper()
	r := b.State.Run("inspect", b.ID)
	var recs []Record
	err := json.Unmarshal(r.Stdout, &recs)
	check.Require(b.State.T, err == nil && len(recs) == 1 && recs[0].ID == b.ID, "inspect %s: exit code %d, %v: %.2000s%s", b.ID, r.ExitCode, err, r.Stdout, r.Stderr)
	return recs[0]
}

// Alive asserts that the sandbox is running.
func (b *Sandbox) Alive() {
	b.State.T.Helper()
	if b.Supervisor.Ended() || b.Init == nil || b.Init.Ended() {
		b.State.T.Errorf("the sandbox %s has ended: %.2000s", b.ID, b.State.Run("inspect", b.ID).Stdout)
	}
}

// Ended waits until the sandbox's supervisor exits, and asserts that all its processes have exited.
func (b *Sandbox) Ended() Record {
	b.State.T.Helper()
	b.AwaitEnd()
	return b.Inspect()
}

// AwaitEnd is Ended for a sandbox whose record is removed at its end.
func (b *Sandbox) AwaitEnd() {
	b.State.T.Helper()
	check.Require(b.State.T, b.Supervisor.endsIn(Bound), "the supervisor of %s still runs after %v", b.ID, Bound)
	b.gone()
}

// Exec runs a command in the sandbox to its end. It asserts what [Process.Wait] does, and that the
// sandbox is unchanged. flags are those of exec.
func (b *Sandbox) Exec(o Options, flags []string, command ...string) *Result {
	b.State.T.Helper()
	return b.StartExec(o, flags, command...).Wait()
}

// StartExec starts a command in the sandbox. The test must call Wait.
func (b *Sandbox) StartExec(o Options, flags []string, command ...string) *Process {
	b.State.T.Helper()
	o.inside = b
	if o.T == nil {
		o.T = b.State.T
	}
	args := append(append([]string{"exec"}, flags...), b.ID, "--")
	return Start(o.T, b.State.options(o), append(args, command...)...)
}

// members returns the processes of the sandbox itself, without its execs.
func (b *Sandbox) members() map[identity]bool {
	found := map[identity]bool{}
	for _, p := range b.Members() {
		found[identity{p.PID, p.Start}] = true
	}
	return found
}

// Members returns the processes of the sandbox's room and of its own command; the command's init
// only if the caller may inspect it.
func (b *Sandbox) Members() []Proc {
	if b.NS == 0 {
		return nil
	}
	found := Members(b.NS)
	if b.commandNS != 0 {
		found = append(found, Members(b.commandNS)...)
	}
	return found
}

// unchanged asserts that an exec has left the sandbox running, with the same processes. Other
// execs that are just entering disappear by themselves.
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
		b.State.T.Errorf("the exec has left in the sandbox:\n%s", List(left))
	}
}

// KillSupervisor kills the supervisor. The harness reaps its keeper.
func (b *Sandbox) KillSupervisor() {
	b.State.T.Helper()
	b.ends = true
	killSupervisor(b.State.T, b.ID, b.Supervisor)
}

// killSupervisor kills a supervisor, and returns when the keeper has exited too.
func killSupervisor(t T, of string, supervisor *Adopted) {
	t.Helper()
	keepers, err := killAdopting(supervisor.Target)
	check.Must(t, err)
	check.That(t, len(keepers) != 0, "the supervisor of %s had no keeper", of)
	awaitReaped(t, of, keepers)
	check.Require(t, supervisor.endsIn(settle), "the supervisor of %s still runs %v after it was killed", of, settle)
}

// AdoptAll adopts all processes of the sandbox, for a supervisor that gives up and leaves them.
func (b *Sandbox) AdoptAll() {
	b.State.T.Helper()
	b.orphans = true
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

// gone asserts that all processes of the sandbox have exited, and kills those that have not.
// Adopted ones are reaped concurrently, so they may take a moment.
func (b *Sandbox) gone() {
	b.State.T.Helper()
	deadline := time.Now()
	if b.orphans {
		deadline = deadline.Add(reap)
	}
	goneBy(b.State.T, b.Marker, b.NS, deadline)
}

// goneBy asserts that all processes of a run or a sandbox have exited, and kills those that have not.
func goneBy(t T, marker string, ns uint64, deadline time.Time) {
	t.Helper()
	var left []Proc
	if !holdsBy(deadline, func() bool {
		left = Find(marker, func(inode uint64) bool { return inode == ns })
		return len(left) == 0
	}) {
		t.Errorf("%d processes are left of what has ended:\n%s", len(left), List(left))
		for _, p := range left {
			end(p)
		}
	}
}

func (b *Sandbox) finish() {
	t := b.State.T
	if !b.Supervisor.endsIn(settle) {
		t.Errorf("the supervisor of %s still runs %v after it was killed", b.ID, settle)
		_ = b.Supervisor.Signal(unix.SIGKILL) // the test has failed already
		return
	}
	ws := b.Supervisor.Status
	check.That(t, b.ends || ws.Exited() && ws.ExitStatus() == 0, "the supervisor of %s has ended with wait status %#x", b.ID, ws)
	b.gone()
	b.Supervisor.Close()
	if b.Init != nil {
		b.Init.Close()
		b.seen.Close()
	}
}

// Files returns the contents of files of /proc/PID, of the supervisor and its descendants.
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
