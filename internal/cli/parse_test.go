package cli

import (
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sbxrun/sbxrun/internal/values"
)

// newFlags is an empty struct of a command's flags.
func newFlags(command string) any {
	i := slices.IndexFunc(Commands(), func(c Command) bool { return c.Name == command })
	return reflect.New(reflect.TypeFor[CLI]().Field(i).Type).Interface()
}

// parseLine parses words separated by blanks, the first of which names the command.
func parseLine(line string) (flags any, words []string, err error) {
	args := strings.Fields(line)
	flags = newFlags(args[0])
	words, err = Parse(flags, args[1:])
	return flags, words, err
}

// want is the flags of a command that was given nothing, with some changes.
func want[F any](t *testing.T, change func(*F)) any {
	t.Helper()
	var f F
	if _, err := commandOf(&f).parse(nil); err != nil {
		t.Fatal(err)
	}
	if change != nil {
		change(&f)
	}
	return &f
}

func TestDefaults(t *testing.T) {
	var r Run
	if _, err := Parse(&r, nil); err != nil {
		t.Fatal(err)
	}
	if r.ProofTimeout != values.Span(5*time.Second) || r.TmpSize != 256<<20 || r.Net != "none" || r.Hostname != "sandbox" || r.Warn == 0 || r.Nice.Given {
		t.Errorf("%+v", r)
	}
	for _, c := range Commands() {
		if _, err := c.parse(nil); err != nil {
			t.Errorf("%s: %v", c.Name, err)
		}
	}
}

func TestParse(t *testing.T) {
	const second = values.Duration(time.Second)
	nothing := want[Run](t, nil)
	for _, tt := range []struct {
		line  string
		flags any
		words string
	}{
		// A command line is verbatim from the first word that is no flag on, or after --.
		{"run", nothing, ""},
		{"run true", nothing, "true"},
		{"run ls -l --timeout 5", nothing, "ls -l --timeout 5"},
		{"run -- ls", nothing, "ls"},
		{"run -- --timeout 5", nothing, "--timeout 5"},
		{"run -- -- ls", nothing, "-- ls"},
		{"run --", nothing, ""},
		{"run ls -- x", nothing, "ls -- x"},
		{"run - x", nothing, "- x"},
		{"run -- ps", nothing, "ps"},
		{"run --timeout 5 ls", want(t, func(r *Run) { r.Timeout = 5 * second }), "ls"},
		{"run --timeout=5 --grace=1s -- x --timeout 7", want(t, func(r *Run) { r.Timeout, r.Grace = 5*second, second }), "x --timeout 7"},
		{"run --timeout 1 --timeout 2 x", want(t, func(r *Run) { r.Timeout = 2 * second }), "x"},
		{"run --json run -- x", want(t, func(r *Run) { r.JSON = true }), "run -- x"},
		{"run -qt bash -t", want(t, func(r *Run) { r.Quiet, r.Tty = true, true }), "bash -t"},
		// Behind a letter that needs a value comes that, in the same word or the next.
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
		{"run --net host --seccomp=off --limits best-effort x", want(t, func(r *Run) { r.Net, r.Seccomp, r.Limits.Limits = "host", "off", "best-effort" }), "x"},
		{"start --name web --tag a=b --tag c=d=e -- sleep 9", want(t, func(s *Start) { s.Name, s.Tag = "web", []string{"a=b", "c=d=e"} }), "sleep 9"},
		{"start --ready-tcp 80 x", want(t, func(s *Start) { s.ReadyTCP = "80" }), "x"},
		{"exec -dq --workdir=/w web -- true -x", want(t, func(x *Exec) { x.Detach, x.Quiet, x.Workdir = true, true, "/w" }), "web -- true -x"},
		{"exec -- web true", want[Exec](t, nil), "web true"},

		// Names come before and after flags.
		{"kill", want[Kill](t, nil), ""},
		{"kill web db", want[Kill](t, nil), "web db"},
		{"kill web --signal KILL db", want(t, func(k *Kill) { k.Signal = 9 }), "web db"},
		{"kill -s 9 web", want(t, func(k *Kill) { k.Signal = 9 }), "web"},
		{"kill --tag a=b web --tag c=d -a", want(t, func(k *Kill) { k.Tag, k.All = []string{"a=b", "c=d"}, true }), "web"},
		{"kill -k 7 web", want(t, func(k *Kill) { k.Grace = 7 * second }), "web"},
		{"kill web --kill-after=7", want(t, func(k *Kill) { k.Grace = 7 * second }), "web"},
		{"kill --grace 0 web --proof-timeout 1s --json", want(t, func(k *Kill) { k.Grace, k.ProofTimeout, k.JSON = 0, values.Span(second), true }), "web"},
		{"kill web -- --signal HUP --", want[Kill](t, nil), "web --signal HUP --"},
		{"kill - web", want[Kill](t, nil), "- web"},
		{"ps --status lost --status failed", want(t, func(p *Ps) { p.Status = []string{"lost", "failed"} }), ""},
		{"wait web --timeout 1m", want(t, func(w *Wait) { w.Timeout = 60 * second }), "web"},
	} {
		flags, words, err := parseLine(tt.line)
		if err != nil {
			t.Errorf("%q: %v", tt.line, err)
			continue
		}
		if diff := cmp.Diff(tt.flags, flags); diff != "" {
			t.Errorf("%q (-want +got):\n%s", tt.line, diff)
		}
		if got := strings.Join(words, " "); got != tt.words {
			t.Errorf("%q: words %q, want %q", tt.line, got, tt.words)
		}
	}
}

