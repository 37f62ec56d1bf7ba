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
func (r *run) rightOrError(o *harness.Result) {
	r.t.Helper()
	switch {
	case o.ExitCode == 7 && r.wrote("ran"):
	case (o.ExitCode == 125 || o.ExitCode == 75) && !r.wrote("ran"): // 75: no process can be started now
		oneLine(r.t, o)
	default:
		r.t.Errorf("want 7, or 125 or 75 with one line of sbxrun's: %v", o)
	}
}

// When the reader of the output or of the report closes it, the command still runs, and all processes exit.
func TestClosedStdout(t *testing.T) {
	for _, args := range [][]string{
		{"--json", "--timeout", lifetime, "sh", "-c", ": >/out/ran; setsid sleep 600 & yes | head -c 4M; exit 7"},
		{"--report", "fd:1", "--timeout", lifetime, "sh", "-c", ": >/out/ran; setsid sleep 600 & sleep 0.05; exit 7"},
	} {
		reader, writer := harness.Pipe(t)
		r := start(t, harness.Options{Stdout: writer}, args...)
		writer.Close()
		reader.Close()
		o := r.Wait()
		check.That(t, r.wrote("ran") && o.ExitCode != 0 && (args[0] == "--json" || o.ExitCode != 125), "%v", o)
	}
}

// sbxrun works with a read-only /tmp and an invalid TMPDIR.
func TestReadOnlyTmp(t *testing.T) {
	r := start(t, harness.Options{Env: []string{"TMPDIR=/nonexistent"}}, append([]string{"--timeout", lifetime}, leaver...)...)
	r.rightOrError(r.Wait())

	dir := harness.SharedDir(t) // for the report: everything else is read-only
	wrap := []string{"bwrap", "--dev-bind", "/", "/", "--ro-bind", "/tmp", "/tmp", "--bind", dir, dir}
	report := filepath.Join(dir, "report.json")
	r = start(t, harness.Options{Wrap: wrap, Dir: "/usr"}, "--report", report, "--timeout", lifetime, "sh", "-c", "setsid sleep 600 & exit 7")
	r.report = report
	o := r.Wait()
	o.Expect(t, 7, "exited")
	check.Equal(t, o.Report.Teardown.Verdict, "proven")
}

// When the report's directory is removed during the run, sbxrun passes on the command's exit code and reports the loss.
func TestReportVanishes(t *testing.T) {
	for _, code := range []int{0, 7} {
		dir := filepath.Join(harness.SharedDir(t), "reports")
		check.Must(t, os.Mkdir(dir, 0o777))
		r := start(t, harness.Options{}, "--report", filepath.Join(dir, "report.json"), "--timeout", lifetime, "sh", "-c",
			fmt.Sprintf(": >/out/ran; setsid sleep 600 & until [ -e /out/go ]; do sleep 0.01; done; exit %d", code))
		r.until("the command", func() bool { r.processes(); return r.wrote("ran") })
		check.Must(t, os.RemoveAll(dir))
		check.Must(t, os.WriteFile(filepath.Join(r.out, "go"), nil, 0o644))
		o := r.Wait()
		oneLine(t, o)
		check.That(t, (o.ExitCode == code || code == 0 && o.ExitCode != 125) && o.ExitCode != 0, "want the command's %d, but not 0, and not 125 for a command that ran: %v", code, o)
	}
}
