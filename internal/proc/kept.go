package proc

import (
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Kept is a PID namespace below a keeper: the two processes that stand for its
// end.
type Kept struct {
	Keeper *Keeper
	Init   *Process // PID 1 of the namespace, verified
	PIDNS  uint64   // inode of the namespace, to name survivors
	mounts *os.File // init's mount namespace, if it is held
}

// maxLook bounds every look at the processes: it delays the kill.
const maxLook = 1000

// maxUsage bounds how many processes are asked what they have used.
const maxUsage = 100

// Strays looks at what is alive besides init and the payload: how many
// processes, at most 1,000, and what the first 100 have used. payload is its pid, 0
// if it is no more. While init still lives.
func (k *Kept) Strays(payload int) (n int, used Usage) {
	var alive []Stat
	for _, st := range Descendants(k.Init.PID, maxLook) {
		if st.State != "Z" && st.State != "X" && st.PID != payload {
			alive = append(alive, st)
		}
	}
	return len(alive), sum(alive)
}

// Used is what the processes that run now have used, up to 100 of them, and what
// nobody may wait for any more: when init is killed the kernel discards it
// (zap_pid_ns_processes ignores SIGCHLD).
func (k *Kept) Used() Usage { return sum(Descendants(k.Init.PID, maxUsage)) }

func sum(stats []Stat) (total Usage) {
	for i, st := range stats {
		if i == maxUsage {
			break
		}
		total.User += st.CPU.User
		total.System += st.CPU.System
		total.MaxRSS = max(total.MaxRSS, PeakRSS(st.PID))
	}
	return total
}

// InitEnding says whether init has ended, or is about to. It says so before any of the
// others dies with it: an init that was killed is marked as exiting first, and kills
// them then (zap_pid_ns_processes).
func (k *Kept) InitEnding() bool {
	// An error means that it is gone.
	st, err := ReadStat(k.Init.PID)
	return err != nil || st.Exiting || k.Init.Exited()
}

// Abandon ends what did not come to be: init may be unknown, so it is the keeper
// that kills what it has. It returns when nothing is left, or at the deadline
// with an error.
func (k *Kept) Abandon(deadline time.Time) error {
	k.Keeper.Kill()
	_, err := k.Keeper.Empty(deadline)
	if err == ErrNotEmpty {
		err = k.Keeper.Inherit(k.Init, deadline)
	}
	if reapErr := k.Keeper.Reap(deadline); err == nil {
		err = reapErr
	}
	return err
}

// HoldMounts holds init's mount namespace. As long as somebody does, init can end
// without having to take all mounts down before, which takes the kernel longer than
// all the rest (namespace_unlock waits for RCU). Where it is not allowed, the end
// takes that much longer.
func (k *Kept) HoldMounts() {
	fd, err := OpenNamespace(k.Init.PID, "mnt")
	if err != nil {
		return
	}
	mounts := os.NewFile(uintptr(fd), "mount namespace")
	if k.Init.Exited() {
		mounts.Close() // it may be another's
		return
	}
	k.mounts = mounts
}

// Unmount gives the mount namespace up, if it is held. It blocks while the kernel
// takes it down: half a millisecond.
func (k *Kept) Unmount() {
	if k.mounts != nil {
		_ = k.mounts.Close() // an error means that it was closed
	}
}

// KillInit sends SIGKILL to init, and with it to everything in the namespace
// (pid_namespaces(7)). An init that has ended is no error.
func (k *Kept) KillInit() error {
	if err := k.Init.Signal(unix.SIGKILL); err != nil && err != ErrGone {
		return err
	}
	return nil
}
