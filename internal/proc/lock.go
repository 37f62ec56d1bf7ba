package proc

import (
	"io"
	"time"

	"golang.org/x/sys/unix"
)

// TryLock takes, changes or releases (unix.F_UNLCK) an exclusive (unix.F_WRLCK) or shared (unix.F_RDLCK) lock of a file,
// without waiting. The lock belongs to the open file description and ends with its last descriptor (F_OFD_SETLK,
// fcntl_locking(2)). It fails with EAGAIN if another has a conflicting lock.
func TryLock(fd int, kind int16) error {
	return unix.FcntlFlock(uintptr(fd), unix.F_OFD_SETLK, &unix.Flock_t{Type: kind, Whence: io.SeekStart})
}

// Lock is TryLock with retries for up to patience. It does not block in the kernel, where a stopped holder (SIGSTOP) would
// block it forever.
func Lock(fd int, kind int16, patience time.Duration) error {
	for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		if err := TryLock(fd, kind); err != unix.EAGAIN || !time.Now().Before(end) {
			return err
		}
	}
}
