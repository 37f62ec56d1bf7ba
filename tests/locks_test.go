package tests

import (
	"os"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// Locks belong to an inode. With an overlay, a command's locks are not on the inodes that the host uses.
func TestLocksOfOverlay(t *testing.T) {
	t.Parallel()
	f, err := os.Open("/usr/bin/env")
	check.Must(t, err)
	defer f.Close()
	check.Must(t, syscall.Flock(int(f.Fd()), syscall.LOCK_SH))
	// "1: FLOCK ADVISORY READ PID MAJOR:MINOR:INODE 0 EOF" (proc_locks(5))
	own := regexp.MustCompile(" READ +" + strconv.Itoa(os.Getpid()) + " ([0-9a-f]+:[0-9a-f]+:[0-9]+) ").FindStringSubmatch(locks(t))
	if own == nil {
		t.Fatal(locks(t))
	}
	for _, flags := range [][]string{nil, {"--overlay", "/usr"}} {
		before := strings.Count(locks(t), own[1]+" ")
		p := harness.Start(t, harness.Options{}, append(flags, "flock", "-s", "/usr/bin/env", "sh", "-c", "echo locked; exec sleep 1000")...)
		p.WaitOutput("locked\n")
		if on := strings.Count(locks(t), own[1]+" ") > before; on != (flags == nil) {
			t.Errorf("%v: a lock on the host's inode: %v\n%s", flags, on, locks(t))
		}
		p.Signal(syscall.SIGTERM)
		p.Wait()
	}
}

func locks(t *testing.T) string {
	t.Helper()
	text := harness.ReadFile(t, "/proc/locks")
	return string(text)
}
