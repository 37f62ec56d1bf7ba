package faults

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// most is far above the duration of any run in this package.
const most = 20 * time.Second

var (
	bound = harness.Scaled(most)
	// settle is how long the keeper may take after sbxrun was killed.
	settle = harness.Scaled(5 * time.Second)
)

// oneLine asserts that sbxrun has printed one line, an error message for people, which does not blame the keeper.
func oneLine(t testing.TB, o *harness.Result) {
	t.Helper()
	errorLine(t, o)
	check.That(t, !strings.Contains(string(o.Stderr), "keeper was killed"), "nobody has killed the keeper: %v", o)
}

// errorLine asserts that sbxrun has printed one line, an error message for people.
func errorLine(t testing.TB, o *harness.Result) {
	t.Helper()
	lines := harness.Lines(o.Stderr)
	// bwrap's own messages come first. If bwrap was killed, its last line may be incomplete.
	for i, line := range lines {
		if at := strings.Index(line, "sbxrun: "); at > 0 && strings.HasPrefix(line, "bwrap: ") {
			lines[i] = line[at:]
		}
	}
	lines = slices.DeleteFunc(lines, func(line string) bool { return strings.HasPrefix(line, "bwrap: ") })
	text := strings.Join(lines, "\n")
	check.That(t, strings.HasPrefix(text, "sbxrun: error: ") && !strings.Contains(text, "\n"), "want one line of sbxrun's: %v", o)
	check.That(t, !strings.Contains(text, "Go value") && !strings.Contains(text, "Go struct"), "this is a message of encoding/json: %v", o)
}

// traces identify the processes and files of a run, or of the sandboxes of a test.
type traces struct {
	t      testing.TB
	marker string             // in the environment of sbxrun and of the payloads
	out    string             // visible to payloads as /out
	ns     harness.Namespaces // PID namespaces of rooms and commands, once seen
}

func newTraces(t testing.TB) traces {
	t.Helper()
	return traces{t: t, out: harness.SharedDir(t), marker: fmt.Sprintf("fault-%d-%d", os.Getpid(), time.Now().UnixNano())}
}

// family is [family], and remembers its namespaces. An ordinary user cannot look at init's; the payload is in the same one.
func (x *traces) family(sbxrun int) (pids [roles]int) {
	pids = family(sbxrun)
	for _, pid := range pids[roleRoom:] {
		x.ns.Remember(pid)
	}
	return pids
}

// members returns the processes with the marker, or in one of the namespaces.
func (x *traces) members() []harness.Proc { return harness.Find(x.marker, x.ns.Has) }

// wrote reports whether a payload has created a file.
func (x *traces) wrote(name string) bool {
	_, err := os.Stat(filepath.Join(x.out, name))
	return err == nil
}

// run is one run of sbxrun. Tests may kill its processes in any order, so it is launched, and Wait relies on none of them.
type run struct {
	*harness.Process
	traces
	report string
	// killed is set when sbxrun was killed: no one waits for the rest then, and there is no report.
	killed bool
	// living is the sandbox of an exec, which keeps running.
	living []*sandbox
}

// start runs sbxrun with a marker, a report and /out. A --report in args replaces the report.
func start(t testing.TB, o harness.Options, args ...string) *run {
	t.Helper()
	top := harness.Dir(t)
	r := &run{traces: newTraces(t), report: filepath.Join(top, "report.json")}
	flags := append(harness.Proof(), "--env", harness.MarkerName+"="+r.marker, "--bind", r.out+":/out", "--report", r.report)
	o.Env = append([]string{"TMPDIR=" + top, harness.MarkerName + "=" + r.marker}, o.Env...)
	o.Bound = most
	if o.Dir == "" {
		o.Dir = r.out
	}
	var err error
	r.Process, err = harness.Launch(t, filepath.Join(top, "sbxrun"), o, slices.Concat([]string{harness.Binary(t)}, flags, args)...)
	check.Must(t, err)
	return r
}

