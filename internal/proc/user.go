package proc

import (
	"runtime"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// AsUser calls f with the file system ids of a user, on a thread of its own that ends with
// it; nil is as this process. What f opens and makes is then what that user could, and is that
// user's: a file system of a user namespace takes no file of an id that the namespace has no
// name for (EOVERFLOW). f must not start processes, and must stay on its goroutine.
func AsUser(user *Cred, f func() error) error {
	t, err := NewUserThread(user)
	if err != nil {
		return err
	}
	defer t.Close()
	return t.Do(f)
}

// UserThread is a thread with the file system ids of a user, for many calls: see [AsUser].
// The nil one is whatever thread asks.
type UserThread struct {
	turn sync.Mutex
	work chan func() error
	done chan error
}

// NewUserThread starts one, which the caller closes; of no user it is nil.
func NewUserThread(user *Cred) (*UserThread, error) {
	if user == nil {
		return nil, nil
	}
	t := &UserThread{work: make(chan func() error), done: make(chan error)}
	go func() {
		// Never unlocked: Go ends the thread with the goroutine, and makes no other from it.
		runtime.LockOSThread()
		err := takeOn(user)
		t.done <- err
		if err != nil {
			return
		}
		for f := range t.work {
			t.done <- f()
		}
	}()
	if err := <-t.done; err != nil {
		return nil, err
	}
	return t, nil
}

// Do calls f on the thread.
func (t *UserThread) Do(f func() error) error {
	if t == nil {
		return f()
	}
	t.turn.Lock()
	defer t.turn.Unlock()
	t.work <- f
	return <-t.done
}

// Close ends the thread.
func (t *UserThread) Close() {
	if t != nil {
		close(t.work)
	}
}

// takeOn gives this thread the file system ids of a user, and with them none of root's rights
// over files (capabilities(7)).
func takeOn(user *Cred) error {
	// Changed ids make the whole process undumpable (prctl(2)), which a keeper would inherit.
	syscall.ForkLock.Lock()
	defer syscall.ForkLock.Unlock()
	dumpable, err := unix.PrctlRetInt(unix.PR_GET_DUMPABLE, 0, 0, 0, 0)
	if err != nil {
		return err
	}
	// Groups too, those of the thread alone: package syscall would set them for all.
	_, _, errno := syscall.RawSyscall(syscall.SYS_SETGROUPS, 0, 0, 0)
	for _, set := range []struct {
		call uintptr
		id   uint32
	}{{syscall.SYS_SETFSGID, user.GID}, {syscall.SYS_SETFSUID, user.UID}} {
		// It returns the id before, whether or not it has done anything (setfsuid(2)).
		_, _, _ = syscall.RawSyscall(set.call, uintptr(set.id), 0, 0)
		if got, _, _ := syscall.RawSyscall(set.call, ^uintptr(0), 0, 0); uint32(got) != set.id && errno == 0 {
			errno = unix.EPERM
		}
	}
	_ = unix.Prctl(unix.PR_SET_DUMPABLE, uintptr(dumpable), 0, 0, 0) // as it was is always allowed
	if errno != 0 {
		return errno
	}
	return nil
}

// Capable reports whether we have a capability (capabilities(7)), one of the first 32.
func Capable(capability int) bool {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	return unix.Capget(&hdr, &data[0]) == nil && data[0].Effective&(1<<capability) != 0
}
