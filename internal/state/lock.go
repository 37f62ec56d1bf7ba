package state

import (
	"errors"
	"io"
	"time"

	"golang.org/x/sys/unix"
)

// tryLock takes a lock (unix.F_WRLCK, alone; unix.F_RDLCK, with others), changes it
// or gives it up (unix.F_UNLCK), without waiting. It belongs to the open file and
// ends with its last descriptor. EAGAIN: somebody else has it.
func tryLock(fd int, kind int16) error {
	return unix.FcntlFlock(uintptr(fd), unix.F_OFD_SETLK, &unix.Flock_t{Type: kind, Whence: io.SeekStart})
}

// locked asks whether another open file has a lock, and takes none.
func locked(fd int) (bool, error) {
	l := unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart}
	err := unix.FcntlFlock(uintptr(fd), unix.F_OFD_GETLK, &l)
	return l.Type != unix.F_UNLCK, err
}

// lock is tryLock for locks that are held for a few system calls. It tries again,
// for so long, instead of waiting in the kernel, where a holder that was stopped
// (SIGSTOP) would keep us for ever.
func lock(fd int, kind int16, patience time.Duration) error {
	for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		err := tryLock(fd, kind)
		if !errors.Is(err, unix.EAGAIN) || time.Now().After(end) {
			return err
		}
	}
}
