package proc

import (
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/go-multierror"
	"golang.org/x/sys/unix"
)

// Kept is a keeper with the processes whose end proves the end of a room, of a command in a room, or of both.
type Kept struct {
	Keeper *Keeper
	Room   *Process // verified PID 1 of the room; nil if the room is another keeper's
	Init   *Process // verified PID 1 of the command's namespace; nil without a command
	// Monitor is the bwrap process above the room's PID 1; nil if bwrap is that PID 1.
	Monitor *Process
	RoomNS  uint64 // inode of the room's PID namespace, to find survivors
	InitNS  uint64 // inode of the command's PID namespace
	// Lasting is set if the keeper has other commands, too. Then only Init is ended.
	Lasting bool
	// Timer, if not nil, is a timerfd. When it expires, init exits by itself.
	Timer  *os.File
	told   *End // a lasting keeper's report of init's end, if Ends has received it
	mounts []heldMounts
}

// heldMounts is a mount namespace held open until the end of an init.
type heldMounts struct {
	namespace *os.File
	init      *Process
}

// maxLook is the maximum number of processes to inspect, because inspecting delays the kill.
const maxLook = 1000

// maxUsage is the maximum number of processes whose resource usage is read.
const maxUsage = 100

// Strays counts the processes, at most 1,000, that are alive besides init after the payload's end, and returns the resource
// usage of the first 100. Init must be alive.
func (k *Kept) Strays() (n int, used Usage) {
	var alive []Stat
	for _, st := range Descendants(k.Init.PID, maxLook) {
		if !st.Ended() {
			alive = append(alive, st)
		}
	}
	return len(alive), k.sum(alive)
}

// Used returns the resource usage of the command until now: of init and up to 100 running processes, with the children that
// they have waited for. If init is killed, the kernel discards the usage of most running processes
// (zap_pid_ns_processes ignores SIGCHLD). So Used and the usage reported to init's parent are two measurements of the same
// processes. Neither is too large, so the larger one counts.
func (k *Kept) Used() Usage {
	if k.Init == nil {
		return Usage{}
	}
	return k.sum(Descendants(k.Init.PID, maxUsage))
}

// sum returns the resource usage of init and these processes.
func (k *Kept) sum(stats []Stat) (total Usage) {
	for _, st := range stats[:min(len(stats), maxUsage)] {
		total.User += st.CPU.User + st.Waited.User
		total.System += st.CPU.System + st.Waited.System
		total.MaxRSS = max(total.MaxRSS, PeakRSS(st.PID))
	}
	if init, err := ReadStat(k.Init.PID); err == nil { // an error means that it has ended
		total.User += init.CPU.User + init.Waited.User
		total.System += init.CPU.System + init.Waited.System
	}
	return total
}

// EndAt sets a deadline at which the keeper, or init, ends everything in case sbxrun is stopped.
func (k *Kept) EndAt(t time.Time) {
	if k.Timer != nil {
		setTimer(k.Timer, t)
		return
	}
	k.Keeper.EndAt(t)
}

// Kill makes the keeper kill all its children, unless it has other commands.
func (k *Kept) Kill() {
	if !k.Lasting {
		k.Keeper.Kill()
	}
}

// Payload opens the command's own process, the first child of init and so PID 2 of its namespace. The caller closes it. It
// returns [ErrGone] if the process has ended.
func (k *Kept) Payload() (*Process, error) {
	init, err := k.Init.Dup()
	if errors.Is(err, os.ErrClosed) {
		return nil, ErrGone
	}
	if err != nil {
		return nil, err
	}
	defer init.Close()
	children, _ := Children(init.PID) // an incomplete list is enough
	for _, pid := range children {
		p, err := Open(pid)
		if err == ErrGone {
			continue
		}
		if err != nil {
			return nil, err
		}
		st, err := ReadStat(pid)
		number, nsErr := NSPID(pid)
		// The values belong to the opened processes only if both are still alive.
		if err == nil && nsErr == nil && st.Parent == init.PID && number == 2 && !p.Exited() && !init.Exited() {
			return p, nil
		}
		p.Close()
	}
	return nil, ErrGone
}

// lookEvery is the poll interval for detecting a stopped keeper.
const lookEvery = 500 * time.Millisecond

// instead limits the time that sbxrun takes to kill and reap a dead keeper's children. On a busy machine a killed process
// may take more than half a second to exit.
const instead = 2 * time.Second

// Abandon ends a setup that failed. Init may be unknown, so the keeper kills its children. Abandon waits until all have
// exited, and fails at the deadline.
func (k *Kept) Abandon(deadline time.Time) (end End, err error) {
	k.Keeper.Kill()
	// No command has started, so do not wait until the deadline for a stopped keeper.
	for {
		by := time.Now().Add(lookEvery)
		if by.After(deadline) {
			by = deadline
		}
		if end, err = k.Empty(by); !errors.Is(err, os.ErrDeadlineExceeded) || by == deadline {
			break
		}
	}
	if reapErr := k.Collect(deadline); err == nil {
		err = reapErr
	}
	return end, err
}

