package harness

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/sbxrun/sbxrun/tests/check"
)

// MarkerName is the variable that holds a run's marker.
const MarkerName = "SBXRUN_TEST_RUN"

// Options say how sbxrun is started. The zero value is right for most tests.
type Options struct {
	// Dir is sbxrun's current directory; "" is an empty one made for the run.
	Dir string
	// Env is added to a small environment: a PATH without a developer's directories, HOME, LANG
	// and TMPDIR. NAME= sets an empty value.
	Env []string
	// Bare leaves the command line as given: no --report, no marker in the sandbox, no /fixtures.
	// sbxrun's own environment still has the marker.
	Bare bool
	// Wrap is a command that executes sbxrun; sbxrun and its arguments follow.
	Wrap []string
	// Stdin is sbxrun's stdin; nil is /dev/null. A file is passed as it is, anything else is written to a pipe.
	Stdin io.Reader
	// Stdout and Stderr replace the pipes that are read into Result.
	Stdout, Stderr *os.File
	// ExtraFiles are descriptors 3, 4 … of sbxrun.
	ExtraFiles []*os.File
	// Attr is for a session, a terminal or a process group of its own.
	Attr *syscall.SysProcAttr
	// T is the test that an exec belongs to; nil is the sandbox's. A parallel subtest passes its
	// own, because only a test's own goroutine may call FailNow.
	T T
	// Bound replaces the usual Bound. It is scaled too.
	Bound time.Duration

	inside *Sandbox // sandbox of an exec
	others bool     // the command deals with other sandboxes than its own
	// handover is called with stdout when the command has exited, before any assertion. It takes
	// over what is meant to live on.
	handover func(stdout string)
}

// Result is a run that has ended.
type Result struct {
	ExitCode int            // -1 if it died of Signal
	Signal   syscall.Signal // signal that killed sbxrun itself
	Stdout   []byte
	Stderr   []byte
	Report   *Report       // nil if absent
	Elapsed  time.Duration // from sbxrun's start to its exit
	Ended    time.Time     // when sbxrun exited
	// EOF is the time from sbxrun's exit to the end of both outputs.
	EOF time.Duration

	args []string // the command line
}

// Process is a run in progress.
type Process struct {
	PID    int
	Marker string
	Begin  time.Time

	t       T
	o       Options
	cmd     *exec.Cmd
	dir     string // directory with report and TMPDIR
	outputs [2]*output
	files   [2]string // stdout and stderr of a launched command

	exited chan struct{} // closed after exit is set
	exit   time.Time

	watched chan struct{} // closed when the search for the namespace ends
	ns      uint64        // valid after watched is closed
	seen    Namespaces
	killed  bool
	keepers []*Adopted        // set once it was killed
	before  map[identity]bool // for an exec: processes in the sandbox's own PID namespace
}

// Run runs sbxrun to its end; see [Process.Wait] for what it asserts.
func Run(t T, o Options, args ...string) *Result {
	t.Helper()
	return Start(t, o, args...).Wait()
}

// Start starts sbxrun. The test must call Wait.
func Start(t T, o Options, args ...string) *Process {
	t.Helper()
	p, err := TryStart(t, o, args...)
	check.Require(t, err == nil, "start sbxrun: %v", err)
	return p
}

// TryStart is Start for tests where starting a process may fail.
func TryStart(t T, o Options, args ...string) (*Process, error) {
	t.Helper()
	p := &Process{Marker: newMarker(), t: t, o: o, dir: Dir(t), exited: make(chan struct{}), watched: make(chan struct{})}
	tmp := filepath.Join(p.dir, "tmp")
	if err := os.Mkdir(tmp, 0o700); err != nil {
		return nil, err
	}
	if o.Dir == "" {
		p.o.Dir = Dir(t)
	}
	p.o.Env = append([]string{"TMPDIR=" + tmp, MarkerName + "=" + p.Marker}, o.Env...)
	if o.inside != nil {
		p.before = o.inside.members()
	}
	if err := p.start(append([]string{Binary(t)}, p.arguments(args)...)); err != nil {
		return nil, err
	}
	if o.others {
		close(p.watched) // processes below it may be in namespaces of other sandboxes
	} else {
		go p.watch()
	}
	return p, nil
}

