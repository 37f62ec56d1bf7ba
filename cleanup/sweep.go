// Package cleanup removes what sandboxes have left that nobody looks after any more.
//
// Whoever runs commands brings them to their end himself, and proves it; and should he be
// killed, the keeper of each sandbox does. [Sweep] is for what is left when both were
// killed in the same instant, or the machine was short of everything: it ends processes,
// each verified by the kernel's word to be a sandbox's, and removes records of sandboxes
// that `sbxrun start` has started. It is what `sbxrun cleanup` does.
//
// It may be called at any time, by several processes at once and beside sandboxes that are
// just being made: a sandbox with a living sbxrun, supervisor or keeper is never touched,
// but for one that a killed snapshot has left frozen, which is thawed.
package cleanup

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/snapshots"
	"github.com/sbxrun/sbxrun/internal/state"
)

// A Finding is one thing that a sandbox, or its crash, has left.
type Finding struct {
	// Kind is "init" (of a sandbox without its supervisor), "held-init" (the room of one
	// that no record knows of), "zombie" (which only its parent can collect), "record",
	// "damaged" (something in the state directory), "cgroup", "frozen" (a sandbox that stands
	// still for a snapshot that was killed), "volume" (what is left of one) or "apply" (what
	// sbxrun apply has not put in its place).
	Kind string `json:"kind"`
	ID   string `json:"id,omitempty"`   // of the sandbox, if it is known
	Name string `json:"name,omitempty"` // likewise
	PID  int    `json:"pid,omitempty"`
	What string `json:"what"`            // for people
	Done bool   `json:"done"`            // it is gone, or thawed; never with DryRun
	Err  string `json:"error,omitempty"` // why it is not
}

// Options say how far a sweep goes. The zero value is all that `sbxrun cleanup` does.
type Options struct {
	// StateDir is where the records are; "" for what SBXRUN_STATE_DIR says, or the
	// caller's own (docs/reference/state.md).
	StateDir string
	// Names, if there are any, are those sandboxes, or execs by their handles, that alone are
	// looked at. One that there is not, or that lives, is a Finding with Err.
	Names     []string
	OlderThan time.Duration // records of what has ended since are kept
	DryRun    bool          // only looks
	// KeepRecords leaves all records, also those that are damaged, what applies have left, and
	// cgroups, which one that is just being made looks like if it has no process yet: only
	// processes end.
	// For a sweep that nobody has asked for, and that others start beside.
	KeepRecords bool
	// Quick leaves all records, and does not look through /proc: what other commands
	// do on the way.
	Quick bool
}

// sweepBound is how long a sweep waits for the end of one init.
const sweepBound = 5 * time.Second

type sweep struct {
	Options
	found []Finding
}

func (s *sweep) note(f Finding) { s.found = append(s.found, f) }

// Sweep removes what has no supervisor any more, and returns what it has found. An error
// says that nothing was looked at: /proc is another PID namespace's, or the state directory
// is not the caller's. It waits for what it kills, for each at most five seconds.
func Sweep(o Options) ([]Finding, error) {
	c := state.Mine()
	if o.StateDir != "" {
		c.StateDir = o.StateDir
	}
	dir, err := state.Look(c)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	s := sweep{Options: o}
	for _, name := range o.Names {
		s.named(dir, name)
	}
	if len(o.Names) == 0 {
		s.all(dir)
	}
	return s.found, nil
}

// named removes one record.
func (s *sweep) named(dir *state.Dir, name string) {
	e, err := dir.Find(name)
	switch {
	case err != nil:
		reason := err.Error()
		if e := (*result.Error)(nil); errors.As(err, &e) && e.Hint != "" {
			reason += "; " + e.Hint
		}
		s.note(Finding{Kind: "record", Name: name, What: "no record", Err: reason})
	case e.Alive:
		s.note(Finding{Kind: "record", ID: e.ID, Name: e.Record.Name, What: e.What(), Err: "it has not ended; sbxrun kill ends it"})
	default:
		s.entry(e)
	}
}

