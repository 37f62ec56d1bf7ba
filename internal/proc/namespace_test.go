package proc

import (
	"fmt"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
)

// Concurrent calls of asOwner each run with the owner's IDs. Afterwards this process has its own IDs and is dumpable, as
// before.
func TestAsOwnerAtOnce(t *testing.T) {
	other := exec.Command("sleep", "60")
	if os.Geteuid() == 0 {
		other.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	}
	err := other.Start()
	check.Must(t, err)
	defer func() {
		_ = other.Process.Kill()
		_ = other.Wait()
	}()
	if os.Geteuid() != 0 {
		err := asOwner(other.Process.Pid, func() error { return nil })
		check.That(t, err == unix.EACCES, "an ordinary user: %v", err)
		return
	}
	var st unix.Stat_t
	// Package syscall shares memory with a child until the exec (CLONE_VM), so the child's change of IDs has made this
	// process undumpable, too.
	const before = 1
	check.Must(t, unix.Prctl(unix.PR_SET_DUMPABLE, before, 0, 0, 0))
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 300 {
				err := asOwner(other.Process.Pid, func() error {
					uid, gid := unix.Geteuid(), unix.Getegid()
					check.That(t, uid == 65534 && gid == 65534, "ids are %d and %d", uid, gid)
					return unix.Stat(fmt.Sprintf("/proc/%d/ns/pid", other.Process.Pid), new(unix.Stat_t))
				})
				check.That(t, err == nil, "%v", err)
			}
		})
	}
	// Concurrent forks inherit neither the IDs nor the flag.
	for range 20 {
		out, err := exec.Command("sh", "-c", "id -u; stat -c %u /proc/self").Output()
		check.That(t, err == nil && string(out) == "0\n0\n", "a fork has ids %q, %v", out, err)
	}
	all.Wait()
	after, err := unix.PrctlRetInt(unix.PR_GET_DUMPABLE, 0, 0, 0, 0)
	check.That(t, err == nil && after == before, "dumpable is %d, and was %d (%v)", after, before, err)
	err = unix.Stat("/proc/self/ns/pid", &st)
	check.That(t, err == nil && unix.Geteuid() == 0, "%v, uid %d", err, unix.Geteuid())
}
