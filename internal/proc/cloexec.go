package proc

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// CloseOnExec sets close-on-exec for all descriptors from first on.
func CloseOnExec(first int) error {
	err := unix.CloseRange(uint(first), MaxFD, unix.CLOSE_RANGE_CLOEXEC)
	if err != unix.EINVAL {
		return err
	}
	// close_range(2) has this flag since Linux 5.11.
	names, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return fmt.Errorf("list descriptors: %w", err)
	}
	for _, name := range names {
		if fd, err := strconv.Atoi(name.Name()); err == nil && fd >= first {
			unix.CloseOnExec(fd) // the directory's own is closed by now, which is harmless
		}
	}
	return nil
}

// DescriptorsHint returns the hint for an error caused by a limit on open or sent files or on file sizes; "" for others.
func DescriptorsHint(err error) string {
	switch {
	case errors.Is(err, unix.EMFILE):
		return "raise the limit of open files (ulimit -n)"
	case errors.Is(err, unix.ENFILE):
		return "the machine has no more open files (sysctl fs.file-max)"
	case errors.Is(err, unix.EFBIG):
		return "raise the limit of file sizes (ulimit -f)"
	case errors.Is(err, unix.ETOOMANYREFS): // unix(7)
		return "processes of this user have sent more unreceived descriptors than sbxrun may have open; end them, or raise the limit of open files (ulimit -n)"
	}
	return ""
}
