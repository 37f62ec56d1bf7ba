package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

func caller() room.Caller {
	return room.Caller{Bwrap: os.Getenv("SBXRUN_BWRAP"), Path: os.Getenv("PATH"), Home: os.Getenv("HOME"), UID: os.Geteuid(), GID: os.Getegid()}
}

// TestMain lets the test binary, when started in its own namespaces, break something about the machine and print the
// diagnosis.
func TestMain(m *testing.M) {
	if broken := os.Getenv("SBXRUN_TEST_BREAK"); broken != "" {
		os.Exit(diagnoseBroken(broken))
	}
	os.Exit(m.Run())
}

func diagnoseBroken(what string) int {
	c := caller()
	var err error
	switch what {
	case "masked":
		// Run as an ordinary user, because root of this namespace could not change its uid.
		c.UID, c.GID = 1000, 1000
		if err = unix.Mount("/proc/sys", "/proc/sys", "", unix.MS_BIND|unix.MS_REC, ""); err == nil {
			err = unix.Mount("", "/proc/sys", "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
		}
	case "limit":
		c.UID, c.GID = 1000, 1000
		err = os.WriteFile("/proc/sys/user/max_user_namespaces", []byte("0"), 0)
	case "noproc":
		err = unix.Mount("none", "/proc", "tmpfs", 0, "")
	}
	if err != nil {
		fmt.Println("cannot break it:", err)
		return 2
	}
	if d := Diagnose(context.Background(), c); d != nil {
		fmt.Printf("%s\n%s\n", d.Message, d.Hint)
	}
	return 0
}

// works skips the test if this machine cannot run it, unless skips are failures.
func works(t *testing.T) {
	t.Helper()
	if d := Diagnose(context.Background(), caller()); d != nil {
		check.Require(t, os.Getenv("SBXRUN_TESTS_NO_SKIP") == "", "%s; %s", d.Message, d.Hint)
		t.Skipf("%s; %s", d.Message, d.Hint)
	}
}

func TestDiagnoseBroken(t *testing.T) {
	works(t)
	self, err := os.Executable()
	check.Must(t, err)
	onlyRoot := []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
	onlyGroup := []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	tests := []struct {
		name string
		attr *syscall.SysProcAttr
		want []string
	}{
		{"unmapped", &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER}, []string{"user namespace: uid ", " is not mapped", "newuidmap"}},
		{"root without nobody", &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER, UidMappings: onlyRoot, GidMappings: onlyGroup},
			[]string{"unprivileged uid: ", "does not have", "ordinary user"}},
		{"masked", &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER | unix.CLONE_NEWNS, UidMappings: onlyRoot, GidMappings: onlyGroup}, []string{"fresh /proc: parts of /proc are hidden by other mounts (/proc/sys)"}},
		{"limit", &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER, UidMappings: onlyRoot, GidMappings: onlyGroup}, []string{"user.max_user_namespaces is 0", "sysctl -w user.max_user_namespaces="}},
		{"noproc", &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER | unix.CLONE_NEWNS, UidMappings: onlyRoot, GidMappings: onlyGroup}, []string{"process table: /proc is not mounted", "mount -t proc proc /proc"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			cmd := exec.Command(self)
			cmd.Env = append(os.Environ(), "SBXRUN_TEST_BREAK="+tt.name)
			cmd.SysProcAttr = tt.attr
			out, err := cmd.CombinedOutput()
			check.Require(t, err == nil, "%v: %s", err, out)
			rest := string(out)
			for _, part := range tt.want {
				_, after, ok := strings.Cut(rest, part)
				check.Require(t, ok, "got %swant a part %q", out, part)
				rest = after
			}
			n := strings.Count(string(out), "\n")
			check.That(t, n == 2, "%d lines, want message and hint: %s", n, out)
		})
	}
}

// Everything works here, and every check is documented, in order.
func TestExamine(t *testing.T) {
	works(t)
	t.Setenv("TMPDIR", harness.Dir(t)) // other processes may examine the machine, too
	before := children(t)
	r := Examine(context.Background(), caller())
	doc := harness.ReadFile(t, "../../docs/reference/doctor.md")
	_, table, _ := strings.Cut(string(doc), "| check | ")
	for _, f := range r.Checks {
		t.Logf("%-8s %-20s %s%s", f.Verdict, f.Name, f.Detail, f.Cause)
		_, after, ok := strings.Cut(table, "`"+f.Name+"`")
		check.Require(t, ok, "docs/reference/doctor.md lacks %q, or has it in another place", f.Name)
		table = after
	}
	check.That(t, r.OK && r.Failed() == nil && r.RoundTrip != nil && r.Bwrap != nil && r.Kernel != "", "not everything works, or is told: %+v", r)
	check.NoDiff(t, cmp.Diff(before, children(t)), "processes left behind (-before +after)")
	left, _ := filepath.Glob(filepath.Join(os.TempDir(), "sbxrun-doctor-*"))
	check.That(t, len(left) == 0, "files left behind: %q", left)
}

