package cli

import (
	"cmp"
	"errors"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/alecthomas/kong"
	gocmp "github.com/google/go-cmp/cmp"

	"github.com/sbxrun/sbxrun/internal/values"
	"github.com/sbxrun/sbxrun/tests/check"
)

// empty returns an empty struct of the command that args begin with, and the rest of args.
func empty(args []string) (flags any, rest []string) {
	n := Model().Model.Node
	for rest = args; len(n.Children) > 0 && len(rest) > 0; rest = rest[1:] {
		n = n.Children[slices.IndexFunc(n.Children, func(c *kong.Node) bool { return c.Name == rest[0] })]
	}
	return n.Target.Addr().Interface(), rest
}

// parseLine parses words separated by blanks, the first of which names the command. It returns the positional ones.
func parseLine(line string) (flags any, words []string, err error) {
	flags, args := empty(strings.Fields(line))
	err = Parse(flags, args)
	k := kong.Must(flags)
	for _, p := range k.Model.Positional {
		switch v := p.Target.Addr().Interface().(type) {
		case *string:
			if *v != "" {
				words = append(words, *v)
			}
		case *[]string:
			words = append(words, *v...)
		}
		p.Target.SetZero()
	}
	return flags, words, err
}

// want returns the flags of a command without arguments, changed by change.
func want[F any](t *testing.T, change func(*F)) any {
	t.Helper()
	var f F
	ctx, err := kong.Trace(kong.Must(&f), nil)
	check.Must(t, cmp.Or(err, ctx.Reset()))
	if change != nil {
		change(&f)
	}
	return &f
}

func TestDefaults(t *testing.T) {
	var r Run
	check.Must(t, Parse(&r, nil))
	check.That(t, r.ProofTimeout == values.Span(5*time.Second) && r.TmpSize == 256<<20 && r.Net == "none" && r.Hostname == "sandbox" && r.Warn != 0 && !r.Nice.Given, "%+v", r)
}

func TestParse(t *testing.T) {
	const second = values.Duration(time.Second)
	nothing := want[Run](t, nil)
	for _, tt := range []struct {
		line  string
		flags any
		words string
	}{
		// A command line is verbatim from the first word that is not a flag, or after --.
		{"run", nothing, ""},
		{"run true", nothing, "true"},
		{"run ls -l --timeout 5", nothing, "ls -l --timeout 5"},
		{"run -- ls", nothing, "ls"},
		{"run -- --timeout 5", nothing, "--timeout 5"},
		{"run -- -- ls", nothing, "-- ls"},
		{"run --", nothing, ""},
		{"run ls -- x", nothing, "ls -- x"},
		{"run - x", nothing, "- x"},
		{"run --timeout 5 ls", want(t, func(r *Run) { r.Timeout = 5 * second }), "ls"},
		{"run --timeout=5 --grace=1s -- x --timeout 7", want(t, func(r *Run) { r.Timeout, r.Grace = 5*second, second }), "x --timeout 7"},
		{"run --timeout 1 --timeout 2 x", want(t, func(r *Run) { r.Timeout = 2 * second }), "x"},
		{"run --json run -- x", want(t, func(r *Run) { r.JSON = true }), "run -- x"},
		{"run -qt bash -t", want(t, func(r *Run) { r.Quiet, r.Tty = true, true }), "bash -t"},
		// The value of a one-letter flag is in the same word or the next.
		{"run -s INT x", want(t, func(r *Run) { r.Signal = 2 }), "x"},
		{"run -k5 -sSIGHUP x -k 7", want(t, func(r *Run) { r.Grace, r.Signal = 5*second, 1 }), "x -k 7"},
		{"run -qvk 5 x", want(t, func(r *Run) { r.Quiet, r.Verbose, r.Grace = true, true, 5*second }), "x"},
		{"run --kill-after 5 x", want(t, func(r *Run) { r.Grace = 5 * second }), "x"},
		{"run --kill-after=5 --grace 6 x", want(t, func(r *Run) { r.Grace = 6 * second }), "x"},
		{"run --json=false --quiet=true x", want(t, func(r *Run) { r.Quiet = true }), "x"},
		{"run --ro-bind /a --ro-bind /b:/c --bind=/d,e x", want(t, func(r *Run) { r.RoBind, r.Bind = []string{"/a", "/b:/c"}, []string{"/d,e"} }), "x"},
		{"run --env= x", want(t, func(r *Run) { r.Env = []string{""} }), "x"},
		{"run --env A=--tty --env=--tty x", want(t, func(r *Run) { r.Env = []string{"A=--tty", "--tty"} }), "x"},
		{"run --report - x", want(t, func(r *Run) { r.Report = "-" }), "x"},
		{"run --report ls ls", want(t, func(r *Run) { r.Report = "ls" }), "ls"},
		{"run --nice -5 --cpu-time .5 x", want(t, func(r *Run) { r.Nice, r.CPUTime = values.Adjustment{Given: true, Value: -5}, second/2 }), "x"},
		{"run --net host --seccomp=off --limits best-effort x", want(t, func(r *Run) { r.Net, r.Seccomp, r.Limits = "host", "off", "best-effort" }), "x"},
		{"start --name web --tag a=b --tag c=d=e -- sleep 9", want(t, func(s *Start) { s.Name, s.Tag = "web", []string{"a=b", "c=d=e"} }), "sleep 9"},
		{"start --ready-tcp 80 x", want(t, func(s *Start) { s.ReadyTCP = "80" }), "x"},
		{"exec -dq --workdir=/w web -- true -x", want(t, func(x *Exec) { x.Detach, x.Quiet, x.Workdir = true, true, "/w" }), "web true -x"},
		{"exec -- web true", want[Exec](t, nil), "web true"},

		// Names before and after flags.
		{"kill", want[Kill](t, nil), ""},
		{"kill web db", want[Kill](t, nil), "web db"},
		{"kill web --signal KILL db", want(t, func(k *Kill) { k.Signal = 9 }), "web db"},
		{"kill -s 9 web", want(t, func(k *Kill) { k.Signal = 9 }), "web"},
		{"kill --tag a=b web --tag c=d -a", want(t, func(k *Kill) { k.Tag, k.All = []string{"a=b", "c=d"}, true }), "web"},
		{"kill -k 7 web", want(t, func(k *Kill) { k.Grace = 7 * second }), "web"},
		{"kill web --kill-after=7", want(t, func(k *Kill) { k.Grace = 7 * second }), "web"},
		{"kill --grace 0 web --proof-timeout 1s --json", want(t, func(k *Kill) { k.Grace, k.ProofTimeout, k.JSON = 0, values.Span(second), true }), "web"},
		{"kill web -- --signal HUP --", want[Kill](t, nil), "web --signal HUP --"},
		{"kill a --json b c --all d -- -e --json", want(t, func(k *Kill) { k.JSON, k.All = true, true }), "a b c d -e --json"},
		{"ps --status lost --status failed", want(t, func(p *Ps) { p.Status = []string{"lost", "failed"} }), ""},
		{"wait web --timeout 1m", want(t, func(w *Wait) { w.Timeout = 60 * second }), "web"},
	} {
		flags, words, err := parseLine(tt.line)
		if err != nil {
			t.Errorf("%q: %v", tt.line, err)
			continue
		}
		check.NoDiff(t, gocmp.Diff(tt.flags, flags), "%q (-want +got)", tt.line)
		check.Equal(t, strings.Join(words, " "), tt.words, "%q: words", tt.line)
	}
}

