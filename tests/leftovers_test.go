package tests

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
	"golang.org/x/sys/unix"
)

// A child that holds stdout delays nothing, and is dead before sbxrun returns.
func TestStdoutHeldByChild(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{}, "/fixtures/leave-stdout", "7")
	p.WaitOutput("left 1\n")
	r := p.Wait().Expect(t, 7, "exited")
	check.That(t, r.Report.Teardown.Strays == 1, "%d strays, want 1", r.Report.Teardown.Strays)
	// sbxrun measures from the command's exit to the proof, and the test from there to end-of-file.
	teardown := time.Duration(*r.Report.TeardownMS * float64(time.Millisecond))
	harness.Within(t, "from the command's exit to the end of its output", teardown+r.EOF, 0, 50*time.Millisecond)
}

// Not a byte is written after sbxrun has returned.
func TestWriterIsStopped(t *testing.T) {
	t.Parallel()
	// A writer would outlive its sandbox only for milliseconds, so look at once and often.
	const runs, watch = 20, 25 * time.Millisecond
	for range runs {
		dir := harness.SharedDir(t)
		file := filepath.Join(dir, "file")
		r := harness.Run(t, harness.Options{}, "--bind", dir+":/out", "/fixtures/leave-writer", "/out/file")
		size := fileSize(t, file)
		r.Expect(t, 0, "exited")
		check.Require(t, size != 0, "the writer has not written")
		for over := time.Now().Add(watch); time.Now().Before(over); time.Sleep(time.Millisecond) {
			now := fileSize(t, file)
			check.Require(t, now == size, "the file has grown from %d to %d bytes after sbxrun had returned", size, now)
		}
	}
}

func fileSize(t *testing.T, name string) int64 {
	t.Helper()
	st, err := os.Stat(name)
	check.Must(t, err)
	return st.Size()
}

// When a command leaves many empty files in /tmp, the kernel takes longer to free them than to end
// the processes. The proof does not wait for that, but sbxrun's exit does.
func TestLitter(t *testing.T) {
	t.Parallel()
	for range 5 { // a busy machine may delay the end of the processes
		r := harness.Run(t, harness.Options{}, "--timeout", "600", "--tmp-size", "512M", "/fixtures/litter", "100000").Expect(t, 0, "exited")
		proof := *r.Report.TeardownMS
		rest := float64(r.Elapsed.Milliseconds()) - r.Report.DurationMS
		if proof <= rest {
			return
		}
		t.Logf("the proof took %v ms, and what comes after it %v ms", proof, rest)
	}
	t.Error("the proof took longer than what comes after it")
}

// exec prints the number of killed background processes and a hint, but not with --quiet or --json.
func TestExecReportsLeftoverProcesses(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{}, "--name", "web")
	const hint = "; use exec --detach to keep one running\n"
	for _, c := range []struct {
		args []string
		want string // all of stderr
	}{
		{[]string{"sh", "-c", "sleep 600 >/dev/null 2>&1 &"}, "sbxrun: killed 1 leftover process" + hint},
		{[]string{"sh", "-c", "sleep 600 >/dev/null 2>&1 & sleep 600 >/dev/null 2>&1 &"}, "sbxrun: killed 2 leftover processes" + hint},
		{[]string{"sh", "-c", "exec sleep 0.01"}, ""},
		{[]string{"--", "sh", "-c", "sleep 600 >/dev/null 2>&1 & exit 3"}, "sbxrun: killed 1 leftover process" + hint},
	} {
		s.Start(harness.Options{}, append([]string{"exec", b.ID}, c.args...)...).Wait().Err(t, c.want)
		for _, flag := range []string{"--quiet", "--json"} {
			r := s.Start(harness.Options{}, append([]string{"exec", flag, b.ID}, c.args...)...).Wait().Err(t, "")
			check.That(t, flag != "--json" || strings.Contains(string(r.Stdout), `"strays":0`) != (c.want != ""), "%q: report %s", c.args, r.Stdout)
		}
	}
	s.Start(harness.Options{}, "sh", "-c", "sleep 600 >/dev/null 2>&1 &").Wait().Err(t, "")
}

// A teardown lifts the CPU quota. A process that survives it, here because a tracer outside stops
// it, gets the quota back.
func TestUnprovenQuota(t *testing.T) {
	t.Parallel()
	if !enforced(t, limits.Request{CPUs: 0.25}, "--cpus", "0.25") {
		return
	}
	runtime.LockOSThread() // a tracer is a thread
	defer runtime.UnlockOSThread()
	dir := harness.SharedDir(t)
	cmd := exec.Command(harness.Binary(t), "--cpus", "0.25", "--timeout", "600", "--proof-timeout", "0.5", "--bind", dir+":/out", "sh", "-c", "read line; exit 7")
	stdin, err := cmd.StdinPipe()
	check.Must(t, err)
	cmd.Dir = dir
	done, err := harness.StartCommand(cmd)
	check.Must(t, err)
	defer done()
	exited := make(chan error, 1)
	go func() { exited <- cmd.Wait() }()
	pid := 0
	harness.Until(t, harness.Bound, "the command", func() bool {
		for _, child := range harness.Descendants(cmd.Process.Pid) {
			if name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", child)); strings.HasPrefix(string(name), "sh\x00") {
				pid = child
			}
		}
		return pid != 0
	})
	keeper, err := harness.Adopt(harness.FirstChild(t, cmd.Process.Pid)) // the parent of the command's init; it outlives sbxrun
	check.Must(t, err)
	defer keeper.Close()
	groups := harness.ReadFile(t, fmt.Sprintf("/proc/%d/cgroup", pid))
	id := regexp.MustCompile(`/sbxrun-([0-9a-f]+)`).FindStringSubmatch(string(groups))
	_, _, errno := unix.RawSyscall6(unix.SYS_PTRACE, unix.PTRACE_SEIZE, uintptr(pid), 0, unix.PTRACE_O_TRACEEXIT, 0, 0)
	check.Require(t, errno == 0 && id != nil, "trace %d in %s: %v", pid, groups, errno)
	check.Must(t, cmd.Process.Signal(unix.SIGTERM))
	stdin.Close()
	err = <-exited
	e := (*exec.ExitError)(nil)
	check.That(t, errors.As(err, &e) && e.ExitCode() == 123, "want unproven: %v", err)
	quotas := 0
	for _, dir := range harness.Cgroups(id[1]) {
		for file, want := range map[string]string{"cpu.max": "25000 100000", "cpu.cfs_quota_us": "25000"} {
			quota, err := os.ReadFile(filepath.Join(dir, file))
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			check.Must(t, err)
			check.That(t, strings.TrimSpace(string(quota)) == want, "%s of the survivor: %s", file, quota)
			quotas++
		}
	}
	check.That(t, quotas > 0, "no quota of %q", id[1])
	var status unix.WaitStatus
	_, err = unix.Wait4(pid, &status, unix.WALL, nil)
	check.Must(t, err)
	_, _, errno = unix.RawSyscall6(unix.SYS_PTRACE, unix.PTRACE_CONT, uintptr(pid), 0, 0, 0, 0)
	check.That(t, errno == 0, "%v", errno)
	_, _ = unix.Wait4(pid, &status, unix.WALL, nil) // its end
	<-keeper.Reaped()
	left := harness.Cgroups(id[1])
	check.That(t, len(left) == 0, "left: %q", left)
}
