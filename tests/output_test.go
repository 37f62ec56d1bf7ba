package tests

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// maxRSS is the limit for sbxrun's own memory, whatever the output.
const maxRSS = 32 << 20

// captured runs with --json, and returns the run, the printed report and sbxrun's peak memory.
func captured(t *testing.T, args ...string) (*harness.Result, *harness.Report) {
	t.Helper()
	p := harness.Start(t, harness.Options{}, append([]string{"--json"}, args...)...)
	var peak int64
	for running := true; running; {
		select {
		case <-p.Exited():
			running = false
		case <-time.After(20 * time.Millisecond):
			peak = max(peak, p.PeakRSS())
		}
	}
	r := p.Wait()
	check.That(t, peak <= maxRSS, "sbxrun had %d bytes resident, more than %d", peak, maxRSS)
	rep, err := harness.ParseReport(r.Stdout)
	check.Require(t, err == nil, "--json: %v; stderr %.2000s", err, r.Stderr)
	check.Require(t, rep.StdoutBytes != nil && rep.StderrBytes != nil && rep.StdoutTruncated != nil && rep.StderrTruncated != nil, "stream members are missing: %.2000s", rep.Raw())
	return r, rep
}

// bulk returns what fixtures/out-bulk prints on each stream.
func bulk(tag string, lines int) []byte {
	var b bytes.Buffer
	for i := range lines {
		fmt.Fprintf(&b, "%s%08d\n", tag, i)
	}
	return b.Bytes()
}

// Output that is passed through arrives unchanged.
func TestPassThrough(t *testing.T) {
	t.Parallel()
	r := harness.Run(t, harness.Options{}, "/fixtures/out-bulk").Expect(t, 0, "exited")
	check.That(t, bytes.Equal(r.Stdout, bulk("o", 500000)) && bytes.Equal(r.Stderr, bulk("e", 300000)),
		"stdout (%d bytes) or stderr (%d bytes) is not what was printed", len(r.Stdout), len(r.Stderr))
	every := make([]byte, 256)
	for i := range every {
		every[i] = byte(i)
	}
	r = harness.Run(t, harness.Options{}, "/fixtures/out-bytes")
	check.That(t, bytes.Equal(r.Stdout, every), "all 256 bytes became %q", r.Stdout)
}

// Captured streams are truncated, counted to their end, and drained.
func TestCaptureBulk(t *testing.T) {
	t.Parallel()
	r, rep := captured(t, "--max-output", "100k", "/fixtures/out-bulk")
	r.Expect(t, 0, "exited")
	check.That(t, *rep.StdoutBytes == 5000000 && *rep.StderrBytes == 3000000, "%d and %d bytes", *rep.StdoutBytes, *rep.StderrBytes)
	for name, text := range map[string]*string{"stdout": rep.Stdout, "stderr": rep.Stderr} {
		if text == nil {
			t.Errorf("%s: not there as text", name)
			continue
		}
		check.That(t, len(*text) <= 100<<10+100 && len(*text) >= 99<<10, "%s: %d bytes kept of 100k", name, len(*text))
		tag := name[3:4] // o of stdout, e of stderr
		last := map[string]string{"o": "o00499999\n", "e": "e00299999\n"}[tag]
		if !strings.HasPrefix(*text, tag+"00000000\n") || !strings.HasSuffix(*text, last) || !strings.Contains(*text, "bytes left out") {
			t.Errorf("%s: head or tail is missing: %.30q … %q", name, *text, (*text)[len(*text)-30:])
		}
	}
	check.That(t, *rep.StdoutTruncated && *rep.StderrTruncated, "not said to be truncated")
}