// Words that no blank can separate, and values that are not UTF-8, stay what they are.
func TestParseBytes(t *testing.T) {
	for _, words := range [][]string{{"", "x"}, {"a b"}, {"\n--json"}, {" --json"}, {"\xff"}} {
		for _, flags := range []any{&Run{}, &Kill{}} {
			if got, err := Parse(flags, words); err != nil || !slices.Equal(got, words) {
				t.Errorf("%T %q: %q, %v", flags, words, got, err)
			}
		}
	}
	var r Run
	if _, err := Parse(&r, []string{"--bind", "/\xff:/x", "y"}); err != nil || !slices.Equal(r.Bind, []string{"/\xff:/x"}) {
		t.Errorf("%q, %v", r.Bind, err)
	}
}

func TestParseErrors(t *testing.T) {
	for _, tt := range []struct{ line, want string }{
		{"run --timeout", "--timeout: needs a value"},
		{"run -q --env A=b --report", "--report: needs a value"},
		{"run --timeout -- x", `--timeout: needs a value, and "--" looks like a flag; if it is the value, write --timeout=--`},
		{"run --env --tty ls", `--env: needs a value, and "--tty" looks like a flag; if it is the value, write --env=--tty`},
		{"run --timeout -1 x", `--timeout: invalid duration "-1": want seconds (5, 0.5) or a value with a unit (1500ms, 5m, 1h, 1d)`},
		{"run --cwd src x", `--cwd "src": want ro, rw, overlay or none; --workdir DIR has the command start there`},
		{"run --timeout= x", `--timeout: invalid duration "": want seconds (5, 0.5) or a value with a unit (1500ms, 5m, 1h, 1d)`},
		{"run --report= x", "--report: the value is empty"},
		{"run --workdir= --report r x", "--workdir: the value is empty"},
		{"run --json=maybe x", `--json: "maybe": want true or false`},
		{"run --net bogus x", `--net "bogus": want none, host or allow=host[:port],...`},
		{"run --on-pressure= x", `--on-pressure "": want refuse, wait or ignore`},
		{"start --name= x", "--name: the name is empty"},
		{"start --ready-tcp 1 --ready-log x y", "--ready-tcp and --ready-log can't be used together"},
		{"wait web --log x --ready", "--ready and --log can't be used together"},
		{"ps --json --names", "--names and --json can't be used together"},
		{"ps --status failed --status dead", `--status "dead": want starting, running, completed, failed, killed, error or lost`},
		{"kill --grace --tag", `--grace: needs a value, and "--tag" looks like a flag; if it is the value, write --grace=--tag`},

		{"run -k", "--grace: needs a value"},
		{"run -k -s INT x", `--grace: needs a value, and "-s" looks like a flag; if it is the value, write --grace=-s`},
		{"run -sFOO x", `--signal: no such signal "FOO": want a name such as INT, or a number from 1 to 64`},

		// What may be meant.
		{"run --kill 5 x", "unknown flag --kill, did you mean --kill-after?"},
		{"run --nosuch x", "unknown flag --nosuch"},
		{"run --nosuch=ls x", "unknown flag --nosuch"},
		{"run -x y", "unknown flag -x"},
		{"run -qx y", "unknown flag -x"},
		{"run -é y", "unknown flag -é"},
		{"run --time 5 x", "unknown flag --time, did you mean --timeout?"},
		{"start --lifetime 5 x", "unknown flag --lifetime, did you mean --timeout?"},
		{"run --timeotu 5 x", "unknown flag --timeotu, did you mean --timeout?"},
		{"run ---timeout 5 x", "unknown flag ---timeout, did you mean --timeout?"},
		{"run -timeout 5 x", "unknown flag -timeout, did you mean --timeout?"},
		{"run -e A=b x", "unknown flag -e, did you mean --env or --env-file?"},
		{"start -t 5 x", "unknown flag -t, did you mean --tag, --timeout, --tmpfs, --tmp-size or --tools?"},
		{"ps --jsn", "unknown flag --jsn, did you mean --json?"},
		{"exec --net host web true", "unknown flag --net, which is a flag of run, start"},
		{"start --get out x", "unknown flag --get, which is a flag of run; in a sandbox that lives on, that is sbxrun cp SANDBOX:SRC DST"},
		{"exec --diff box x", "unknown flag --diff, which is a flag of run; in a sandbox that lives on, that is sbxrun diff SANDBOX"},
		{"run -it bash", "unknown flag -it: stdin is the command's already; -t for a terminal"},
		{"exec --interactive web bash", "unknown flag --interactive: stdin is the command's already; -t for a terminal"},
		{"start -d x", "unknown flag -d: leave it out: start always returns"},
		{"start --detach x", "unknown flag --detach: leave it out: start always returns"},
		{"run --rm x", "unknown flag --rm: leave it out: run leaves nothing behind"},
		{"logs -n 5 web", "unknown flag -n, did you mean --tail?"},
		{"logs --lines=5 web", "unknown flag --lines, did you mean --tail?"},
		{"cp -a src web:", "unknown flag -a, did you mean --recursive?"},
		{"run --ulimit nofile=5 x", "unknown flag --ulimit, did you mean --fsize, --nofile or --stack?"},
		{"run --pids-limit 5 x", "unknown flag --pids-limit, did you mean --pids?"},
		{"start --time_limit 5 x", "unknown flag --time_limit, did you mean --timeout?"},
		{"kill -9 web", "unknown flag -9: to send a signal write -s KILL; --grace 0 kills at once"},
		{"kill -KILL web", "unknown flag -KILL: to send a signal write -s KILL; --grace 0 kills at once"},
		{"kill -SIGKILL web", "unknown flag -SIGKILL: to send a signal write -s KILL; --grace 0 kills at once"},
		{"kill -TERM web", "unknown flag -TERM: to send a signal write -s TERM; --grace 0 kills at once"},
		{"kill -40 web", "unknown flag -40: to send a signal write -s 40; --grace 0 kills at once"},
		{"kill --nosuch web", "unknown flag --nosuch"},
		{"run -interval x", "unknown flag -i"},
		{"run -d x", "unknown flag -d, did you mean --data-dir or --diff?"},

		// How many names.
		{"ps x y", "ps takes one sandbox, got 2"},
		{"stats x", `stats takes no names, got "x"`},
		{"doctor --json x", `doctor takes no names, got "x"`},
		{"wait", "wait takes one sandbox, got 0"},
		{"logs a b", "logs takes one sandbox, got 2"},
		{"kill a b", ""},
		{"wait --help a b", ErrHelp.Error()},
		{"run -qh x", ErrHelp.Error()},
		{"run x --help", ""},
	} {
		_, _, err := parseLine(tt.line)
		if err == nil {
			err = errors.New("")
		}
		if diff := cmp.Diff(tt.want, err.Error()); diff != "" {
			t.Errorf("%q (-want +got):\n%s", tt.line, diff)
		}
	}
}

