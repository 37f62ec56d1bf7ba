package faults

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/harness"
)

var (
	// bound is far above what a run of this package takes: who exceeds it hangs.
	bound = harness.Scaled(20 * time.Second)
	// settle is how long the keeper may take after sbxrun was killed.
	settle = harness.Scaled(5 * time.Second)
)

// options are how a run is started; the zero value is right for most.
type options struct {
	env    []string
	stdin  *os.File
	stdout *os.File // instead of a file of the run's
	attr   *syscall.SysProcAttr
	wrap   []string // a command that becomes sbxrun
	report string   // instead of the run's own; "none" for none
	dir    string   // the current directory
}

// run is one run of sbxrun. Unlike the harness's, its processes may be killed in
// any order, so everything is looked for and nothing is taken for granted.
type run struct {
	t      testing.TB
	pid    int
	marker string
	out    string // the directory that the payload sees as /out
	report string
	stderr string
	stdout string

	cmd    *exec.Cmd
	exited chan struct{} // closed when sbxrun has been reaped
	begin  time.Time
	end    time.Time // after exited
	// ns are the inodes of the room's and the command's PID namespaces once they were
	// seen, and the handles that keep them from being given to the next ones. known are
	// the processes that they were seen by.
	ns    map[uint64]*os.File
	known map[int]bool
	// killed: sbxrun was, so nobody waits for the rest and there is no report.
	killed bool
}

// start runs sbxrun with flags of its own: the marker, the report, /out.
func start(t testing.TB, o options, args ...string) *run {
	t.Helper()
	top := harness.Dir(t)
	r := &run{
		t: t, out: harness.SharedDir(t), exited: make(chan struct{}), ns: map[uint64]*os.File{}, known: map[int]bool{},
		marker: fmt.Sprintf("fault-%d-%d", os.Getpid(), time.Now().UnixNano()),
		report: filepath.Join(top, "report.json"),
		stdout: filepath.Join(top, "stdout"),
		stderr: filepath.Join(top, "stderr"),
	}
	flags := append(harness.Proof(), "--env", harness.MarkerName+"="+r.marker, "--bind", r.out+":/out")
	if o.report != "" {
		r.report = o.report
	}
	if o.report != "none" {
		flags = append(flags, "--report", r.report)
	}
	words := slices.Concat(o.wrap, []string{harness.Binary(t)}, flags, args)
	r.cmd = exec.Command(words[0], words[1:]...)
	r.cmd.Dir = o.dir
	if o.dir == "" {
		r.cmd.Dir = r.out
	}
	r.cmd.Env = append([]string{"PATH=" + harness.Path, harness.Bwrap(), "HOME=/nonexistent", "LANG=C.UTF-8", "TMPDIR=" + top, harness.MarkerName + "=" + r.marker}, o.env...)
	r.cmd.SysProcAttr = o.attr
	if o.stdin != nil {
		r.cmd.Stdin = o.stdin
	}
	// Files and no pipes: nobody has to read them, and nobody can fill them.
	stderr, err := os.Create(r.stderr)
	harness.Must(t, err)
	defer stderr.Close()
	r.cmd.Stderr = stderr
	r.cmd.Stdout = o.stdout
	if o.stdout == nil {
		stdout, err := os.Create(r.stdout)
		harness.Must(t, err)
		defer stdout.Close()
		r.cmd.Stdout = stdout
	}
	r.begin = time.Now()
	done, err := harness.StartCommand(r.cmd)
	harness.Must(t, err)
	r.pid = r.cmd.Process.Pid
	registered[r.pid]++
	go func() {
		_ = r.cmd.Wait() // shows in ProcessState
		r.end = time.Now()
		done()
		close(r.exited)
	}()
	return r
}

// registered counts, by pid, the children that this package has started and not let go
// yet. Between the end of one and that, its pid may be another's. The tests run one after
// the other; where one has goroutines, the lock registering guards it.
var registered = map[int]int{}

func unregister(pid int) {
	if registered[pid]--; registered[pid] <= 0 {
		delete(registered, pid)
	}
}

// over says whether sbxrun has been reaped.
func (r *run) over() bool {
	select {
	case <-r.exited:
		return true
	default:
		return false
	}
}

// processes are the pids of the run's processes by role, as far as they exist.
func (r *run) processes() (pids [roles]int) {
	pids = family(r.pid)
	for _, pid := range pids[roleRoom:] {
		r.remember(pid)
	}
	return pids
}

