package faults

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// rightOrError asserts that a run with too few resources either succeeded, or did not start and
// says so in one line.
func (r *run) rightOrError(o result) {
	r.t.Helper()
	switch {
	case o.code == 7 && r.wrote("ran"):
	case (o.code == 125 || o.code == 75) && !r.wrote("ran"): // 75: no process can be started now
		o.oneLine(r.t)
	default:
		r.t.Errorf("want 7, or 125 or 75 with one line of sbxrun's: %v", o)
	}
}

// limited starts sbxrun under a limit set by the shell.
func limited(t *testing.T, limit string, n int) *run {
	t.Helper()
	wrap := []string{"bash", "-c", fmt.Sprintf(`ulimit %s %d || exit 99; exec "$@"`, limit, n), "-"}
	return start(t, options{wrap: wrap}, append([]string{"--timeout", lifetime}, leaver...)...)
}

// With too few processes a run works or fails to start. The limit counts all processes of the
// user, and does not apply to root.
func TestFewProcesses(t *testing.T) {
	if harness.Root() {
		// The limit still applies to bwrap, which runs with another UID.
		for _, n := range []int{0, 1, 2} {
			r := limited(t, "-u", n)
			r.rightOrError(r.wait())
		}
		return
	}
	now := harness.TasksOf(os.Getuid())
	for more := 0; more <= 14; more += 2 {
		r := limited(t, "-u", now+more)
		r.briefly(10 * time.Second)
		// The Go runtime itself crashes. As after SIGKILL, the keeper ends the rest soon.
		crashed := r.cmd.ProcessState.ExitCode() == 2 && strings.Contains(text(t, r.files[1]), "failed to create new OS thread")
		r.killed = r.killed || crashed
		o := r.wait()
		if crashed {
			continue
		}
		if o.code == 254 || o.code == 1 || o.code == 126 {
			continue // bash could not fork or exec
		}
		if o.code == 7 || o.code == 125 || o.code == 75 {
			r.rightOrError(o)
			continue
		}
		// The command's own forks may fail; then the code is the shell's.
		check.That(t, o.report != nil && o.report.Cause == "exited", "%d processes more: %v", more, o)
	}
}

// The deadline holds when stdout is full and has no reader.
func TestFullStdout(t *testing.T) {
	for _, tty := range []bool{false, true} {
		reader, writer, err := os.Pipe()
		check.Must(t, err)
		deadline := harness.Deadline(300 * time.Millisecond)
		flags := []string{"--timeout", deadline.String()}
		if tty {
			flags = append(flags, "--tty")
		}
		r := start(t, options{stdout: writer}, append(flags, "sh", "-c", ": >/out/ran; setsid yes & exec yes")...)
		writer.Close()
		// On a busy machine the deadline may pass before the command starts.
		late := func() bool { return time.Since(r.begin) > deadline && r.empty() }
		r.until("the command", func() bool { r.processes(); return r.wrote("ran") || late() })
		if tty {
			// The sandbox ends, but sbxrun still has the terminal's output and waits for a reader,
			// as any program does.
			r.until("the end of the sandbox", late)
			go func() { _, _ = io.Copy(io.Discard, reader) }() // ends with the pipe
		}
		o := r.wait()
		check.That(t, o.code == 124 && o.report != nil && o.report.Cause == "timeout" && o.report.Teardown.Verdict == "proven", "tty %v: want a proven timeout: %v", tty, o)
		if !tty {
			harness.Within(t, "the run", r.end.Sub(r.begin), deadline, deadline+200*time.Millisecond)
		}
		reader.Close()
	}
}

// full returns a pipe that is full.
func full(t *testing.T) (reader, writer *os.File) {
	t.Helper()
	reader, writer, err := os.Pipe()
	check.Must(t, err)
	fd := int(writer.Fd()) // Fd makes it blocking
	check.Must(t, unix.SetNonblock(fd, true))
	for junk := make([]byte, 4096); ; {
		if _, err := unix.Write(fd, junk); err != nil {
			break
		}
	}
	check.Must(t, unix.SetNonblock(fd, false))
	return reader, writer
}