// Empty waits until the deadline for the end of all the keeper's children. If the keeper was killed, or is stopped at the
// deadline and therefore killed by Empty, sbxrun kills and reaps its children itself, for up to two more seconds. Empty
// fails with os.ErrDeadlineExceeded if there are children left.
func (k *Kept) Empty(deadline time.Time) (End, error) {
	end, err := k.empty(deadline)
	// A dead keeper's end of the socket may stay open in a child that was stopped before it set its death signal.
	if errors.Is(err, os.ErrDeadlineExceeded) && (k.Keeper.Exited() || k.Keeper.stopped() && k.Keeper.Signal(unix.SIGKILL) == nil) {
		err, deadline = errNotEmpty, time.Now().Add(instead)
	}
	if errors.Is(err, errNotEmpty) {
		end.Killed, err = true, k.Inherit(deadline)
	}
	return end, err
}

func (k *Kept) empty(deadline time.Time) (End, error) {
	switch {
	case k.told != nil:
		return *k.told, nil
	case k.Lasting:
		return k.Keeper.Reaped(k.Init.PID, deadline)
	}
	return k.Keeper.Empty(deadline)
}

// Ends waits until the deadline for a lasting keeper's report that init has ended by itself, and reports whether it has
// arrived. [Kept.Empty] uses the report, too.
func (k *Kept) Ends(deadline time.Time) bool {
	end, err := k.Keeper.Reaped(k.Init.PID, deadline)
	if err == nil {
		k.told = &end
	}
	return err == nil
}

// Collect ends and reaps the keeper, which first restores the terminal and removes the cgroups. A keeper that still has
// children at the deadline continues on its own until they have exited, because the room's PID 1 cannot exit before the
// processes inside are reaped. Only a stopped keeper is killed.
func (k *Kept) Collect(deadline time.Time) error {
	if k.Lasting {
		return nil
	}
	err := k.Keeper.Reap(deadline)
	if errors.Is(err, os.ErrDeadlineExceeded) && k.Keeper.stopped() && k.Keeper.Signal(unix.SIGKILL) == nil {
		err = k.Keeper.Reap(time.Now().Add(instead))
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		go func() { _ = reap(k.Keeper.PID) }() // if sbxrun lives that long
	}
	return err
}

// reap waits for the end of a child. Its PID cannot be reused until then.
func reap(pid int) error {
	for {
		if _, err := unix.Wait4(pid, nil, 0, nil); err != unix.EINTR {
			return err
		}
	}
}

// stopped reports whether the keeper is stopped (SIGSTOP). Any other late keeper waits for something and continues to reap
// after sbxrun's end.
func (k *Keeper) stopped() bool {
	st, err := ReadStat(k.PID)
	return err == nil && st.State == "T"
}

// inits returns the PID 1 of each namespace, the inner one first.
func (k *Kept) inits() (list []*Process) {
	for _, p := range []*Process{k.Init, k.Room} {
		if p != nil {
			list = append(list, p)
		}
	}
	return list
}

// Inherit kills and reaps the children that a killed keeper has left to sbxrun. It waits for their end, and fails at the
// deadline.
func (k *Kept) Inherit(deadline time.Time) error {
	// The keeper's socket closes before its children are reparented; its pidfd becomes readable later.
	if err := k.Keeper.Wait(deadline); err != nil {
		return err
	}
	for none := 0; ; {
		left, err := k.orphans()
		if len(left) == 0 && err == nil {
			// A single read may miss a child if another one is reaped, or its thread ends, during the read
			// (proc_pid_children(5)).
			if none++; none == 2 {
				return nil
			}
			continue
		}
		none = 0
		for _, st := range left {
			// The PIDs of unreaped children cannot be reused.
			_ = unix.Kill(st.PID, unix.SIGKILL)
			_, _ = unix.Wait4(st.PID, nil, unix.WNOHANG, nil) // its children may be reparented to sbxrun only after this
		}
		if time.Now().After(deadline) {
			if err == nil {
				err = os.ErrDeadlineExceeded
			}
			return err
		}
		time.Sleep(time.Millisecond) // this case is rare and not urgent
	}
}

// orphans returns the children that a killed keeper has left to sbxrun, which is a subreaper, too: the inits and the
// processes in the keeper's session. It excludes other children of sbxrun, for example from before its exec. After an
// error, for example a lack of descriptors, the list may be incomplete.
func (k *Kept) orphans() (list []Stat, err error) {
	children, _, err := children(os.Getpid(), math.MaxInt) // this process may have any number of threads
	for _, pid := range children {
		st, statErr := ReadStat(pid)
		if statErr != nil && statErr != ErrGone {
			err = statErr
		}
		if statErr == nil && pid != k.Keeper.PID && (st.Session == k.Keeper.PID || slices.ContainsFunc(k.inits(), func(p *Process) bool { return p.PID == pid })) {
			list = append(list, st)
		}
	}
	return list, err
}

