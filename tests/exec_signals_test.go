package tests

import (
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// A signal to sbxrun exec ends that exec completely, and nothing else.
func TestExecSignal(t *testing.T) {
	t.Parallel()
	b := harness.NewState(t).Sandbox(harness.Options{}, "/fixtures/term-handler")
	w := newWitness(b)
	for _, sig := range endSignals {
		p := b.StartExec(harness.Options{}, nil, "/fixtures/tree-daemon")
		p.WaitOutput("ready 2\n")
		sent := time.Now()
		p.Signal(sig)
		r := p.Wait()
		r.Expect(t, 128+int(sig), "canceled")
		harness.Within(t, "the end by "+unix.SignalName(sig), r.Ended.Sub(sent), 0, 200*time.Millisecond)
		w.lives(t, unix.SignalName(sig))
	}
	// With a grace period the command gets the signal, and a second one kills it.
	p := b.StartExec(harness.Options{}, []string{"--grace", "20"}, "/fixtures/term-handler")
	p.WaitOutput("ready 1\n")
	p.Signal(syscall.SIGTERM)
	r := p.Wait()
	r.Expect(t, 128+15, "canceled")
	check.That(t, strings.HasSuffix(string(r.Stdout), "cleaned\n"), "stdout %q", r.Stdout)
	p = b.StartExec(harness.Options{}, []string{"--grace", "50"}, "/fixtures/term-swallow")
	p.WaitOutput("ready 1\n")
	p.Signal(syscall.SIGINT)
	p.WaitOutput("got SIGINT\n")
	sent := time.Now()
	p.Signal(syscall.SIGINT)
	r = p.Wait()
	r.Expect(t, 128+2, "canceled")
	harness.Within(t, "the end by a second signal", r.Ended.Sub(sent), 0, 200*time.Millisecond)
	w.end(t)
	check.Equal(t, string(b.State.Run("logs", b.ID).Stdout), "ready 1\n", "the sandbox's own command has noticed")
}

// The same at many moments while the exec enters.
func TestExecSignalEarly(t *testing.T) {
	// Not in parallel, so that an orphan is not blamed on another test.
	b := harness.NewState(t).Sandbox(harness.Options{})
	for i := range 40 {
		p := b.StartExec(harness.Options{}, nil, "/fixtures/tree-sleep")
		// Vary the moment.
		time.Sleep(time.Duration(i) * 200 * time.Microsecond)
		p.Signal(syscall.SIGTERM)
		r := p.Wait()
		if r.Signal == syscall.SIGTERM {
			continue // no handler yet, and no processes
		}
		r.Expect(t, 128+15, "canceled")
	}
}

// A stopped init or payload does not delay an exec's deadline; a stopped keeper delays only the
// proof.
func TestExecDeadlineStopped(t *testing.T) {
	t.Parallel()
	b := harness.NewState(t).Sandbox(harness.Options{})
	for _, role := range []int{harness.RoleKeeper, harness.RoleInit, harness.RolePayload} {
		p, low := harness.InTime(t, time.Second, "ready 2\n", func(timeout string) *harness.Process {
			return b.StartExec(harness.Options{}, []string{"--timeout", timeout, "--proof-timeout", timeout}, "/fixtures/tree-setsid")
		})
		target := p.Role(role)
		harness.Must(t, target.Signal(unix.SIGSTOP))
		r := p.Wait()
		r.Expect(t, 124, "timeout")
		if role == harness.RoleKeeper {
			low *= 2
		}
		harness.Within(t, "the exec", r.Elapsed, low, low+500*time.Millisecond)
	}
}

// After many execs in a row the sandbox has as many tasks, and its supervisor as many descriptors
// and as much memory, as before. SBXRUN_SOAK=100 makes 500.
func TestExecSoak(t *testing.T) {
	// Not in parallel: it keeps a CPU busy.
	b := harness.NewState(t).Sandbox(harness.Options{})
	measure := func() (tasks, fds int, rss int64) {
		for _, p := range b.Members() {
			tasks += countDir(t, "/proc/%d/task", p.PID)
		}
		return tasks, countDir(t, "/proc/%d/fd", b.Supervisor.PID), b.Supervisor.RSS()
	}
	// Until the supervisor has opened everything that it keeps open.
	for begin := time.Now(); time.Since(begin) < 500*time.Millisecond; {
		b.Exec(harness.Options{}, nil, "true").Expect(t, 0, "exited")
	}
	tasks, fds, rss := measure()
	for i := range harness.Soak(t) {
		switch i % 4 {
		case 0:
			b.Exec(harness.Options{}, nil, "sh", "-c", "setsid sleep 60 & exit 3").Expect(t, 3, "exited")
		case 1:
			b.Exec(harness.Options{}, []string{"--timeout", harness.Deadline(150 * time.Millisecond).String()}, "sh", "-c", "setsid sleep 60 & sleep 60").Expect(t, 124, "timeout")
		case 2:
			b.Exec(harness.Options{}, nil, "no-such-command").Expect(t, 127, "start-failed")
		default:
			b.Exec(harness.Options{}, nil, "true").Expect(t, 0, "exited")
		}
		if t.Failed() {
			return
		}
	}
	nowTasks, nowFDs, nowRSS := measure()
	if nowTasks != tasks || nowFDs != fds || nowRSS > rss+1<<20 {
		t.Errorf("before: %d tasks, %d descriptors, %d bytes; after %d execs: %d, %d, %d", tasks, fds, rss, harness.Soak(t), nowTasks, nowFDs, nowRSS)
	}
}

// Fifty execs at once don't disturb each other.
func TestExecParallel(t *testing.T) {
	b := harness.NewState(t).Sandbox(harness.Options{})
	var ps []*harness.Process
	for i := range 50 {
		flags := []string{"--timeout", "50"}
		if i%2 == 1 {
			flags = []string{"--timeout", harness.Deadline(2 * time.Second).String()}
		}
		ps = append(ps, b.StartExec(harness.Options{}, flags, "sh", "-c", `setsid sleep 60 & echo "number $1"; [ $(($1 % 2)) = 1 ] && sleep 60; exit $1`, "-", strconv.Itoa(i)))
	}
	for i, p := range ps {
		r := p.Wait()
		if i%2 == 1 {
			r.Expect(t, 124, "timeout")
		} else {
			r.Expect(t, i, "exited")
		}
		check.That(t, string(r.Stdout) == "number "+strconv.Itoa(i)+"\n", "%d: stdout %q", i, r.Stdout)
	}
}

func countDir(t *testing.T, format string, pid int) int {
	t.Helper()
	entries, err := os.ReadDir(strings.Replace(format, "%d", strconv.Itoa(pid), 1))
	harness.Must(t, err)
	return len(entries)
}
