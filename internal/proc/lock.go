package proc

import (
	"io"
	"time"

	"golang.org/x/sys/unix"
)

// TryLock takes the lock of an open file (unix.F_WRLCK, alone; unix.F_RDLCK, with others), changes it
// or gives it up (unix.F_UNLCK), without waiting. It belongs to the open file and ends with its last
// descriptor (F_OFD_SETLK, fcntl_locking(2)). EAGAIN: somebody else has it.
func TryLock(fd int, kind int16) error {
	return unix.FcntlFlock(uintptr(fd), unix.F_OFD_SETLK, &unix.Flock_t{Type: kind, Whence: io.SeekStart})
}

// Lock is [TryLock] that tries again for so long. It does not wait in the kernel, where a holder that was
// stopped (SIGSTOP) would keep us for ever.
func Lock(fd int, kind int16, patience time.Duration) error {
	for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		if err := TryLock(fd, kind); err != unix.EAGAIN || !time.Now().Before(end) {
			return err
		}
	}
}