// HoldMounts opens the mount namespaces. While they are open, an init can exit before the kernel unmounts everything,
// which takes longer than all other steps (namespace_unlock waits for RCU). An ordinary user may not open them because an
// init is undumpable, so there the end takes longer. Only the first call has an effect.
func (k *Kept) HoldMounts() {
	if k.mounts != nil {
		return
	}
	for _, p := range k.inits() {
		fd, err := OpenNamespace(p.PID, "mnt")
		if err != nil {
			continue
		}
		mounts := os.NewFile(uintptr(fd), "mount namespace")
		if p.Exited() {
			mounts.Close() // the namespace may belong to another process
			continue
		}
		k.mounts = append(k.mounts, heldMounts{mounts, p})
	}
}

// Hold takes over a descriptor of init's mount namespace, which replaces HoldMounts.
func (k *Kept) Hold(fd int) {
	k.mounts = append(k.mounts, heldMounts{os.NewFile(uintptr(fd), "mount namespace"), k.Init})
}

// Unmount closes each held mount namespace when its init has ended or the deadline has passed. The kernel takes at least
// half a millisecond to unmount one, and sbxrun cannot exit before that. So each is closed in its own thread, in parallel
// with the proof.
func (k *Kept) Unmount(deadline time.Time) {
	for _, m := range k.mounts {
		if k.Lasting {
			letGo(m.namespace)
			continue
		}
		if m.init.Exited() {
			go m.namespace.Close() // it fails only if it was closed
			continue
		}
		// Use a separate pidfd, because the other one may be closed in the meantime.
		init, err := m.init.Dup()
		go func() {
			if err == nil {
				_ = init.Wait(deadline) // close the namespace anyway after the deadline
				init.Close()
			}
			m.namespace.Close()
		}()
	}
	k.mounts = nil
}

// letGo closes a mount namespace on one of a few threads, for a process that ends many commands.
func letGo(namespace *os.File) {
	select {
	case waiting() <- namespace:
	default: // the kernel is slow
		go namespace.Close()
	}
}

var waiting = sync.OnceValue(func() chan<- *os.File {
	const threads = 4
	files := make(chan *os.File, 8*threads)
	for range threads {
		go func() {
			for f := range files {
				f.Close() // it fails only if it was closed
			}
		}()
	}
	return files
})

// KillInits sends SIGKILL to the inits, with which the kernel kills all processes in their namespaces
// (pid_namespaces(7)), and first to bwrap, whose end takes longest. A process that has already ended is not an error.
func (k *Kept) KillInits() error {
	var failed *multierror.Error
	list := k.inits()
	if k.Monitor != nil {
		list = slices.Insert(list, 0, k.Monitor)
	}
	for _, p := range list {
		if err := p.Signal(unix.SIGKILL); err != nil && err != ErrGone {
			failed = multierror.Append(failed, fmt.Errorf("kill init %d: %w", p.PID, err))
		}
	}
	return failed.ErrorOrNil()
}

// Wait waits until all inits have exited, which means that their namespaces are empty, or until the deadline.
func (k *Kept) Wait(deadline time.Time) error {
	var failed *multierror.Error
	for _, p := range k.inits() {
		// [Kept.Empty] may have taken longer than the deadline; an init that has ended is still not an error.
		if p.Exited() {
			continue
		}
		if err := p.Wait(deadline); err != nil {
			failed = multierror.Append(failed, fmt.Errorf("wait for init %d: %w", p.PID, err))
		}
	}
	return failed.ErrorOrNil()
}

// Gone returns a channel that is closed when all processes have exited, even after k is closed.
func (k *Kept) Gone() <-chan struct{} {
	gone := make(chan struct{})
	list := k.inits()
	if !k.Lasting { // the keeper exits after its last child
		list = append(list, &k.Keeper.Process)
	}
	var own []*Process
	for _, p := range list {
		d, err := p.Dup()
		if err != nil { // fail closed: the channel stays open
			for _, d := range own {
				d.Close()
			}
			return gone
		}
		own = append(own, d)
	}
	go func() {
		defer close(gone)
		for _, d := range own {
			_ = d.Wait(time.Time{}) // without a deadline it fails only if d is closed
			d.Close()
		}
	}()
	return gone
}

// Survivors lists at most limit processes that are left: members of the namespaces, descendants of the keeper, and children
// that it has left to sbxrun.
func (k *Kept) Survivors(limit int) (left []Stat) {
	seen := map[int]bool{}
	orphans, _ := k.orphans() // an incomplete list is enough
	kept := Descendants(k.Keeper.PID, limit)
	if k.Lasting {
		kept = Descendants(k.Init.PID, limit)
	}
	for _, st := range slices.Concat(Members(limit, k.RoomNS, k.InitNS), kept, orphans) {
		if !seen[st.PID] && len(left) < limit {
			seen[st.PID] = true
			left = append(left, st)
		}
	}
	return left
}