// remember notes the PID namespace of a process. That of an init cannot be looked at by an
// ordinary user: it shows in the payload.
func (r *run) remember(pid int) {
	if pid <= 1 || r.known[pid] {
		return
	}
	held, err := os.Open(fmt.Sprintf("/proc/%d/ns/pid", pid))
	if err != nil {
		return // it has ended, or cannot be looked at yet
	}
	var mine, its unix.Stat_t
	if unix.Stat("/proc/self/ns/pid", &mine) != nil || unix.Fstat(int(held.Fd()), &its) != nil || its.Ino == mine.Ino || r.ns[its.Ino] != nil {
		held.Close()
		return
	}
	r.known[pid] = true
	r.ns[its.Ino] = held
}

// childrenOf lists the children of all threads of a process, zombies included: of each
// thread's the oldest first, which is the order of the kernel and not that of the pids.
func childrenOf(pid int) (pids []int) {
	task := fmt.Sprintf("/proc/%d/task", pid)
	threads, err := os.ReadDir(task)
	if err != nil {
		return nil // ended: it has no children any more
	}
	for _, thread := range threads {
		data, err := os.ReadFile(task + "/" + thread.Name() + "/children")
		if err != nil {
			continue
		}
		for _, field := range bytes.Fields(data) {
			if child, err := strconv.Atoi(string(field)); err == nil && child > 1 {
				pids = append(pids, child)
			}
		}
	}
	return pids
}

// hit sends a signal to a process of the run, if it is still the child of the
// process it was found below, and says whether it was alive to receive it. The
// pidfd comes first and the look second: no stranger is ever hit.
func (r *run) hit(pids [roles]int, role int, sig unix.Signal) bool {
	r.t.Helper()
	if role == roleSbxrun {
		return r.signal(sig)
	}
	if pids[role] <= 1 {
		return false
	}
	target, err := harness.Open(pids[role])
	if err != nil {
		return false
	}
	defer target.Close()
	p, ok := harness.ReadProc(pids[role])
	if !ok || p.Parent != pids[above[role]] || p.State == "Z" || p.State == "X" {
		return false
	}
	if err := target.Signal(sig); err != nil {
		r.t.Fatalf("signal %v to the %s: %v", sig, roleNames[role], err)
	}
	return true
}

// signal signals sbxrun, and says whether it ran.
func (r *run) signal(sig unix.Signal) bool {
	if r.over() {
		return false
	}
	if sig == unix.SIGKILL {
		r.killed = true
	}
	return r.cmd.Process.Signal(sig) == nil
}

// until waits for something that a run comes to. false if sbxrun has ended
// before; the test fails if it takes for ever.
func (r *run) until(what string, holds func() bool) bool {
	r.t.Helper()
	for begin := time.Now(); !holds(); pause(begin) {
		if r.over() {
			return holds()
		}
		if time.Since(begin) > bound {
			r.t.Errorf("waited %v in vain for %s; stderr %q", bound, what, r.text(r.stderr))
			r.abort()
			return false
		}
	}
	return true
}

// pause is between two looks of who has waited since begin: so short that what lasts briefly is met
// soon after the beginning, and that a long wait costs nobody beside it a CPU.
func pause(begin time.Time) {
	time.Sleep(min(max(time.Since(begin)/32, 100*time.Microsecond), 5*time.Millisecond))
}

// wrote says whether the payload has made a file.
func (r *run) wrote(name string) bool {
	_, err := os.Stat(filepath.Join(r.out, name))
	return err == nil
}

func (r *run) text(name string) string {
	data, err := os.ReadFile(name)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		r.t.Errorf("%v", err)
	}
	return string(data)
}

// abort ends a run that has failed.
func (r *run) abort() {
	r.signal(unix.SIGKILL)
	<-r.exited
}

// outcome is how sbxrun ended.
type outcome struct {
	code   int
	signal syscall.Signal
	report *harness.Report // nil if there is none
	stderr string
}

func (o outcome) String() string {
	text := fmt.Sprintf("code %d, signal %d, stderr %.300q, ", o.code, int(o.signal), o.stderr)
	if o.report == nil {
		return text + "no report"
	}
	return text + fmt.Sprintf("report: cause %s, started %v, code %d, teardown %+v", o.report.Cause, o.report.Started, o.report.ExitCode, o.report.Teardown)
}

// wait waits for sbxrun's end and then asserts that nothing is left and that the
// outcome agrees with itself.
func (r *run) wait() outcome {
	r.t.Helper()
	select {
	case <-r.exited:
	case <-time.After(bound):
		r.t.Errorf("sbxrun still runs after %v; below it:\n%s", bound, stuck(r.pid)+describe(below(r.pid)))
		r.abort()
	}
	r.gone()
	return r.outcome()
}

