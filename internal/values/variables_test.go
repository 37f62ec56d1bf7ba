package values

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sbxrun/sbxrun/tests/check"
)

// host is sbxrun's own environment.
func host(t testing.TB) {
	for name, value := range map[string]string{"LANG": "C.UTF-8", "EMPTY": "", "KEY": "line 1\nline 2"} {
		t.Setenv(name, value)
	}
	os.Unsetenv("UNSET")
}

func TestParseVar(t *testing.T) {
	host(t)
	tests := []struct {
		arg  string
		want Var
		ok   bool
	}{
		{"A=1", Var{"A", "1"}, true},
		{"_a9=x", Var{"_a9", "x"}, true},
		{"A=", Var{"A", ""}, true},
		{"A==", Var{"A", "="}, true},
		{"A=b=c", Var{"A", "b=c"}, true},
		{"A= \"b\" $C ", Var{"A", " \"b\" $C "}, true},
		{"A=1\n2\r\n", Var{"A", "1\n2\r\n"}, true},
		{"A=\xff", Var{"A", "\xff"}, true},
		{"LANG", Var{"LANG", "C.UTF-8"}, true},
		{"LANG=de", Var{"LANG", "de"}, true},
		{"EMPTY", Var{"EMPTY", ""}, true},
		{"KEY", Var{"KEY", "line 1\nline 2"}, true},
		{"UNSET", Var{"UNSET", ""}, false},
	}
	for _, tt := range tests {
		got, ok, err := ParseVar(tt.arg)
		check.That(t, err == nil && ok == tt.ok && got == tt.want, "ParseVar(%q) = %q, %v, %v; want %q, %v", tt.arg, got, ok, err, tt.want, tt.ok)
	}
}

func TestParseVarRefused(t *testing.T) {
	for _, name := range []string{"", "1A", "A-B", "A ", "A\n", "Ä"} {
		got, ok, err := ParseVar(name + "=hunter2")
		check.That(t, err != nil && err.Error() == fmt.Sprintf("environment variable %q: invalid name: want letters, digits and underscores, not a digit first", name) && !ok && got == (Var{}), "%q gives %q, %v, %v", name, got, ok, err)
	}
	got, ok, err := ParseVar("A=hunter2\x00")
	check.That(t, err != nil && err.Error() == `environment variable "A": value contains a NUL byte` && !ok && got == (Var{}), "%q, %v, %v", got, ok, err)
}

func TestParseVars(t *testing.T) {
	host(t)
	tests := []struct {
		name, in string
		want     []Var
	}{
		{"empty", "", nil},
		{"blank lines", "\n \n\t\n\r\n", nil},
		{"comments", "# a\n  # b=c\n\t#\nA=1\n", []Var{{"A", "1"}}},
		{"no comment after a value", "A=1 # 2\n", []Var{{"A", "1 # 2"}}},
		{"no newline at the end", "A=1\nB=2", []Var{{"A", "1"}, {"B", "2"}}},
		{"value verbatim", "A= \"x\" '$B' \\n \t\n", []Var{{"A", " \"x\" '$B' \\n \t"}}},
		{"equals in the value", "A=b=c\n", []Var{{"A", "b=c"}}},
		{"empty value", "A=\n", []Var{{"A", ""}}},
		{"blanks before the name", " \tA=1\n", []Var{{"A", "1"}}},
		{"DOS line ends", "A=1\r\nLANG\r\nB=2\r\r\n", []Var{{"A", "1"}, {"LANG", "C.UTF-8"}, {"B", "2\r"}}},
		{"byte order mark", "\ufeffA=1\n", []Var{{"A", "1"}}},
		{"byte order mark and comment", "\ufeff# x\nA=\ufeff\n", []Var{{"A", "\ufeff"}}},
		{"passed on", "LANG\nUNSET\nEMPTY\nKEY\n", []Var{{"LANG", "C.UTF-8"}, {"EMPTY", ""}, {"KEY", "line 1\nline 2"}}},
		{"duplicates", "A=1\nB=2\nA=3\n", []Var{{"A", "1"}, {"B", "2"}, {"A", "3"}}},
		{"not UTF-8", "A=\xff\xfe\n", []Var{{"A", "\xff\xfe"}}},
		{"as large as may be", "A=" + strings.Repeat("x", MaxVarsSize-2), []Var{{"A", strings.Repeat("x", MaxVarsSize-2)}}},
	}
	for _, tt := range tests {
		got, err := ParseVars([]byte(tt.in), "f")
		check.Must(t, err)
		check.NoDiff(t, cmp.Diff(tt.want, got), "%s (-want +got)", tt.name)
	}
}

