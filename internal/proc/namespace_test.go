package proc

import (
	"fmt"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// Concurrent calls of asOwner each run with the owner's IDs. Afterwards this process has its own IDs and is dumpable, as
// before.
func TestAsOwnerAtOnce(t *testing.T) {
	other := exec.Command("sleep", "60")
	if os.Geteuid() == 0 {
		other.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	}
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = other.Process.Kill()
		_ = other.Wait()
	}()
	if os.Geteuid() != 0 {
		if err := asOwner(other.Process.Pid, func() error { return nil }); err != unix.EACCES {
			t.Errorf("an ordinary user: %v", err)
		}
		return
	}
	var st unix.Stat_t
	// Package syscall shares memory with a child until the exec (CLONE_VM), so the child's change of IDs has made this
	// process undumpable, too.
	const before = 1
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, before, 0, 0, 0); err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 300 {
				err := asOwner(other.Process.Pid, func() error {
					if uid, gid := unix.Geteuid(), unix.Getegid(); uid != 65534 || gid != 65534 {
						t.Errorf("ids are %d and %d", uid, gid)
					}
					return unix.Stat(fmt.Sprintf("/proc/%d/ns/pid", other.Process.Pid), new(unix.Stat_t))
				})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	// Concurrent forks inherit neither the IDs nor the flag.
	for range 20 {
		out, err := exec.Command("sh", "-c", "id -u; stat -c %u /proc/self").Output()
		if err != nil || string(out) != "0\n0\n" {
			t.Errorf("a fork has ids %q, %v", out, err)
		}
	}
	all.Wait()
	after, err := unix.PrctlRetInt(unix.PR_GET_DUMPABLE, 0, 0, 0, 0)
	if err != nil || after != before {
		t.Errorf("dumpable is %d, and was %d (%v)", after, before, err)
	}
	if err := unix.Stat("/proc/self/ns/pid", &st); err != nil || unix.Geteuid() != 0 {
		t.Errorf("%v, uid %d", err, unix.Geteuid())
	}
}
