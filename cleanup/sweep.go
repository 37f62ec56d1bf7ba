// Package cleanup removes abandoned remains of sandboxes.
//
// A process that runs commands ends them and proves it. If it is killed, the keeper of each sandbox does that.
// [Sweep] handles the case that both were killed at the same time, or that the machine ran out of resources:
// it ends processes, each of which the kernel confirms to be a sandbox's, and removes records of sandboxes
// started by `sbxrun start`. `sbxrun cleanup` calls it.
//
// It may be called at any time, by several processes at once, and while sandboxes are being started. It does not
// touch a sandbox with a living sbxrun, supervisor or keeper, except for thawing one that a killed snapshot
// has left frozen.
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

// A Finding is something left behind by a sandbox or its crash.
type Finding struct {
	// Kind is "init" (of a sandbox without its supervisor), "held-init" (PID 1 of a sandbox without a record),
	// "zombie" (which only its parent can reap), "record", "damaged" (something in the state directory),
	// "cgroup", "frozen" (a sandbox left frozen by a killed snapshot), "volume" (remains of one) or "apply"
	// (temporary files of a killed sbxrun apply).
	Kind string `json:"kind"`
	ID   string `json:"id,omitempty"`   // of the sandbox, if known
	Name string `json:"name,omitempty"` // of the sandbox, if known
	PID  int    `json:"pid,omitempty"`
	What string `json:"what"`            // description
	Done bool   `json:"done"`            // removed or thawed; never with DryRun
	Err  string `json:"error,omitempty"` // why not
}

// Options restrict a sweep. The zero value does everything that `sbxrun cleanup` does.
type Options struct {
	// StateDir is the state directory; "" means $SBXRUN_STATE_DIR, or the caller's own (docs/reference/state.md).
	StateDir string
	// Names, if any, are the only sandboxes, or execs by their handles, to examine. One that does not exist
	// or is alive gives a Finding with Err.
	Names     []string
	OlderThan time.Duration // keep records of sandboxes that ended more recently
	DryRun    bool          // report, but change nothing
	// KeepRecords restricts the sweep to processes. It keeps all records, including damaged ones, files of
	// killed applies, and cgroups, because a new cgroup without a process looks like a leftover. It is for an
	// unrequested sweep while other sandboxes start.
	KeepRecords bool
	// Quick keeps all records and does not search /proc. Other commands use it in passing.
	Quick bool
}

// sweepBound is how long a sweep waits for the end of one init.
const sweepBound = 5 * time.Second

type sweep struct {
	Options
	found []Finding
}

func (s *sweep) note(f Finding) { s.found = append(s.found, f) }

// Sweep removes leftovers without a supervisor, and returns its findings. An error means that nothing was
// examined, because /proc shows another PID namespace or the state directory is not the caller's. Sweep waits
// up to five seconds for each process that it kills.
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
		s.note(Finding{Kind: "record", ID: e.ID, Name: e.Record.Name, What: e.What(), Err: "still running; end it with sbxrun kill"})
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
		s.cgroups() // the processes just ended may have left some
		s.snapshots()
	}
}

