package tests

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// The deadline is a point in time: it counts while sbxrun is stopped, as after a suspend, and
// fires as soon as sbxrun continues.
func TestClockStopped(t *testing.T) {
	t.Parallel()
	p, timeout := harness.InTime(t, time.Second, "ready 2\n", func(timeout string) *harness.Process {
		return harness.Start(t, harness.Options{}, "--timeout", timeout, "/fixtures/tree-sleep")
	})
	p.Signal(syscall.SIGSTOP)
	begin := time.Now()
	harness.Until(t, harness.Bound, "the deadline to pass", func() bool { return time.Since(begin) > timeout+500*time.Millisecond })
	continued := time.Now() // taken first, because sbxrun may exit at once
	p.Signal(syscall.SIGCONT)
	r := p.Wait()
	r.Expect(t, 124, "timeout")
	harness.Within(t, "the end after SIGCONT", r.Ended.Sub(continued), 0, 200*time.Millisecond)
}

// No timer of sbxrun or its keeper uses a clock that can be set. The test inspects the timers
// (proc_pid_fdinfo(5), proc_pid_timers(5)), because setting the clock would disturb the machine.
func TestClockMonotonic(t *testing.T) {
	t.Parallel()
	p, _ := harness.InTime(t, time.Second, "ready 2\n", func(timeout string) *harness.Process {
		return harness.Start(t, harness.Options{}, "--timeout", timeout, "--grace", "1", "/fixtures/tree-sleep")
	})
	pids := []int{p.PID}
	if harness.Root() {
		pids = append(pids, p.Role(harness.RoleKeeper).PID) // not dumpable, so only root can inspect it
	}
	for _, pid := range pids {
		infos, err := os.ReadDir(fmt.Sprintf("/proc/%d/fdinfo", pid))
		harness.Must(t, err)
		for _, info := range infos {
			data, err := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/%s", pid, info.Name()))
			check.That(t, err != nil || !strings.Contains(string(data), "clockid: 0"), "process %d has a timer on CLOCK_REALTIME:\n%s", pid, data)
		}
		timers, err := os.ReadFile(fmt.Sprintf("/proc/%d/timers", pid))
		check.That(t, err != nil || !strings.Contains(string(timers), "ClockID: 0"), "process %d has a timer on CLOCK_REALTIME:\n%s", pid, timers)
	}
	p.Wait().Expect(t, 124, "timeout")
}
