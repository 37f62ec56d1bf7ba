package proc

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// MountError says why the numbers in /proc are of no use to this process.
type MountError struct {
	Cause, Remedy string
	Err           error // of readlink(2); nil if /proc shows another PID namespace
}

func (e *MountError) Error() string { return e.Cause }

func (e *MountError) Unwrap() error { return e.Err }

// CheckMount returns a *[MountError] unless /proc shows the PID namespace that this
// process is in. A /proc shows the namespace of who mounted it: after unshare(1) --pid
// it is still the outer one's. The numbers read there are strangers' in our namespace,
// and kill(2) or pidfd_open(2) would take them for ours. Whoever uses a number from
// /proc calls this before; it costs one readlink(2).
//
// The two numbers can agree by chance, but only after those of the outer namespace have
// wrapped around: a process gets its numbers in all namespaces at once, and the outer
// ones have counted more.
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

// CheckHidden returns a *[MountError] if /proc shows this process no other user's (hidepid of
// proc(5)): then it does not show what bwrap starts either, which has other user and group ids, or
// capabilities in a user namespace of its own. PID 1 stands for all of these.
func CheckHidden() error {
	if err := unix.Access("/proc/1/stat", unix.F_OK); err != nil {
		return &MountError{Cause: "/proc hides the processes of others (hidepid)", Remedy: "mount -o remount,hidepid=0 /proc; or, for one group, with gid=ITS-ID instead", Err: err}
	}
	return nil
}