// processes returns the PIDs of the run's processes by role, 0 for those that do not exist.
func (r *run) processes() [roles]int { return r.family(r.PID) }

// hit sends a signal to a process of the run, and reports whether it was alive.
func (r *run) hit(pids [roles]int, role int, sig unix.Signal) bool {
	r.t.Helper()
	if role == roleSbxrun {
		return r.signal(sig)
	}
	target, hit := harness.Strike(pids[role], pids[above[role]], sig)
	if hit {
		target.Close()
	}
	return hit
}

// signal signals sbxrun, and reports whether it was running.
func (r *run) signal(sig unix.Signal) bool {
	if r.Over() {
		return false
	}
	if sig == unix.SIGKILL {
		r.killed = true
	}
	r.Signal(sig)
	return true
}

// until waits for a condition of a run. It returns false if sbxrun ends first, and fails the test after the bound.
func (r *run) until(what string, holds func() bool) bool {
	r.t.Helper()
	for begin := time.Now(); !holds(); pause(begin) {
		if r.Over() {
			return holds()
		}
		if time.Since(begin) > bound {
			r.t.Errorf("waited %v in vain for %s; stderr %q", bound, what, r.ErrorOutput())
			r.abort()
			return false
		}
	}
	return true
}

// within reports whether a condition comes to hold within a time.
func within(limit time.Duration, holds func() bool) bool {
	for begin := time.Now(); !holds(); pause(begin) {
		if time.Since(begin) > limit {
			return false
		}
	}
	return true
}

// pause sleeps between two checks of a condition. The pauses are short at first, to meet
// short-lived states, and grow so that a long wait leaves the CPU to others.
func pause(begin time.Time) {
	time.Sleep(min(max(time.Since(begin)/32, 100*time.Microsecond), 5*time.Millisecond))
}

// abort kills the sbxrun of a run that has failed.
func (r *run) abort() {
	r.signal(unix.SIGKILL)
	<-r.Exited()
}

// briefly fails the test and kills sbxrun if it does not exit within the limit.
func (r *run) briefly(limit time.Duration) {
	r.t.Helper()
	r.exitsIn(harness.Scaled(limit))
}

func (r *run) exitsIn(limit time.Duration) {
	r.t.Helper()
	select {
	case <-r.Exited():
	case <-time.After(limit):
		r.t.Errorf("sbxrun still runs after %v; below it:\n%s%s", limit, harness.Stuck(r.PID), harness.List(harness.Below(r.PID)))
		r.abort()
	}
}

// Wait waits until sbxrun exits, and asserts that all processes have exited and that the
// report agrees with the exit code.
func (r *run) Wait() *harness.Result {
	r.t.Helper()
	r.exitsIn(bound)
	r.gone()
	return r.result()
}

func (r *run) result() *harness.Result {
	r.t.Helper()
	o := r.Process.Wait()
	readReport(r.t, o, r.report)
	if o.Report == nil {
		return o
	}
	check.That(r.t, !r.wrote("ran") || o.Report.Started, "the command has run, and the report says that it was not started: %v", o)
	check.That(r.t, o.Report.Teardown.Verdict != "not_applicable" || !o.Report.Started, "started, and nothing to prove: %v", o)
	return o
}

// readReport reads the report if there is one.
func readReport(t testing.TB, o *harness.Result, name string) {
	t.Helper()
	data, err := os.ReadFile(name)
	if err != nil {
		return
	}
	o.Report, err = harness.ParseReport(data)
	check.OK(t, err)
	check.That(t, err != nil || o.Signal != 0 || o.Report.ExitCode == o.ExitCode, "the report has another exit code: %v", o)
}

