package helper

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// script returns a script with every kind of argument.
func script() *Script {
	var s Script
	s.Add("open", 3, unix.SYS_OPENAT, unix.AT_FDCWD, "/dev/null", unix.O_RDONLY, 0)
	s.Do("read", unix.SYS_READ, Slot(3), s.Space(16), 16)
	s.Allow(1, unix.EINVAL, unix.ESRCH)
	s.Over(1)
	s.Do("close", unix.SYS_CLOSE, Slot(3))
	x := s.Space(256)
	s.Do("compare", SameFile, x, 0, 0, 0)
	s.Do("compare", SameMount, x, x)
	s.Do("receive", Receive, 3, 2, 7)
	child := s.Fork("fork", 4, unix.CLONE_PARENT)
	s.Do("ready", ReportReady, x, Slot(4), 2, 7)
	s.Do("exit", Exit, 0)
	s.Begin(child)
	s.Mount(3)
	s.Do("execute", Exec, s.Texts([]string{"/bin/true", "true"}), s.Texts([]string{"true"}), s.Texts([]string{"A=b"}))
	return &s
}

// keeper executes the helper as a keeper, and returns sbxrun's end of its socket.
func keeper(t *testing.T) (socket int, cmd *exec.Cmd) {
	t.Helper()
	program, err := File()
	check.Must(t, err)
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	check.Must(t, err)
	end := os.NewFile(uintptr(pair[1]), "socket")
	defer end.Close()
	cmd = &exec.Cmd{Path: "/proc/self/fd/3", Args: []string{"keeper", Keep}, Stdin: end, ExtraFiles: []*os.File{program}}
	check.Must(t, cmd.Start())
	t.Cleanup(func() {
		unix.Close(pair[0])
		_ = cmd.Wait() // the exit code is not checked
	})
	return pair[0], cmd
}

// A lack of descriptors is not remembered.
func TestFileAgain(t *testing.T) {
	if file := theHelper.file; file != nil {
		theHelper.file = nil
		t.Cleanup(func() { file.Close() })
	}
	restore := harness.LimitDescriptors(t, 3)
	_, err := File()
	restore()
	check.That(t, errors.Is(err, unix.EMFILE), "without descriptors: %v", err)
	_, err = File()
	check.That(t, err == nil, "%v", err)
}

// Without a role, or with more arguments, the program refuses to run: a command has executed /proc/self/exe.
func TestNoRole(t *testing.T) {
	program, err := File()
	check.Must(t, err)
	for _, args := range [][]string{{"x"}, {"x", "y"}, {"x", Keep, ""}} {
		cmd := &exec.Cmd{Path: "/proc/self/fd/3", Args: args, ExtraFiles: []*os.File{program}}
		out, _ := cmd.CombinedOutput()
		check.That(t, cmd.ProcessState.ExitCode() == 126 && strings.Contains(string(out), "cannot be executed here"), "%q: %v, %q", args, cmd.ProcessState, out)
	}
}

// A keeper without an order ends with sbxrun's end of the socket, and one with a malformed order ends at once.
func TestKeeperOrders(t *testing.T) {
	for _, text := range []string{"", "x", strings.Repeat("\x00", 100), strings.Repeat("\xff", 184), strings.Repeat("x", 9000)} {
		socket, cmd := keeper(t)
		_, err := unix.Write(socket, []byte(text))
		check.Must(t, err)
		if text == "" {
			_ = unix.Shutdown(socket, unix.SHUT_WR)
		}
		done := make(chan error, 1)
		go func() { done <- cmd.Wait() }()
		// The keeper waits for this with an order to remove cgroups.
		timer := time.AfterFunc(time.Second, func() { _ = unix.Shutdown(socket, unix.SHUT_RDWR) })
		select {
		case <-done:
		case <-time.After(time.Minute):
			t.Fatalf("%.10q: the keeper is still there", text)
		}
		timer.Stop() // or it shuts down another socket with that number
	}
}

func TestReport(t *testing.T) {
	var r Report
	check.That(t, unsafe.Sizeof(r) == 4*8+64, "%d bytes", unsafe.Sizeof(r))
	copy(r.Text[:], "mount /proc")
	check.That(t, r.Step() == "mount /proc", "%q", r.Step())
}

func TestSealErrors(t *testing.T) {
	var s Script
	s.Do("exit", Exit, s.Text("a\x00b"))
	_, err := s.Seal()
	check.That(t, err != nil && strings.Contains(err.Error(), "NUL"), "%v", err)
	s = Script{}
	for range 20 {
		s.Text(strings.Repeat("x", 1<<20))
	}
	_, err = s.Seal()
	check.That(t, err != nil && strings.Contains(err.Error(), unix.E2BIG.Error()), "%v", err)
}

// compiled skips nothing: without a C compiler there is nothing to compare.
func compiled(t *testing.T, args ...string) bool {
	t.Helper()
	if _, err := exec.LookPath(args[0]); err != nil {
		return false
	}
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Dir = "src"
	out, err := cmd.CombinedOutput()
	check.Require(t, err == nil, "%q: %v\n%s", args, err, out)
	return true
}

// The helper survives malformed scripts. SBXRUN_FUZZ is the number of seconds.
func TestMalformedScripts(t *testing.T) {
	dir := t.TempDir()
	fuzz, seed := filepath.Join(dir, "fuzz"), filepath.Join(dir, "seed")
	err := os.WriteFile(seed, script().bytes(), 0o600)
	check.Must(t, err)
	if !compiled(t, "gcc", "-std=gnu11", "-g", "-O1", "-fno-builtin", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-Wall", "-Wextra", "-Werror",
		"-o", fuzz, "fuzz.c", "main.c", "script.c", "keeper.c", "enter.c", "init.c") {
		return
	}
	seconds := 1
	if n, err := strconv.Atoi(os.Getenv("SBXRUN_FUZZ")); err == nil {
		seconds = n
	}
	out, err := exec.Command(fuzz, strconv.Itoa(seconds), strconv.FormatInt(time.Now().UnixNano(), 10), seed).CombinedOutput()
	check.Require(t, err == nil, "%v\n%s", err, out)
	t.Logf("%s", out)
}