// Endless output is captured until the deadline.
func TestCaptureFlood(t *testing.T) {
	// Not in parallel: it keeps a CPU busy.
	deadline := harness.Deadline(time.Second)
	r, rep := captured(t, "--timeout", deadline.String(), "/fixtures/out-flood")
	r.Expect(t, 124, "timeout")
	harness.Within(t, "the run", r.Elapsed, deadline, deadline+300*time.Millisecond)
	// Hundreds of MiB on an idle machine, and less on a slower one.
	least := int64(10 << 20 * time.Second / harness.Scaled(time.Second))
	check.That(t, *rep.StdoutTruncated && int64(*rep.StdoutBytes) >= least, "%d bytes, truncated: %v: the command was held up", *rep.StdoutBytes, *rep.StdoutTruncated)
	check.That(t, rep.Stdout != nil && len(*rep.Stdout) <= 1<<20+100, "more than 1 MiB kept, or no text")
}

// Output that is not UTF-8 comes as Base64, and the JSON is valid.
func TestCaptureBytes(t *testing.T) {
	t.Parallel()
	_, rep := captured(t, "/fixtures/out-bytes", "010203")
	check.That(t, rep.Stdout != nil && *rep.Stdout == "\x01\x02\x03" && rep.StdoutBase64 == nil, "control characters: %s", rep.Raw())
	_, rep = captured(t, "/fixtures/out-bytes")
	check.That(t, rep.Stdout == nil && len(rep.StdoutBase64) == 256 && rep.StdoutBase64[255] == 255, "all bytes: %s", rep.Raw())
	_, rep = captured(t, "true")
	check.That(t, rep.Stdout != nil && *rep.Stdout == "" && *rep.StdoutBytes == 0 && !*rep.StdoutTruncated, "no output: %s", rep.Raw())
}

// --json and --report describe the same run.
func TestCaptureAndReport(t *testing.T) {
	t.Parallel()
	r, rep := captured(t, "sh", "-c", "echo out; echo err >&2; exit 3")
	r.Expect(t, 3, "exited")
	check.That(t, *rep.Stdout == "out\n" && *rep.Stderr == "err\n" && rep.ID == r.Report.ID && len(r.Stderr) == 0,
		"printed %s, reported %s, stderr %q", rep.Raw(), r.Report.Raw(), r.Stderr)
	// Also for a failed start.
	r, rep = captured(t, "no-such-command")
	r.Expect(t, 127, "start-failed")
	check.That(t, !rep.Started && *rep.StdoutBytes == 0, "printed %s", rep.Raw())
}

// --report writes to a descriptor in one write.
func TestReportToDescriptor(t *testing.T) {
	t.Parallel()
	b := harness.NewState(t).Sandbox(harness.Options{})
	for _, verb := range [][]string{{"run"}, {"exec", b.ID}} {
		read, write, err := os.Pipe()
		check.Must(t, err)
		args := slices.Concat(verb[:1], []string{"--report", "fd:3", "--timeout", "0.2"}, verb[1:], []string{"sleep", "600"})
		p := b.State.Start(harness.Options{Bare: true, ExtraFiles: []*os.File{write}}, args...)
		write.Close()
		r := p.Wait()
		buf := make([]byte, 64<<10)
		n, err := read.Read(buf)
		check.Must(t, err)
		rep, err := harness.ParseReport(buf[:n])
		check.Must(t, err)
		check.That(t, r.ExitCode == 124 && rep.Cause == "timeout", "%s: exit code %d, report %s", verb[0], r.ExitCode, buf[:n])
		if n, err := read.Read(buf); n != 0 {
			t.Errorf("%s: then came %q, %v", verb[0], buf[:n], err)
		}
		read.Close()
	}
}

