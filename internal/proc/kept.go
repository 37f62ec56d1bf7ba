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

// Kept is what a keeper keeps, and what stands for its end: a room, a command in a
// room, or both.
type Kept struct {
	Keeper *Keeper
	Room   *Process // PID 1 of the room, verified; nil if the room is another keeper's
	Init   *Process // PID 1 of the command's namespace, verified; nil without a command
	// Monitor is bwrap, above the room's PID 1; nil if that is.
	Monitor *Process
	RoomNS  uint64 // inode of the room's PID namespace, to name survivors
	InitNS  uint64 // and of the command's
	// Lasting says that the keeper has others, too: the command is its init, and nothing else
	// is ended with it.
	Lasting bool
	// Timer, if not nil, is a timerfd at which init ends by itself.
	Timer  *os.File
	told   *End // what a lasting keeper has told of init, if that was waited for
	mounts []heldMounts
}

// heldMounts is a mount namespace that is held, and the init that it is let go with.
type heldMounts struct {
	namespace *os.File
	init      *Process
}

// maxLook bounds every look at the processes: it delays the kill.
const maxLook = 1000

// maxUsage bounds how many processes are asked what they have used.
const maxUsage = 100

// Strays looks at what is alive besides init when the payload has ended: how many
// processes, at most 1,000, and what the first 100 have used. While init still lives.
func (k *Kept) Strays() (n int, used Usage) {
	var alive []Stat
	for _, st := range Descendants(k.Init.PID, maxLook) {
		if !st.Ended() {
			alive = append(alive, st)
		}
	}
	return len(alive), k.sum(alive)
}

// Used is what the command has used until now: init, and the processes that run, up to 100
// of them, with the children that they have waited for. When init is killed the kernel
// discards what runs (zap_pid_ns_processes ignores SIGCHLD), but for what somebody else had
// killed a moment before; so this and what init's parent is told are two looks at the same,
// neither of which is too much, and the larger one counts.
func (k *Kept) Used() Usage {
	if k.Init == nil {
		return Usage{}
	}
	return k.sum(Descendants(k.Init.PID, maxUsage))
}

// sum is what init and these have used.
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

// EndAt has everything ended at a time, should sbxrun not have done so by then because it is
// stopped: by the keeper, or by init.
func (k *Kept) EndAt(t time.Time) {
	if k.Timer != nil {
		setTimer(k.Timer, t)
		return
	}
	k.Keeper.EndAt(t)
}

// Kill lets the keeper kill whatever it still has, if it has nobody else's.
func (k *Kept) Kill() {
	if !k.Lasting {
		k.Keeper.Kill()
	}
}

// Payload takes hold of the command's own process, which is the first below init and so has
// number 2 in its namespace. The caller closes it. [ErrGone] if it has ended.
func (k *Kept) Payload() (*Process, error) {
	init, err := k.Init.Dup()
	if errors.Is(err, os.ErrClosed) {
		return nil, ErrGone
	}
	if err != nil {
		return nil, err
	}
	defer init.Close()
	children, _ := Children(init.PID) // what could be read is all there is to see
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
		// What was read is its own only if it runs still; and init's number is init's only then.
		if err == nil && nsErr == nil && st.Parent == init.PID && number == 2 && !p.Exited() && !init.Exited() {
			return p, nil
		}
		p.Close()
	}
	return nil, ErrGone
}

// lookEvery is how often is seen whether a keeper is stopped that may not be waited for.
const lookEvery = 500 * time.Millisecond

// instead is how long it may take to do a keeper's work that does not do it: on a machine that
// is busy, what was killed may take more than half a second to be gone.
const instead = 2 * time.Second

