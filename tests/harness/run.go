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

	"golang.org/x/sys/unix"
)

// MarkerName is the variable that holds a run's marker.
const MarkerName = "SBXRUN_TEST_RUN"

// Options are how sbxrun is started. The zero value is right for most tests.
type Options struct {
	// Dir is sbxrun's current directory; "" is an empty one made for the run.
	Dir string
	// Env is added to a small environment: PATH without what only a developer
	// has, HOME, LANG, TMPDIR. NAME= alone removes nothing, it sets empty.
	Env []string
	// Bare leaves the command line exactly as given: no --report, no marker in
	// the sandbox, no /fixtures. The marker is still in sbxrun's environment.
	Bare bool
	// Wrap is a command that starts sbxrun; sbxrun and its arguments follow.
	Wrap []string
	// Stdin is sbxrun's; nil is /dev/null. A file is handed over as it is,
	// anything else is written into a pipe.
	Stdin io.Reader
	// Stdout and Stderr replace the pipes that are read into Result.
	Stdout, Stderr *os.File
	// ExtraFiles are descriptors 3, 4 … of sbxrun.
	ExtraFiles []*os.File
	// Attr is for a session, a terminal or a process group of its own.
	Attr *syscall.SysProcAttr
	// T is the test that an exec belongs to; nil is the sandbox's own. A parallel
	// subtest gives its own, because it must not end its parent (testing: FailNow).
	T T
	// Bound replaces the usual Bound; on a slow machine it is longer as well.
	Bound time.Duration

	inside *Sandbox // an exec: the sandbox that it is in
	others bool     // it has to do with sandboxes that are not its own
	// handover is called when what was started has ended, and its stdout, before
	// anything is asserted: what lives on by intention is taken over there.
	handover func(stdout string)
}

// Result is a run that is over.
type Result struct {
	ExitCode int            // -1 if it died of Signal
	Signal   syscall.Signal // that ended sbxrun itself
	Stdout   []byte
	Stderr   []byte
	Report   *Report       // nil if there is none
	Elapsed  time.Duration // from start to the exit of sbxrun
	Ended    time.Time     // when sbxrun exited
	// EOF is when both outputs had ended, counted from sbxrun's exit.
	EOF time.Duration
}

// Process is a run in progress.
type Process struct {
	PID    int
	Marker string

	t       T
	o       Options
	cmd     *exec.Cmd
	begin   time.Time
	dir     string // of the run: report, TMPDIR
	outputs [2]*output

	exited chan struct{} // closed after the fields below are set
	exit   time.Time
	err    error

	watched chan struct{} // closed when the look-out for the namespace is over
	ns      uint64        // after watched
	// held keeps the namespace from being freed as long as it is looked for:
	// the next one made would get the same inode.
	held    *os.File
	killed  bool
	keepers []*Adopted        // once it was killed
	before  map[identity]bool // an exec: what ran in the sandbox's own PID namespace
}

// Run runs sbxrun to its end; see [Process.Wait] for what it asserts.
func Run(t T, o Options, args ...string) *Result {
	t.Helper()
	return Start(t, o, args...).Wait()
}

// Start starts sbxrun. The test must Wait.
func Start(t T, o Options, args ...string) *Process {
	t.Helper()
	p, err := TryStart(t, o, args...)
	if err != nil {
		t.Fatalf("start sbxrun: %v", err)
	}
	return p
}

// TryStart is Start where the system call may fail.
func TryStart(t T, o Options, args ...string) (*Process, error) {
	t.Helper()
	p := &Process{Marker: newMarker(), t: t, o: o, dir: Dir(t), exited: make(chan struct{}), watched: make(chan struct{})}
	tmp := filepath.Join(p.dir, "tmp")
	if err := os.Mkdir(tmp, 0o700); err != nil {
		return nil, err
	}
	words := append(slices.Clone(o.Wrap), Binary(t))
	words = append(words, p.arguments(args)...)
	p.cmd = exec.Command(words[0], words[1:]...)
	p.cmd.Dir = o.Dir
	if o.Dir == "" {
		p.cmd.Dir = Dir(t)
	}
	p.cmd.Env = append([]string{"PATH=" + Path, "HOME=/nonexistent", "LANG=C.UTF-8", Bwrap(), "TMPDIR=" + tmp, MarkerName + "=" + p.Marker}, o.Env...)
	p.cmd.ExtraFiles, p.cmd.SysProcAttr = o.ExtraFiles, o.Attr

	mine, err := p.connect()
	defer func() {
		for _, f := range mine {
			f.Close()
		}
	}()
	if err != nil {
		return nil, err
	}
	if o.inside != nil {
		p.before = o.inside.members()
	}
	p.begin = time.Now()
	done, err := StartCommand(p.cmd)
	if err != nil {
		return nil, err
	}
	p.PID = p.cmd.Process.Pid
	go func() {
		p.err = p.cmd.Wait()
		p.exit = time.Now()
		done()
		close(p.exited)
	}()
	if o.others {
		close(p.watched) // what runs below it may be in another's namespace
	} else {
		go p.watch()
	}
	return p, nil
}