func (r *run) outcome() outcome {
	r.t.Helper()
	o := outcome{stderr: r.text(r.stderr), code: r.cmd.ProcessState.ExitCode()}
	if ws := r.cmd.ProcessState.Sys().(syscall.WaitStatus); ws.Signaled() {
		o.signal = ws.Signal()
	}
	r.readReport(&o)
	return o
}

func (r *run) readReport(o *outcome) {
	r.t.Helper()
	data, err := os.ReadFile(r.report)
	if err != nil {
		return
	}
	if o.report, err = harness.ParseReport(data); err != nil {
		r.t.Errorf("%v", err)
		o.report = nil
		return
	}
	if o.signal == 0 && o.report.ExitCode != o.code {
		r.t.Errorf("the report says another exit code: %v", o)
	}
	if r.wrote("ran") && !o.report.Started {
		r.t.Errorf("the command has run, and the report says that it was not started: %v", o)
	}
	if o.report.Teardown.Verdict == "not_applicable" && o.report.Started {
		r.t.Errorf("started, and nothing to prove: %v", o)
	}
}

// gone asserts that nothing of the run is left: at once, or soon if sbxrun was
// killed. What is left all the same is ended, so that no other test suffers.
func (r *run) gone() {
	r.t.Helper()
	defer func() {
		for inode, held := range r.ns {
			held.Close()
			delete(r.ns, inode)
		}
	}()
	deadline := time.Now()
	if r.killed {
		deadline = deadline.Add(settle)
	}
	var left []harness.Proc
	for {
		left = r.left()
		if len(left) == 0 || time.Now().After(deadline) {
			break
		}
		time.Sleep(200 * time.Microsecond)
	}
	if len(left) > 0 {
		after := time.Since(r.end).Round(time.Microsecond)
		// For the message only: does it end by itself?
		last := r.left()
		for patience := time.Now().Add(time.Second); len(last) > 0 && time.Now().Before(patience); last = r.left() {
			time.Sleep(time.Millisecond)
		}
		r.t.Errorf("%d processes are left %v after the end of sbxrun:\n%sand %d of them a second later:\n%s", len(left), after, describe(left), len(last), describe(last))
		sweep(r.t, r.left)
	}
	reapStrays(r.t) // what gone has accepted
	unregister(r.pid)
	r.frozen()
}

// left are the processes of the run, found by marker, namespace and descent.
func (r *run) left() (left []harness.Proc) {
	for _, p := range orphans() {
		// "3" is the one that makes a user namespace to idmap by: it executes a descriptor.
		if r.killed && p.Parent == os.Getpid() && p.State == "Z" && (strings.HasPrefix(p.Comm, "sbxrun") || p.Comm == "3") {
			continue // a fork of sbxrun's: its caller reaps it, as it reaps sbxrun
		}
		left = append(left, p)
	}
	for _, p := range marked(r.marker, func(inode uint64) bool { return r.ns[inode] != nil }) {
		if !slices.ContainsFunc(left, func(q harness.Proc) bool { return q.PID == p.PID }) {
			left = append(left, p)
		}
	}
	return left
}

// orphans is what hangs below the test process and was not started by it.
func orphans() (found []harness.Proc) {
	for _, p := range strays() {
		p.Why = "was abandoned"
		found = append(append(found, p), below(p.PID)...)
	}
	return found
}

// strays are the children of the test process that it has not started itself. Two looks that agree
// count: where a child ends while the kernel writes the list of them, another may be missing
// (proc_pid_children(5)), and its own children have come to us after the look at them.
func strays() []harness.Proc {
	look := func() (found []harness.Proc) {
		for _, pid := range childrenOf(os.Getpid()) {
			registering.Lock()
			mine := registered[pid] > 0
			registering.Unlock()
			if p, ok := harness.ReadProc(pid); ok && !mine && p.Parent == os.Getpid() {
				found = append(found, p)
			}
		}
		return found
	}
	for seen := look(); ; {
		again := look()
		if slices.Equal(seen, again) {
			return again
		}
		seen = again
	}
}

// reapStrays collects what has come to the test, which stands for the machine's init, but for the
// living sandboxes. All must be zombies, or about to be: none is left for another test to find.
func reapStrays(t testing.TB, living ...*sandbox) {
	t.Helper()
	var found []harness.Proc
	for deadline := time.Now().Add(settle); time.Now().Before(deadline); time.Sleep(100 * time.Microsecond) {
		found = slices.DeleteFunc(strays(), func(p harness.Proc) bool {
			return slices.ContainsFunc(living, func(b *sandbox) bool { return b.PID == p.PID })
		})
		if len(found) == 0 {
			return
		}
		for _, p := range found {
			if p.State == "Z" {
				_, _ = unix.Wait4(p.PID, nil, unix.WNOHANG, nil) // the next look tells
			}
		}
	}
	t.Errorf("not ended, and with no parent but the test:\n%s", describe(found))
}