func (s *sweep) all(dir *state.Dir) {
	entries, warnings := dir.List()
	for _, e := range entries {
		if !e.Alive {
			s.entry(e)
		}
	}
	if s.Quick {
		return
	}
	for _, e := range entries {
		if e.Alive {
			s.execs(e)
			s.frozen(dir, e)
		}
	}
	if !s.KeepRecords {
		s.damaged(dir, warnings)
		s.applies(dir)
	}
	s.processes()
	if !s.KeepRecords {
		s.cgroups() // what was ended just now may have had some
		s.snapshots()
	}
}

// snapshots removes what the caller's store of snapshots has and nobody needs.
func (s *sweep) snapshots() {
	dir, err := snapshots.Dir()
	if err != nil {
		return // so there is none
	}
	store, err := snapshots.Look(dir)
	if err != nil {
		s.note(Finding{Kind: "damaged", What: "directory of snapshots", Err: err.Error()})
		return
	}
	defer store.Close()
	for _, l := range store.Sweep(s.DryRun) {
		f := Finding{Kind: l.Kind, ID: l.ID, Name: l.Name, What: l.What, Done: !s.DryRun && l.Err == nil}
		if l.Err != nil {
			f.Err = l.Err.Error()
		}
		s.note(f)
	}
}

// cgroups removes those that hold nothing and whose sbxrun is dead, or could not remove them. Its
// keeper, which may live, does not mind.
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

// execs removes what detached execs have left in a sandbox that lives: those whose
// supervisor was killed. What is known of the others goes with the sandbox.
func (s *sweep) execs(box *state.Entry) {
	dir, err := box.Execs()
	if err != nil {
		return // it has just ended
	}
	defer dir.Close()
	entries, warnings := dir.List()
	for _, e := range entries {
		if e.Status() == "lost" {
			s.entry(e)
		}
	}
	if !s.KeepRecords {
		s.damaged(dir, warnings)
	}
}

