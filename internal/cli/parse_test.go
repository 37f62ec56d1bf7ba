package cli

import (
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
)

// byKong parses without the quick way.
func byKong[F any](args []string) (flags F, payload []string, err error) {
	k, err := New(&flags)
	if err != nil {
		return flags, nil, err
	}
	words, payload := split(k.Model, args)
	_, err = k.Parse(words)
	return flags, payload, err
}

// same checks that what the quick way accepts is what kong makes of it.
func same[F any](t *testing.T, args []string) (wasQuick bool) {
	t.Helper()
	var got F
	payload, ok := quick(&got, args)
	if !ok {
		return false
	}
	want, wantPayload, err := byKong[F](args)
	if err != nil {
		t.Fatalf("%q: kong says %v, the quick way nothing", args, err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%q (-kong +quick):\n%s", args, diff)
	}
	if !slices.Equal(wantPayload, payload) {
		t.Errorf("%q: payload %q by kong, %q by the quick way", args, wantPayload, payload)
	}
	return true
}

func TestQuickAgreesWithKong(t *testing.T) {
	for _, c := range []struct {
		line  string
		quick bool // must be, or its speed is lost
	}{
		{"true", true},
		{"--timeout 5 python3 job.py --timeout 7", true},
		{"--timeout=5 --grace=1s --proof-timeout 2 -- x", true},
		{"--ro-bind /a --ro-bind /b:/c --bind=/d --env A=b --env B --tmpfs /x:1M --json x", true},
		{"--report fd:3 --max-output 10K --quiet --inherit-env --net host x y", true},
		{"--tmp-size 1G --user 1:2 --hostname h --workdir /w --env-file f --print-command --tty x", true},
		{"--ro-bind-try /a --bind-try /b x", true},
		{"--env= x", false},
		{"-t x", true},
		{"-qt --timeout 5 x", true},
		{"-x y", false},
		{"--nosuch x", false},
		{"--timeout", false},
		{"--timeout -1 x", false},
		{"--timeout 1.5x x", false},
		{"--json=false x", false},
		{"--version", true},
		{"--help", true},
		{"-- --timeout 5", true},
		{"- x", true},
		{"", true},
		{"--on-pressure wait --wait-timeout 10s --max-parallel 8 --warn 50 --alert=90.5 x", true},
		{"--max-parallel many x", false},
		{"--alert 101 x", false},
	} {
		if got := same[Run](t, strings.Fields(c.line)); got != c.quick && c.line != "--env= x" {
			t.Errorf("%q: quick is %v", c.line, got)
		}
	}
}

// TestQuickAgreesWithKongEmbedded: the same for structs that embed others.
func TestQuickAgreesWithKongEmbedded(t *testing.T) {
	for _, c := range []struct {
		command func(*testing.T, []string) bool
		line    string
		quick   bool
	}{
		{same[Start], "", true},
		{same[Start], "--name web --tag a=b --tag c=d=e --env A=b --net host -- sleep 9", true},
		{same[Start], "--timeout 1h --idle-timeout=5m --ro-bind /a --tmpfs /x --hostname h --log-max 1M --json x --json", true},
		{same[Start], "--wait-ready --ready-interval 1s --ready-timeout 2 --inherit-env --env-file f --user 1 x", true},
		{same[Start], "--ready-tcp 80 x", false}, // excludes the other two
		{same[Start], "--ready-tcp 80 --ready-log x y", false},
		{same[Start], "-t x", false},
		{same[Start], "-h", true},
		{same[Exec], "web true", true},
		{same[Exec], "--timeout 5 --grace 1 --env A=b --env B --env-file f --inherit-env -- web true", true},
		{same[Exec], "-dqt --workdir=/w --report fd:3 --max-output 1K --proof-timeout 2 web -- true -x", true},
		{same[Exec], "--json --quiet --detach --tty web", true},
		{same[Exec], "--net host web true", false},
		{same[Exec], "-x web true", false},
	} {
		if got := c.command(t, strings.Fields(c.line)); got != c.quick {
			t.Errorf("%q: quick is %v", c.line, got)
		}
	}
}

func TestQuickKeepsBytes(t *testing.T) {
	var flags Run
	if _, err := Parse(&flags, []string{"-q", "--bind", "/\xff:/x", "y"}); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"/\xff:/x"}, flags.Bind); diff != "" {
		t.Error(diff)
	}
}

func TestMissingValue(t *testing.T) {
	for _, line := range []string{"--timeout", "--quiet --timeout", "-q --env A=b --report"} {
		args := strings.Fields(line)
		_, err := Parse(&Run{}, args)
		if want := args[len(args)-1] + ": needs a value"; err == nil || err.Error() != want {
			t.Errorf("%q: got %v, want %s", line, err, want)
		}
	}
	// A value that looks like a flag is still one.
	if _, err := Parse(&Run{}, []string{"--env", "A=--timeout", "x"}); err != nil {
		t.Error(err)
	}
}

func FuzzQuick(f *testing.F) {
	f.Add("--timeout\n5\n--env\nA=b\n--\nx")
	f.Add("--tty\n--json\n-")
	f.Add("--name\nweb\n--ready-tcp\n80\n--net=host\nx")
	f.Add("-dq\n--workdir\n/w\nweb\n--\nx")
	f.Fuzz(func(t *testing.T, text string) {
		if utf8.ValidString(text) {
			args := strings.Split(text, "\n")
			same[Run](t, args)
			same[Start](t, args)
			same[Exec](t, args)
		}
	})
}
