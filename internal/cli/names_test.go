package cli

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sbxrun/sbxrun/internal/values"
)

func TestParseNames(t *testing.T) {
	def := Kill{Signal: "TERM", Grace: values.Duration(5 * time.Second), ProofTimeout: values.Duration(5 * time.Second)}
	with := func(change func(*Kill)) Kill {
		k := def
		change(&k)
		return k
	}
	kill := func(k *Kill) { k.Signal = "KILL" }
	for _, tt := range []struct {
		line  string
		flags Kill
		names string
	}{
		{"", def, ""},
		{"web", def, "web"},
		{"web db", def, "web db"},
		{"--signal KILL web", with(kill), "web"},
		{"web --signal KILL", with(kill), "web"},
		{"web --signal=KILL db", with(kill), "web db"},
		{"web -a", with(func(k *Kill) { k.All = true }), "web"},
		{"--tag a=b web --tag c=d", with(func(k *Kill) { k.Tag = []string{"a=b", "c=d"} }), "web"},
		{"--signal KILL -- --signal HUP", with(kill), "--signal HUP"},
		{"web -- -x --", def, "web -x --"},
		{"--", def, ""},
		{"- web", def, "- web"},
		{"--grace 0 web --proof-timeout 1s --json -h", with(func(k *Kill) {
			k.Grace, k.ProofTimeout, k.JSON, k.Help = 0, values.Duration(time.Second), true, true
		}), "web"},
	} {
		var got Kill
		words, err := ParseNames(&got, strings.Fields(tt.line))
		if err != nil {
			t.Errorf("%q: %v", tt.line, err)
			continue
		}
		if diff := cmp.Diff(tt.flags, got); diff != "" {
			t.Errorf("%q (-want +got):\n%s", tt.line, diff)
		}
		if diff := cmp.Diff(tt.names, strings.Join(words, " ")); diff != "" {
			t.Errorf("%q: names (-want +got):\n%s", tt.line, diff)
		}
	}
	// Words that no blank can separate, and a value of no UTF-8.
	words, err := ParseNames(&Kill{}, []string{"", "a b", "\xff"})
	if err != nil || !slices.Equal(words, []string{"", "a b", "\xff"}) {
		t.Errorf("got %q, %v", words, err)
	}
}

func TestParseNamesErrors(t *testing.T) {
	for _, tt := range []struct {
		parse      func([]string) error
		line, want string
	}{
		{names[Kill], "web --signal", "--signal: needs a value"},
		{names[Kill], "--grace --tag", "--grace: "},
		{names[Kill], "web --nosuch", "unknown flag --nosuch"},
		{names[Kill], "--grace -1s web", "--grace: "},
		{names[Kill], "--grace 1.5x web", "--grace: "},
		{names[Wait], "web --ready --log x", "--ready and --log can't be used together"},
		{names[Logs], "web --stream stderr", ""},
		{names[Logs], "web --stream both", `--stream "both": want stdout or stderr`},
		{names[Logs], "web --stream=", `--stream "": want stdout or stderr`},
		{names[Ps], "--status lost --status failed", ""},
		{names[Ps], "--status failed --status dead", `--status "dead": want starting, running, completed, failed, killed, error or lost`},
		{names[Ps], "--json --names", "--names and --json can't be used together"},
		{parses[Start], "--ready-tcp 80 --ready-log x y", "--ready-tcp and --ready-log can't be used together"},
	} {
		err := tt.parse(strings.Fields(tt.line))
		switch {
		case tt.want == "" && err != nil:
			t.Errorf("%q: %v", tt.line, err)
		case tt.want != "" && (err == nil || !strings.HasPrefix(err.Error(), tt.want)):
			t.Errorf("%q: got %v, want %s", tt.line, err, tt.want)
		}
	}
}

// FuzzParseNames: no word is lost or invented, and what is no flag stays as it is.
func FuzzParseNames(f *testing.F) {
	for _, seed := range []string{"", "web\n--signal\nKILL", "--\n--signal", "-a\n-\n--", "web\n--grace", "--tag=\n\n--json"} {
		f.Add(seed)
	}
	k, err := New(&Kill{})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, text string) {
		args := strings.Split(text, "\n")
		flags, names, missing := separate(k.Model, args)
		got := slices.Concat(flags, names)
		if missing != "" {
			got = append(got, missing)
		}
		want := slices.Clone(args)
		if i := len(want) - len(got); i == 1 {
			at := slices.Index(want, "--") // of several any will do
			if at < 0 {
				t.Fatalf("%q: lost a word: %q %q %q", args, flags, names, missing)
			}
			want = slices.Delete(want, at, at+1)
		}
		slices.Sort(want)
		slices.Sort(got)
		if !slices.Equal(want, got) {
			t.Errorf("%q: flags %q, names %q, missing %q", args, flags, names, missing)
		}
		_, _ = ParseNames(&Kill{}, args) // must not panic
	})
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
		payload, err := Parse(&Exec{}, strings.Fields(tt.line))
		if err != nil {
			t.Errorf("%q: %v", tt.line, err)
			continue
		}
		name, command, err := SplitExec(payload)
		got := [3]string{name, strings.Join(command, " "), ""}
		if err != nil {
			got[2] = err.Error()
		}
		if diff := cmp.Diff([3]string{tt.name, tt.command, tt.err}, got); diff != "" {
			t.Errorf("%q (-want +got):\n%s", tt.line, diff)
		}
	}
}
