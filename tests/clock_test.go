package tests

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// A long run survives the end of sbxrun's threads, with one CPU and constant garbage collection. A
// parent-death signal would depend on a thread (prctl(2), PR_SET_PDEATHSIG).
func TestThreadChurn(t *testing.T) {
	// Not in parallel: it keeps a CPU busy.
	for _, env := range [][]string{
		{"GOMAXPROCS=1", "GOGC=1"},
		{"GOMAXPROCS=8", "GOGC=1", "GODEBUG=asyncpreemptoff=1"},
	} {
		t.Run(env[0], func(t *testing.T) {
			t.Parallel()
			// Captured output makes sbxrun allocate, and signals that it ignores keep its threads
			// busy.
			p := harness.Start(t, harness.Options{Env: env}, "--json", "--timeout", "120",
				"sh", "-c", "i=0; while [ $i -lt 20 ]; do head -c 500000 /dev/zero; sleep 0.1; i=$((i+1)); done; exit 7")
			for running := true; running; {
				select {
				case <-p.Exited():
					running = false
				case <-time.After(2 * time.Millisecond):
					p.Signal(syscall.SIGURG)
					p.Signal(syscall.SIGWINCH)
				}
			}
			r := p.Wait()
			r.Expect(t, 7, "exited")
			if r.Elapsed < 2*time.Second {
				t.Errorf("over after %v already", r.Elapsed)
			}
		})
	}
}

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
			if err == nil && strings.Contains(string(data), "clockid: 0") {
				t.Errorf("process %d has a timer on CLOCK_REALTIME:\n%s", pid, data)
			}
		}
		timers, err := os.ReadFile(fmt.Sprintf("/proc/%d/timers", pid))
		if err == nil && strings.Contains(string(timers), "ClockID: 0") {
			t.Errorf("process %d has a timer on CLOCK_REALTIME:\n%s", pid, timers)
		}
	}
	p.Wait().Expect(t, 124, "timeout")
}
