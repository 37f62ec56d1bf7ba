package tests

import (
	"bytes"
	"os"
	"testing"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// full returns a stdout on a full disk.
func full(t *testing.T) *os.File {
	t.Helper()
	f, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	harness.Must(t, err)
	t.Cleanup(func() { f.Close() })
	return f
}

// Output that cannot be written causes exit code 74 and one line that names it; not 125, which
// means that nothing started.
func TestOutputFull(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{}, "--name", "full", "sh", "-c", "echo hello; exec sleep infinity")
	harness.Until(t, harness.Bound, "the log", func() bool { return len(s.Run("logs", "full").Stdout) > 0 })
	for _, args := range [][]string{
		{"--output-limit", "kill", "--max-output", "1M", "echo", "x"},
		{"--output-limit", "truncate", "--max-output", "1M", "sh", "-c", "echo x; sleep 60"},
		{"--json", "echo", "x"}, {"--report", "/dev/full", "true"}, {"--report", "fd:1", "true"},
		{"--help"}, {"--version"}, {"--print-command", "true"}, {"exec", "--json", "full", "true"},
		{"ps"}, {"ps", "--json"}, {"ps", "--names"}, {"inspect", "full"}, {"logs", "full"}, {"logs", "--json", "full"},
		{"stats"}, {"stats", "--json"}, {"stats", "--prometheus"}, {"doctor"}, {"doctor", "--json"}, {"cleanup", "--json"}, {"cleanup", "--help"},
		{"volume", "ls"}, {"volume", "ls", "--json"}, {"snapshot", "ls", "--json"},
		{"kill", "full"}, {"kill", "--json", "full"},
	} {
		r := s.Start(harness.Options{Stdout: full(t)}, args...).Wait()
		if r.ExitCode != 74 || bytes.Count(r.Stderr, []byte("\n")) != 1 || !bytes.HasSuffix(r.Stderr, []byte(": no space left on device\n")) {
			t.Errorf("%q: exit code %d, stderr %.300q", args, r.ExitCode, r.Stderr)
		}
	}
	b.Ended()

	// The command's own failure takes precedence.
	r := s.Start(harness.Options{Stdout: full(t)}, "--json", "sh", "-c", "exit 3").Wait()
	if r.ExitCode != 3 || !bytes.HasSuffix(r.Stderr, []byte(": no space left on device\n")) {
		t.Errorf("exit code %d, stderr %q", r.ExitCode, r.Stderr)
	}
	// The report has the error if it can be written.
	r = harness.Run(t, harness.Options{Stdout: full(t)}, "--output-limit", "truncate", "--max-output", "1M", "sh", "-c", "echo x; sleep 60")
	if e := r.Report.Error; r.ExitCode != 74 || r.Report.ExitCode != 74 || e == nil || e.Code != "output" {
		t.Errorf("exit code %d, report %s", r.ExitCode, r.Report.Raw())
	}
}
