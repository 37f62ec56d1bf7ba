package proc

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// CloseOnExec has all descriptors from first on closed by an exec, whoever opened them.
func CloseOnExec(first int) error {
	err := unix.CloseRange(uint(first), MaxFD, unix.CLOSE_RANGE_CLOEXEC)
	if err != unix.EINVAL {
		return err
	}
	// Before Linux 5.11 close_range(2) has no such flag.
	names, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return fmt.Errorf("list descriptors: %w", err)
	}
	for _, name := range names {
		if fd, err := strconv.Atoi(name.Name()); err == nil && fd >= first {
			unix.CloseOnExec(fd) // the list's own is closed by now, which is no harm
		}
	}
	return nil
}

// DescriptorsHint is the remedy for an error that comes from no file being left that could
// be opened, or sent, or from how large those may be that the caller writes; "" for any other.
func DescriptorsHint(err error) string {
	switch {
	case errors.Is(err, unix.EMFILE):
		return "raise the limit of open files (ulimit -n)"
	case errors.Is(err, unix.ENFILE):
		return "the machine has no more open files (sysctl fs.file-max)"
	case errors.Is(err, unix.EFBIG):
		return "raise the limit of file sizes (ulimit -f)"
	case errors.Is(err, unix.ETOOMANYREFS): // unix(7)
		return "processes of this user have sent more descriptors that nobody has received than we may have open; end them, or raise the limit of open files (ulimit -n)"
	}
	return ""
}
