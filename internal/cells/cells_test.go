package cells

import (
	"context"
	"errors"
	"os"
	"path"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/bwrap"
	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/slot"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// bound is far longer than any correct operation takes.
var bound = harness.Scaled(30 * time.Second)

func init() { interruptBound = min(harness.Scaled(interruptBound), 3*time.Second) }

// newRoom returns a room that ends with the test.
func newRoom(t testing.TB) *bwrap.Room {
	t.Helper()
	room := &bwrap.Room{}
	check.Must(t, room.Start(t.Context()))
	t.Cleanup(func() {
		res, err := room.Close()
		check.That(t, err == nil && res.Verdict == result.Proven, "the room: %+v, %v", res, err)
	})
	return room
}

// installed returns the languages with a driver whose interpreter is in the room, at least python.
func installed(t testing.TB, room *bwrap.Room) (names []string) {
	t.Helper()
	for _, name := range []string{"python", "node"} {
		if has(t, room, Languages()[name].Kept[0]) {
			names = append(names, name)
		}
	}
	check.Require(t, slices.Contains(names, "python"), "these tests need a python3 of the system's")
	return names
}

func has(t testing.TB, room *bwrap.Room, program string) bool {
	t.Helper()
	c := room.Command("sh", "-c", `command -v "$0"`, program)
	c.Timeout = bound
	res, err := c.Run(t.Context())
	check.Must(t, err)
	return res.ExitCode() == 0
}

// open returns a kernel that is closed with the test.
func open(t testing.TB, spec Spec) *Kernel {
	t.Helper()
	k := New(spec)
	t.Cleanup(func() {
		check.OK(t, k.Close())
	})
	return k
}

func python(t testing.TB) *Kernel {
	return open(t, Spec{Room: In(newRoom(t)), Language: Languages()["python"]})
}

// do runs a cell with enough time.
func do(t testing.TB, k *Kernel, code string) *Answer {
	t.Helper()
	return within(t, k, code, bound)
}

func within(t testing.TB, k *Kernel, code string, timeout time.Duration) *Answer {
	t.Helper()
	begin := time.Now()
	a, err := k.Run(t.Context(), Cell{Code: code, Timeout: timeout})
	check.Require(t, err == nil, "%q: %v", code, err)
	// The deadline, one second after SIGINT, and the teardown.
	took := time.Since(begin)
	check.That(t, took <= timeout+interruptBound+harness.Slack, "%q took %v", code, took)
	check.That(t, (a.State == Lost) == (a.Ended != nil) && (a.Ended == nil || a.Ended.Verdict == result.Proven), "%q: %s, and %+v", code, a.State, a.Ended)
	return a
}

// inside runs a command next to the interpreter.
func inside(t testing.TB, k *Kernel, script string) {
	t.Helper()
	c := k.spec.Room.(in).room.Command("sh", "-c", script)
	c.Timeout = bound
	res, err := c.Run(t.Context())
	check.Require(t, err == nil && res.ExitCode() == 0, "%q: %+v, %v", script, res, err)
}

// seen is the part of an answer that most tests check.
type seen struct {
	Cause  result.Cause
	State  State
	Out    string // stdout and stderr
	Values []string
	Error  string // name and message
}

func see(a *Answer) seen {
	s := seen{Cause: a.Cause, State: a.State, Out: a.Stdout.Text + a.Stderr.Text}
	for _, r := range a.Results {
		text := r.Kind
		for _, m := range r.Media {
			text += " " + m.Type + "=" + m.Text
			if m.Base64 != nil {
				text += string(m.Base64[:min(8, len(m.Base64))])
			}
		}
		s.Values = append(s.Values, text)
	}
	if e := a.Error; e != nil {
		s.Error = e.Name + ": " + e.Message
	}
	return s
}

func done(out string, values ...string) seen {
	return seen{Cause: Done, State: Kept, Out: out, Values: values}
}

func failed(message string) seen { return seen{Cause: Done, State: Kept, Error: message} }

// The results of cells, run one after another in one interpreter per language.
func TestCells(t *testing.T) {
	t.Parallel()
	room := newRoom(t)
	tests := map[string][]struct {
		name, code string
		want       seen
	}{
		"python": {
			{"nothing", "", done("")},
			{"a comment", "# x", done("")},
			{"output", "import sys; print('out'); print('err', file=sys.stderr)", done("out\nerr\n")},
			{"no newline at the end", "print('a', end='')", done("a")},
			{"a definition", "x = 3", done("")},
			{"a value", "y = 1\nx * 2", done("", "value text/plain=6")},
			{"the last value", "_", done("", "value text/plain=6")},
			{"None is no value", "print(x)", done("3\n")},
			{"an exception", "1/0", failed("ZeroDivisionError: division by zero")},
			{"what it printed before", "print('so far')\nraise KeyError('k')", seen{Cause: Done, State: Kept, Out: "so far\n", Error: "KeyError: 'k'"}},
			{"a syntax error", "def (", failed("SyntaxError: invalid syntax (<cell 11>, line 1)")},
			{"an exception that cannot be told", "class E(Exception):\n  def __str__(self): return 1/0\nraise E", failed("E: ")},
			{"await", "import asyncio\nasync def f():\n  await asyncio.sleep(0.01)\n  return 'slept'\nawait f()", done("", "value text/plain='slept'")},
			{"a loop of its own", "asyncio.run(f())", done("", "value text/plain='slept'")},
			{"sys.exit(0) is an end", "import sys; sys.exit(0)", done("")},
			{"sys.exit(3) is a failure", "sys.exit(3)", failed("SystemExit: 3")},
			{"no input", "input()", failed("EOFError: EOF when reading a line")},
			{"display", "display(1, 'two')", done("", "display text/plain=1", "display text/plain='two'")},
			{"rich", "class R:\n  def __repr__(self): return 'R'\n  def _repr_html_(self): return '<b>R</b>'\n  def _repr_png_(self): return b'PNG'\n  def _repr_svg_(self): return 1/0\nR()", done("", "value text/plain=R text/html=<b>R</b> image/png=PNG")},
			{"a class is no instance", "R", done("", "value text/plain=<class '__main__.R'>")},
			{"a mock answers to every name", "from unittest.mock import Mock\nMock(name='m', __repr__=lambda s: 'mock')", done("", "value text/plain=mock")},
			{"its module", "import pickle; pickle.loads(pickle.dumps(R())).__class__ is R, __name__", done("", "value text/plain=(True, '__main__')")},
			{"descriptors", "import os; sorted(os.listdir('/proc/self/fd'))[:4]", done("", "value text/plain=['0', '1', '2', '3']")},
			{"not those of a command", "os.system('ls /proc/self/fd') and None", done("0\n1\n2\n3\n", "value text/plain=0")}, // 3 is the directory
			{"builtins", "import builtins; builtins.len is len, __builtins__ is builtins", done("", "value text/plain=(True, True)")},
			{"a line of shell", "z = 1\n!echo 'it''s' $((z + 41))\nz", done("its 41\n", "value text/plain=1")},
			{"its failure", "!exit 3", done("exit code 3\n")},
			{"its output", "if z:\n    lines = !printf 'a\\nb\\n'\nlines", done("", "value text/plain=['a', 'b']")},
			{"magics", "%matplotlib inline\n%env SBXRUN_A=b\n!echo $SBXRUN_A\n%cd /\n%pwd", done("b\n", "value text/plain='/'")},
			{"a cell of shell", "%%bash\nfor i in 1 2; do echo $i; done", done("1\n2\n")},
			{"the remainder operator", "n = 7\n(n\n%3)", done("", "value text/plain=1")},
			{"text that looks like it", "'''\n!echo no\n%pwd\n'''", done("", "value text/plain='\\n!echo no\\n%pwd\\n'")},
		},
		"node": {
			{"nothing", "", done("")},
			{"output", "console.log('out'); console.error('err')", done("out\nerr\n")},
			{"a definition", "const x = 3", done("")},
			{"again, and a value", "const x = 4; x * 2", done("", "value text/plain=8")},
			{"undefined is no value", "console.log(x)", done("4\n")},
			{"a string", "'a\\nb'", done("", `value text/plain='a\nb'`)},
			{"an object", "({a: [1n]})", done("", "value text/plain={ a: [ 1n ] }")},
			{"null", "null", done("", "value text/plain=null")},
			{"NaN", "0/0", done("", "value text/plain=NaN")},
			{"an exception", "null.y", failed("TypeError: Cannot read properties of null (reading 'y')")},
			{"what is thrown is no error", "throw 5", failed("Error: 5")},
			{"a syntax error", "(", failed("SyntaxError: Unexpected end of input")},
			{"await", "const slept = await new Promise(r => setTimeout(() => r('slept'), 5)); slept", done("", "value text/plain='slept'")},
			{"a rejection that is awaited", "await Promise.reject(new RangeError('r'))", failed("RangeError: r")},
			{"a rejection that nobody sees", "Promise.reject(7); await new Promise(r => setTimeout(r, 20))", done("Uncaught 7\n")},
			{"an exception in a timer", "setTimeout(() => { throw 8 }, 1); await new Promise(r => setTimeout(r, 20))", done("Uncaught 8\n")},
			{"a module", "require('path').join('a', 'b')", done("", "value text/plain='a/b'")},
			{"no input", "require('fs').readFileSync(0, 'utf8')", done("", "value text/plain=''")},
			{"display", "display(1, 'two')", done("", "display text/plain=1", "display text/plain=two")},
			{"rich", "({[Symbol.for('Jupyter.display')]: () => ({'text/html': '<b>', 'image/png': Buffer.from('PNG')}), [require('util').inspect.custom]: () => 'R'})", done("", "value text/plain=R text/html=<b> image/png=PNG")},
			{"the inspector's promise", "Promise.resolve(1)", done("", "value text/plain=Promise { 1 }")},
			{"not the descriptors of a command", "require('child_process').execSync('ls /proc/self/fd').toString()", done("", `value text/plain='0\n1\n2\n3\n'`)}, // 3 is the directory
		},
	}
	for _, language := range installed(t, room) {
		k := open(t, Spec{Room: In(room), Language: Languages()[language]})
		for i, test := range tests[language] {
			a := do(t, k, test.code)
			check.NoDiff(t, cmp.Diff(test.want, see(a)), "%s: %s: (-want +got)", language, test.name)
			check.That(t, a.Number == i+1 && a.Earlier == nil, "%s: %s: number %d, %+v", language, test.name, a.Number, a.Earlier)
		}
	}
}

// A traceback has the lines of the cell and no frames of the driver.
func TestTraceback(t *testing.T) {
	t.Parallel()
	room := newRoom(t)
	codes := map[string][2]string{
		"python": {"def f():\n    return 1/0\nf()", "Traceback (most recent call last):\n  File \"<cell 1>\", line 3, in <module>\n    f()\n  File \"<cell 1>\", line 2, in f\n    return 1/0\n"},
		"node":   {"function f() {\n  null.x\n}\nf()", "TypeError: Cannot read properties of null (reading 'x')\n    at f (cell-1:2:8)\n    at cell-1:4:1"},
	}
	for _, language := range installed(t, room) {
		k := open(t, Spec{Room: In(room), Language: Languages()[language]})
		text := do(t, k, codes[language][0]).Error.Traceback
		lines := strings.SplitAfter(text, "\n")
		lines = slices.DeleteFunc(lines, func(l string) bool { return strings.Trim(l, " ^~\n") == "" }) // in later versions of Python
		text = strings.Join(lines, "")
		check.That(t, strings.HasPrefix(text, codes[language][1]) && !strings.Contains(text, "driver"), "%s", text)
	}
}

// Figures are results if matplotlib has been imported; a module with the same interface replaces it here.
func TestFigures(t *testing.T) {
	t.Parallel()
	k := python(t)
	a := do(t, k, `
import os, sys
os.makedirs("matplotlib")
open("matplotlib/__init__.py", "w").close()
open("matplotlib/pyplot.py", "w").write('''
`+harness.Pyplot+`''')
import matplotlib.pyplot as plt
plt.figure(1), plt.figure(2)
None`)
	check.NoDiff(t, cmp.Diff(done("", "figure image/png=png by A", "figure image/png=png by A"), see(a)))
	a = do(t, k, "plt.figure(3)\n1/0")
	check.That(t, len(a.Results) == 1 && a.Results[0].Kind == "figure" && a.Error != nil, "with an exception: %+v", see(a))
	a = do(t, k, "1")
	check.That(t, len(a.Results) == 1, "then: %+v", see(a))
}

// The driver uses the system's modules, whatever is in the directory. Cells may import modules of the directory.
func TestShadowedModules(t *testing.T) {
	t.Parallel()
	room := newRoom(t)
	spec := Spec{Room: In(room), Language: Languages()["python"]}
	k := open(t, spec)
	do(t, k, "for n in ('json', 'ast', 'os', 'mine'): open(n + '.py', 'w').write('x = 42')")
	a := do(t, open(t, spec), "import mine; mine.x")
	check.That(t, cmp.Equal(see(a), done("", "value text/plain=42")), "%+v", see(a))
}

// Code is not visible in the command line.
func TestCommandLine(t *testing.T) {
	t.Parallel()
	room := newRoom(t)
	for _, language := range installed(t, room) {
		k := open(t, Spec{Room: In(room), Language: Languages()[language]})
		code := map[string]string{"python": "print(open('/proc/self/cmdline').read(), 'secret')", "node": "console.log(require('fs').readFileSync('/proc/self/cmdline', 'utf8'), 'secret')"}[language]
		a := do(t, k, code)
		check.That(t, strings.Count(a.Stdout.Text, "secret") == 1 && len(a.Stdout.Text) <= 1000, "%s: %q", language, a.Stdout.Text)
	}
}

func TestStartFails(t *testing.T) {
	t.Parallel()
	room := newRoom(t)
	late, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	kept := func(words ...string) Language { return Language{Kept: words, Driver: "python"} }
	for name, test := range map[string]struct {
		ctx        context.Context
		language   Language
		code, says string
	}{
		"not there":       {t.Context(), kept("no-such-python"), "not-found", "no-such-python"},
		"another program": {t.Context(), kept("sh", "-c", "echo none >&2; exit 3"), "setup", "exit code 3): none"},
		"a flood":         {t.Context(), kept("sh", "-c", "yes >&3; sleep 1000"), "setup", ""},
		"no socket":       {t.Context(), kept("sh", "-c", "exec 3>&-; sleep 1000"), "setup", ""},
		"nobody waits":    {late, kept("sh", "-c", "sleep 1000"), "ended", ""},
	} {
		begin := time.Now()
		_, err := New(Spec{Room: In(room), Language: test.language}).Run(test.ctx, Cell{})
		e, ok := errors.AsType[*result.Error](err)
		check.That(t, ok && e.Code == test.code && strings.Contains(e.Message, test.says), "%s: %v", name, err)
		took := time.Since(begin)
		check.That(t, took <= startBound/2, "%s: took %v", name, took) // the exit was noticed at once
	}
}

// A client that disconnects ends its cell but not the state.
func TestCanceled(t *testing.T) {
	t.Parallel()
	room := newRoom(t)
	loops := map[string]string{"python": "x = 5\nopen('begun-python', 'w').close()\nwhile True: pass", "node": "var x = 5; require('fs').writeFileSync('begun-node', ''); while (true);"}
	for _, language := range installed(t, room) {
		k := open(t, Spec{Room: In(room), Language: Languages()[language]})
		do(t, k, "1")
		for _, when := range []string{"before", "begun", "soon"} {
			given := when == "begun"
			ctx, cancel := context.WithCancel(t.Context())
			if when == "before" {
				cancel()
			}
			go func() {
				defer cancel()
				if given {
					c := room.Command("sh", "-c", "while [ ! -e begun-"+language+" ]; do sleep 0.01; done")
					c.Timeout = bound
					_, _ = c.Run(t.Context())
				}
			}()
			a, err := k.Run(ctx, Cell{Code: loops[language]})
			// node may lose a signal that arrives when a script begins.
			check.That(t, err == nil && a.Cause == result.Canceled && (a.State == Kept || !given && language != "python"), "%s, %s: %+v, %v", language, when, a, err)
			a = do(t, k, "x")
			check.That(t, !given || cmp.Equal(see(a), done("", "value text/plain=5")), "%s: %+v", language, see(a))
		}
	}
}

// In adapts a room of package bwrap.
func In(room *bwrap.Room) Room { return in{room} }

type in struct{ room *bwrap.Room }

func (r in) Start(ctx context.Context, c slot.Command) (slot.Running, error) {
	cmd := r.room.Command(c.Args...)
	cmd.Limits = bwrap.Limits(c.Limits)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = c.Stdin, c.Stdout, c.Stderr
	return cmd, cmd.Start(ctx)
}

// Each language in the room runs a program from a file.
func TestLanguages(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	check.Must(t, os.Chmod(dir, 0o755))
	programs := map[string]string{
		"python": "print(6*7)", "node": "console.log(6*7)", "bash": "echo $((6*7))", "sh": "echo $((6*7))", "ruby": "puts 6*7",
		"java": "class Main { public static void main(String[] a) { System.out.println(6*7); } }",
		"go":   "package main\n\nfunc main() { println(6 * 7) }\n",
	}
	room := &bwrap.Room{Policy: bwrap.Policy{Mounts: []bwrap.Mount{{Source: dir, Dest: "/code"}}}}
	check.Must(t, room.Start(t.Context()))
	defer room.Close()
	for name, language := range Languages() {
		check.OK(t, language.Check(), "%s", name)
		check.That(t, programs[name] != "", "%s has no program here", name)
		check.Must(t, os.WriteFile(path.Join(dir, language.File), []byte(programs[name]), 0o644))
		if !has(t, room, language.Command[0]) {
			continue
		}
		c := room.Command(language.Argv("/code")...)
		var out strings.Builder
		c.Stdout, c.Stderr, c.Timeout, c.MaxOutput = &out, &out, 2*bound, 1<<20
		res, err := c.Run(t.Context())
		check.That(t, err == nil && res.ExitCode() == 0 && out.String() == "42\n", "%s: %+v, %v, %s", name, res, err, &out)
	}
	for name, l := range map[string]Language{
		"nothing":          {},
		"no file":          {Command: []string{"x"}},
		"a path":           {Command: []string{"x"}, File: "a/b"},
		"no driver":        {Command: []string{"x"}, File: "a", Kept: []string{"x"}},
		"an unknown one":   {Command: []string{"x"}, File: "a", Kept: []string{"x"}, Driver: "x"},
		"nothing to drive": {Command: []string{"x"}, File: "a", Driver: "node"},
	} {
		check.That(t, l.Check() != nil, "%s: no error", name)
	}
}

// A cell that exceeds the interpreter's memory limit ends it, where the limit can be enforced.
func TestOutOfMemory(t *testing.T) {
	t.Parallel()
	room := newRoom(t)
	spec := Spec{Room: In(room), Language: Languages()["python"]}
	spec.Limits.Memory = 64 << 20
	k := open(t, spec)
	_, err := k.Run(t.Context(), Cell{})
	if e, ok := errors.AsType[*result.Error](err); ok && e.Code == "limit" {
		return // the limit cannot be enforced here
	}
	check.Must(t, err)
	a := do(t, k, "x = bytearray(1 << 30)")
	check.That(t, a.Cause == result.OOM && a.State == Lost, "%+v", a)
	a = do(t, k, "1")
	check.That(t, a.Cause == Done && a.Number == 1, "%+v", a)
}

// signalOf returns the signal that ended an interpreter.
func signalOf(a *Answer) unix.Signal {
	if a.Ended == nil || a.Ended.Payload == nil {
		return 0
	}
	return a.Ended.Payload.Signal
}

// %%time reports the time, and an unsupported magic names the supported ones in one line.
func TestMagics(t *testing.T) {
	t.Parallel()
	k := open(t, Spec{Room: In(newRoom(t)), Language: Languages()["python"]})
	a := do(t, k, "%%time\nx = 6 * 7\nx")
	check.That(t, a.Error == nil && len(a.Results) == 1 && strings.HasPrefix(a.Stdout.Text, "Wall time: "), "%+v", a)
	for _, code := range []string{"%%html\n<b>", "%prun f()"} {
		a := do(t, k, code)
		check.That(t, a.Error != nil && strings.Contains(a.Error.Message, "is not supported; cells support %cd DIR") && !strings.Contains(a.Error.Message, "\n"), "%s: %+v", code, a.Error)
	}
}