// children returns the PIDs of this process's children, including zombies, for all threads.
func children(t *testing.T) (pids []string) {
	t.Helper()
	lists, err := filepath.Glob("/proc/self/task/*/children")
	check.Must(t, err)
	for _, list := range lists {
		b, _ := os.ReadFile(list) // fails if the thread has exited
		pids = append(pids, strings.Fields(string(b))...)
	}
	return pids
}

func TestReportJSON(t *testing.T) {
	ms := 6.5
	r := Report{Version: 1, OK: true, RoundTrip: &ms, Kernel: "6.1.0", Checks: []Finding{{Name: "kernel", Verdict: OK, Detail: "Linux 6.1.0"}, {Name: "run", Verdict: Skipped, Cause: "needs: bwrap"}}}
	b := harness.JSON(t, r)
	want := `{"version":1,"ok":true,"checks":[{"name":"kernel","verdict":"ok","detail":"Linux 6.1.0"},{"name":"run","verdict":"skipped","cause":"needs: bwrap"}],"round_trip_ms":6.5,"kernel":"6.1.0"}`
	check.NoDiff(t, cmp.Diff(want, string(b)), "(-want +got)")
}

func TestGround(t *testing.T) {
	ran := func(e *exam, name string, err error) {
		e.check(name, func() (string, error) { return "seen", err })
	}
	made := func(e *exam) []Finding {
		ran(e, "a", warning{errors.New("bad"), "less"})
		e.ground()
		ran(e, "b", errors.New("bad"))
		ran(e, "c", nil)
		e.ground()
		ran(e, "d", nil)
		e.ground()
		ran(e, "e", errors.New("bad"))
		return e.Checks
	}
	want := []Finding{{Name: "a", Verdict: Warning, Cause: "less: bad"}, {Name: "b", Verdict: Failed, Cause: "bad"}, {Name: "c", Verdict: OK, Detail: "seen"},
		{Name: "d", Verdict: Skipped, Cause: "needs: b"}, {Name: "e", Verdict: Skipped, Cause: "needs: b"}}
	check.NoDiff(t, cmp.Diff(want, made(newExam(context.Background(), room.Caller{}))), "(-want +got)")
	first := newExam(context.Background(), room.Caller{})
	first.firstOnly = true
	check.NoDiff(t, cmp.Diff(want[:2], made(first)), "first only (-want +got)")
	ctx, cancel := context.WithCancel(context.Background())
	interrupted := newExam(ctx, room.Caller{})
	interrupted.check("a", func() (string, error) { cancel(); return "", errors.New("interrupted") })
	got := made(interrupted)
	check.That(t, len(got) == 0, "interrupted: %+v", got)
}

// A failure of sbxrun itself has the same remedies as a message of bwrap, and a lack of descriptors is named.
func TestFinding(t *testing.T) {
	step := &proc.StartError{Step: "set the size of a tmpfs", Err: unix.ENOSYS}
	wrapped := fmt.Errorf("cannot set up the sandbox: %w", &result.Error{Code: "setup", Message: "x", Err: step})
	f, ok := ownStep(wrapped)
	check.That(t, ok && f == (failure{step: stepCall, errno: unix.ENOSYS, text: "set the size of a tmpfs: function not implemented"}), "%+v %v", f, ok)
	e := newExam(t.Context(), caller())
	found := e.finding("", wrapped)
	check.That(t, found.Verdict == Failed && found.Fix != "" && strings.Contains(found.Cause, "set the size of a tmpfs"), "%+v", found)
	for _, err := range []error{&os.PathError{Op: "open", Path: "/dev/null", Err: unix.EMFILE}, failed(stepCall, "pidfd_open: ", unix.EMFILE), warning{step, ""}, &proc.StartError{Step: "x", Err: unix.ENFILE}} {
		f := e.finding("", err)
		check.That(t, (strings.Contains(f.Fix, "open files") || strings.Contains(f.Fix, "file-max")) == (err != error(warning{step, ""})), "%v: %+v", err, f)
	}
}