// With --json and a full pipe, the sandbox ends long before somebody reads, and then the report is
// complete.
func TestFullStdoutJSON(t *testing.T) {
	reader, writer := full(t)
	defer reader.Close()
	r := start(t, options{stdout: writer}, "--json", "--timeout", harness.Deadline(200*time.Millisecond).String(), "sh", "-c", ": >/out/ran; setsid yes & exec yes")
	writer.Close()
	r.until("the report on disk", func() bool {
		_, err := os.Stat(r.report)
		return err == nil
	})
	left := harness.Below(r.pid)
	check.That(t, len(left) == 0, "left while sbxrun waits for its reader:\n%s", harness.List(left))
	read := make(chan []byte)
	go func() {
		data, _ := io.ReadAll(reader) // a shorter text fails below
		read <- data
	}()
	o := r.wait()
	check.That(t, o.code == 124, "want a timeout: %v", o)
	var doc map[string]any
	err := json.Unmarshal(bytes.TrimLeft(<-read, "\x00"), &doc)
	check.That(t, err == nil && doc["cause"] == "timeout", "what was printed: %v, %v", err, doc["cause"])
}

// When the reader of stdout closes it, all processes exit.
func TestClosedStdout(t *testing.T) {
	for _, flags := range [][]string{{"--json"}, {"--tty"}, {}} {
		writes := "exec yes"
		if slices.Contains(flags, "--json") { // --json reads all output
			writes = "yes | head -c 4M; exec sleep 600"
		}
		for deadline := harness.Deadline(time.Second); ; deadline *= 2 {
			reader, writer, err := os.Pipe()
			check.Must(t, err)
			r := start(t, options{stdout: writer}, append(flags, "--timeout", deadline.String(), "sh", "-c", ": >/out/ran; setsid sleep 600 & "+writes)...)
			writer.Close()
			reader.Close()
			o := r.wait()
			if !r.wrote("ran") && o.report != nil && o.report.Cause == "timeout" && deadline < bound {
				continue // the deadline passed before the command got a CPU
			}
			if !r.wrote("ran") {
				t.Errorf("%v: it did not run: %v", flags, o)
			} else if o.signal == unix.SIGPIPE && slices.Contains(flags, "--tty") {
				t.Errorf("%v: sbxrun died of SIGPIPE while its sandbox ran", flags)
			}
			break
		}
	}
}

// sbxrun works with a read-only /tmp and an invalid TMPDIR.
func TestReadOnlyTmp(t *testing.T) {
	r := start(t, options{env: []string{"TMPDIR=/nonexistent"}}, append([]string{"--timeout", lifetime}, leaver...)...)
	r.rightOrError(r.wait())

	dir := harness.SharedDir(t) // for the report: everything else is read-only
	wrap := []string{"bwrap", "--dev-bind", "/", "/", "--ro-bind", "/tmp", "/tmp", "--bind", dir, dir}
	r = start(t, options{wrap: wrap, report: filepath.Join(dir, "report.json"), dir: "/usr"}, "--timeout", lifetime, "sh", "-c", "setsid sleep 600 & exit 7")
	o := r.wait()
	check.That(t, o.code == 7 && o.report != nil && o.report.Teardown.Verdict == "proven", "want 7 and proven: %v", o)
}

// When the report's directory is removed during the run, sbxrun passes on the command's exit code
// and reports the loss.
func TestReportVanishes(t *testing.T) {
	for _, code := range []int{0, 7} {
		dir := filepath.Join(harness.SharedDir(t), "reports")
		check.Must(t, os.Mkdir(dir, 0o777))
		r := start(t, options{report: filepath.Join(dir, "report.json")}, "--timeout", lifetime, "sh", "-c",
			fmt.Sprintf(": >/out/ran; setsid sleep 600 & until [ -e /out/go ]; do sleep 0.01; done; exit %d", code))
		r.until("the command", func() bool { r.processes(); return r.wrote("ran") })
		check.Must(t, os.RemoveAll(dir))
		check.Must(t, os.WriteFile(filepath.Join(r.out, "go"), nil, 0o644))
		o := r.wait()
		o.oneLine(t)
		check.That(t, (o.code == code || code == 0 && o.code != 125) && o.code != 0, "want the command's %d, but not 0, and not 125 for a command that ran: %v", code, o)
	}
}

// The same when the report goes to a pipe that no one reads.
func TestReportUnread(t *testing.T) {
	reader, writer, err := os.Pipe()
	check.Must(t, err)
	r := start(t, options{stdout: writer, report: "fd:1"}, "--timeout", lifetime, "sh", "-c", ": >/out/ran; setsid sleep 600 & sleep 0.05; exit 7")
	writer.Close()
	reader.Close()
	o := r.wait()
	check.That(t, r.wrote("ran") && o.code != 0 && o.code != 125, "%v", o)
}

// empty reports whether no process below sbxrun is alive. The keeper may be a zombie until the
// last output is passed on.
func (r *run) empty() bool {
	for _, p := range harness.Below(r.pid) {
		if p.State != "Z" || p.Parent != r.pid {
			return false
		}
	}
	return true
}
