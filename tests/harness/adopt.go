package harness

import (
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
)

// Adopted is a process that becomes a child of the test process because its parent exits first: a supervisor, or the
// keeper of an sbxrun that the test kills. The harness reaps it, as an ordinary PID 1 would; it reaps no other orphan.
type Adopted struct {
	*Target
	Status unix.WaitStatus // after Reaped

	reaped chan struct{}
}

// Adopt takes over a process that is an orphan or will soon be one. It fails if there is no such
// process; a zombie counts as one.
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

// killAdopting kills a process and adopts its children. It stops the process first, so that it
// cannot create another child in between.
func killAdopting(victim *Target) (children []*Adopted, err error) {
	if err := victim.Signal(unix.SIGSTOP); err != nil {
		return nil, err
	}
	holdsBy(time.Now().Add(settle), func() bool { return victim.Ended() || Stopped(victim.PID) })
	for _, pid := range childrenNow(victim.PID) {
		a, err := Adopt(pid)
		if err != nil {
			continue // reaped by its parent before that was stopped
		}
		children = append(children, a)
	}
	return children, victim.Signal(unix.SIGKILL)
}

// awaitReaped waits until all have been reaped, and closes them.
func awaitReaped(t T, whose string, all []*Adopted) {
	t.Helper()
	for _, a := range all {
		check.That(t, a.endsIn(settle), "process %d of %s still runs %v after it was killed", a.PID, whose, settle)
		a.Close()
	}
}

// Reaped is closed when the process has been reaped.
func (a *Adopted) Reaped() <-chan struct{} { return a.reaped }

// endsIn waits until the process has been reaped, and reports whether that was in time.
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
	// Its parent may still be a zombie, so it is not yet our child.
	holdsBy(time.Now().Add(settle), func() bool {
		ours.Lock()
		defer ours.Unlock()
		got, err := unix.Wait4(a.PID, &a.Status, unix.WNOHANG, nil)
		if err == unix.ECHILD && parentOf(a.PID) != os.Getpid() {
			// Not our child: another process has reaped it, or will.
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

// waitEnd blocks until the process exits. It needs no thread while it waits.
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
