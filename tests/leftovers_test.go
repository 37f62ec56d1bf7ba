package tests

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
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

// A process whose first thread has ended looks like a zombie, but counts as alive.
func TestStrayWithoutFirstThread(t *testing.T) {
	t.Parallel()
	r := harness.Run(t, harness.Options{}, "python3", "-c", `
import ctypes, os, platform, threading, time
if os.fork() == 0:
    threading.Thread(target=time.sleep, args=(60,)).start()
    ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0) # exit(2), of one thread
child = next(pid for pid in os.listdir("/proc") if pid.isdigit() and pid not in ("1", str(os.getpid())))
while open("/proc/" + child + "/stat").read().split()[2] != "Z":
    time.sleep(0.01)
`)
	r.Expect(t, 0, "exited")
	check.That(t, r.Report.Teardown.Strays == 1, "%d strays, want 1", r.Report.Teardown.Strays)
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
	r := harness.Run(t, harness.Options{}, "--timeout", "600", "--tmp-size", "512M", "/fixtures/litter", "100000").Expect(t, 0, "exited")
	proof := *r.Report.TeardownMS
	rest := float64(r.Elapsed.Milliseconds()) - r.Report.DurationMS
	check.That(t, proof <= rest, "the proof took %v ms, and what comes after it %v ms", proof, rest)
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
		{[]string{"sh", "-c", "sleep 60 >/dev/null 2>&1 &"}, "sbxrun: killed 1 leftover process" + hint},
		{[]string{"sh", "-c", "sleep 60 >/dev/null 2>&1 & sleep 60 >/dev/null 2>&1 &"}, "sbxrun: killed 2 leftover processes" + hint},
		{[]string{"sh", "-c", "exec sleep 0.01"}, ""},
		{[]string{"--", "sh", "-c", "sleep 60 >/dev/null 2>&1 & exit 3"}, "sbxrun: killed 1 leftover process" + hint},
	} {
		s.Start(harness.Options{}, append([]string{"exec", b.ID}, c.args...)...).Wait().Err(t, c.want)
		for _, flag := range []string{"--quiet", "--json"} {
			r := s.Start(harness.Options{}, append([]string{"exec", flag, b.ID}, c.args...)...).Wait().Err(t, "")
			check.That(t, flag != "--json" || strings.Contains(string(r.Stdout), `"strays":0`) != (c.want != ""), "%q: report %s", c.args, r.Stdout)
		}
	}
	s.Start(harness.Options{}, "sh", "-c", "sleep 60 >/dev/null 2>&1 &").Wait().Err(t, "")
}