// Words with blanks or without characters, and values that are not UTF-8, are not changed.
func TestParseBytes(t *testing.T) {
	for _, words := range [][]string{{"", "x"}, {"a b"}, {"\n--json"}, {" --json"}, {"\xff"}} {
		var r Run
		err := Parse(&r, words)
		check.That(t, err == nil && slices.Equal(r.Command, words), "run %q: %q, %v", words, r.Command, err)
		var k Kill
		err = Parse(&k, words)
		check.That(t, err == nil && slices.Equal(k.Sandboxes, words), "kill %q: %q, %v", words, k.Sandboxes, err)
	}
	var r Run
	err := Parse(&r, []string{"--bind", "/\xff:/x", "y"})
	check.That(t, err == nil && slices.Equal(r.Bind, []string{"/\xff:/x"}), "%q, %v", r.Bind, err)
}

// Many names take no longer than their number suggests: the grammar has an argument for each flag, not for each name.
func TestParseManyNames(t *testing.T) {
	const many = 20_000
	var k Kill
	args := slices.Concat(slices.Repeat([]string{"web"}, many), []string{"--json"}, slices.Repeat([]string{"db"}, many))
	err := Parse(&k, args)
	check.That(t, err == nil && len(k.Sandboxes) == 2*many && k.Sandboxes[many] == "db" && k.JSON, "%d names, %v", len(k.Sandboxes), err)
}