func TestSplitExec(t *testing.T) {
	for _, tt := range []struct{ line, name, command, err string }{
		{"web true", "web", "true", ""},
		{"web -- true", "web", "true", ""},
		{"-- web true", "web", "true", ""},
		{"-- web -- true", "web", "true", ""},
		{"--json web true --json", "web", "true --json", ""},
		{"-q --timeout 5 web sh -c x -- y", "web", "sh -c x -- y", ""},
		{"web -- -x y", "web", "-x y", ""},
		{"web -- --", "web", "--", ""},
		{"web -", "web", "-", ""},
		{"web -- true -- x", "web", "true -- x", ""},
		{"web --timeout 5 true", "", "", "--timeout: flags come before the sandbox; a command of such a name comes after --"},
		{"web", "", "", "no command given"},
		{"web --", "", "", "no command given"},
		{"", "", "", "no sandbox given"},
		{"--", "", "", "no sandbox given"},
		{"-- -- true", "", "", "no sandbox given"},
	} {
		words, err := Parse(&Exec{}, strings.Fields(tt.line))
		if err != nil {
			t.Errorf("%q: %v", tt.line, err)
			continue
		}
		name, command, err := SplitExec(words)
		got := [3]string{name, strings.Join(command, " "), ""}
		if err != nil {
			got[2] = err.Error()
		}
		if diff := cmp.Diff([3]string{tt.name, tt.command, tt.err}, got); diff != "" {
			t.Errorf("%q (-want +got):\n%s", tt.line, diff)
		}
	}
}