// gone asserts that all processes of the run have exited: at once, or soon if sbxrun was
// killed. It ends those that have not, so that they do not disturb other tests.
func (r *run) gone() {
	r.t.Helper()
	defer r.ns.Close()
	limit := time.Duration(0) // no second look
	if r.killed {
		limit = settle
	}
	var left, last []harness.Proc
	if !within(limit, func() bool { left = r.left(); return len(left) == 0 }) {
		after := time.Since(r.Process.Wait().Ended).Round(time.Microsecond)
		// The message also says whether they exit by themselves.
		within(time.Second, func() bool { last = r.left(); return len(last) == 0 })
		r.t.Errorf("%d processes are left %v after the end of sbxrun:\n%sand %d of them a second later:\n%s", len(left), after, harness.List(left), len(last), harness.List(last))
		harness.Sweep(r.t, r.left)
	}
	reapOrphans(r.t, r.living...) // zombies that left has accepted
	if len(r.living) == 0 {
		r.frozen()
	}
}

// left returns the processes of the run, found by marker, namespace and descent.
func (r *run) left() (left []harness.Proc) {
	for _, p := range orphans(r.living...) {
		// "3" is the process that makes a user namespace for an idmapped mount: it executes a descriptor.
		if r.killed && p.Parent == os.Getpid() && p.State == "Z" && (strings.HasPrefix(p.Comm, "sbxrun") || p.Comm == "3") {
			continue // a fork of sbxrun, which sbxrun's parent has to reap
		}
		left = append(left, p)
	}
	for _, p := range r.members() {
		if r.killed && len(r.living) > 0 && p.Parent == os.Getpid() && p.State == "Z" {
			continue // init of an exec whose keeper was killed too
		}
		if !slices.ContainsFunc(left, func(q harness.Proc) bool { return q.PID == p.PID }) {
			left = append(left, p)
		}
	}
	return left
}

// orphans returns the processes that were abandoned to the test process, with their descendants, except living sandboxes.
func orphans(living ...*sandbox) (found []harness.Proc) {
	for _, p := range harness.Orphans() {
		if !slices.ContainsFunc(living, func(b *sandbox) bool { return b.PID == p.PID }) {
			found = append(append(found, p), harness.Below(p.PID)...)
		}
	}
	return found
}

// reapOrphans reaps the orphans except those of living sandboxes, as init would. It fails the
// test if one does not exit soon.
func reapOrphans(t testing.TB, living ...*sandbox) {
	t.Helper()
	var found []harness.Proc
	ok := within(settle, func() bool {
		reapZombies(living...)
		found = orphans(living...)
		return len(found) == 0
	})
	check.That(t, ok, "not exited, and with no parent but the test:\n%s", harness.List(found))
}

// logSizes are the sizes of the logs of earlier runs after their end.
var logSizes = map[string]int64{}

// frozen records the size of the run's log, and asserts that the logs of earlier runs of the test have not grown.
func (r *run) frozen() {
	r.t.Helper()
	for name, size := range logSizes {
		switch st, err := os.Stat(name); {
		case errors.Is(err, fs.ErrNotExist):
			delete(logSizes, name) // its test has ended
		case err != nil:
			r.t.Errorf("%v", err)
		case st.Size() != size:
			r.t.Errorf("a command went on after all processes had exited: %s has grown from %d to %d bytes", name, size, st.Size())
			delete(logSizes, name)
		}
	}
	name := filepath.Join(r.out, "log")
	if st, err := os.Stat(name); err == nil {
		logSizes[name] = st.Size()
	}
}

// When any process is killed at its n-th system call, before or after the call, the run ends
// completely. Tries a sample of the calls, or all with SBXRUN_SOAK=1000.
func TestKilledAtSystemCalls(t *testing.T) {
	for _, victim := range []struct {
		role, least int
		name        string
	}{
		{roleSbxrun, 500, "sbxrun"},
		{roleKeeper, 100, "keeper"},
		{roleMonitor, 100, "monitor"},
		{roleRoom, 100, "room"},
		{tracedEnters, 20, "enters"},
		{tracedInside, 3, "inside"},
		{roleInit, 100, "init"},
	} {
		t.Run(victim.name, func(t *testing.T) {
			victim, least := victim.role, victim.least
			total := traced(t, victim, 0)
			check.Require(t, total >= least, "only %d stops were seen", total)
			samples := scaled(t, 40)
			if soak(t) >= 1000 {
				samples = total
			}
			samples = min(samples, total)
			for i := range samples {
				// Pick one from each equal part, so that repeated tests come to see all calls.
				low, high := i*total/samples, (i+1)*total/samples
				at := 1 + low + rand.IntN(high-low)
				traced(t, victim, at)
				check.Require(t, !t.Failed(), "that was at stop %d of %d", at, total)
			}
			t.Logf("%d of %d stops", samples, total)
		})
	}
}