// Parsing with only the given flags has the same result as parsing with the whole grammar, and fails where that fails.
func TestParseGiven(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	values := []string{"5", "1M", "none", "a=b", "/x", "kill", "wait", "TERM", "-1", "--json", "x"}
	succeeded := 0
	for _, c := range Commands() {
		var spellings []string
		for _, f := range c.Flags {
			spellings = append(spellings, Spellings(f)...)
		}
		for range 60 {
			var args []string
			for range random.IntN(4) {
				args = append(args, spellings[random.IntN(len(spellings))])
				if random.IntN(2) > 0 {
					args = append(args, values[random.IntN(len(values))])
				}
			}
			args = append(args, []string{"web", "--", "-x", "true"}[random.IntN(4)])
			small, whole := reflect.New(c.Target.Type()).Interface(), reflect.New(c.Target.Type()).Interface()
			ok := parseGiven(small, args) == nil
			_, err := build(whole).Parse(args)
			check.That(t, ok == (err == nil), "%s %q: given %v, whole %v", c.Path(), args, ok, err)
			diff := gocmp.Diff(whole, small)
			check.That(t, !ok || diff == "", "%s %q (-whole +given):\n%s", c.Path(), args, diff)
			if ok {
				succeeded++
			}
		}
	}
	check.That(t, succeeded >= 100, "only %d command lines were right", succeeded)
}

func TestParseErrors(t *testing.T) {
	for _, tt := range []struct{ line, want string }{
		{"run --timeout", "--timeout: needs a value"},
		{"run -q --env A=b --report", "--report: needs a value"},
		{"run --timeout -- x", `--timeout: needs a value, and "--" looks like a flag; if it is the value, write --timeout=--`},
		{"run --env --tty ls", `--env: needs a value, and "--tty" looks like a flag; if it is the value, write --env=--tty`},
		{"run --timeout -1 x", `--timeout: invalid duration "-1": want seconds (5, 0.5) or a value with a unit (1500ms, 5m, 1h, 1d)`},
		{"run --cwd src x", `--cwd: invalid value "src": want ro, rw, overlay or none`},
		{"run --timeout= x", `--timeout: invalid duration "": want seconds (5, 0.5) or a value with a unit (1500ms, 5m, 1h, 1d)`},
		{"run --report= x", "--report: the value is empty"},
		{"run --workdir= --report r x", "--workdir: the value is empty"},
		{"run --json=maybe x", "--json: takes no value"},
		{"run --output-limit 64K x", `--output-limit: invalid value "64K": want kill or truncate; --max-output 64K sets the size`},
		{"run --net bogus x", `--net: invalid value "bogus": want none, host or allow=HOST[:PORT],...`},
		{"start --name= x", "--name: the value is empty"},
		{"start --ready-tcp 1 --ready-log x y", "--ready-tcp and --ready-log can't be used together"},
		{"wait web --log x --ready", "--ready and --log can't be used together"},
		{"ps --json --names", "--names and --json can't be used together"},
		{"ps --status failed --status dead", `--status: invalid value "dead": want starting, running, completed, failed, killed, error or lost`},
		{"kill --grace --tag", `--grace: needs a value, and "--tag" looks like a flag; if it is the value, write --grace=--tag`},

		{"run -k", "--grace: needs a value"},
		{"run -k -s INT x", `--grace: needs a value, and "-s" looks like a flag; if it is the value, write --grace=-s`},
		{"run -sFOO x", `--signal: no such signal "FOO": want a name such as INT, or a number from 1 to 64`},

		// Suggestions.
		{"run --kill 5 x", "unknown flag --kill: use --kill-after"},
		{"run --nosuch x", "unknown flag --nosuch"},
		{"run -x y", "unknown flag -x"},
		{"run -qx y", "unknown flag -x"},
		{"run -é y", "unknown flag -é"},
		{"run --time 5 x", "unknown flag --time, did you mean one of --timeout, --nice?"},
		{"start --lifetime 5 x", "unknown flag --lifetime: use --timeout"},
		{"run --timeotu 5 x", "unknown flag --timeotu, did you mean --timeout?"},
		{"run ---timeout 5 x", "unknown flag ---timeout, did you mean --timeout?"},
		{"run -timeout 5 x", "unknown flag -timeout, did you mean --timeout?"},
		{"run -e A=b x", "unknown flag -e: use --env or --env-file"},
		{"start -t 5 x", "unknown flag -t: use --timeout, --tag or --tmpfs"},
		{"ps --jsn", "unknown flag --jsn, did you mean --json?"},
		{"exec --net host web true", "unknown flag --net, which is a flag of run, start"},
		{"start --get out x", "unknown flag --get: use sbxrun cp SANDBOX:SRC DST to copy files out of a running sandbox"},
		{"exec --diff box x", "unknown flag --diff: use sbxrun diff SANDBOX for the changes in a running sandbox"},
		{"run -it bash", "unknown flag -it: the command reads stdin anyway; use -t for a terminal"},
		{"exec --interactive web bash", "unknown flag --interactive: the command reads stdin anyway; use -t for a terminal"},
		{"start -d x", "unknown flag -d: leave it out: start always returns"},
		{"run --rm x", "unknown flag --rm: leave it out: run leaves nothing behind"},
		{"run --allow example.org x", "unknown flag --allow: use --net allow=HOST"},
		{"diff --name-only box", "unknown flag --name-only: leave it out: diff lists names"},
		{"logs -n 5 web", "unknown flag -n: use --tail"},
		{"cp -a src web:", "unknown flag -a: use --recursive"},
		{"run --ulimit nofile=5 x", "unknown flag --ulimit: use --nofile, --fsize or --stack"},
		{"run --pids-limit 5 x", "unknown flag --pids-limit: use --pids"},
		{"start --time_limit 5 x", "unknown flag --time_limit: use --timeout"},
		{"kill -9 web", "unknown flag -9: use -s 9 to send a signal, or --grace 0 to kill at once"},
		{"kill -KILL web", "unknown flag -KILL: use -s KILL to send a signal, or --grace 0 to kill at once"},
		{"run -interval x", "unknown flag -interval"},
		{"run -d x", "unknown flag -d, which is a flag of exec"},

		// Number of names.
		{"ps x y", "unexpected argument y"},
		{"doctor --json x", "unexpected argument x"},
		{"wait", "no sandbox given"},
		{"logs a b", "unexpected argument b"},
		{"snapshot create box base", "unexpected argument base: use --name base"},
		{"kill a b", ""},
		{"wait --help a b", ErrHelp.Error()},
		{"run -qh x", ErrHelp.Error()},
		{"run x --help", ""},
	} {
		_, _, err := parseLine(tt.line)
		if err == nil {
			err = errors.New("")
		}
		check.NoDiff(t, gocmp.Diff(tt.want, err.Error()), "%q (-want +got)", tt.line)
	}
}

