package proc

import (
	"runtime"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// AsUser calls f with the file system IDs of a user; nil means this process's own. f can open and create
// only the files that this user can, and new files belong to the user: a file system of a user namespace
// rejects files of an ID that the namespace does not map (EOVERFLOW). f must not start processes, and must stay
// on its goroutine.
//
// f runs on one of at most userThreads threads that are kept for the user. Further calls wait in order, so
// f must only make system calls that return soon.
func AsUser(user *Cred, f func() error) error {
	if user == nil {
		return f()
	}
	one, _ := users.LoadOrStore(*user, &userPool{calls: make(chan *userCall)})
	return one.(*userPool).do(user, f)
}

// userThreads is the maximum number of threads for one user. They run until the process exits, because a
// process acts as one or two users.
const userThreads = 8

var users sync.Map // *userPool by Cred

// userPool holds the threads of one user.
type userPool struct {
	calls   chan *userCall
	mutex   sync.Mutex
	threads int
}

// userCall is one call of a function on a thread.
type userCall struct {
	f        func() error
	err      error
	panicked any
	done     chan struct{}
}

func (c *userCall) run() {
	defer func() {
		c.panicked = recover()
		close(c.done)
	}()
	c.err = c.f()
}

func (p *userPool) do(user *Cred, f func() error) error {
	c := &userCall{f: f, done: make(chan struct{})}
	select {
	case p.calls <- c:
	default: // no thread is idle
		if err := p.grow(user); err != nil {
			return err
		}
		p.calls <- c
	}
	<-c.done
	if c.panicked != nil {
		panic(c.panicked) // this ends the caller's request, and not the process
	}
	return c.err
}

// grow starts one more thread, unless there are enough.
func (p *userPool) grow(user *Cred) error {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if p.threads == userThreads {
		return nil
	}
	started := make(chan error)
	go func() {
		// The thread is never unlocked: Go makes no other thread from it, and ends it with the goroutine.
		runtime.LockOSThread()
		err := takeOn(user)
		started <- err
		if err != nil {
			return
		}
		for c := range p.calls {
			c.run()
		}
	}()
	err := <-started
	if err == nil {
		p.threads++
	}
	return err
}

// takeOn gives this thread the file system IDs of a user. The thread then loses root's rights over files
// (capabilities(7)).
func takeOn(user *Cred) error {
	// Changed IDs make the whole process undumpable (prctl(2)), which a keeper would inherit.
	syscall.ForkLock.Lock()
	defer syscall.ForkLock.Unlock()
	dumpable, err := unix.PrctlRetInt(unix.PR_GET_DUMPABLE, 0, 0, 0, 0)
	if err != nil {
		return err
	}
	// Drop the groups of this thread, too. Package syscall would set them for all threads.
	_, _, errno := syscall.RawSyscall(syscall.SYS_SETGROUPS, 0, 0, 0)
	for _, set := range []struct {
		call uintptr
		id   uint32
	}{{syscall.SYS_SETFSGID, user.GID}, {syscall.SYS_SETFSUID, user.UID}} {
		// The call returns the previous ID, whether or not it has changed anything (setfsuid(2)).
		_, _, _ = syscall.RawSyscall(set.call, uintptr(set.id), 0, 0)
		if got, _, _ := syscall.RawSyscall(set.call, ^uintptr(0), 0, 0); uint32(got) != set.id && errno == 0 {
			errno = unix.EPERM
		}
	}
	_ = unix.Prctl(unix.PR_SET_DUMPABLE, uintptr(dumpable), 0, 0, 0) // restoring the flag is always allowed
	if errno != 0 {
		return errno
	}
	return nil
}

// Capable reports whether this process has a capability (capabilities(7)), one of the first 32.
func Capable(capability int) bool {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	return unix.Capget(&hdr, &data[0]) == nil && data[0].Effective&(1<<capability) != 0
}