// snapshots removes unneeded files from the caller's store of snapshots.
func (s *sweep) snapshots() {
	dir, err := snapshots.Dir()
	if err != nil {
		return // there is no store
	}
	store, err := snapshots.Look(dir)
	if err != nil {
		s.note(Finding{Kind: "damaged", What: "snapshot directory", Err: err.Error()})
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

// cgroups removes empty cgroups whose sbxrun is dead, or could not remove them. A keeper that is still alive
// tolerates their removal.
func (s *sweep) cgroups() {
	machine, err := limits.Detect()
	if err != nil {
		return // a kernel without cgroups
	}
	for _, l := range machine.Leftovers() {
		s.do(Finding{Kind: "cgroup", ID: l.ID, What: "empty cgroup " + l.Dir}, func() error {
			return limits.RemoveDirs([]string{l.Dir}, time.Now().Add(sweepBound))
		})
	}
}

// damaged removes dead sandboxes without a usable record. Their processes are found in /proc.
func (s *sweep) damaged(dir *state.Dir, warnings []error) {
	var failed, left []error
	if !s.DryRun {
		failed = dir.Sweep()
		_, left = dir.List() // the rest have supervisors
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

// execs removes the records of detached execs in a running sandbox whose supervisor was killed. The other
// records are removed with the sandbox.
func (s *sweep) execs(sandbox *state.Entry) {
	dir, err := sandbox.Execs()
	if err != nil {
		return // the sandbox has just ended
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

// frozen thaws a sandbox that was frozen for a snapshot, if the snapshot and its guard were killed at the same time.
func (s *sweep) frozen(dir *state.Dir, e *state.Entry) {
	_, a, ok := dir.Access(e.ID)
	if s.KeepRecords || !ok || !limits.Frozen(a.Room.Cgroups) {
		return
	}
	lock, err := limits.LockFreezer(a.Room.Cgroups, 0)
	if errors.Is(err, unix.EAGAIN) || !limits.Frozen(a.Room.Cgroups) {
		lock.Close()
		return // the snapshot is in progress, or has just finished
	}
	defer lock.Close()
	s.do(Finding{Kind: "frozen", ID: e.ID, Name: e.Record.Name, What: "sandbox frozen by a snapshot that was killed"}, func() error {
		if err != nil {
			return err
		}
		return limits.ThawDirs(a.Room.Cgroups)
	})
}

// do performs the action for a finding, unless this is a dry run.
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

// entry ends the processes that a dead supervisor has left behind, and removes its record.
func (s *sweep) entry(e *state.Entry) {
	ended := true
	if id := e.Record.Init; id != nil {
		init, err := id.OpenInit()
		switch {
		case err == nil:
			f := Finding{Kind: "init", ID: e.ID, Name: e.Record.Name, PID: id.PID, What: "init of " + e.What() + ", whose supervisor is dead"}
			ended = s.do(f, func() error { return end(init) })
			init.Close()
		case !errors.Is(err, proc.ErrGone):
			s.note(Finding{Kind: "init", ID: e.ID, Name: e.Record.Name, PID: id.PID, What: "init that cannot be verified and is not touched", Err: err.Error()})
			ended = false
		}
	}
	if s.Quick || s.KeepRecords || !ended || s.young(e) {
		return
	}
	s.do(Finding{Kind: "record", ID: e.ID, Name: e.Record.Name, What: "record, logs and name: " + e.Status()}, e.Remove)
}

// young reports whether a sandbox has ended, or started if its end is unknown, within OlderThan.
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

// end kills an init and waits, at most sweepBound, until all processes of its namespace have exited.
func end(init *proc.Process) error {
	if err := init.Signal(unix.SIGKILL); err != nil && !errors.Is(err, proc.ErrGone) {
		return err
	}
	return init.Wait(time.Now().Add(sweepBound))
}

// processes searches /proc for processes without a record: zombies, and PID 1 of a sandbox whose monitor and keeper
// were killed together before PID 1 had asked to die with them (bubblewrap #633), so that it would wait forever.
func (s *sweep) processes() {
	pids, err := proc.All()
	if len(pids) == 0 && err != nil { // otherwise use the partial list
		s.note(Finding{Kind: "held-init", What: "sandboxes without a record", Err: err.Error()})
	}
	for _, pid := range pids {
		if pid > 1 {
			s.process(pid)
		}
	}
}

// process ends a process if it is PID 1 of an abandoned sandbox, and reports it if it is our zombie.
func (s *sweep) process(pid int) {
	st, err := proc.ReadStat(pid)
	if err != nil {
		return
	}
	if st.State == "Z" {
		s.zombie(st)
		return
	}
	// Open the pidfd first: all checks are about its process, provided that it is still alive at the end.
	init, err := proc.Open(pid)
	if err != nil {
		return
	}
	defer init.Close()
	if !abandoned(pid) || init.Exited() {
		return
	}
	s.do(Finding{Kind: "held-init", PID: pid, What: "init of a sandbox whose keeper is dead"}, func() error { return end(init) })
}

// abandoned reports whether a process is PID 1 of one of our sandboxes, and all processes that could end it are
// dead. A command can neither forge nor evade the checks, because they only use the kernel's
// information about PID 1 and its ancestors, which a command can neither see nor change:
//
//   - It has the caller's uid; root checks all. An ordinary user cannot examine other users' processes.
//   - It is number 1 of a PID namespace made in this one (NSpid has two numbers). Processes in a sandbox also
//     have a number in the sandbox's namespace, and those in a namespace that a command makes have three or more:
//     no process can leave its namespace (pid_namespaces(7)). Or it is in this PID namespace itself, and its user
//     namespace has no uid_map yet: a bwrap that doctor started and that waits for its parent to write the
//     map. No process can move another one into a user namespace (user_namespaces(7)).
//   - It executes our program, or is the bwrap that is about to ([room.Holds]). That program only waits, so a user
//     who runs it directly loses nothing else.
//   - Its session was made by the keeper, and the keeper, whose PID is the session's ID, is dead. That ID is not
//     reused while a process is in the session, and a process can only leave a session itself (setsid(2)), which
//     our program does not do.
//   - No sbxrun is alive above it, which would do the work of a killed keeper.
//
// A process below a living keeper, sbxrun or supervisor is therefore never touched. sbxrun is recognised by its
// name or executable, which could be forged, but only by an ancestor of the sandbox outside of all sandboxes,
// and only with the result that the sandbox stays.
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

// dead reports whether a process has ended, even if its parent has not reaped it yet.
func dead(pid int) bool {
	st, err := proc.ReadStat(pid)
	return err == proc.ErrGone || err == nil && st.Ended()
}

// supervised reports whether sbxrun is, or may be, above a sandbox whose keeper is dead.
func supervised(room proc.Stat) bool {
	for range 3 { // its monitor may die between two reads
		above, err := proc.ReadStat(room.Parent)
		if err == nil && above.Session == room.Session {
			above, err = proc.ReadStat(above.Parent) // above the monitor, which is dying as well
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

// isSbxrun reports whether a process is called sbxrun or has the same executable as this one.
func isSbxrun(st proc.Stat) bool {
	if st.Comm == "sbxrun" || st.Comm == proc.KeeperName {
		return true
	}
	its, err := executable(st.PID)
	if err != nil {
		return false // another user's process, or one without an executable
	}
	own, err := executable(os.Getpid())
	return err != nil || its == own
}

// executable returns the device and inode of a process's executable. It does not query file systems in user space,
// which could block (statx(2), AT_STATX_DONT_SYNC).
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

// own reports whether a process belongs to the caller; for root all do.
func own(pid int) bool {
	var st unix.Stat_t
	err := unix.Stat("/proc/"+strconv.Itoa(pid), &st)
	return err == nil && (os.Geteuid() == 0 || int(st.Uid) == os.Geteuid())
}

// zombie reports one of our processes that its parent does not reap. No other process can.
func (s *sweep) zombie(st proc.Stat) {
	// Processes in sandboxes can have any name. Ours are not in one, and those in another sbxrun's
	// namespace are not ours to report.
	if st.Comm != proc.KeeperName && st.Comm != "sbxrun" || !own(st.PID) || proc.Nested(st.PID) {
		return
	}
	above, err := proc.ReadStat(st.Parent)
	if err != nil || above.Comm == proc.KeeperName || above.Comm == "sbxrun" {
		return // about to be reaped
	}
	s.note(Finding{Kind: "zombie", PID: st.PID, What: fmt.Sprintf("zombie of %s, which only its parent %d (%s) can reap", st.Comm, st.Parent, above.Comm)})
}
