package tests

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/alecthomas/kong"
	"github.com/rogpeppe/go-internal/testscript"

	"github.com/sbxrun/sbxrun/internal/cli"
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
			env.Values[last{}] = &runs{t: env.T()}
			return nil
		},
		Condition: func(name string) (bool, error) {
			switch name {
			case "root":
				return harness.Root(), nil
			case "layers-in-memory":
				return kernel(t, 6, 6), nil
			}
			return false, fmt.Errorf("no condition %s", name)
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"sbxrun": func(ts *testscript.TestScript, neg bool, args []string) {
				refuse(ts, neg)
				scriptRun(ts, 0, args)
			},
			"rootfs": func(ts *testscript.TestScript, neg bool, _ []string) {
				refuse(ts, neg)
				ts.Setenv("TREE", rootTree(scriptT{ts}))
			},
			"image":   image,
			"fail":    fail,
			"timeout": timeout,
			"json":    json,
			"within":  within,
			"lines":   lines,
		},
	})
}

// runs is the state of a script.
type runs struct {
	t      testscript.T
	result *harness.Result // of the last run
	later  time.Duration   // by how much its deadline was raised
	state  *harness.State  // nil before the first command on sandboxes
	boxes  map[string]*harness.Sandbox
}

type last struct{}

// scriptT adapts a script to harness.T.
type scriptT struct{ *testscript.TestScript }

func (scriptT) Helper()                             {}
func (s scriptT) Errorf(format string, args ...any) { s.Fatalf(format, args...) }
func (s scriptT) Cleanup(f func()) {
	s.Defer(func() {
		defer func() {
			if e := recover(); e != nil { // of Fatalf, which only the script's lines may call
				s.Logf("%v", e)
				s.Value(last{}).(*runs).t.FailNow()
			}
		}()
		f()
	})
}

func refuse(ts *testscript.TestScript, neg bool) {
	if neg {
		ts.Fatalf("no ! here: say which exit code with fail N")
	}
}

// scriptRun runs sbxrun to its end. Commands on sandboxes share a state directory, and start and exec go through Sandbox
// and Exec of the harness.
func scriptRun(ts *testscript.TestScript, code int, args []string) {
	script := ts.Value(last{}).(*runs)
	o, args := scriptOptions(ts, args)
	switch box := slices.IndexFunc(args, func(arg string) bool { return script.boxes[arg] != nil }); {
	case !onSandboxes(args):
		if script.state != nil {
			o.Env = append(o.Env, "SBXRUN_STATE_DIR="+script.state.Dir, "SBXRUN_DATA_DIR="+script.state.Dir+"-data")
		}
		scriptEnd(ts, code, 0, harness.Run(scriptT{ts}, o, args...))
	case args[0] == "start":
		b, r := script.onState(ts).TrySandbox(o, args[1:]...)
		if b != nil && b.Name != "" {
			script.boxes[b.Name] = b
		}
		scriptEnd(ts, code, 0, r)
	case args[0] == "exec" && box > 0:
		command := args[box+1:]
		if len(command) > 0 && command[0] == "--" {
			command = command[1:]
		}
		scriptEnd(ts, code, 0, script.boxes[args[box]].Exec(o, args[1:box], command...))
	default:
		scriptEnd(ts, code, 0, script.onState(ts).Start(o, args...).Wait())
	}
}

// onSandboxes reports whether a command line is one of sbxrun's own commands, other than run.
func onSandboxes(args []string) bool {
	return len(args) > 0 && args[0] != "run" && slices.ContainsFunc(cli.Commands(), func(c *kong.Node) bool {
		return strings.HasPrefix(c.Path()+" ", args[0]+" ")
	})
}

// onState returns the script's state directory.
func (r *runs) onState(ts *testscript.TestScript) *harness.State {
	if r.state == nil {
		r.state, r.boxes = harness.NewState(scriptT{ts}), map[string]*harness.Sandbox{}
		ts.Setenv("STATE", r.state.Dir)
	}
	return r.state
}

// scriptOptions returns the options for sbxrun, and its arguments. It replaces LAYER by the flag for a layer, and takes
// the stdin from < FILE at the end.
func scriptOptions(ts *testscript.TestScript, args []string) (harness.Options, []string) {
	o := harness.Options{
		Dir: ts.MkAbs("."),
		Env: []string{"PATH=" + ts.Getenv("PATH"), "HOME=" + ts.Getenv("HOME"), "SBXRUN_BWRAP=" + ts.Getenv("SBXRUN_BWRAP")},
	}
	if dirs := ts.Getenv("SBXRUN_CDI_DIRS"); dirs != "" {
		o.Env = append(o.Env, "SBXRUN_CDI_DIRS="+dirs)
	}
	if i := slices.Index(args, "LAYER"); i >= 0 {
		args = slices.Concat(args[:i], layer(scriptT{ts}), args[i+1:])
	}
	if end := len(args) - 2; end >= 0 && args[end] == "<" {
		o.Stdin = strings.NewReader(ts.ReadFile(args[end+1]))
		args = args[:end]
	}
	return o, args
}

// scriptEnd makes a run the last one.
func scriptEnd(ts *testscript.TestScript, code int, later time.Duration, r *harness.Result) {
	script := ts.Value(last{}).(*runs)
	script.result, script.later = r, later
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

// image NAME imports the image of [imageOf]. DIGEST and PREFIX name it, too, and LAYOUT is where it came from.
func image(ts *testscript.TestScript, neg bool, args []string) {
	refuse(ts, neg)
	digest, layout := imageOf(scriptT{ts}, ts.Value(last{}).(*runs).onState(ts), args[0])
	ts.Setenv("DIGEST", digest)
	ts.Setenv("PREFIX", digest[len("sha256:"):][:12])
	ts.Setenv("LAYOUT", layout)
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
		o, args := scriptOptions(ts, append([]string{"--timeout", timeout}, args[2:]...))
		return harness.Start(scriptT{ts}, o, args...)
	})
	scriptEnd(ts, 124, got-d, p.Wait())
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