// FuzzParse: a command line is the end of the words, verbatim, and its first word is no
// flag unless -- stands before it; of names and flags no word is lost or invented.
func FuzzParse(f *testing.F) {
	for _, seed := range []string{"", "ls\n-l", "--timeout\n5\nls", "--", "--env\n--\n--\n-x", "-qt\n-\n-", "--nosuch=\n\n--json", "web\n--signal\nKILL", "web\n--grace", "--tag=\n\n--json", "-\xff"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		args := strings.Split(text, "\n")
		if words, err := Parse(&Run{}, args); err == nil && len(words) > 0 {
			begin := len(args) - len(words)
			if begin < 0 || !slices.Equal(words, args[begin:]) {
				t.Fatalf("%q: %q is not their end", args, words)
			}
			if isFlag(words[0]) && (begin == 0 || args[begin-1] != "--") {
				t.Errorf("%q: %q is taken for the command", args, words[0])
			}
		}
		if words, err := Parse(&Kill{}, args); err == nil {
			for _, word := range words {
				if !slices.Contains(args, word) {
					t.Errorf("%q: invented %q", args, word)
				}
			}
		}
	})
}

// What is right is set, whatever is wrong before or after it; but what may be the command's is
// nobody's flag.
func TestParseAfterAnError(t *testing.T) {
	for line, want := range map[string]bool{
		"run --json --badflag x": true, "run --badflag --json x": true, "run --badflag 5 --json x": true, "run --timeout --json x": true, "ps x y --json": true, "kill --badflag x y --json": true,
		"run --timeout=x y --json": false, "run --badflag -- --json": false, "run --badflag x y --json": false, "run --json=x y": false, "doctor --badflag": false,
	} {
		flags, _, err := parseLine(line)
		if got := WantsJSON(flags); got != want || err == nil {
			t.Errorf("%q: JSON %v, want %v; error %v", line, got, want, err)
		}
	}
}
