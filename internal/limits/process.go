package limits

import (
	"errors"
	"os"
	"runtime"
	"strconv"
	"strings"

	"github.com/sbxrun/sbxrun/internal/proc"
	"golang.org/x/sys/unix"
)

// asOwner calls f, and if that is forbidden once more as the user whose process it
// is. Root in a container often lacks CAP_SYS_RESOURCE and CAP_SYS_NICE, and then may not set
// the limits of a process of nobody's, which nobody may (prlimit(2), setpriority(2)).
func asOwner(pid int, f func() error) error {
	err := f()
	if !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.EACCES) || os.Geteuid() != 0 {
		return err
	}
	status, readErr := proc.ReadFile("/proc/" + strconv.Itoa(pid) + "/status")
	uid, uidOK := parseID(status, "Uid:")
	gid, gidOK := parseID(status, "Gid:")
	if readErr != nil || !uidOK || !gidOK || uid == 0 {
		return err
	}
	done := make(chan error)
	go func() {
		// The identity is the thread's alone, and ends with it: it is not unlocked.
		// The saved uid stays 0, so that nobody may not trace it.
		runtime.LockOSThread()
		const keep = ^uintptr(0)
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESGID, gid, gid, keep); errno != 0 {
			done <- err
		} else if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uid, uid, keep); errno != 0 {
			done <- err
		} else {
			done <- f()
		}
	}()
	return <-done
}

// parseID is the real, effective and saved id of a process, if they are one, from /proc/PID/status.
// Its name, which comes first, has no newlines there.
func parseID(status []byte, key string) (id uintptr, ok bool) {
	for line := range strings.Lines(string(status)) {
		f := strings.Fields(line)
		if len(f) != 5 || f[0] != key || !strings.HasPrefix(line, key) {
			continue
		}
		n, err := strconv.ParseUint(f[1], 10, 32)
		return uintptr(n), err == nil && f[2] == f[1] && f[3] == f[1]
	}
	return 0, false
}

// mayRaise: who has CAP_SYS_RESOURCE may raise a hard limit (setrlimit(2)).
func mayRaise() bool {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	return unix.Capget(&hdr, &data[0]) == nil && data[0].Effective&(1<<unix.CAP_SYS_RESOURCE) != 0
}