// traced does a run whose victim is killed at a stop; 0 is never.
func traced(t *testing.T, victim, at int) (stops int) {
	t.Helper()
	self, err := os.Executable()
	check.Must(t, err)
	count := filepath.Join(harness.Dir(t), "stops")
	r := start(t, harness.Options{Wrap: []string{self}, Env: []string{
		fmt.Sprintf("%s=%d %d", tracerEnv, victim, at), tracerStops + "=" + count,
	}}, append([]string{"--timeout", lifetime}, leaver...)...)
	// The tracer dies as sbxrun does, and leaves what sbxrun leaves.
	r.killed = victim == roleSbxrun && at > 0
	o := r.Wait()
	if t.Failed() {
		return 0
	}
	check.Require(t, o.ExitCode < 200, "the tracer failed: %v", o)
	text := harness.ReadFile(t, count)
	stops, err = strconv.Atoi(string(text))
	check.Must(t, err)
	switch {
	case at == 0 && o.ExitCode != 7:
		t.Fatalf("traced, and left alone: %v", o)
	case at == 0 || stops < at:
		check.That(t, o.ExitCode == 7, "nobody was killed at %d of %d: %v", at, stops, o)
	default:
		judge(t, o, victim, r.wrote("ran"))
	}
	return stops
}

// SIGQUIT at a random system call ends a command with 131 and without a goroutine trace, or comes
// too late: from the moment when internal/quit sets its handler, long before sbxrun handles
// signals, to the last one. One cleanup removes what is left.
func TestQuitCalls(t *testing.T) {
	for _, verb := range []string{"run", "start", "kill", "cleanup"} {
		t.Run(verb, func(t *testing.T) {
			e := newEnv(t)
			total := e.quit(verb, 0)
			check.Require(t, total >= 50, "only %d stops were seen", total)
			quit := 0
			for range scaled(t, 10) {
				if at := 1 + rand.IntN(total); e.quit(verb, at) < 0 {
					quit++
				}
				if t.Failed() {
					break
				}
			}
			e.clean()
			t.Logf("131 of %d times, %d stops", quit, total)
		})
	}
}

// quit runs a command that gets SIGQUIT at a stop; 0 is never. It returns the number of stops, or
// -1 if the command exited with 131.
func (e *env) quit(verb string, at int) int {
	e.t.Helper()
	self, err := os.Executable()
	check.Must(e.t, err)
	args := []string{verb}
	switch verb {
	case "run":
		args = append(args, "--env", harness.MarkerName+"="+e.marker, "true")
	case "start":
		args = e.startFlags()
	case "kill":
		args = append(args, e.start(nil).ID)
	}
	count := filepath.Join(e.top, "stops")
	c, err := e.command(harness.Options{Env: []string{fmt.Sprintf("%s=%d %d QUIT", tracerEnv, roleSbxrun, at), tracerStops + "=" + count}},
		slices.Concat([]string{self, harness.Binary(e.t)}, proving(args))...)
	check.Must(e.t, err)
	s := e.wait(c)
	text := harness.ReadFile(e.t, count)
	stops, err := strconv.Atoi(string(text))
	check.Must(e.t, err)
	check.That(e.t, s.Signal == 0 && string(s.Stderr) == "" && (s.ExitCode == 0 || s.ExitCode == 131 && at != 0), "at stop %d of %d: want 131 without a word, or 0: %v", at, stops, s)
	if s.ExitCode == 131 {
		return -1
	}
	return stops
}
