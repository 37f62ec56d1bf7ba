package tests

import (
	"fmt"
	"os"
	"regexp"
	"strconv"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// TestScripts runs scripts/*.txt, one behaviour each. tests/README.md lists their commands. The
// harness makes its usual assertions after each run.
func TestScripts(t *testing.T) {
	t.Parallel()
	testscript.Run(t, testscript.Params{
		Dir: "scripts",
		// testscript's own directory cannot be entered by the user that root's sandboxes run as.
		WorkdirRoot:        harness.Dir(t),
		RequireUniqueNames: true,
		Setup: func(env *testscript.Env) error {
			env.Setenv("PATH", harness.Path)
			env.Setenv("SBXRUN_BWRAP", os.Getenv("SBXRUN_BWRAP"))
			env.Setenv("FIXTURES", harness.FixturesDir(t))
			env.Values[last{}] = new(runs)
			return nil
		},
		Condition: func(name string) (bool, error) {
			switch name {
			case "root":
				return harness.Root(), nil
			}
			return false, fmt.Errorf("no condition %s", name)
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"sbxrun": func(ts *testscript.TestScript, neg bool, args []string) {
				refuse(ts, neg)
				scriptRun(ts, 0, args)
			},
			"fail":    fail,
			"timeout": timeout,
			"json":    json,
			"within":  within,
			"lines":   lines,
		},
	})
}

// runs is the state of a script: its last run, and by how much its deadline was raised.
type runs struct {
	result *harness.Result
	later  time.Duration
}

type last struct{}

// scriptT adapts a script to harness.T.
type scriptT struct{ *testscript.TestScript }

func (scriptT) Helper()                             {}
func (s scriptT) Errorf(format string, args ...any) { s.Fatalf(format, args...) }
func (s scriptT) Cleanup(f func())                  { s.Defer(f) }

func refuse(ts *testscript.TestScript, neg bool) {
	if neg {
		ts.Fatalf("no ! here: say which exit code with fail N")
	}
}

func scriptRun(ts *testscript.TestScript, code int, args []string) {
	scriptEnd(ts, code, 0, scriptStart(ts, args))
}

func scriptStart(ts *testscript.TestScript, args []string) *harness.Process {
	return harness.Start(scriptT{ts}, harness.Options{
		Dir: ts.MkAbs("."),
		Env: []string{"PATH=" + ts.Getenv("PATH"), "HOME=" + ts.Getenv("HOME"), "SBXRUN_BWRAP=" + ts.Getenv("SBXRUN_BWRAP")},
	}, args...)
}

func scriptEnd(ts *testscript.TestScript, code int, later time.Duration, p *harness.Process) {
	r := p.Wait()
	*ts.Value(last{}).(*runs) = runs{r, later}
	ts.Stdout().Write(r.Stdout)
	ts.Stderr().Write(r.Stderr)
	if r.ExitCode != code {
		ts.Fatalf("exit code %d, want %d; stderr: %.2000s", r.ExitCode, code, r.Stderr)
	}
}

func result(ts *testscript.TestScript) *harness.Result {
	r := ts.Value(last{}).(*runs).result
	if r == nil {
		ts.Fatalf("nothing was run yet")
	}
	return r
}

// fail N ARG... runs sbxrun, which must exit with N.
func fail(ts *testscript.TestScript, neg bool, args []string) {
	refuse(ts, neg)
	if len(args) == 0 {
		ts.Fatalf("usage: fail N [ARG...]")
	}
	code, err := strconv.Atoi(args[0])
	ts.Check(err)
	scriptRun(ts, code, args[1:])
}

// timeout D TEXT ARG... runs sbxrun --timeout D ARG..., which must print TEXT before the deadline
// and exit with 124. On a slow machine D is longer, and within accounts for that.
func timeout(ts *testscript.TestScript, neg bool, args []string) {
	refuse(ts, neg)
	if len(args) < 3 {
		ts.Fatalf("usage: timeout D TEXT ARG...")
	}
	d, err := time.ParseDuration(args[0])
	ts.Check(err)
	p, got := harness.InTime(scriptT{ts}, d, args[1], func(timeout string) *harness.Process {
		return scriptStart(ts, append([]string{"--timeout", timeout}, args[2:]...))
	})
	scriptEnd(ts, 124, got-d, p)
}

// json PATH RE asserts that RE matches a whole member of the report. A missing member reads as absent.
func json(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) != 2 {
		ts.Fatalf("usage: json PATH RE")
	}
	re, err := regexp.Compile("^(?s:" + args[1] + ")$")
	ts.Check(err)
	r := result(ts)
	if r.Report == nil {
		ts.Fatalf("there is no report")
	}
	if got := r.Report.Value(args[0]); re.MatchString(got) == neg {
		ts.Fatalf("%s is %s in the report %s", args[0], got, r.Report.Raw())
	}
}

// within LOW HIGH asserts the duration of the last run, with the harness's slack.
func within(ts *testscript.TestScript, neg bool, args []string) {
	refuse(ts, neg)
	if len(args) != 2 {
		ts.Fatalf("usage: within LOW HIGH")
	}
	low, err := time.ParseDuration(args[0])
	ts.Check(err)
	high, err := time.ParseDuration(args[1])
	ts.Check(err)
	harness.Within(scriptT{ts}, "the run", result(ts).Elapsed-ts.Value(last{}).(*runs).later, low, high)
}

// lines N asserts the number of lines on stderr.
func lines(ts *testscript.TestScript, neg bool, args []string) {
	refuse(ts, neg)
	if len(args) != 1 {
		ts.Fatalf("usage: lines N")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	if got := harness.Lines(result(ts).Stderr); len(got) != want {
		ts.Fatalf("%d lines on stderr, want %d: %q", len(got), want, got)
	}
}