// Launch starts a command whose processes the test kills and stops itself: Wait waits for the command, and asserts
// nothing but the time limit. Its output goes to the files name.out and name.err, unless Options has others, because a
// stopped process may keep a pipe open.
func Launch(t T, name string, o Options, words ...string) (*Process, error) {
	t.Helper()
	p := &Process{t: t, o: o, exited: make(chan struct{}), files: [2]string{name + ".out", name + ".err"}}
	for i, file := range []**os.File{&p.o.Stdout, &p.o.Stderr} {
		if *file != nil {
			continue
		}
		f, err := os.Create(p.files[i])
		if err != nil {
			return nil, err
		}
		defer f.Close()
		*file = f
	}
	return p, p.start(words)
}

func (p *Process) start(words []string) error {
	words = slices.Concat(p.o.Wrap, words)
	p.cmd = exec.Command(words[0], words[1:]...)
	p.cmd.Dir, p.cmd.ExtraFiles, p.cmd.SysProcAttr = p.o.Dir, p.o.ExtraFiles, p.o.Attr
	p.cmd.Env = append([]string{"PATH=" + Path, "HOME=/nonexistent", "LANG=C.UTF-8", Bwrap()}, p.o.Env...)
	mine, err := p.connect()
	defer func() {
		for _, f := range mine {
			f.Close()
		}
	}()
	if err != nil {
		return err
	}
	p.Begin = time.Now()
	done, err := StartCommand(p.cmd)
	if err != nil {
		return err
	}
	p.PID = p.cmd.Process.Pid
	go func() {
		_ = p.cmd.Wait() // sets ProcessState
		p.exit = time.Now()
		done()
		close(p.exited)
	}()
	return nil
}

// Path is the PATH of a run: the directories of the distribution.
const Path = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"

// Bwrap returns the environment variable that names the bwrap to test; empty for the installed one.
func Bwrap() string { return "SBXRUN_BWRAP=" + os.Getenv("SBXRUN_BWRAP") }

// arguments adds the harness's flags, after the name of the command if there is one.
func (p *Process) arguments(args []string) []string {
	if p.o.Bare {
		return args
	}
	if p.o.inside != nil {
		return slices.Concat(args[:1], Proof(), []string{"--report", p.reportPath(), "--env", MarkerName + "=" + p.Marker}, args[1:])
	}
	own := append(Proof(),
		"--report", p.reportPath(),
		"--env", MarkerName+"="+p.Marker,
		"--env", fixtureSeconds(), // ends what is left if the test fails
		"--ro-bind", fixturesBind(p.t),
	)
	if len(args) > 0 && args[0] == "run" {
		return append(append([]string{"run"}, own...), args[1:]...)
	}
	return append(own, args...)
}

// fixtureSeconds sets how long processes of fixtures live. Fixtures accept at most 999.
func fixtureSeconds() string { return fmt.Sprintf("FIXTURE_SECONDS=%.0f", min(999, Bound.Seconds())) }

