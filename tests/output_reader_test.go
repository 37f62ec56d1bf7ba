package tests

import (
	"bytes"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// handover is how long sbxrun waits after the sandbox's end for a reader that reads nothing. It is
// documented.
const handover = 10 * time.Second

// busy is the allowance for a busy machine.
const busy = 10 * time.Second

// Without a reader of sbxrun's output, the deadline holds, and sbxrun exits by itself or on a
// signal.
func TestReaderBlocked(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		flags []string
		told  bool
	}{
		{"pipe", []string{"--output-limit", "truncate", "--max-output", "1G"}, false},
		{"pipe, told", []string{"--output-limit", "truncate", "--max-output", "1G"}, true},
		{"terminal", []string{"--tty"}, false},
		{"terminal, told", []string{"--tty"}, true},
		{"json", []string{"--json", "--max-output", "1M"}, false},
		{"json, told", []string{"--json", "--max-output", "1M"}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r, w, err := os.Pipe()
			harness.Must(t, err)
			defer r.Close()
			deadline := harness.Deadline(time.Second)
			p := harness.Start(t, harness.Options{Stdout: w}, append(append([]string{"--timeout", deadline.String()}, c.flags...), "/fixtures/out-flood")...)
			w.Close()
			// The sandbox ends long before sbxrun.
			begin := time.Now()
			ns := p.Namespace()
			harness.Until(t, harness.Bound, "the sandbox's end", func() bool { return len(harness.Members(ns)) == 0 })
			harness.Within(t, "the sandbox", time.Since(begin), 0, deadline+500*time.Millisecond)
			least, most := handover, deadline+handover+busy
			if c.told {
				p.Signal(unix.SIGTERM)
				least, most = 0, deadline+time.Second+busy/2
			}
			res := p.Wait()
			res.Expect(t, 124, "timeout")
			harness.Within(t, "sbxrun", res.Elapsed, least, most)
			check.That(t, strings.Contains(string(res.Stderr), "its reader has stopped reading"), "stderr %q", res.Stderr)
		})
	}
}

// A reader that starts after the sandbox's end gets everything.
func TestReaderLate(t *testing.T) {
	t.Parallel()
	// More than a pipe holds, and less than two.
	want := bytes.Repeat([]byte("0123456789\n"), 6000)
	command := []string{"sh", "-c", "until [ -e /shared/go ]; do sleep 0.02; done; yes 0123456789 | head -6000; exit 3"}
	for name, flags := range map[string][]string{
		"truncate": {"--output-limit", "truncate", "--max-output", "1G"},
		"kill":     {"--output-limit", "kill", "--max-output", "66000"}, // exactly as much
		"terminal": {"--tty"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, w, err := os.Pipe()
			harness.Must(t, err)
			defer r.Close()
			if name == "terminal" {
				// A terminal holds 8 KiB, and copying from it fills only half of each page of a
				// pipe.
				_, err := unix.FcntlInt(w.Fd(), unix.F_SETPIPE_SZ, 256<<10)
				harness.Must(t, err)
			}
			dir := harness.SharedDir(t)
			p := harness.Start(t, harness.Options{Stdout: w}, append(append(flags, "--bind", dir+":/shared"), command...)...)
			w.Close()
			ns := p.Namespace()
			harness.Must(t, os.WriteFile(dir+"/go", nil, 0o644))
			harness.Until(t, harness.Bound, "the sandbox's end", func() bool { return len(harness.Members(ns)) == 0 })
			got, err := io.ReadAll(r)
			harness.Must(t, err)
			p.Wait().Expect(t, 3, "exited")
			got = bytes.ReplaceAll(got, []byte("\r"), nil)
			check.That(t, bytes.Equal(got, want), "%d bytes of %d, or others", len(got), len(want))
		})
	}
}

// sbxrun exits even if the payload has filled sbxrun's stderr, or the pipe for its report, and nobody reads it.
func TestReaderOfMessagesBlocked(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		file    int // descriptor that the payload fills
		flags   []string
		command string
	}{
		{"stderr", 2, nil, "yes >&2"},
		{"report", 1, []string{"--report", "/dev/stdout"}, "yes"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r, w, err := os.Pipe()
			harness.Must(t, err)
			defer r.Close()
			o := harness.Options{Bare: true, Stdout: w}
			if c.file == 2 {
				o = harness.Options{Stderr: w}
			}
			p := harness.Start(t, o, append(append([]string{"--timeout", "1"}, c.flags...), "sh", "-c", c.command)...)
			w.Close()
			res := p.Wait()
			check.That(t, res.ExitCode == 124, "exit code %d", res.ExitCode)
			harness.Within(t, "sbxrun", res.Elapsed, time.Second, 2*time.Second+handover+busy)
		})
	}
}