func TestExecWords(t *testing.T) {
	for _, tt := range []struct{ line, sandbox, command, err string }{
		{"web true", "web", "true", ""},
		{"web -- true", "web", "true", ""},
		{"-- web true", "web", "true", ""},
		{"-- web -- true", "web", "true", ""},
		{"--json web true --json", "web", "true --json", ""},
		{"-q --timeout 5 web sh -c x -- y", "web", "sh -c x -- y", ""},
		{"web --timeout 5 true --timeout 7", "web", "true --timeout 7", ""},
		{"web -- -x y", "web", "-x y", ""},
		{"web -- --", "web", "--", ""},
		{"web -", "web", "-", ""},
		{"web -- true -- x", "web", "true -- x", ""},
		{"web", "web", "", ""},
		{"web --", "web", "", ""},
		{"web -x y", "", "", "unknown flag -x"},
		{"", "", "", "no sandbox given"},
		{"--", "", "", "no sandbox given"},
	} {
		var x Exec
		err := cmp.Or(Parse(&x, strings.Fields(tt.line)), errors.New(""))
		check.That(t, err.Error() == tt.err && (tt.err != "" || x.Sandbox == tt.sandbox && strings.Join(x.Command, " ") == tt.command), "%q: %q, %q, %v", tt.line, x.Sandbox, x.Command, err)
	}
}

// FuzzParse checks that the command line is the verbatim end of the words, that its first word is not a flag except
// after --, and that names are neither lost nor invented.
func FuzzParse(f *testing.F) {
	for _, seed := range []string{"", "ls\n-l", "--timeout\n5\nls", "--", "--env\n--\n--\n-x", "-qt\n-\n-", "--nosuch=\n\n--json", "web\n--signal\nKILL", "web\n--grace", "--tag=\n\n--json", "-\xff", "a\n-a\nb\n--\n-c"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		args := strings.Split(text, "\n")
		var r Run
		if err := Parse(&r, args); err == nil && len(r.Command) > 0 {
			begin := len(args) - len(r.Command)
			check.Require(t, begin >= 0 && slices.Equal(r.Command, args[begin:]), "%q: %q is not their end", args, r.Command)
			check.That(t, !isFlag(r.Command[0]) || begin != 0 && args[begin-1] == "--", "%q: %q is taken for the command", args, r.Command)
		}
		var k Kill
		if err := Parse(&k, args); err == nil {
			for _, word := range k.Sandboxes {
				check.That(t, slices.Contains(args, word), "%q: invented %q", args, word)
			}
		}
	})
}

// --json is set despite errors before or after it, but not by a word that may belong to the command.
func TestParseAfterAnError(t *testing.T) {
	for line, want := range map[string]bool{
		"run --json --badflag x": true, "run --badflag --json x": true, "run --badflag 5 --json x": true, "run --timeout --json x": true, "ps x y --json": true, "kill --badflag x y --json": true,
		"run --timeout=x y --json": false, "run --badflag -- --json": false, "run --badflag x y --json": false, "run --json=x y": false, "doctor --badflag": false,
	} {
		flags, _, err := parseLine(line)
		got := field(flags, "JSON").Bool()
		check.That(t, got == want && err != nil, "%q: JSON %v, want %v; error %v", line, got, want, err)
	}
}
