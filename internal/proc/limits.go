package proc

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// SetLimits sets resource limits of a process that is held, and so of all that it
// starts later. It is owner's process, nil for sbxrun's own user's. [ErrGone] if it has
// ended meanwhile.
func (p *Process) SetLimits(list []Rlimit, owner *Cred) error {
	for _, l := range list {
		v := unix.Rlimit{Cur: l.Value, Max: l.Value}
		set := func() error { return unix.Prlimit(p.PID, l.Resource, &v, nil) }
		err := set()
		if err == unix.EPERM && owner != nil {
			err = as(owner, set)
		}
		if err != nil && !p.Exited() {
			return err
		}
	}
	if len(list) > 0 && p.Exited() {
		return ErrGone // and its pid may have been somebody else's
	}
	return nil
}

// as calls f as another user. Root in a container often lacks CAP_SYS_RESOURCE, and
// then may not set the limits of a process of nobody's, which nobody may (prlimit(2)).
func as(user *Cred, f func() error) error {
	done := make(chan error)
	go func() {
		// The identity is the thread's alone, and ends with it: it is not unlocked.
		// The saved uid stays 0, so that nobody may not trace it.
		runtime.LockOSThread()
		const keep = ^uintptr(0)
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESGID, uintptr(user.GID), uintptr(user.GID), keep); errno != 0 {
			done <- errno
		} else if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(user.UID), uintptr(user.UID), keep); errno != 0 {
			done <- errno
		} else {
			done <- f()
		}
	}()
	return <-done
}
