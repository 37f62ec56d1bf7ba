package values

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sbxrun/sbxrun/tests/check"
)

// hostile are words that are special to a shell.
var hostile = []string{
	"", " ", "\n", "\t", "'", `"`, `\`, `\'`, "''", `'"'"'`, "'; touch x; '", "$HOME", "`id`", "$(id)", "a b", "a\nb\n", "*", "?", "[a]", "~", "~root", "#", "# x",
	"!", "!!", "&", "|", ";", "<", ">", "(", ")", "{a,b}", "-", "-n", "--", "%s", `%d\n`, "A=b", "=", "^", "\x01\x1b[2J", "\x7f", "\xff\xfe", "ä€", "\u2028", "é'\xff'",
	"\r", "\r\n", "$'x'", "plain-word_1.2/3:4,5@6%7+8=9",
}

// readBack returns the words that sh(1) reads from a line.
func readBack(t *testing.T, line string) []string {
	t.Helper()
	out, err := exec.Command("sh", "-c", `printf '%s\0' `+line).Output()
	check.Require(t, err == nil, "%s: %v", line, err)
	return strings.Split(strings.TrimSuffix(string(out), "\x00"), "\x00")
}

func TestShellQuote(t *testing.T) {
	var line []string
	for _, word := range hostile {
		line = append(line, ShellQuote(word))
	}
	check.NoDiff(t, cmp.Diff(hostile, readBack(t, strings.Join(line, " "))), "(-want +got)")
	// Words that need no quotes stay readable.
	for _, word := range []string{"/usr/bin/env", "--ro-bind", "A=b", "1.5"} {
		check.Equal(t, ShellQuote(word), word, "ShellQuote")
	}
}

func FuzzShellQuote(f *testing.F) {
	for _, word := range hostile {
		f.Add(word)
	}
	f.Fuzz(func(t *testing.T, word string) {
		if strings.Contains(word, "\x00") || len(word) > 100_000 {
			return // cannot be an argument
		}
		check.NoDiff(t, cmp.Diff([]string{word, "x"}, readBack(t, ShellQuote(word)+" x")), "ShellQuote(%q) (-want +got)", word)
	})
}

func TestSplitColon(t *testing.T) {
	tests := []struct {
		in   string
		want []string
	}{
		{"", []string{""}},
		{":", []string{"", ""}},
		{"::", []string{"", "", ""}},
		{"a:b", []string{"a", "b"}},
		{`a\:b`, []string{"a:b"}},
		{`a\\:b`, []string{`a\`, "b"}},
		{`a\\\:b`, []string{`a\:b`}},
		{`a\`, []string{`a\`}},
		{`\`, []string{`\`}},
		{`\n:\ `, []string{`\n`, `\ `}}, // a backslash before anything else stands for itself
		{"\xff:\xfe", []string{"\xff", "\xfe"}},
	}
	for _, tt := range tests {
		check.NoDiff(t, cmp.Diff(tt.want, SplitColon(tt.in)), "SplitColon(%q) (-want +got)", tt.in)
	}
}