// Path is the PATH of a run: where a distribution puts its programs.
const Path = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"

// Bwrap is a variable for the environment of sbxrun. It names the bwrap that the tests use; empty
// for the installed one.
func Bwrap() string { return "SBXRUN_BWRAP=" + os.Getenv("SBXRUN_BWRAP") }

// arguments puts the harness's own flags before the test's, behind the name of
// the command if there is one.
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
		"--env", fixtureSeconds(), // should a test fail, the rest ends by itself
		"--ro-bind", fixturesBind(p.t),
	)
	if len(args) > 0 && args[0] == "run" {
		return append(append([]string{"run"}, own...), args[1:]...)
	}
	return append(own, args...)
}

// fixtureSeconds is after how long what a fixture has started ends by itself; they
// take no more than 999.
func fixtureSeconds() string { return fmt.Sprintf("FIXTURE_SECONDS=%.0f", min(999, Bound.Seconds())) }

func fixturesBind(t T) string {
	t.Helper()
	return strings.NewReplacer(`\`, `\\`, ":", `\:`).Replace(FixturesDir(t)) + ":/fixtures"
}

func (p *Process) reportPath() string { return filepath.Join(p.dir, "report.json") }

// connect sets up the standard streams and returns the ends that only the child
// needs.
func (p *Process) connect() (mine []*os.File, err error) {
	stdin := p.o.Stdin
	if _, ok := stdin.(*os.File); !ok && stdin != nil {
		r, w, err := os.Pipe()
		if err != nil {
			return mine, err
		}
		mine = append(mine, r)
		// Not by package exec: its Wait would wait for this to end.
		go func(src io.Reader) {
			_, _ = io.Copy(w, src) // who does not read gets us EPIPE
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
	host := Namespace(os.Getpid())
	outer := host // on its way in an exec is in the sandbox's for a moment
	if p.o.inside != nil {
		outer = p.o.inside.NS
	}
	for pause := time.Millisecond; ; pause = min(pause+pause/4, 50*time.Millisecond) {
		below := Descendants(p.PID)
		own(p.Marker, below)
		for _, pid := range below {
			ns := Namespace(pid)
			if ns == 0 || ns == host || ns == outer {
				continue
			}
			held, err := os.Open(procFile(pid, "ns/pid"))
			if err != nil {
				continue // it has just ended
			}
			// Looked at again, through what is held: pid may be another's by now, and so may
			// sbxrun's own, once it has been reaped.
			var st unix.Stat_t
			if unix.Fstat(int(held.Fd()), &st) == nil && st.Ino != host && st.Ino != outer && isBelow(pid, p.PID) && p.cmd.Process.Signal(syscall.Signal(0)) == nil {
				p.ns, p.held = st.Ino, held
				return
			}
			held.Close()
		}
		select {
		case <-p.exited:
			return
		case <-time.After(pause):
		}
	}
}

// Namespace waits until the sandbox's PID namespace is known.
func (p *Process) Namespace() uint64 {
	p.t.Helper()
	<-p.watched
	if p.ns == 0 {
		p.t.Fatalf("sbxrun ended before its sandbox was seen")
	}
	return p.ns
}

// Signal sends a signal to the process that was started: sbxrun, or Wrap.
func (p *Process) Signal(sig syscall.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		p.t.Errorf("signal %v: %v", sig, err)
	}
}

// Kill kills sbxrun itself, from where on nobody waits for the sandbox: what is
// left may take a moment to end, and its keepers are ours to reap.
func (p *Process) Kill() {
	p.killed = true
	target, err := Open(p.PID)
	if err != nil {
		return // it has ended already: nothing to kill
	}
	defer target.Close()
	if p.cmd.Process.Signal(syscall.Signal(0)) != nil {
		return // it has ended, and the pid may be another's
	}
	keepers, err := killAdopting(target)
	if err != nil {
		p.t.Errorf("kill sbxrun: %v", err)
	}
	p.keepers = append(p.keepers, keepers...)
}

func (p *Process) Exited() <-chan struct{} { return p.exited }

// The processes of a run, from the outside in.
const (
	RoleKeeper  = 1 // child of sbxrun
	RoleMonitor = 2 // bwrap's outer process, child of the keeper
	RoleRoom    = 3 // PID 1 of the room, child of the monitor
	RoleInit    = 4 // PID 1 of the command's own namespace, child of the keeper
	RolePayload = 5 // child of init
)

// role returns the pid of one of the run's processes, 0 if it is not there. Of the
// keeper's children init is the last that was forked, and the one that has a child.
func (p *Process) role(role int) int {
	first := func(pid int) int {
		if c := Children(pid); pid > 0 && len(c) > 0 {
			return c[0] // not the lowest: pids begin again at /proc/sys/kernel/pid_max
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

// Role waits for one of the run's processes and takes hold of it. It fails the
// test if sbxrun ends first.
func (p *Process) Role(role int) *Target {
	p.t.Helper()
	var target *Target
	Until(p.t, p.bound(), "process "+strconv.Itoa(role)+" of the run", func() bool {
		select {
		case <-p.exited:
			p.t.Fatalf("sbxrun ended before process %d of the run was seen", role)
		default:
		}
		pid := p.role(role)
		if pid == 0 {
			return false
		}
		held, err := Open(pid)
		if err != nil {
			return false
		}
		if p.role(role) != pid {
			held.Close() // it had ended, and this is another's
			return false
		}
		target = held
		return true
	})
	p.t.Cleanup(target.Close)
	return target
}

// WaitOutput waits until stdout holds a text. It fails the test if stdout ends
// first.
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
		p.Wait()
		p.t.Fatalf("gave up")
	}
}

// InTime starts what has to print a text before its deadline, which is d if that is twice the time that it
// needs: on a machine that is slow, or busy, the first of 2d, 4d… that is. It returns what then runs, and
// its deadline. What the test does before the deadline has half of d too: where bounds are wide, a second
// to five.
func InTime(t T, d time.Duration, text string, start func(timeout string) *Process) (*Process, time.Duration) {
	t.Helper()
	if Slack > time.Second {
		d = max(d, min(Slack/2, 10*time.Second))
	}
	for ; ; d *= 2 {
		p := start(d.String())
		if p.outputs[0].waitFor(text, p.begin.Add(d/2)) {
			return p, d
		}
		r := p.Wait()
		late := bytes.Contains(r.Stdout, []byte(text)) || r.Report != nil && r.Report.Cause == "timeout"
		if !late || d > Bound {
			t.Fatalf("no %q in %v: exit code %d, %.2000q, %.2000s", text, d/2, r.ExitCode, r.Stdout, r.Stderr)
		}
	}
}

func (p *Process) Output() string { return p.outputs[0].String() }

func (p *Process) ErrorOutput() string { return p.outputs[1].String() }

func (p *Process) bound() time.Duration {
	if p.o.Bound > 0 {
		return Scaled(p.o.Bound)
	}
	return Bound
}

// Command runs something else than sbxrun, which the tests need, to its end or
// until the bound. It returns stdout and stderr in one.
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
		_ = cmd.Process.Kill() // it has just ended: nothing to kill
	})
	err = cmd.Wait()
	done()
	if !timer.Stop() {
		t.Errorf("%s was killed after %v", cmd.Args[0], bound)
	}
	<-out.ended
	return out.String(), err
}

// Wait waits for sbxrun's end and asserts all that holds for every run:
//
//   - it ends within the bound; or else it is killed, and the test fails;
//   - when it returns no process of the run is alive, not even for a moment;
//     after Kill: soon;
//   - stdout and stderr are at their end, nobody holds them;
//   - nothing was abandoned to sbxrun's parent, not even a zombie;
//   - no file was left but the report, and no cgroup;
//   - the report says the same as the exit code, and is consistent.
func (p *Process) Wait() *Result {
	p.t.Helper()
	select {
	case <-p.exited:
	case <-time.After(p.bound()):
		p.t.Errorf("sbxrun still runs after %v and is killed now; below it:\n%s", p.bound(), List(Below(p.PID)))
		p.Kill()
		<-p.exited
	}
	if p.o.handover != nil {
		p.o.handover(string(p.drain(0, &Result{})))
	}
	awaitReaped(p.t, "the run", p.keepers)
	p.gone()
	if p.o.inside != nil {
		p.o.inside.unchanged(p.before)
	}
	r := &Result{Elapsed: p.exit.Sub(p.begin), Ended: p.exit}
	state := p.cmd.ProcessState
	r.ExitCode = state.ExitCode()
	if ws, ok := state.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		r.Signal = ws.Signal()
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

// gone asserts that no process of the run is left, and ends those that are.
func (p *Process) gone() {
	p.t.Helper()
	<-p.watched
	if p.held != nil {
		defer p.held.Close()
	}
	deadline := p.exit // one look, and no second chance
	if p.killed {
		deadline = time.Now().Add(settle)
	}
	goneBy(p.t, p.Marker, p.ns, deadline)
}

// drain waits for the end of one output.
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
		return // nobody can remove files of a killed process
	}
	err := filepath.WalkDir(p.dir, func(path string, d os.DirEntry, err error) error {
		switch path {
		case p.dir, filepath.Join(p.dir, "tmp"), p.reportPath():
		default:
			p.t.Errorf("sbxrun left a file behind: %s", path)
		}
		return err
	})
	if err != nil {
		p.t.Errorf("look for files: %v", err)
	}
}

func (p *Process) readReport(r *Result) {
	p.t.Helper()
	if p.o.Bare || p.killed {
		return
	}
	data, err := os.ReadFile(p.reportPath())
	if err != nil {
		if r.ExitCode != 125 && r.Signal == 0 && len(p.o.Wrap) == 0 {
			p.t.Errorf("exit code %d without a report; stderr: %.2000s", r.ExitCode, r.Stderr)
		}
		return // a usage error, which a test sees by the code
	}
	if r.Report, err = ParseReport(data); err != nil {
		p.t.Errorf("%v", err)
		return
	}
	for _, wrong := range r.Report.check() {
		p.t.Errorf("report: %s; it is %.2000s", wrong, data)
	}
	if r.Report.ExitCode != r.ExitCode && len(p.o.Wrap) == 0 {
		p.t.Errorf("exit code %d, but %d in the report", r.ExitCode, r.Report.ExitCode)
	}
	if r.Report.Started && r.Report.Teardown.Verdict != "proven" {
		p.t.Errorf("the end is not proven: %.2000s", data)
	}
}

// Expect asserts how the run has ended.
func (r *Result) Expect(t T, code int, cause string) {
	t.Helper()
	if r.ExitCode != code {
		t.Errorf("exit code %d (signal %v), want %d; stdout %.500q; stderr %.500q", r.ExitCode, r.Signal, code, r.Stdout, r.Stderr)
	}
	switch {
	case r.Report == nil:
		t.Fatalf("there is no report; stderr %.500q", r.Stderr)
	case r.Report.Cause != cause:
		t.Errorf("cause %q, want %q; report %.2000s", r.Report.Cause, cause, r.Report.Raw())
	}
}

// Within asserts a measured time: at least low, and at most high plus Slack.
func Within(t T, what string, got, low, high time.Duration) {
	t.Helper()
	if got < low || got > high+Slack {
		t.Errorf("%s took %v, want %v to %v (and %v of slack)", what, got, low, high, Slack)
	}
}

// PeakRSS is the most memory sbxrun has had resident so far, in bytes; 0 if it
// has ended. Not by getrusage(2): that includes what was before the exec.
func (p *Process) PeakRSS() int64 { return memory(p.PID, "VmHWM:") }

// memory is a line of /proc/PID/status, in bytes.
func memory(pid int, name string) int64 {
	f := status(pid, name)
	if len(f) == 0 {
		return 0
	}
	kib, _ := strconv.ParseInt(f[0], 10, 64)
	return kib << 10
}

// status are the words of a line of /proc/PID/status, behind its name; none if the process has ended.
func status(pid int, name string) []string {
	data, _ := os.ReadFile(procFile(pid, "status"))
	_, rest, _ := strings.Cut(string(data), "\n"+name)
	line, _, _ := strings.Cut(rest, "\n")
	return strings.Fields(line)
}

// output collects a stream and lets others wait for a text in it.
type output struct {
	Log
	ended chan struct{} // closed at end-of-file, after eof is set
	eof   time.Time
}

func newOutput(r *os.File) *output {
	o := &output{ended: make(chan struct{})}
	go func() {
		defer r.Close()
		_, _ = io.Copy(&o.Log, r) // whatever ends it
		o.eof = time.Now()
		close(o.ended)
	}()
	return o
}

func (o *output) waitFor(text string, deadline time.Time) (found bool) {
	holdsBy(deadline, func() bool {
		over := false
		select {
		case <-o.ended: // then all of it is there
			over = true
		default:
		}
		found = strings.Contains(o.String(), text)
		return found || over
	})
	return found
}

// HostFork makes and reaps one process on the host, and says how long it took.
func HostFork(t T) time.Duration {
	t.Helper()
	begin := time.Now()
	if _, err := Command(t, exec.Command("/bin/true"), Bound); err != nil {
		t.Errorf("the host cannot fork: %v", err)
	}
	return time.Since(begin)
}

// Must fails the test on an error.
func Must(t T, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%v", err)
	}
}

// Root says whether the tests run as root; some rows expect more then.
func Root() bool { return os.Geteuid() == 0 }
