package faults

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// rightOrError asserts that a run with too few resources either succeeded, or did not start and reported one error.
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

// When the reader of stdout closes it before the report, all processes exit.
func TestClosedStdout(t *testing.T) {
	reader, writer, err := os.Pipe()
	check.Must(t, err)
	r := start(t, options{stdout: writer}, "--json", "--timeout", lifetime, "sh", "-c", ": >/out/ran; setsid sleep 600 & yes | head -c 4M; exit 7")
	writer.Close()
	reader.Close()
	o := r.wait()
	check.That(t, r.wrote("ran") && o.code != 0, "%v", o)
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

// When the report's directory is removed during the run, sbxrun passes on the command's exit code and reports the loss.
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
