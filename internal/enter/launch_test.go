package enter

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// launched runs the launcher with a gate that contains these bytes, and returns its output, its exit code and its message.
func launched(t *testing.T, gate string, args ...string) (output string, code int, said message) {
	t.Helper()
	f, err := proc.MemoryFile("launcher", launcher(), 0o555)
	harness.Must(t, err)
	defer f.Close()
	read, write, err := os.Pipe()
	harness.Must(t, err)
	defer read.Close()
	waits, begin, err := os.Pipe()
	harness.Must(t, err)
	defer waits.Close()
	_, err = begin.WriteString(gate)
	harness.Must(t, err)
	begin.Close()
	cmd := &exec.Cmd{Path: "/proc/self/fd/5", Args: args, Env: []string{"A=b"}, ExtraFiles: []*os.File{write, waits, f}}
	out, err := cmd.CombinedOutput()
	write.Close()
	if _, isExit := err.(*exec.ExitError); err != nil && !isExit {
		t.Fatal(err)
	}
	_, _ = read.Read((*[unsafe.Sizeof(said)]byte)(unsafe.Pointer(&said))[:]) // fails if it has sent nothing
	return string(out), cmd.ProcessState.ExitCode(), said
}

func TestLauncher(t *testing.T) {
	dir := harness.Dir(t)
	path := func(name, text string, mode os.FileMode) string {
		p := filepath.Join(dir, name)
		harness.Must(t, os.WriteFile(p, []byte(text), mode))
		return p
	}
	script := path("script", "echo $0 $*; for n in 3 4; do ! [ -e /proc/$$/fd/$n ] || echo open: $n; done\n", 0o755)
	data := path("data", "\n", 0o644)
	broken := path("broken", "\x7fELF\x02\x01\x01", 0o755)
	failed := func(errno unix.Errno) message {
		return message{kind: messageFailed, step: stepExec, value: int64(errno)}
	}
	for _, test := range []struct {
		gate   string
		args   []string
		output string
		code   int
		said   message
	}{
		{"\x00", []string{"wait", "/bin/sh", "", "sh", "-c", "echo $0 $1 $A", "x", "y"}, "x y b\n", 0, message{}},
		{"", []string{"now", "/nosuch/sh", "/dev/null/sh", "/bin/sh", "", "sh", "-c", "exit 7"}, "", 7, message{}},
		{"", []string{"wait", "/bin/sh", "", "sh", "-c", "echo released"}, "", 0, message{}},
		{"", []string{"now", script, "", "name", "one", ""}, script + " one\n", 0, message{}},
		{"", []string{"now", data, script, "", "name"}, script + "\n", 0, message{}},
		{"", []string{"now", data, "/nosuch/sh", "", "name"}, "", 125, failed(unix.EACCES)},
		{"", []string{"now", "/nosuch/sh", "", "name"}, "", 125, failed(unix.ENOENT)},
		{"", []string{"now", "", "name"}, "", 125, failed(unix.ENOENT)},
		{"", []string{"now", strings.Repeat("x/", 3000), script, "", "name"}, "", 125, failed(unix.ENAMETOOLONG)},
		{"", []string{"wai", "/bin/sh", "", "sh"}, launchRefusal, 126, message{}},
		{"", []string{"/proc/self/exe"}, launchRefusal, 126, message{}},
		{"", []string{"now", "/proc/self/exe", "", "/proc/self/exe"}, launchRefusal, 126, message{}},
	} {
		output, code, said := launched(t, test.gate, test.args...)
		if output != test.output || code != test.code || said != test.said {
			t.Errorf("%.300q: output %q, exit code %d, %+v", test.args, output, code, said)
		}
	}
	// The shell cannot execute this file either, and reports that.
	if output, code, said := launched(t, "", "now", broken, "", "name"); code != 2 && code != 126 && code != 127 || said != (message{}) {
		t.Errorf("%q, exit code %d, %+v", output, code, said)
	}
}

// A program in memory can be neither written to nor truncated.
func TestMemoryFileIsSealed(t *testing.T) {
	f, err := proc.MemoryFile("launcher", launcher(), 0o777)
	harness.Must(t, err)
	defer f.Close()
	if _, err := f.WriteAt([]byte{0}, 0); err == nil {
		t.Error("it can be written to")
	}
	if err := f.Truncate(0); err == nil {
		t.Error("it can be truncated")
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/self/fd/%d", proc.Descriptor(f)))
	if err != nil || !bytes.Equal(text, launcher()) {
		t.Errorf("it is %d bytes, %v", len(text), err)
	}
}