// full returns a stdout on a full disk.
func full(t *testing.T) *os.File {
	t.Helper()
	f, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	check.Must(t, err)
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
		{"--output-limit", "truncate", "--max-output", "1M", "sh", "-c", "echo x; sleep 600"},
		{"--json", "echo", "x"}, {"--report", "/dev/full", "true"}, {"--report", "fd:1", "true"},
		{"--help"}, {"--version"}, {"--print-command", "true"}, {"exec", "--json", "full", "true"},
		{"ps"}, {"ps", "--json"}, {"ps", "--names"}, {"inspect", "full"}, {"logs", "full"}, {"logs", "--json", "full"},
		{"stats"}, {"stats", "--json"}, {"stats", "--prometheus"}, {"doctor"}, {"doctor", "--json"}, {"cleanup", "--json"}, {"cleanup", "--help"},
		{"volume", "ls"}, {"volume", "ls", "--json"}, {"snapshot", "ls", "--json"},
		{"kill", "full"}, {"kill", "--json", "full"},
	} {
		r := s.Start(harness.Options{Stdout: full(t)}, args...).Wait()
		check.That(t, r.ExitCode == 74 && bytes.Count(r.Stderr, []byte("\n")) == 1 && bytes.HasSuffix(r.Stderr, []byte(": no space left on device\n")),
			"%q: exit code %d, stderr %.300q", args, r.ExitCode, r.Stderr)
	}
	b.Ended()

	// The command's own failure takes precedence.
	r := s.Start(harness.Options{Stdout: full(t)}, "--json", "sh", "-c", "exit 3").Wait()
	check.That(t, r.ExitCode == 3 && bytes.HasSuffix(r.Stderr, []byte(": no space left on device\n")), "exit code %d, stderr %q", r.ExitCode, r.Stderr)
	// The report has the error if it can be written.
	r = harness.Run(t, harness.Options{Stdout: full(t)}, "--output-limit", "truncate", "--max-output", "1M", "sh", "-c", "echo x; sleep 600")
	e := r.Report.Error
	check.That(t, r.ExitCode == 74 && r.Report.ExitCode == 74 && e != nil && e.Code == "output", "exit code %d, report %s", r.ExitCode, r.Report.Raw())
}

// handover is how long sbxrun waits after the sandbox's end for a reader that reads nothing. It is documented.
const handover = 10 * time.Second

// busy is the allowance for a busy machine.
const busy = 10 * time.Second

// Without a reader of sbxrun's output, the deadline holds, and sbxrun exits by itself or on a signal.
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
			check.Must(t, err)
			defer r.Close()
			deadline := harness.Scaled(time.Second)
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
			res := p.Wait().Expect(t, 124, "timeout")
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
			check.Must(t, err)
			defer r.Close()
			if name == "terminal" {
				// A terminal holds 8 KiB, and copying from it fills only half of each page of a pipe.
				_, err := unix.FcntlInt(w.Fd(), unix.F_SETPIPE_SZ, 256<<10)
				check.Must(t, err)
			}
			dir := harness.SharedDir(t)
			p := harness.Start(t, harness.Options{Stdout: w}, append(append(flags, "--bind", dir+":/shared"), command...)...)
			w.Close()
			ns := p.Namespace()
			check.Must(t, os.WriteFile(dir+"/go", nil, 0o644))
			harness.Until(t, harness.Bound, "the sandbox's end", func() bool { return len(harness.Members(ns)) == 0 })
			got := harness.ReadAll(t, r)
			p.Wait().Expect(t, 3, "exited")
			got = bytes.ReplaceAll(got, []byte("\r"), nil)
			check.That(t, bytes.Equal(got, want), "%d bytes of %d, or others", len(got), len(want))
		})
	}
}

// sbxrun exits even if the payload has filled sbxrun's stderr, or the pipe for its report, and no one reads it.
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
			check.Must(t, err)
			defer r.Close()
			o := harness.Options{Bare: true, Stdout: w}
			if c.file == 2 {
				o = harness.Options{Stderr: w}
			}
			p := harness.Start(t, o, append(append([]string{"--timeout", "1"}, c.flags...), "sh", "-c", c.command)...)
			w.Close()
			res := p.Wait().Exits(t, 124)
			harness.Within(t, "sbxrun", res.Elapsed, time.Second, 2*time.Second+handover+busy)
		})
	}
}