func fixturesBind(t T) string {
	t.Helper()
	return strings.NewReplacer(`\`, `\\`, ":", `\:`).Replace(FixturesDir(t)) + ":/fixtures"
}

func (p *Process) reportPath() string { return filepath.Join(p.dir, "report.json") }

// connect sets up the standard streams, and returns the ends that only the child needs.
func (p *Process) connect() (mine []*os.File, err error) {
	stdin := p.o.Stdin
	if _, ok := stdin.(*os.File); !ok && stdin != nil {
		r, w, err := os.Pipe()
		if err != nil {
			return mine, err
		}
		mine = append(mine, r)
		// Package exec would do this too, but then its Wait waits until stdin ends.
		go func(src io.Reader) {
			_, _ = io.Copy(w, src) // EPIPE if the command does not read it
			w.Close()
		}(stdin)
		stdin = r
	}
	p.cmd.Stdin = stdin
	for i, file := range []*os.File{p.o.Stdout, p.o.Stderr} {
		if file == nil {
			r, w, err := os.Pipe()
			if err != nil {
				return mine, err
			}
			mine = append(mine, w)
			p.outputs[i], file = newOutput(r), w
		}
		if i == 0 {
			p.cmd.Stdout = file
		} else {
			p.cmd.Stderr = file
		}
	}
	return mine, nil
}

// watch looks for the sandbox's PID namespace below sbxrun while it runs.
func (p *Process) watch() {
	defer close(p.watched)
	outer := uint64(0) // an exec is in the sandbox's namespace for a moment while it enters
	if p.o.inside != nil {
		outer = p.o.inside.NS
	}
	for pause := time.Millisecond; ; pause = min(pause+pause/4, 50*time.Millisecond) {
		below := Descendants(p.PID)
		own(p.Marker, below)
		for _, pid := range below {
			// Check again with the namespace held: the PIDs of this process and of sbxrun may have been reused.
			ns := p.seen.Remember(pid)
			if ns != 0 && ns != outer && isBelow(pid, p.PID) && p.cmd.Process.Signal(syscall.Signal(0)) == nil {
				p.ns = ns
				return
			}
		}
		select {
		case <-p.exited:
			return
		case <-time.After(pause):
		}
	}
}

// Namespace waits until the sandbox's PID namespace is known, and returns its inode.
func (p *Process) Namespace() uint64 {
	p.t.Helper()
	<-p.watched
	check.Require(p.t, p.ns != 0, "sbxrun ended before its sandbox was seen")
	return p.ns
}

// Signal signals the process that was started: sbxrun, or Wrap.
func (p *Process) Signal(sig syscall.Signal) {
	p.t.Helper()
	err := p.cmd.Process.Signal(sig)
	check.That(p.t, err == nil || errors.Is(err, os.ErrProcessDone), "signal %v: %v", sig, err)
}

// Kill kills sbxrun itself. From then on no one waits for the sandbox: its processes may take a
// moment to exit, and the harness reaps its keepers.
func (p *Process) Kill() {
	p.killed = true
	target, err := Open(p.PID)
	if err != nil {
		return // it has exited
	}
	defer target.Close()
	if p.cmd.Process.Signal(syscall.Signal(0)) != nil {
		return // it has exited, and another process may have the PID
	}
	keepers, err := killAdopting(target)
	check.That(p.t, err == nil, "kill sbxrun: %v", err)
	p.keepers = append(p.keepers, keepers...)
}

func (p *Process) Exited() <-chan struct{} { return p.exited }

// Over reports whether the process that was started has exited and was reaped.
func (p *Process) Over() bool {
	select {
	case <-p.exited:
		return true
	default:
		return false
	}
}

// State is how the process ended, nil before.
func (p *Process) State() *os.ProcessState { return p.cmd.ProcessState }

// The processes of a run, from the outside in.
const (
	RoleKeeper  = 1 // child of sbxrun
	RoleMonitor = 2 // bwrap's outer process, child of the keeper
	RoleRoom    = 3 // PID 1 of the room, child of the monitor
	RoleInit    = 4 // PID 1 of the command's own namespace, child of the keeper
	RolePayload = 5 // child of init
)

// role returns the PID of one of the run's processes, or 0. Init is the last child that the keeper
// has forked, and the one that has a child.
func (p *Process) role(role int) int {
	first := func(pid int) int {
		if c := Children(pid); pid > 0 && len(c) > 0 {
			return c[0] // not the lowest: PIDs wrap around
		}
		return 0
	}
	keeper := first(p.PID)
	switch role {
	case RoleKeeper:
		return keeper
	case RoleMonitor:
		return first(keeper)
	case RoleRoom:
		return first(first(keeper))
	}
	init, monitor := 0, first(keeper)
	for _, pid := range Children(keeper) {
		if proc, ok := ReadProc(pid); ok && proc.Comm == "sbxrun-init" && proc.State != "Z" && (pid != monitor || p.o.inside != nil) {
			init = pid
		}
	}
	if role == RoleInit {
		return init
	}
	return first(init)
}

// Role waits for one of the run's processes and opens a pidfd for it. It fails the test if sbxrun exits first.
func (p *Process) Role(role int) *Target {
	p.t.Helper()
	var target *Target
	Until(p.t, p.bound(), "process "+strconv.Itoa(role)+" of the run", func() bool {
		check.Require(p.t, !p.Over(), "sbxrun ended before process %d of the run was seen", role)
		pid := p.role(role)
		if pid == 0 {
			return false
		}
		held, err := Open(pid)
		if err != nil {
			return false
		}
		if p.role(role) != pid {
			held.Close() // it has exited, and this is another process
			return false
		}
		target = held
		return true
	})
	p.t.Cleanup(target.Close)
	return target
}

// WaitOutput waits until stdout contains a text. It fails the test if stdout ends first.
func (p *Process) WaitOutput(text string) {
	p.t.Helper()
	p.waitOutput(0, text)
}

// WaitStderr is WaitOutput for stderr.
func (p *Process) WaitStderr(text string) {
	p.t.Helper()
	p.waitOutput(1, text)
}

func (p *Process) waitOutput(i int, text string) {
	p.t.Helper()
	if !p.outputs[i].waitFor(text, time.Now().Add(p.bound())) {
		p.t.Errorf("no %q in the output %.2000q", text, p.outputs[i].String())
		r := p.Wait()
		p.t.Fatalf("gave up; exit code %d, stderr %.2000q", r.ExitCode, r.Stderr)
	}
}

// InTime starts a command that prints a text before its deadline. The first deadline is d, which
// suffices if the command needs half of it; on a slow or busy machine InTime tries 2d, 4d and so
// on. It returns the running process and its deadline. The test itself has half of the deadline
// too; where time limits are scaled, d is raised to leave it one to five seconds.
func InTime(t T, d time.Duration, text string, start func(timeout string) *Process) (*Process, time.Duration) {
	t.Helper()
	if Slack > time.Second {
		d = max(d, min(Slack/2, 10*time.Second))
	}
	for ; ; d *= 2 {
		p := start(d.String())
		if p.outputs[0].waitFor(text, p.Begin.Add(d/2)) {
			return p, d
		}
		r := p.Wait()
		late := bytes.Contains(r.Stdout, []byte(text)) || r.Report != nil && r.Report.Cause == "timeout"
		if !late || d > Bound {
			t.Fatalf("no %q in %v: exit code %d, %.2000q, %.2000s", text, d/2, r.ExitCode, r.Stdout, r.Stderr)
		}
	}
}

// Longer calls try with d, 2d, 4d and so on until it returns true. It is for commands that need some time before a
// deadline but cannot print a text for [InTime].
func Longer(t T, d time.Duration, try func(d time.Duration) bool) {
	t.Helper()
	for ; !try(d); d *= 2 {
		check.Require(t, d <= Bound/4, "%v did not suffice", d)
	}
}

func (p *Process) Output() string { return p.printed(0) }

func (p *Process) ErrorOutput() string { return p.printed(1) }

func (p *Process) printed(i int) string {
	if p.outputs[i] != nil {
		return p.outputs[i].String()
	}
	text, _ := os.ReadFile(p.files[i]) // absent if Options has another
	return string(text)
}

func (p *Process) bound() time.Duration {
	if p.o.Bound > 0 {
		return Scaled(p.o.Bound)
	}
	return Bound
}

// Command runs another command than sbxrun to its end, at most for a time limit, and returns its combined output.
func Command(t T, cmd *exec.Cmd, bound time.Duration) (string, error) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		return "", err
	}
	out := newOutput(r)
	cmd.Stdout, cmd.Stderr = w, w
	done, err := StartCommand(cmd)
	w.Close()
	if err != nil {
		return "", err
	}
	timer := time.AfterFunc(bound, func() {
		_ = cmd.Process.Kill() // fails only if it has just exited
	})
	err = cmd.Wait()
	done()
	if !timer.Stop() {
		t.Errorf("%s was killed after %v", cmd.Args[0], bound)
	}
	<-out.ended
	return out.String(), err
}

// Wait waits until sbxrun exits, and asserts what holds for every run:
//
//   - sbxrun exits within the time limit, or else Wait kills it and fails the test;
//   - no process of the run is alive at that moment (after Kill: soon);
//   - stdout and stderr are at end-of-file;
//   - nothing was left to sbxrun's parent, not even a zombie;
//   - no file but the report is left, and no cgroup;
//   - the report is consistent and has the same exit code.
//
// Only the first of these holds for a launched command.
func (p *Process) Wait() *Result {
	p.t.Helper()
	select {
	case <-p.exited:
	case <-time.After(p.bound()):
		p.t.Errorf("%.120q still runs after %v and is killed now; below it:\n%s%s", p.cmd.Args, p.bound(), Stuck(p.PID), List(Below(p.PID)))
		p.Kill()
		<-p.exited
	}
	r := &Result{ExitCode: p.cmd.ProcessState.ExitCode(), Elapsed: p.exit.Sub(p.Begin), Ended: p.exit, args: p.cmd.Args}
	if ws, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		r.Signal = ws.Signal()
	}
	if p.files[0] != "" {
		r.Stdout, r.Stderr = []byte(p.Output()), []byte(p.ErrorOutput())
		return r
	}
	if p.o.handover != nil {
		p.o.handover(string(p.drain(0, &Result{})))
	}
	awaitReaped(p.t, "the run", p.keepers)
	p.gone()
	if p.o.inside != nil {
		p.o.inside.unchanged(p.before)
	}
	r.Stdout, r.Stderr = p.drain(0, r), p.drain(1, r)
	if left := orphansBy(p.Marker, time.Now().Add(reap)); len(left) > 0 {
		p.t.Errorf("left for PID 1 to reap:\n%s", List(left))
	}
	p.checkFiles()
	p.readReport(r)
	if r.Report != nil {
		for _, dir := range Cgroups(r.Report.ID) {
			p.t.Errorf("cgroup %s is left", dir)
		}
	}
	return r
}

// gone asserts that all processes of the run have exited, and kills those that have not.
func (p *Process) gone() {
	p.t.Helper()
	<-p.watched
	defer p.seen.Close()
	deadline := p.exit // no second look
	if p.killed {
		deadline = time.Now().Add(settle)
	}
	goneBy(p.t, p.Marker, p.ns, deadline)
}

// drain waits until an output ends.
func (p *Process) drain(i int, r *Result) []byte {
	p.t.Helper()
	out := p.outputs[i]
	if out == nil {
		return nil
	}
	select {
	case <-out.ended:
		r.EOF = max(r.EOF, out.eof.Sub(p.exit))
	case <-time.After(settle):
		p.t.Errorf("output %d is still open %v after sbxrun has ended", i+1, settle)
	}
	return []byte(out.String())
}

func (p *Process) checkFiles() {
	p.t.Helper()
	if p.killed {
		return // a killed sbxrun cannot remove its files
	}
	err := filepath.WalkDir(p.dir, func(path string, d os.DirEntry, err error) error {
		switch path {
		case p.dir, filepath.Join(p.dir, "tmp"), p.reportPath():
		default:
			p.t.Errorf("sbxrun left a file behind: %s", path)
		}
		return err
	})
	check.That(p.t, err == nil, "look for files: %v", err)
}

func (p *Process) readReport(r *Result) {
	p.t.Helper()
	if p.o.Bare || p.killed {
		return
	}
	data, err := os.ReadFile(p.reportPath())
	if err != nil {
		check.That(p.t, r.ExitCode == 125 || r.Signal != 0 || len(p.o.Wrap) != 0, "exit code %d without a report; stderr: %.2000s", r.ExitCode, r.Stderr)
		return // a usage error, which tests see by the exit code
	}
	if r.Report, err = ParseReport(data); err != nil {
		p.t.Errorf("%v", err)
		return
	}
	for _, wrong := range r.Report.check() {
		p.t.Errorf("report: %s; it is %.2000s", wrong, data)
	}
	check.That(p.t, r.Report.ExitCode == r.ExitCode || len(p.o.Wrap) != 0, "exit code %d, but %d in the report", r.ExitCode, r.Report.ExitCode)
	check.That(p.t, !r.Report.Started || r.Report.Teardown.Verdict == "proven", "the end is not proven: %.2000s", data)
}

// Expect asserts how the run has ended.
func (r *Result) Expect(t T, code int, cause string) *Result {
	t.Helper()
	r.Exits(t, code)
	check.Require(t, r.Report != nil, "there is no report; stderr %.500q", r.Stderr)
	r.Report.Expect(t, code, cause)
	return r
}

// Expect asserts how an exec or a sandbox has ended.
func (r *Report) Expect(t T, code int, cause string) *Report {
	t.Helper()
	check.Require(t, r != nil, "there is no report")
	check.Require(t, r.ExitCode == code && r.Cause == cause, "want exit code %d and cause %q: %.2000s", code, cause, r.Raw())
	return r
}

// Exits asserts the exit code.
func (r *Result) Exits(t T, code int) *Result {
	t.Helper()
	return r.assert(t, r.ExitCode == code, "exit code %d", code)
}

// Out asserts what was printed on stdout.
func (r *Result) Out(t T, text string) *Result {
	t.Helper()
	return r.assert(t, string(r.Stdout) == text, "stdout %q", text)
}

// OutHas asserts that stdout contains a text.
func (r *Result) OutHas(t T, text string) *Result {
	t.Helper()
	return r.assert(t, strings.Contains(string(r.Stdout), text), "%q in stdout", text)
}

// Err asserts the text on stderr.
func (r *Result) Err(t T, text string) *Result {
	t.Helper()
	return r.assert(t, string(r.Stderr) == text, "stderr %q", text)
}

// ErrHas asserts that stderr contains a text.
func (r *Result) ErrHas(t T, text string) *Result {
	t.Helper()
	return r.assert(t, strings.Contains(string(r.Stderr), text), "%q in stderr", text)
}

// ErrLines asserts the number of lines on stderr.
func (r *Result) ErrLines(t T, n int) *Result {
	t.Helper()
	return r.assert(t, len(Lines(r.Stderr)) == n, "%d lines on stderr", n)
}

func (r *Result) assert(t T, ok bool, want string, args ...any) *Result {
	t.Helper()
	check.That(t, ok, "want %s: %v", fmt.Sprintf(want, args...), r)
	return r
}

func (r *Result) String() string {
	return fmt.Sprintf("%.500q: exit code %d (signal %v), stdout %.500q, stderr %.2000q, report %.2000s", r.args, r.ExitCode, r.Signal, r.Stdout, r.Stderr, r.Report.Raw())
}

// Within asserts that a measured time is at least low, and at most high plus Slack.
func Within(t T, what string, got, low, high time.Duration) {
	t.Helper()
	check.That(t, got >= low && got <= high+Slack, "%s took %v, want %v to %v (and %v of slack)", what, got, low, high, Slack)
}

// PeakRSS returns sbxrun's peak of resident memory so far in bytes, 0 if it has exited.
// getrusage(2) would include the time before the exec.
func (p *Process) PeakRSS() int64 { return memory(p.PID, "VmHWM:") }

// memory returns a line of /proc/PID/status in bytes.
func memory(pid int, name string) int64 {
	f := status(pid, name)
	if len(f) == 0 {
		return 0
	}
	kib, _ := strconv.ParseInt(f[0], 10, 64)
	return kib << 10
}

// status returns the words of a line of /proc/PID/status after its name; none if the process was reaped.
func status(pid int, name string) []string {
	data, _ := os.ReadFile(procFile(pid, "status"))
	_, rest, _ := strings.Cut(string(data), "\n"+name)
	line, _, _ := strings.Cut(rest, "\n")
	return strings.Fields(line)
}

// output collects a stream, and lets others wait for a text in it.
type output struct {
	Log
	ended chan struct{} // closed at end-of-file, after eof is set
	eof   time.Time
}

func newOutput(r *os.File) *output {
	o := &output{ended: make(chan struct{})}
	go func() {
		defer r.Close()
		_, _ = io.Copy(&o.Log, r) // any error ends it
		o.eof = time.Now()
		close(o.ended)
	}()
	return o
}

func (o *output) waitFor(text string, deadline time.Time) (found bool) {
	holdsBy(deadline, func() bool {
		over := false
		select {
		case <-o.ended: // the stream is complete
			over = true
		default:
		}
		found = strings.Contains(o.String(), text)
		return found || over
	})
	return found
}

// Root reports whether the tests run as root; some expect more then.
func Root() bool { return os.Geteuid() == 0 }