// Abandon ends what could not be set up. Init may be unknown, so it is the keeper that
// kills what it has. It returns when nothing is left, or at the deadline
// with an error.
func (k *Kept) Abandon(deadline time.Time) (end End, err error) {
	k.Keeper.Kill()
	// Nothing of this has begun, so a keeper that is stopped is not waited for till then.
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

// Empty waits, at most until the deadline, until all that the keeper ever had is dead and
// reaped. A keeper that was killed, or is stopped when the deadline has come and is then
// killed here, cannot say so: what it had is killed and reaped in its place, for which
// there are two seconds more. os.ErrDeadlineExceeded: it still has children.
func (k *Kept) Empty(deadline time.Time) (End, error) {
	end, err := k.empty(deadline)
	// One that is dead may leave its end of the socket to a child that was stopped before it
	// could ask to die with it.
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

// Ends waits, at most until the deadline, for a lasting keeper's word that init has ended by itself, and
// reports whether it has come. [Kept.Empty] has it then, too.
func (k *Kept) Ends(deadline time.Time) bool {
	end, err := k.Keeper.Reaped(k.Init.PID, deadline)
	if err == nil {
		k.told = &end
	}
	return err == nil
}

// Collect ends the keeper, which puts back the terminal and removes the cgroups first,
// and reaps it. One that has something left by the deadline goes on without us, and ends when
// that has: the room's PID 1 does not end before somebody has reaped what was in it, which
// need not be whoever inherits it. Only one that is stopped is killed.
func (k *Kept) Collect(deadline time.Time) error {
	if k.Lasting {
		return nil
	}
	err := k.Keeper.Reap(deadline)
	if errors.Is(err, os.ErrDeadlineExceeded) && k.Keeper.stopped() && k.Keeper.Signal(unix.SIGKILL) == nil {
		err = k.Keeper.Reap(time.Now().Add(instead))
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		go func() { _ = reap(k.Keeper.PID) }() // should we live that long
	}
	return err
}

// reap waits for the end of a child of ours, whose number is its own until then.
func reap(pid int) error {
	for {
		if _, err := unix.Wait4(pid, nil, 0, nil); err != unix.EINTR {
			return err
		}
	}
}

// stopped reports whether somebody has stopped the keeper (SIGSTOP). Any other that is
// late waits for something, and will go on reaping when we are gone.
func (k *Keeper) stopped() bool {
	st, err := ReadStat(k.PID)
	return err == nil && st.State == "T"
}

// inits are the processes whose end is the end of a PID namespace, the inner one first.
func (k *Kept) inits() (list []*Process) {
	for _, p := range []*Process{k.Init, k.Room} {
		if p != nil {
			list = append(list, p)
		}
	}
	return list
}

// Inherit kills and reaps what a killed keeper has left to sbxrun. It blocks until none is
// left, or the deadline has passed; an error says that something may be.
func (k *Kept) Inherit(deadline time.Time) error {
	// Its socket closes before its children are reparented; its pidfd tells later.
	if err := k.Keeper.Wait(deadline); err != nil {
		return err
	}
	for none := 0; ; {
		left, err := k.orphans()
		if len(left) == 0 && err == nil {
			// One look may miss a child, if another one is reaped or the thread that has it ends just
			// then (proc_pid_children(5)).
			if none++; none == 2 {
				return nil
			}
			continue
		}
		none = 0
		for _, st := range left {
			// Our own unreaped children: their pids cannot be recycled.
			_ = unix.Kill(st.PID, unix.SIGKILL)
			_, _ = unix.Wait4(st.PID, nil, unix.WNOHANG, nil) // what it had may be ours only then
		}
		if time.Now().After(deadline) {
			if err == nil {
				err = os.ErrDeadlineExceeded
			}
			return err
		}
		time.Sleep(time.Millisecond) // between two looks, in a case that nobody waits for
	}
}

// orphans are what a killed keeper has left to sbxrun, which is a subreaper too: the inits,
// and what is in the keeper's session. Other children that sbxrun may have, from before it
// was executed, are not among them. An error, for want of a descriptor for one, says that
// there may be more.
func (k *Kept) orphans() (list []Stat, err error) {
	children, _, err := children(os.Getpid(), math.MaxInt) // a program of ours may have any number of threads
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

// HoldMounts holds the mount namespaces. As long as somebody does, an init can end
// without having to take all mounts down before, which takes the kernel longer than
// all the rest (namespace_unlock waits for RCU). Where it is not allowed (an ordinary
// user may not look at an init, which is undumpable), the end takes that much longer. Only
// the first call does anything.
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
			mounts.Close() // it may be another's
			continue
		}
		k.mounts = append(k.mounts, heldMounts{mounts, p})
	}
}

// Hold holds init's mount namespace by a descriptor, which is taken over; HoldMounts is not
// needed then.
func (k *Kept) Hold(fd int) {
	k.mounts = append(k.mounts, heldMounts{os.NewFile(uintptr(fd), "mount namespace"), k.Init})
}

// Unmount gives each mount namespace up that is held as soon as its init has ended, or the
// deadline has passed. The kernel takes half a millisecond and more to take one down, and
// sbxrun does not end before it has; so each gets a thread of its own, beside the proof.
func (k *Kept) Unmount(deadline time.Time) {
	for _, m := range k.mounts {
		if k.Lasting {
			letGo(m.namespace)
			continue
		}
		if m.init.Exited() {
			go m.namespace.Close() // an error means that it was closed
			continue
		}
		// A pidfd of our own: the other one may be closed meanwhile.
		init, err := m.init.Dup()
		go func() {
			if err == nil {
				_ = init.Wait(deadline) // then it is late, and nothing else
				init.Close()
			}
			m.namespace.Close()
		}()
	}
	k.mounts = nil
}

// letGo gives up a mount namespace of a process that ends many: by a few threads, so that it has
// not one for each.
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
				f.Close() // an error means that it was closed
			}
		}()
	}
	return files
})

// KillInits sends SIGKILL to the inits, and with them to everything in their namespaces
// (pid_namespaces(7)); and to bwrap, whose end takes the kernel longest. One that has ended is
// no error.
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

// Wait waits, at most until the deadline, for the end of the inits: then their
// namespaces are empty.
func (k *Kept) Wait(deadline time.Time) error {
	var failed *multierror.Error
	for _, p := range k.inits() {
		// One that has ended has, also after the deadline: [Kept.Empty] may take longer.
		if p.Exited() {
			continue
		}
		if err := p.Wait(deadline); err != nil {
			failed = multierror.Append(failed, fmt.Errorf("wait for init %d: %w", p.PID, err))
		}
	}
	return failed.ErrorOrNil()
}

// Gone returns a channel that is closed when everything has exited. It works on after k is closed.
func (k *Kept) Gone() <-chan struct{} {
	gone := make(chan struct{})
	list := k.inits()
	if !k.Lasting { // it stays until it has no children
		list = append(list, &k.Keeper.Process)
	}
	var own []*Process
	for _, p := range list {
		d, err := p.Dup()
		if err != nil { // the channel stays open: fail closed
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
			_ = d.Wait(time.Time{}) // without a deadline it fails only when d is closed
			d.Close()
		}
	}()
	return gone
}

// Survivors lists what is left: members of the namespaces, and what the keeper still
// has, or has left to sbxrun; at most limit.
func (k *Kept) Survivors(limit int) (left []Stat) {
	seen := map[int]bool{}
	orphans, _ := k.orphans() // what could be read is all there is to see
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
