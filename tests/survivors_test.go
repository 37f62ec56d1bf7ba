package tests

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// A teardown lifts the CPU quota. A process that survives it, here because a tracer outside stops
// it, gets the quota back.
func TestUnprovenQuota(t *testing.T) {
	t.Parallel()
	if !enforced(t, limits.Request{CPUs: 0.25}, "--cpus", "0.25") {
		return
	}
	runtime.LockOSThread() // a tracer is a thread
	defer runtime.UnlockOSThread()
	dir := harness.SharedDir(t)
	cmd := exec.Command(harness.Binary(t), "--cpus", "0.25", "--timeout", "60", "--proof-timeout", "0.5", "--bind", dir+":/out", "sh", "-c", "read line; exit 7")
	stdin, err := cmd.StdinPipe()
	harness.Must(t, err)
	cmd.Dir = dir
	done, err := harness.StartCommand(cmd)
	harness.Must(t, err)
	defer done()
	exited := make(chan error, 1)
	go func() { exited <- cmd.Wait() }()
	pid := 0
	harness.Until(t, harness.Bound, "the command", func() bool {
		for _, child := range harness.Descendants(cmd.Process.Pid) {
			if name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", child)); strings.HasPrefix(string(name), "sh\x00") {
				pid = child
			}
		}
		return pid != 0
	})
	keeper, err := harness.Adopt(harness.Descendants(cmd.Process.Pid)[0]) // the parent of the command's init; it outlives sbxrun
	harness.Must(t, err)
	defer keeper.Close()
	groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	harness.Must(t, err)
	id := regexp.MustCompile(`/sbxrun-([0-9a-f]+)`).FindStringSubmatch(string(groups))
	_, _, errno := unix.RawSyscall6(unix.SYS_PTRACE, unix.PTRACE_SEIZE, uintptr(pid), 0, unix.PTRACE_O_TRACEEXIT, 0, 0)
	check.Require(t, errno == 0 && id != nil, "trace %d in %s: %v", pid, groups, errno)
	harness.Must(t, cmd.Process.Signal(unix.SIGTERM))
	stdin.Close()
	err = <-exited
	e := (*exec.ExitError)(nil)
	check.That(t, errors.As(err, &e) && e.ExitCode() == 123, "want unproven: %v", err)
	quotas := 0
	for _, dir := range harness.Cgroups(id[1]) {
		for file, want := range map[string]string{"cpu.max": "25000 100000", "cpu.cfs_quota_us": "25000"} {
			quota, err := os.ReadFile(filepath.Join(dir, file))
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			harness.Must(t, err)
			check.That(t, strings.TrimSpace(string(quota)) == want, "%s of the survivor: %s", file, quota)
			quotas++
		}
	}
	if quotas == 0 {
		t.Errorf("no quota of %s", strconv.Quote(id[1]))
	}
	var status unix.WaitStatus
	_, err = unix.Wait4(pid, &status, unix.WALL, nil)
	harness.Must(t, err)
	_, _, errno = unix.RawSyscall6(unix.SYS_PTRACE, unix.PTRACE_CONT, uintptr(pid), 0, 0, 0, 0)
	check.That(t, errno == 0, "%v", errno)
	_, _ = unix.Wait4(pid, &status, unix.WALL, nil) // its end
	<-keeper.Reaped()
	left := harness.Cgroups(id[1])
	check.That(t, len(left) == 0, "left: %q", left)
}
