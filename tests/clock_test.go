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

// Threads of sbxrun that come and go, on one processor and with the
// collector always at work, do not end a long run: no parent-death signal hangs
// on one of them (prctl(2), PR_SET_PDEATHSIG).
func TestThreadChurn(t *testing.T) {
	// Not in parallel: it takes all of a processor.
	for _, env := range [][]string{
		{"GOMAXPROCS=1", "GOGC=1"},
		{"GOMAXPROCS=8", "GOGC=1", "GODEBUG=asyncpreemptoff=1"},
	} {
		t.Run(env[0], func(t *testing.T) {
			t.Parallel()
			// Captured output keeps sbxrun allocating, and signals it does
			// not act on keep its threads moving.
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

// Time in which sbxrun did not run counts, as it does after a suspend: the
// deadline is an instant, not a number of ticks, and fires as soon as it can.
func TestClockStopped(t *testing.T) {
	t.Parallel()
	p, timeout := harness.InTime(t, time.Second, "ready 2\n", func(timeout string) *harness.Process {
		return harness.Start(t, harness.Options{}, "--timeout", timeout, "/fixtures/tree-sleep")
	})
	p.Signal(syscall.SIGSTOP)
	begin := time.Now()
	harness.Until(t, harness.Bound, "the deadline to pass", func() bool { return time.Since(begin) > timeout+500*time.Millisecond })
	continued := time.Now() // before: afterwards it may have ended already
	p.Signal(syscall.SIGCONT)
	r := p.Wait()
	r.Expect(t, 124, "timeout")
	harness.Within(t, "the end after SIGCONT", r.Ended.Sub(continued), 0, 200*time.Millisecond)
}

// No timer of sbxrun or its keeper is on a clock that can be set. Setting
// the real one would disturb the whole machine, so the timers are looked at
// instead (proc_pid_fdinfo(5), proc_pid_timers(5)).
func TestClockMonotonic(t *testing.T) {
	t.Parallel()
	p, _ := harness.InTime(t, time.Second, "ready 2\n", func(timeout string) *harness.Process {
		return harness.Start(t, harness.Options{}, "--timeout", timeout, "--grace", "1", "/fixtures/tree-sleep")
	})
	pids := []int{p.PID}
	if harness.Root() {
		pids = append(pids, p.Role(harness.RoleKeeper).PID) // not dumpable, so root's to look at
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
