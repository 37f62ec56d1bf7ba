package cli

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestSplit(t *testing.T) {
	k, err := New(&Run{})
	if err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name, in       string // words separated by blanks
		flags, payload string
	}{
		{"command", "true", "", "true"},
		{"command with arguments", "ls -l --timeout 5", "", "ls -l --timeout 5"},
		{"flag with its value", "--timeout 5 ls", "--timeout 5", "ls"},
		{"flag=value", "--timeout=5 ls", "--timeout=5", "ls"},
		{"flag=nothing", "--env= ls", "--env=", "ls"},
		{"value that looks like a command", "--report ls ls", "--report ls", "ls"},
		{"value that looks like a flag", "--env --tty ls", "--env --tty", "ls"},
		{"value that is --", "--env -- ls", "--env --", "ls"},
		{"switches", "--json --quiet ls", "--json --quiet", "ls"},
		{"short", "-t bash", "-t", "bash"},
		{"short ones together", "-qt bash -t", "-qt", "bash -t"},
		{"--", "-- ls", "", "ls"},
		{"-- before flags", "-- --timeout 5", "", "--timeout 5"},
		{"-- after flags", "--json -- ls", "--json", "ls"},
		{"-- twice", "-- -- ls", "", "-- ls"},
		{"-- before a name of ours", "-- ps", "", "ps"},
		{"-- later is the payload's", "ls -- x", "", "ls -- x"},
		{"-", "- x", "", "- x"},
		{"- after flags", "--json -", "--json", "-"},
		{"run later is the payload's", "--json run -- x", "--json", "run -- x"},
		{"unknown flag", "--nosuch ls", "--nosuch", "ls"},
		{"unknown flag with =", "--nosuch=ls ls", "--nosuch=ls", "ls"},
		{"unknown short flag", "-x ls", "-x", "ls"},
		{"no abbreviations", "--time 5", "--time", "5"},
		{"three dashes", "---timeout 5", "---timeout", "5"},
		{"single dash, long name", "-timeout 5", "-timeout", "5"},
		{"flags only", "--json --timeout 5", "--json --timeout 5", ""},
		{"flag without its value", "--timeout", "--timeout", ""},
		{"-- only", "--", "", ""},
		{"nothing", "", "", ""},
	}
	for _, tt := range tests {
		flags, payload := split(k.Model, strings.Fields(tt.in))
		got := [2]string{strings.Join(flags, " "), strings.Join(payload, " ")}
		if diff := cmp.Diff([2]string{tt.flags, tt.payload}, got); diff != "" {
			t.Errorf("%s: %q (-want +got):\n%s", tt.name, tt.in, diff)
		}
	}
	// Words that no blank can separate.
	for _, args := range [][]string{{"", "x"}, {"a b"}, {"\n--json"}, {" --json"}, {"\xff"}} {
		if flags, payload := split(k.Model, args); len(flags) != 0 || !slices.Equal(payload, args) {
			t.Errorf("%q: flags %q, payload %q", args, flags, payload)
		}
	}
}

// FuzzSplit: the payload is the end of the words, verbatim; before it are the
// flags, with -- between the two or nothing; and the first word of a payload
// that no -- announces is no flag.
func FuzzSplit(f *testing.F) {
	for _, seed := range []string{"", "ls\n-l", "--timeout\n5\nls", "--", "--env\n--\n--\n-x", "-qt\n-\n-", "--nosuch=\n\n--json"} {
		f.Add(seed)
	}
	k, err := New(&Run{})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, text string) {
		args := strings.Split(text, "\n")
		flags, payload := split(k.Model, args)
		announced := len(flags)+len(payload) == len(args)-1
		switch {
		case announced && args[len(flags)] != "--":
			t.Errorf("%q: lost %q", args, args[len(flags)])
		case !announced && len(flags)+len(payload) != len(args):
			t.Errorf("%q: flags %q, payload %q", args, flags, payload)
		case !announced && len(payload) > 0 && payload[0] != "-" && strings.HasPrefix(payload[0], "-"):
			t.Errorf("%q: %q is taken for the command", args, payload[0])
		}
		if !slices.Equal(flags, args[:len(flags)]) || !slices.Equal(payload, args[len(args)-len(payload):]) {
			t.Errorf("%q: flags %q, payload %q are not its two ends", args, flags, payload)
		}
	})
}