// fakeBwrap returns an exam whose bwrap is a shell script that runs with the identity of the tests.
func fakeBwrap(t *testing.T, script string) *exam {
	t.Helper()
	name := filepath.Join(t.TempDir(), "bwrap")
	check.Must(t, os.WriteFile(name, []byte("#!/bin/sh\n"+script+"\n"), 0o755))
	check.Must(t, unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
	e := newExam(context.Background(), room.Caller{UID: 1000, GID: 1000})
	e.program = room.Program{Path: name, Version: "0.8.0"}
	return e
}

// ended fails the test if the process whose PID the script printed still exists.
func ended(t *testing.T, words string) {
	t.Helper()
	pid, err := strconv.Atoi(strings.TrimSpace(words))
	check.Require(t, err == nil && pid > 1, "the script printed %q, want a pid", words)
	err = unix.Kill(pid, 0)
	check.That(t, err == unix.ESRCH, "process %d is left: %v", pid, err)
}

func TestExecuteLeavesNothing(t *testing.T) {
	for name, script := range map[string]string{
		"background":       `sleep 100 & echo $! >&2`,
		"deaf, background": `(trap "" TERM HUP; sleep 100) & echo $! >&2; exit 3`,
		"orphan":           `( (sleep 100 & echo $! >&2) & ) & wait`,
	} {
		t.Run(name, func(t *testing.T) {
			before := children(t)
			e := fakeBwrap(t, script)
			_, words, err := e.execute([]string{e.program.Path})
			check.Must(t, err)
			if words != "" { // the orphan may have been killed before it could print
				ended(t, words)
			}
			check.NoDiff(t, cmp.Diff(before, children(t)), "(-before +after)")
		})
	}
}

func TestExecuteHangs(t *testing.T) {
	e := fakeBwrap(t, `sleep 100 & echo $! >&2; wait`)
	harness.Longer(t, time.Second, func(d time.Duration) bool {
		e.bound = d
		_, words, err := e.execute([]string{e.program.Path})
		check.That(t, errors.Is(err, os.ErrDeadlineExceeded), "%v", err)
		if words == "" {
			return false // the script did not get to print
		}
		ended(t, words)
		return true
	})
	err := e.tryBwrap(e.program.Path)
	check.That(t, err != nil && strings.Contains(err.Error(), "within "+e.bound.String()), "%v", err)
}

// A stopped keeper does not delay an interrupted check.
func TestExecuteStopped(t *testing.T) {
	e := fakeBwrap(t, `echo $$ >&2; exec sleep 100`)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	e.ctx = ctx
	before := children(t)
	go func() {
		defer cancel()
		for ctx.Err() == nil {
			pids, _ := proc.Children(os.Getpid()) // use the partial list
			for _, pid := range pids {
				if st, err := proc.ReadStat(pid); err == nil && st.Comm == proc.KeeperName && len(proc.Descendants(pid, 1)) > 0 {
					_ = unix.Kill(pid, unix.SIGSTOP)
					return
				}
			}
			time.Sleep(time.Millisecond)
		}
	}()
	begin := time.Now()
	_, words, err := e.execute([]string{e.program.Path})
	took := time.Since(begin)
	check.That(t, errors.Is(err, os.ErrDeadlineExceeded) && took <= probeBound, "%v, after %v", err, took)
	if words != "" {
		ended(t, words)
	}
	check.NoDiff(t, cmp.Diff(before, children(t)), "(-before +after)")
}

func TestExecuteFloods(t *testing.T) {
	e := fakeBwrap(t, `head -c 3000000 /dev/zero | tr '\0' x >&2; echo >&2; echo "bwrap: setting up uid map: Permission denied" >&2; exit 1`)
	err := e.tryBwrap(e.program.Path)
	want := (failure{step: stepSetup, errno: unix.EACCES, text: "setting up uid map: Permission denied"})
	check.That(t, err == want, "%+v, want %+v", err, want)
}

func TestTryBwrap(t *testing.T) {
	tests := []struct {
		script string
		want   error
	}{
		{"exit 0", nil},
		{"exit 7", failure{step: stepOther, text: "bubblewrap exited with code 7 and no message"}},
		{"kill -SYS $$", failure{step: stepCall, text: "bubblewrap was killed by SIGSYS"}},
		{"kill -SEGV $$", failure{step: stepOther, text: "bubblewrap was killed by SIGSEGV"}},
	}
	for _, tt := range tests {
		e := fakeBwrap(t, "ulimit -c 0; "+tt.script)
		check.Equal(t, e.tryBwrap(e.program.Path), tt.want, "%s", tt.script)
	}
	e := fakeBwrap(t, "")
	err, want := e.tryBwrap("/nonexistent"), (failure{step: stepStart, errno: unix.ENOENT, text: "no such file or directory"})
	check.That(t, err == want, "not there: %+v", err)
	// A missing command shows that the sandbox works.
	e = fakeBwrap(t, `echo "bwrap: execvp true: No such file or directory" >&2; exit 1`)
	check.OK(t, e.trySandbox("--unshare-user"))
}

func TestDiagnoseMissing(t *testing.T) {
	c := caller()
	c.Bwrap = filepath.Join(t.TempDir(), "bwrap")
	d := Diagnose(context.Background(), c)
	check.Require(t, d != nil && strings.Contains(d.Message, "cannot use the bubblewrap that SBXRUN_BWRAP names") && d.Code == "setup", "%+v", d)
	check.That(t, !strings.ContainsAny(d.Message+d.Hint, "\n") && d.Hint != "", "want one line and a hint: %+v", d)
}

func TestInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	r := Examine(ctx, caller())
	check.That(t, !r.OK, "ok, although nothing was tried")
	d := Diagnose(ctx, caller())
	check.That(t, d == nil, "%v", d)
}
