package cleanup

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/result"
	"github.com/sbxrun/sbxrun/internal/state"
)

// Finding is one thing that a sandbox, or its crash, has left.
type Finding struct {
	Kind string `json:"kind"` // record, init, held-init, damaged, zombie, cgroup
	ID   string `json:"id,omitempty"`
	Name string `json:"name,omitempty"`
	PID  int    `json:"pid,omitempty"`
	What string `json:"what"` // for people
	Done bool   `json:"done"` // it is gone; never with DryRun
	Err  string `json:"error,omitempty"`
}

// SweepOptions say how far a sweep goes.
type SweepOptions struct {
	OlderThan time.Duration // records of what has ended since are kept
	DryRun    bool
	// KeepRecords leaves all records, also those that are damaged, and cgroups, which one
	// that is just being made looks like if it has no process yet: only processes end.
	// For a sweep that nobody has asked for, and that others start beside.
	KeepRecords bool
	// Quick leaves all records, and does not look through /proc: what other commands
	// do on the way.
	Quick bool
}

// sweepBound is how long a sweep waits for the end of one init.
const sweepBound = 5 * time.Second

type sweep struct {
	SweepOptions
	found []Finding
}

func (s *sweep) note(f Finding) { s.found = append(s.found, f) }

// Sweep removes what has no supervisor any more: processes, each after it was
// verified to be what a record says, and records. A supervisor that lives is never
// touched, nor is anything of its sandbox.
func Sweep(dir *state.Dir, o SweepOptions) []Finding {
	s := sweep{SweepOptions: o}
	entries, warnings := dir.List()
	for _, e := range entries {
		if !e.Alive {
			s.entry(e)
		}
	}
	if o.Quick {
		return s.found
	}
	if !o.KeepRecords {
		s.damaged(dir, warnings)
	}
	s.processes()
	if !o.KeepRecords {
		s.cgroups() // what was ended just now may have had some
	}
	return s.found
}

// cgroups removes those that hold nothing and whose sbxrun and keeper are both dead: a
// keeper removes them otherwise.
func (s *sweep) cgroups() {
	machine, err := limits.Detect()
	if err != nil {
		return // a kernel without
	}
	for _, l := range machine.Leftovers() {
		s.do(Finding{Kind: "cgroup", ID: l.ID, What: "empty cgroup " + l.Dir}, func() error {
			return limits.RemoveDirs([]string{l.Dir}, time.Now().Add(sweepBound))
		})
	}
}

// damaged removes what has no usable record and does not live. Of what it may have
// known nothing is known: its processes are found by looking.
func (s *sweep) damaged(dir *state.Dir, warnings []error) {
	var failed, left []error
	if !s.DryRun {
		failed = dir.Sweep()
		_, left = dir.List() // what is still there has a supervisor
	}
	for _, err := range warnings {
		f := Finding{Kind: "damaged", What: err.Error(), Done: !s.DryRun}
		if slices.ContainsFunc(left, func(other error) bool { return other.Error() == err.Error() }) {
			f.Done = false
		}
		s.note(f)
	}
	for _, err := range failed {
		s.note(Finding{Kind: "damaged", What: "something in the state directory", Err: err.Error()})
	}
}

// do does what is to be done about a finding, unless this is only a look.
func (s *sweep) do(f Finding, what func() error) bool {
	if !s.DryRun {
		if err := what(); err != nil {
			f.Err = err.Error()
		} else {
			f.Done = true
		}
	}
	s.note(f)
	return f.Err == ""
}

// entry ends what a dead supervisor has left running, and removes its record.
func (s *sweep) entry(e *state.Entry) {
	ended := true
	if id := e.Record.Init; id != nil {
		init, err := id.Open()
		switch {
		case err == nil:
			f := Finding{Kind: "init", ID: e.ID, Name: e.Record.Name, PID: id.PID, What: "init of a sandbox without its supervisor"}
			ended = s.do(f, func() error { return end(init) })
			init.Close()
		case !errors.Is(err, proc.ErrGone):
			s.note(Finding{Kind: "init", ID: e.ID, Name: e.Record.Name, PID: id.PID, What: "init that cannot be verified, and is not touched", Err: err.Error()})
			ended = false
		}
	}
	if s.Quick || s.KeepRecords || !ended || s.young(e) {
		return
	}
	s.do(Finding{Kind: "record", ID: e.ID, Name: e.Record.Name, What: "record, logs and name: " + e.Status()}, e.Remove)
}

