package harness

import (
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Adopted is a process that is to become our child, because whoever has started
// it ends before it does: a supervisor, or the keeper of an sbxrun that the test
// kills. It is reaped here, as by a PID 1 that does; all others would be left.
type Adopted struct {
	*Target
	Status unix.WaitStatus // after Reaped

	reaped chan struct{}
}

// Adopt takes hold of a process that is, or may soon be, an orphan. It fails if
// there is none: a zombie is one still.
func Adopt(pid int) (*Adopted, error) {
	target, err := Open(pid)
	if err != nil {
		return nil, fmt.Errorf("process %d: %w", pid, err)
	}
	a := &Adopted{Target: target, reaped: make(chan struct{})}
	ours.Lock()
	ours.pids[pid]++
	ours.Unlock()
	go a.reap()
	return a, nil
}

// killAdopting kills a process and returns its children, adopted. It is stopped first: so no
// child comes between the look and the end.
func killAdopting(victim *Target) (children []*Adopted, err error) {
	if err := victim.Signal(unix.SIGSTOP); err != nil {
		return nil, err
	}
	holdsBy(time.Now().Add(settle), func() bool { return victim.Ended() || Stopped(victim.PID) })
	for _, pid := range childrenNow(victim.PID) {
		a, err := Adopt(pid)
		if err != nil {
			continue // its parent has reaped it before it was stopped
		}
		children = append(children, a)
	}
	return children, victim.Signal(unix.SIGKILL)
}

// awaitReaped waits until all have been reaped, and closes them.
func awaitReaped(t T, whose string, all []*Adopted) {
	t.Helper()
	for _, a := range all {
		if !a.endsIn(settle) {
			t.Errorf("process %d of %s still runs %v after it was killed", a.PID, whose, settle)
		}
		a.Close()
	}
}

// Reaped is closed when the process has ended and is no zombie any more.
func (a *Adopted) Reaped() <-chan struct{} { return a.reaped }

// endsIn waits for that.
func (a *Adopted) endsIn(bound time.Duration) bool {
	select {
	case <-a.reaped:
		return true
	case <-time.After(bound):
		return false
	}
}

func (a *Adopted) reap() {
	defer close(a.reaped)
	a.waitEnd()
	// Its parent, which it may outlive by a moment, can be a zombie by now and it
	// not yet our child.
	holdsBy(time.Now().Add(settle), func() bool {
		ours.Lock()
		defer ours.Unlock()
		got, err := unix.Wait4(a.PID, &a.Status, unix.WNOHANG, nil)
		if err == unix.ECHILD && parentOf(a.PID) != os.Getpid() {
			// Not ours, for now or for good: somebody else has reaped it, or will.
			if _, there := ReadProc(a.PID); there {
				return false
			}
		} else if got != a.PID {
			return false
		}
		disown(a.PID)
		return true
	})
}

// waitEnd blocks, without a thread of its own, until the process has ended.
func (a *Adopted) waitEnd() {
	fd, err := unix.FcntlInt(uintptr(a.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return
	}
	_ = unix.SetNonblock(fd, true) // for the poller; a pidfd is never read
	file := os.NewFile(uintptr(fd), "pidfd")
	defer file.Close()
	conn, err := file.SyscallConn()
	if err != nil {
		return
	}
	_ = conn.Read(func(uintptr) bool { return a.Ended() })
}

func parentOf(pid int) int {
	p, _ := ReadProc(pid)
	return p.Parent
}
