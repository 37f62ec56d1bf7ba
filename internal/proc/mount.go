package proc

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// MountError reports why this process cannot use the PIDs in /proc.
type MountError struct {
	Cause, Remedy string
	Err           error // of readlink(2); nil if /proc shows another PID namespace
}

func (e *MountError) Error() string { return e.Cause }

func (e *MountError) Unwrap() error { return e.Err }

// CheckMount returns a *[MountError] unless /proc shows this process's PID namespace. A /proc shows the namespace of the
// process that mounted it: after unshare(1) --pid that is still the outer one. In this namespace its PIDs belong to other
// processes, which kill(2) and pidfd_open(2) would use. Call CheckMount before using a PID from /proc; it costs one
// readlink(2).
//
// The PIDs in both namespaces can be equal by chance, but only after the outer PIDs have wrapped around: a process gets its
// PIDs in all namespaces at the same time, and the outer namespaces have counted more processes.
func CheckMount() error {
	number, err := os.Readlink("/proc/self")
	return checkMount(number, os.Getpid(), err)
}

func checkMount(number string, self int, err error) error {
	const mount = "mount -t proc proc /proc"
	switch {
	case errors.Is(err, unix.ENOENT):
		return &MountError{Cause: "/proc is not mounted, or shows a PID namespace that sbxrun is not in", Remedy: mount + " (after unshare --pid: unshare --mount-proc)", Err: err}
	case err != nil:
		return &MountError{Cause: "/proc cannot be read: " + err.Error(), Remedy: mount, Err: err}
	case number != strconv.Itoa(self):
		return &MountError{Cause: fmt.Sprintf("/proc shows another PID namespace: sbxrun is process %d, and %s there", self, number),
			Remedy: "unshare --pid --fork --mount-proc; or, in a mount namespace of your own: " + mount}
	}
	return nil
}

// CheckHidden returns a *[MountError] if /proc hides the processes of other users (hidepid, proc(5)). Then it also hides those
// that bwrap starts, which have other user and group IDs, or capabilities in their own user namespace. PID 1 serves as the
// example.
func CheckHidden() error {
	if err := unix.Access("/proc/1/stat", unix.F_OK); err != nil {
		return &MountError{Cause: "/proc hides the processes of others (hidepid)", Remedy: "mount -o remount,hidepid=0 /proc; or, for one group, with gid=ITS-ID instead", Err: err}
	}
	return nil
}