// young says whether a sandbox has ended, or begun if nobody knows its end, only
// within OlderThan.
func (s *sweep) young(e *state.Entry) bool {
	if s.OlderThan <= 0 {
		return false
	}
	at, err := time.Parse(result.TimeFormat, e.Record.CreatedAt)
	if err != nil {
		return false
	}
	if r := e.Record.Report; r != nil {
		at = at.Add(time.Duration(r.Duration * float64(time.Millisecond)))
	}
	return time.Since(at) < s.OlderThan
}

// end kills an init and waits, at most sweepBound, until all of its namespace is gone.
func end(init *proc.Process) error {
	if err := init.Signal(unix.SIGKILL); err != nil && !errors.Is(err, proc.ErrGone) {
		return err
	}
	return init.Wait(time.Now().Add(sweepBound))
}

// processes looks through /proc for what no record knows of: an init whose monitor
// and keeper were killed in the same instant, before it could ask to die with them
// (bubblewrap #633), waits for ever; and zombies.
func (s *sweep) processes() {
	dir, err := os.Open("/proc")
	if err != nil {
		s.note(Finding{Kind: "held-init", What: "inits that no record knows of", Err: err.Error()})
		return
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(-1) // what could be read is all there is to see
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil && pid > 1 {
			s.process(pid)
		}
	}
}

// process ends one process if it is an abandoned init, and reports it if it is a zombie
// of ours.
func (s *sweep) process(pid int) {
	st, err := proc.ReadStat(pid)
	if err != nil {
		return
	}
	if st.State == "Z" {
		s.zombie(st)
		return
	}
	// The pidfd first: all that follows is about the process that it holds, if that
	// has not ended in the end.
	init, err := proc.Open(pid)
	if err != nil {
		return
	}
	defer init.Close()
	if !abandoned(pid) || init.Exited() {
		return
	}
	s.do(Finding{Kind: "held-init", PID: pid, What: "init of a sandbox that has lost its keeper and monitor, and would stay for ever"}, func() error { return end(init) })
}

// abandoned says whether a process is the init of one of our sandboxes, and has lost
// all that could end it.
func abandoned(pid int) bool {
	if !marked(pid) || !own(pid) {
		return false
	}
	if n, err := proc.NSPID(pid); err != nil || n != 1 {
		return false
	}
	st, err := proc.ReadStat(pid)
	if err != nil {
		return false
	}
	if marked(st.Parent) {
		return unkept(st.Parent)
	}
	// A keeper, or an sbxrun in the place of one that was killed, is about to end it.
	above, err := proc.ReadStat(st.Parent)
	return err == nil && above.Comm != proc.KeeperName && above.Comm != "sbxrun"
}

// unkept says whether a monitor has lost its keeper, and so is about to die, maybe
// before its init has asked to die with it. It is in the session that the keeper
// leads, and as long as it is, the keeper's number is nobody else's.
func unkept(monitor int) bool {
	st, err := proc.ReadStat(monitor)
	if err != nil || st.Session <= 1 || st.Session == monitor {
		return false
	}
	keeper, err := proc.ReadStat(st.Session)
	return err == proc.ErrGone || err == nil && (keeper.State == "Z" || keeper.State == "X")
}

// marked says whether a process is our bubblewrap, by its first argument.
func marked(pid int) bool {
	want := proc.Marker(os.Geteuid())
	// Not all of it: a process can say that gigabytes of its memory are its arguments
	// (prctl(2), PR_SET_MM_MAP).
	fd, err := unix.Open("/proc/"+strconv.Itoa(pid)+"/cmdline", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer func() { _ = unix.Close(fd) }() // only read from
	begin := make([]byte, len(want)+1)
	n, err := unix.Read(fd, begin)
	return err == nil && n == len(begin) && string(begin) == want+"\x00"
}

// own says whether a process is the caller's; to root all are.
func own(pid int) bool {
	var st unix.Stat_t
	err := unix.Stat("/proc/"+strconv.Itoa(pid), &st)
	return err == nil && (os.Geteuid() == 0 || int(st.Uid) == os.Geteuid())
}

// zombie reports one of ours that its parent does not collect. Nobody else can.
func (s *sweep) zombie(st proc.Stat) {
	// What is in a sandbox can have any name. Ours are not in one, and no other sbxrun's
	// namespace is ours to report on.
	if st.Comm != proc.KeeperName && st.Comm != "sbxrun" || !own(st.PID) || proc.Nested(st.PID) {
		return
	}
	above, err := proc.ReadStat(st.Parent)
	if err != nil || above.Comm == proc.KeeperName || above.Comm == "sbxrun" {
		return // about to be collected
	}
	s.note(Finding{Kind: "zombie", PID: st.PID, What: fmt.Sprintf("zombie of %s, which only its parent %d (%s) can collect", st.Comm, st.Parent, above.Comm)})
}