func below(pid int) (found []harness.Proc) {
	for _, pid := range harness.Descendants(pid) {
		if p, ok := harness.ReadProc(pid); ok {
			p.Why = "is a descendant"
			found = append(found, p)
		}
	}
	return found
}

// marked looks through all of /proc for a marker and for members of PID namespaces.
func marked(marker string, ours func(inode uint64) bool) (found []harness.Proc) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		if p, ok := harness.ReadProc(pid); !ok || p.Kernel() {
			continue
		}
		why := ""
		var st unix.Stat_t
		if unix.Stat(fmt.Sprintf("/proc/%d/ns/pid", pid), &st) == nil && ours(st.Ino) {
			why = "is in a PID namespace of the sandbox"
		}
		for _, name := range []string{"environ", "cmdline"} {
			if data, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name)); err == nil && bytes.Contains(data, []byte(marker)) {
				why = "has the marker in its " + name
			}
		}
		if why == "" {
			continue
		}
		if p, ok := harness.ReadProc(pid); ok {
			p.Why = why
			found = append(found, p)
		}
	}
	return found
}

func describe(procs []harness.Proc) string {
	var b strings.Builder
	for _, p := range procs {
		fmt.Fprintf(&b, "\t%v\n", p)
	}
	return b.String()
}

// sweep kills and reaps what a failed test has left, each process by a pidfd
// whose identity was checked.
func sweep(t testing.TB, left func() []harness.Proc) {
	t.Helper()
	harness.Until(t, settle, "the end of what was left", func() bool {
		procs := left()
		for _, p := range procs {
			if p.PID <= 1 || p.PID == os.Getpid() || registered[p.PID] > 0 {
				continue
			}
			if target, err := harness.Open(p.PID); err == nil {
				if now, ok := harness.ReadProc(p.PID); ok && now.Start == p.Start {
					_ = target.Signal(unix.SIGKILL) // the next look tells
				}
				target.Close()
			}
			_, _ = unix.Wait4(p.PID, nil, unix.WNOHANG, nil) // not ours, or not yet: the next look tells
		}
		return len(procs) == 0
	})
}

// grown remembers how much payloads had written when they were gone.
var grown = map[string]int64{}

// frozen notes the size of the log, and looks at those of the earlier runs of
// the test again: nothing may have gone on writing. The later runs are the time
// that passes between the two looks.
func (r *run) frozen() {
	r.t.Helper()
	for name, size := range grown {
		switch st, err := os.Stat(name); {
		case errors.Is(err, fs.ErrNotExist):
			delete(grown, name) // its test is over
		case err != nil:
			r.t.Errorf("%v", err)
		case st.Size() != size:
			r.t.Errorf("a command went on after everything was gone: %s has grown from %d to %d bytes", name, size, st.Size())
			delete(grown, name)
		}
	}
	name := filepath.Join(r.out, "log")
	if st, err := os.Stat(name); err == nil {
		grown[name] = st.Size()
	}
}

// oneLine asserts that sbxrun has said one thing: one line, in its own words,
// and for people.
func (o outcome) oneLine(t testing.TB) {
	t.Helper()
	lines := strings.Split(strings.TrimSuffix(o.stderr, "\n"), "\n")
	// What bwrap itself had to say comes first.
	// It may have been killed in the middle of a line.
	for i, line := range lines {
		if at := strings.Index(line, "sbxrun: "); at > 0 && strings.HasPrefix(line, "bwrap: ") {
			lines[i] = line[at:]
		}
	}
	lines = slices.DeleteFunc(lines, func(line string) bool { return strings.HasPrefix(line, "bwrap: ") })
	text := strings.Join(lines, "\n")
	if !strings.HasPrefix(text, "sbxrun: error: ") || strings.Contains(text, "\n") {
		t.Errorf("want one line of sbxrun's: %v", o)
	}
	if strings.Contains(text, "keeper was killed") {
		t.Errorf("nobody has killed the keeper: %v", o)
	}
	if strings.Contains(text, "Go value") || strings.Contains(text, "Go struct") {
		t.Errorf("these are words of package json: %v", o)
	}
}

// stuck tells of each thread of a process in which function of the kernel it waits.
func stuck(pid int) (text string) {
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid)) // none if it has ended meanwhile
	for _, task := range tasks {
		stat, _ := os.ReadFile(task + "/stat")
		channel, _ := os.ReadFile(task + "/wchan")
		call, _ := os.ReadFile(task + "/syscall")
		text += fmt.Sprintf("\t%.60s: in %s, system call %s\n", stat, channel, strings.TrimSpace(string(call)))
	}
	return text
}