// frozen thaws a sandbox that stands still for a snapshot that nobody takes any more: it and its guard
// were killed in the same instant.
func (s *sweep) frozen(dir *state.Dir, e *state.Entry) {
	_, a, ok := dir.Access(e.ID)
	if s.KeepRecords || !ok || !limits.Frozen(a.Cgroups) {
		return
	}
	lock, err := limits.LockFreezer(a.Cgroups, 0)
	if errors.Is(err, unix.EAGAIN) || !limits.Frozen(a.Cgroups) {
		lock.Close()
		return // the snapshot is being taken, or was just now
	}
	defer lock.Close()
	s.do(Finding{Kind: "frozen", ID: e.ID, Name: e.Record.Name, What: "sandbox that stands still for a snapshot that was killed"}, func() error {
		if err != nil {
			return err
		}
		return limits.ThawDirs(a.Cgroups)
	})
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
		init, err := id.OpenInit()
		switch {
		case err == nil:
			f := Finding{Kind: "init", ID: e.ID, Name: e.Record.Name, PID: id.PID, What: "init of " + e.What() + ", which has lost its supervisor"}
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

// processes looks through /proc for what no record knows of: the PID 1 of a room whose
// monitor and keeper were killed in the same instant, before it could ask to die with them
// (bubblewrap #633), waits for ever; and zombies.
func (s *sweep) processes() {
	pids, err := proc.All()
	if len(pids) == 0 && err != nil { // else what could be read is all there is to see
		s.note(Finding{Kind: "held-init", What: "rooms that no record knows of", Err: err.Error()})
	}
	for _, pid := range pids {
		if pid > 1 {
			s.process(pid)
		}
	}
}

// process ends one process if it is PID 1 of an abandoned room, and reports it if it is a
// zombie of ours.
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
	s.do(Finding{Kind: "held-init", PID: pid, What: "room of a sandbox that has lost its keeper, and would stay for ever"}, func() error { return end(init) })
}

// abandoned reports whether a process is PID 1 of one of our rooms, and all are dead that
// could end it. Nothing that it goes by can be forged or escaped by a payload, because all
// of it is the kernel's word about the room's PID 1 and its ancestors, which a payload can
// neither see nor change:
//
//   - it has the caller's uid; to root all are the same. Of somebody else's processes an
//     ordinary user could not look at the rest.
//   - It is number 1 of a PID namespace made in this one (NSpid has two numbers). What is in
//     a room has a number in the room's namespace too, and what a payload makes has three
//     or more: no process ever gets out of its namespace (pid_namespaces(7)). Or it is in
//     this PID namespace itself, and its user namespace has no uid_map yet: a bwrap that doctor
//     started and that waits for its parent to write the map. No process can move another one
//     into a user namespace (user_namespaces(7)).
//   - It executes our program, or is the bwrap that is just about to ([room.Holds]). That
//     program can do nothing but wait, and whoever runs it by himself loses nothing else.
//   - Its session is the one that the keeper has made, and the keeper, whose pid the
//     session's number is, is dead. That number is nobody else's for as long as a process
//     is in the session, and only a process itself can leave one (setsid(2)): our program
//     does not.
//   - Neither is sbxrun alive above it, which does the work of a keeper that was killed.
//
// So what lives below a living keeper, or a living sbxrun or supervisor, is never touched. Of
// these, sbxrun is known by its name or by its executable. That is a hint, and could be
// forged; but only by a process outside of all sandboxes that is an ancestor of the room,
// and all that comes of it is that the room stays.
func abandoned(pid int) bool {
	st, err := proc.ReadStat(pid)
	if err != nil || st.Session <= 1 || st.Session == pid || !own(pid) {
		return false
	}
	numbers, err := proc.NSPIDs(pid)
	if err != nil || !(len(numbers) == 2 && numbers[1] == 1 || len(numbers) == 1 && unmapped(pid)) {
		return false
	}
	return dead(st.Session) && room.Holds(pid) && !supervised(st)
}

// unmapped reports whether the uid_map of a process is empty (user_namespaces(7)).
func unmapped(pid int) bool {
	uids, err := proc.ReadFile(fmt.Sprintf("/proc/%d/uid_map", pid))
	return err == nil && len(uids) == 0
}

// dead reports whether a process has ended, even if its parent has not collected it yet.
func dead(pid int) bool {
	st, err := proc.ReadStat(pid)
	return err == proc.ErrGone || err == nil && st.Ended()
}

// supervised reports whether sbxrun is above a room whose keeper is dead, or may be.
func supervised(room proc.Stat) bool {
	for range 3 { // its monitor may die between two looks
		above, err := proc.ReadStat(room.Parent)
		if err == nil && above.Session == room.Session {
			above, err = proc.ReadStat(above.Parent) // above the monitor, which is dying, too
		}
		if err == nil {
			return isSbxrun(above)
		}
		if room, err = proc.ReadStat(room.PID); err != nil {
			return true
		}
	}
	return true
}

// isSbxrun reports whether a process is called sbxrun, or has the same executable as we.
func isSbxrun(st proc.Stat) bool {
	if st.Comm == "sbxrun" || st.Comm == proc.KeeperName {
		return true
	}
	its, err := executable(st.PID)
	if err != nil {
		return false // somebody else's, or nothing that has one
	}
	own, err := executable(os.Getpid())
	return err != nil || its == own
}

// executable identifies what a process executes: device and inode. It does not ask a file
// system in user space, which could keep us waiting (statx(2), AT_STATX_DONT_SYNC).
func executable(pid int) (id [3]uint64, err error) {
	fd, err := proc.OpenFile(pid, "exe")
	if err != nil {
		return id, err
	}
	defer unix.Close(fd)
	var st unix.Statx_t
	err = unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_INO, &st)
	return [3]uint64{uint64(st.Dev_major), uint64(st.Dev_minor), st.Ino}, err
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
