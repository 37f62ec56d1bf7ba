package tests

import (
	"bytes"
	stdjson "encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/budget"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// refused asserts that nothing was started because the machine is busy.
func refused(t *testing.T, r *harness.Result) {
	t.Helper()
	r.Expect(t, 75, "start-failed")
	e := r.Report.Error
	check.That(t, e != nil && e.Code == "busy" && e.Hint != "" && strings.Contains(e.Message, " of "), "error %+v", e)
	check.That(t, !r.Report.Started && r.Report.Teardown.Verdict == "not_applicable", "%s", r.Report.Raw())
	lines := harness.Lines(r.Stderr)
	check.That(t, len(lines) == 1 && strings.HasPrefix(lines[0], "sbxrun: error: busy: "), "stderr %q", r.Stderr)
}

// With growing use of tasks sbxrun is silent, then warns, then refuses: with a real pids.max where
// one can be set, and with thresholds everywhere.
func TestPressure(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	env := []string{"SBXRUN_STATE_DIR=" + s.Dir}
	silent := func(o harness.Options, flags ...string) {
		t.Helper()
		harness.Run(t, o, append(flags, "echo", "hi")...).Expect(t, 0, "exited").Err(t, "").Out(t, "hi\n")
	}
	warned := func(o harness.Options, flags ...string) {
		t.Helper()
		r := harness.Run(t, o, append(flags, "echo", "hi")...).Expect(t, 0, "exited")
		lines := harness.Lines(r.Stderr)
		check.That(t, len(lines) == 1 && strings.HasPrefix(lines[0], "sbxrun: warning: ") && string(r.Stdout) == "hi\n", "%q, %q", r.Stdout, r.Stderr)
		silent(o, append(flags, "--quiet")...)
	}
	t.Run("thresholds", func(t *testing.T) {
		o := harness.Options{Env: env}
		silent(o, "--warn", "100", "--alert", "100")
		warned(o, "--warn", "0", "--alert", "100")
		refused(t, harness.Run(t, o, "--warn", "0", "--alert", "0.0001", "echo", "hi"))
		warned(o, "--alert", "0", "--on-pressure", "ignore")
		begin := time.Now()
		r := harness.Run(t, o, "--alert", "0", "--on-pressure", "wait", "--wait-timeout", "0.5", "echo", "hi")
		refused(t, r)
		harness.Within(t, "the wait", time.Since(begin), 500*time.Millisecond, 20*time.Second) // not a minute

		// The client prints the warnings of start, exec and detached commands.
		b := s.Sandbox(harness.Options{})
		refused(t, b.Exec(harness.Options{}, []string{"--alert", "0"}, "echo", "hi"))
		x := b.Exec(harness.Options{}, []string{"--warn", "0"}, "echo", "hi").Expect(t, 0, "exited")
		check.That(t, bytes.HasPrefix(x.Stderr, []byte("sbxrun: warning: ")), "exec: stderr %q", x.Stderr)
		for _, args := range [][]string{{"start", "--json", "--alert", "0"}, {"exec", "--detach", "--json", "--alert", "0", b.ID, "true"}} {
			r := s.Run(args...)
			var said struct {
				ID       string
				Error    struct{ Code string }
				ExitCode int `json:"exit_code"`
			}
			err := stdjson.Unmarshal(r.Stdout, &said)
			check.That(t, err == nil && r.ExitCode == 75 && said.ExitCode == 75 && said.Error.Code == "busy" && said.ID == "", "%q: exit code %d, %v: %s", args, r.ExitCode, err, r.Stdout)
		}
		b, r = s.TrySandbox(harness.Options{}, "--warn", "0")
		check.That(t, b != nil && bytes.HasPrefix(r.Stderr, []byte("sbxrun: warning: ")), "start: %q", r.Stderr)
		check.Equal(t, s.Run("--on-pressure", "ignore", "--max-parallel", "1", "true").ExitCode, 125, "a bound that is ignored: exit code")
		check.Equal(t, s.Run("--on-pressure", "sometimes", "true").ExitCode, 125, "--on-pressure sometimes: exit code")
	})
	t.Run("pids.max", func(t *testing.T) {
		b := budget.New(t, 200)
		if b == nil {
			t.Log("no cgroup can be made here: the thresholds above must do")
			return
		}
		o := harness.Options{Env: env, Wrap: b.Wrap()}
		b.Fill(100)
		silent(o)
		b.Fill(30)
		warned(o)
		b.Fill(40)
		r := harness.Run(t, o, "echo", "hi")
		refused(t, r)
		check.That(t, strings.Contains(r.Report.Error.Message, b.Dir+"/pids.max"), "%s does not name %s", r.Report.Error.Message, b.Dir)
		b.Settled(170)

		// A waiting run starts as soon as there is room.
		p := harness.Start(t, o, "--on-pressure", "wait", "--quiet", "echo", "hi")
		harness.Until(t, harness.Bound, "sbxrun in the cgroup", func() bool { return b.Used() > 170 })
		b.Limit(400)
		p.Wait().Expect(t, 0, "exited")
		b.Settled(170)
	})
}

// At the alert level, sbxrun first ends processes left by crashes, which may suffice. Records stay.
func TestPressureSweep(t *testing.T) {
	t.Parallel()
	b := budget.New(t, 400)
	s := harness.NewState(t)
	ended := s.Sandbox(harness.Options{}, "true")
	ended.Ended()
	if b == nil {
		s.Run("--alert", "0", "true").Exits(t, 75)
	} else {
		b.Fill(180)
		b.Limit(200)
		s.Start(harness.Options{Wrap: b.Wrap()}, "true").Wait().Exits(t, 75)
	}
	rec := ended.Inspect()
	check.That(t, rec.Status == "completed", "the record of what has ended: %+v", rec)
}

// A signal ends a waiting run at once.
func TestPressureWaitSignal(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	for _, flags := range [][]string{{"--alert", "0"}, {"--max-parallel", "1"}} {
		env := []string{"SBXRUN_STATE_DIR=" + s.Dir}
		holder := harness.Start(t, harness.Options{Env: env}, "--max-parallel", "1", "sh", "-c", "echo up; sleep 600")
		holder.WaitOutput("up\n")
		harness.Run(t, harness.Options{Env: env}, "--max-parallel", "1", "true").Exits(t, 75).ErrHas(t, "busy: --max-parallel 1: another command is running; ")
		p := harness.Start(t, harness.Options{Env: env}, append(flags, "--on-pressure", "wait", "echo", "hi")...)
		harness.Until(t, harness.Bound, "somebody who waits", func() bool {
			if flags[0] == "--max-parallel" {
				return queued(t, s.Dir) == 1
			}
			_, err := os.Stat(filepath.Join(s.Dir, "admission"))
			return err == nil
		})
		p.Signal(syscall.SIGTERM)
		r := p.Wait()
		check.That(t, r.Signal == syscall.SIGTERM && r.Report == nil && len(r.Stdout) == 0, "exit code %d, signal %v, stdout %q", r.ExitCode, r.Signal, r.Stdout)
		holder.Signal(syscall.SIGTERM)
		holder.Wait().Expect(t, 143, "canceled")
	}
}

// Near pids.max, a run is refused before anything starts, or has enough tasks.
func TestNoTaskLeftAtStart(t *testing.T) {
	t.Parallel()
	b := budget.New(t, 100)
	s := harness.NewState(t)
	o := harness.Options{Env: []string{"SBXRUN_STATE_DIR=" + s.Dir}}
	if b == nil {
		refused(t, harness.Run(t, o, "--alert", "0", "true"))
		return
	}
	o.Wrap = b.Wrap()
	const others = 10
	b.Fill(others)
	// sbxrun's own number of tasks depends on the CPUs.
	p := harness.Start(t, o, "sh", "-c", "sleep 600 & echo up; wait")
	p.WaitOutput("up\n")
	all := b.Used() - others
	p.Signal(syscall.SIGTERM)
	p.Wait().Expect(t, 143, "canceled")
	b.Settled(others)
	seen := map[int]int{}
	// With fewer, the Go runtime may not even get its first threads (docs/concepts/limits.md).
	const runtimes = 11
	for room := runtimes; room <= max(all, runtimes)+10; room++ {
		b.Limit(others + room)
		r := harness.Run(t, o, "--warn", "100", "--alert", "100", "true")
		seen[r.ExitCode]++
		switch r.ExitCode {
		case 0:
			r.Expect(t, 0, "exited")
		case 75:
			// Usually refused early, but a later fork may fail.
			r.Expect(t, 75, "start-failed")
			e := r.Report.Error
			check.That(t, e != nil && e.Code == "busy" && e.Hint != "" && !r.Report.Started, "room for %d of %d: %s", room, all, r.Report.Raw())
		default:
			t.Errorf("room for %d of %d: exit code %d: %.1000s", room, all, r.ExitCode, r.Stderr)
		}
		b.Settled(others)
	}
	check.That(t, seen[0] != 0 && seen[75] != 0, "exit codes %v: want both 0 and 75", seen)
}

// Killing needs no new process.
func TestNoTaskLeftAtKill(t *testing.T) {
	t.Parallel()
	b := budget.New(t, 100)
	s := harness.NewState(t)
	o := harness.Options{Env: []string{"SBXRUN_STATE_DIR=" + s.Dir}}
	var onStart harness.Options
	count := "20"
	if b != nil {
		b.Limit(60)
		o.Wrap, onStart.Wrap = b.Wrap(), b.Wrap()
		count = "500"
	}
	// The fixture prints "ready" when all processes exist, and "refused" when there was no room for all.
	const full = "re"
	p, _ := harness.InTime(t, harness.Scaled(2*time.Second), full, func(timeout string) *harness.Process {
		return harness.Start(t, o, "--timeout", timeout, "--env", "FIXTURE_COUNT="+count, "/fixtures/fork-bomb", "sleep")
	})
	check.That(t, b == nil || b.Used() >= 55, "it should have taken all tasks")
	r := p.Wait().Expect(t, 124, "timeout")
	check.That(t, r.Report.Teardown.Verdict == "proven", "%s", r.Report.Raw())
	if b != nil {
		b.Settled(0)
	}
	box := s.Sandbox(onStart, "--env", "FIXTURE_COUNT="+count, "/fixtures/fork-bomb", "sleep")
	harness.Until(t, harness.Bound, "the bomb", func() bool { return bytes.Contains(s.Run("logs", box.ID).Stdout, []byte(full)) })
	s.Run("kill", "--grace", "0", box.ID).Exits(t, 0).OutHas(t, "proven")
	box.Ended()
	if b != nil {
		b.Settled(0)
	}
}

// The same when the command has used up its user's tasks.
func TestNoTaskOfUserLeft(t *testing.T) {
	t.Parallel()
	who := os.Getuid()
	if who == 0 {
		who = 65534 // bwrap and the command run as nobody, so the limit applies to nobody's tasks
	}
	for range max(1, harness.Soak(t)/5) {
		harness.Until(t, harness.Bound, "a bomb that takes all tasks", func() bool {
			// Leave room for other tests, but not for a bomb of theirs: one that starts now fills
			// it before sbxrun starts, and one that ends now makes room for all of this one.
			o := harness.Options{Wrap: []string{"bash", "-c", fmt.Sprintf(`ulimit -u %d || exit 99; exec "$@"`, harness.TasksOf(who)+700), "-"}}
			r := harness.Run(t, o, "--timeout", harness.Deadline(2*time.Second).String(), "--env", "FIXTURE_COUNT=1500", "/fixtures/fork-bomb", "sleep")
			if r.ExitCode == 75 && !r.Report.Started && r.Report.Error != nil && r.Report.Error.Code == "busy" {
				return false
			}
			r.Expect(t, 124, "timeout")
			check.That(t, r.Report.Teardown.Verdict == "proven", "%s", r.Report.Raw())
			return !bytes.Contains(r.Stdout, []byte("ready"))
		})
	}
}

// --max-parallel serves runs in order, frees the slot of a killed run, and exits with 75 at once
// or after the maximum wait.
func TestMaxParallel(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	dir := harness.SharedDir(t)
	o := harness.Options{Env: []string{"SBXRUN_STATE_DIR=" + s.Dir}}
	hold := func() *harness.Process {
		t.Helper()
		p := harness.Start(t, o, "--max-parallel", "2", "sh", "-c", "echo up; sleep 600")
		p.WaitOutput("up\n")
		return p
	}
	first, second := hold(), hold()
	full := func(flags ...string) time.Duration {
		t.Helper()
		begin := time.Now()
		r := harness.Run(t, o, append(flags, "--max-parallel", "2", "true")...).Expect(t, 75, "start-failed")
		e := r.Report.Error
		check.That(t, e != nil && e.Code == "busy" && strings.Contains(e.Message, "all 2 slots of --max-parallel"), "%s", r.Report.Raw())
		return time.Since(begin)
	}
	harness.Within(t, "a refusal", full(), 0, 500*time.Millisecond)
	harness.Within(t, "waiting in vain", full("--on-pressure", "wait", "--wait-timeout", "0.3"), 300*time.Millisecond, time.Second)
	harness.Run(t, o, "--max-parallel", "3", "true").Exits(t, 0)

	// Waiting runs start in order, one at a time, because the other slot stays taken.
	const waiters = 5
	var waiting []*harness.Process
	for i := range waiters {
		script := fmt.Sprintf("echo %d >>/out/order", i)
		waiting = append(waiting, harness.Start(t, o, "--max-parallel", "2", "--on-pressure", "wait", "--wait-timeout", "0", "--bind", dir+":/out", "sh", "-c", script))
		harness.Until(t, harness.Bound, "the waiter in the queue", func() bool { return queued(t, s.Dir) == i+1 })
	}
	// A run that does not wait does not overtake the queue.
	full()
	first.Kill()
	first.Wait()
	for _, p := range waiting {
		p.Wait().Exits(t, 0)
	}
	order, err := os.ReadFile(filepath.Join(dir, "order"))
	check.That(t, err == nil && string(order) == "0\n1\n2\n3\n4\n", "they came in as %q, %v", order, err)

	// A sandbox keeps its slot until it ends, and an exec in it has its own.
	b := s.Sandbox(harness.Options{}, "--max-parallel", "2")
	full()
	b.Exec(harness.Options{}, []string{"--max-parallel", "2"}, "true").Exits(t, 75)
	b.Exec(harness.Options{}, nil, "true").Expect(t, 0, "exited")
	kill(t, s, 0, "--grace", "0", b.ID)
	b.Ended()
	// No payload holds a lock or a descriptor of the state directory.
	fds := harness.Run(t, o, "--max-parallel", "2", "--warn", "0", "sh", "-c", "ls -l /proc/self/fd; ls -l /proc/1/fd 2>/dev/null || true") // init has closed its own already
	check.That(t, !bytes.Contains(fds.Stdout, []byte("slot-")) && !bytes.Contains(fds.Stdout, []byte("admission")) && fds.ExitCode == 0,
		"exit code %d: %s%s", fds.ExitCode, fds.Stdout, fds.Stderr)
	second.Signal(syscall.SIGTERM)
	second.Wait().Expect(t, 143, "canceled")
}

// queued returns how many processes hold or await the queue's lock.
func queued(t *testing.T, dir string) (n int) {
	t.Helper()
	st, err := os.Stat(filepath.Join(dir, "queue"))
	if err != nil {
		return 0
	}
	locks := harness.ReadFile(t, "/proc/locks")
	inode := fmt.Sprintf(":%d ", st.Sys().(*syscall.Stat_t).Ino)
	for line := range strings.Lines(string(locks)) {
		if strings.Contains(line, "FLOCK") && strings.Contains(line, inode) {
			n++
		}
	}
	return n
}

// 50 concurrent runs in one directory, half of which time out, don't disturb each other.
func TestConcurrentRuns(t *testing.T) {
	const runs = 50
	dir := harness.SharedDir(t)
	var wg sync.WaitGroup
	ids := make([]string, runs)
	for i := range runs {
		wg.Go(func() {
			code, cause, last := i+1, "exited", fmt.Sprintf("exit %d", i+1)
			args := []string{"--timeout", "600"}
			if i%2 == 1 {
				code, cause, last = 124, "timeout", "sleep 600"
				args = []string{"--timeout", harness.Deadline(3 * time.Second).String()}
			}
			script := fmt.Sprintf("setsid sleep 600 & echo run %d; echo %d >>file-%d; %s", i, i, i, last)
			p := harness.Start(t, harness.Options{Dir: dir}, append(args, "--bind", dir, "sh", "-c", script)...)
			r := p.Wait().Expect(t, code, cause)
			want := fmt.Sprintf("run %d\n", i)
			check.That(t, string(r.Stdout) == want, "run %d printed %q", i, r.Stdout)
			got, err := os.ReadFile(filepath.Join(dir, fmt.Sprintf("file-%d", i)))
			check.That(t, err == nil && string(got) == fmt.Sprintf("%d\n", i), "run %d wrote %q, %v", i, got, err)
			ids[i] = r.Report.ID
		})
	}
	wg.Wait()
	seen := map[string]bool{}
	for i, id := range ids {
		check.That(t, id != "" && !seen[id], "run %d has the id %q, which is empty or another's", i, id)
		seen[id] = true
	}
}

// An exec that waits does not keep its sandbox from being idle.
func TestPressureWaitIdle(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	env := []string{"SBXRUN_STATE_DIR=" + s.Dir}
	holder := harness.Start(t, harness.Options{Env: env}, "--max-parallel", "1", "sh", "-c", "echo up; sleep 900")
	holder.WaitOutput("up\n")
	// The exec must start waiting before the sandbox ends, so double the times until it does.
	var b *harness.Sandbox
	var x *harness.Process
	for idle := harness.Deadline(time.Second); ; idle *= 2 {
		b = s.Sandbox(harness.Options{}, "--idle-timeout", idle.String())
		b.Dying = true
		x = b.StartExec(harness.Options{}, []string{"--max-parallel", "1", "--on-pressure", "wait"}, "echo", "hi")
		over := false
		harness.Until(t, harness.Bound, "somebody who waits", func() bool {
			select {
			case <-x.Exited():
				over = true
			default:
			}
			return over || queued(t, s.Dir) == 1
		})
		if !over {
			break
		}
		r := x.Wait()
		check.Require(t, r.ExitCode == 125 && idle <= harness.Bound/2, "exit code %d, %q: %s", r.ExitCode, r.Stdout, r.Stderr)
		b.Ended()
	}
	rec := b.Ended()
	check.That(t, rec.Report != nil && rec.Report.Cause == "idle-timeout", "%+v", rec)
	holder.Signal(syscall.SIGTERM)
	holder.Wait().Expect(t, 143, "canceled")
	x.Wait().Exits(t, 125).Out(t, "").ErrHas(t, "ended")
}