// The text of an error has the line's number, and nothing of the line.
func TestParseVarsRefused(t *testing.T) {
	for _, tt := range []struct {
		name, in string
		line     int
		reason   error
	}{
		{"bad name", "# c\n\nA=1\n9=hunter2\n", 4, errName},
		{"shell syntax", "export A=hunter2\n", 1, errName},
		{"no name", "A=1\n=hunter2\n", 2, errName},
		{"blank before equals", "A =hunter2\n", 1, errName},
		{"blank after a name alone", "LANG \n", 1, errName},
		{"value over several lines", "KEY=-----BEGIN\nhunter2/+==\n", 2, errName},
		{"second byte order mark", "A=1\n\ufeffB=2\n", 2, errName},
		{"UTF-16", "\xff\xfeA\x00=\x001\x00", 1, errName},
		{"NUL in a value", "A=1\nB=hunter2\x00\n", 2, errNUL},
		{"NUL in a name", "A\x00=hunter2\n", 1, errName},
	} {
		got, err := ParseVars([]byte(tt.in), "my env")
		want := fmt.Sprintf(`read environment file "my env": line %d: %v`, tt.line, tt.reason)
		check.That(t, err != nil && err.Error() == want && got == nil, "%s: got %q, error %v\nwant error %s", tt.name, got, err, want)
	}
	_, err := ParseVars([]byte("A="+strings.Repeat("x", MaxVarsSize-1)), "f")
	check.That(t, err != nil && strings.HasSuffix(err.Error(), "larger than 1048576 bytes"), "%v", err)
}

func TestEnvironment(t *testing.T) {
	var s Environment
	got, ok := s.Lookup("A")
	check.That(t, !ok && s.Vars() == nil, "empty set has A=%q and %q", got, s.Vars())
	for _, v := range []Var{{"B", "1"}, {"A", "2"}, {"B", "3"}, {"C", ""}} {
		s.Put(v)
	}
	want := []Var{{"B", "3"}, {"A", "2"}, {"C", ""}}
	check.NoDiff(t, cmp.Diff(want, s.Vars()), "(-want +got)")
	s.Vars()[0].Value = "changed"
	got, ok = s.Lookup("B")
	check.That(t, got == "3" && ok, "Lookup(B) = %q, %v; want 3", got, ok)
	got, ok = s.Lookup("D")
	check.That(t, got == "" && !ok, "Lookup(D) = %q, %v; want none", got, ok)
}

func FuzzParseVars(f *testing.F) {
	host(f)
	for _, s := range []string{"", "A=1\nB", "# c\r\n\n A=b=c\r\n", "\ufeffLANG\nKEY\nUNSET", "export A=1", "A=\x00", "9=hunter2"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, in string) {
		vars, err := ParseVars([]byte(in), "f")
		if err != nil {
			// The text of an error depends only on the line number.
			var line int
			_, scanErr := fmt.Sscanf(err.Error(), `read environment file "f": line %d:`, &line)
			check.Require(t, scanErr == nil, "unexpected error: %v", err)
			lines := strings.Count(in, "\n") + 1
			check.Require(t, line >= 1 && line <= lines, "line %d of %d: %v", line, lines, err)
			reason := errors.Unwrap(err)
			check.Require(t, reason == errName || reason == errNUL, "unexpected reason: %v", err)
			return
		}
		check.Require(t, len(vars) <= strings.Count(in, "\n")+1, "%d variables from %q", len(vars), in)
		for _, v := range vars {
			pair := v.Name + "=" + v.Value
			got, ok, err := ParseVar(pair)
			check.Require(t, err == nil && ok && got == v, "%q gives %q, which parses to %q, %v, %v", in, v, got, ok, err)
			passed, ok := os.LookupEnv(v.Name)
			check.Require(t, strings.Contains(in, pair) || ok && passed == v.Value, "%q gives %q, which is not in it", in, v)
		}
	})
}
