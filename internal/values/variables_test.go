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
	tests := []struct {
		arg     string
		wantErr string
	}{
		{"", `environment variable "": invalid name: want letters, digits and underscores, not a digit first`},
		{"=hunter2", `environment variable "": invalid name: want letters, digits and underscores, not a digit first`},
		{"1A=hunter2", `environment variable "1A": invalid name: want letters, digits and underscores, not a digit first`},
		{"A-B=hunter2", `environment variable "A-B": invalid name: want letters, digits and underscores, not a digit first`},
		{"A =hunter2", `environment variable "A ": invalid name: want letters, digits and underscores, not a digit first`},
		{"A\n=hunter2", `environment variable "A\n": invalid name: want letters, digits and underscores, not a digit first`},
		{"Ä=hunter2", `environment variable "Ä": invalid name: want letters, digits and underscores, not a digit first`},
		{"A=hunter2\x00", `environment variable "A": value contains a NUL byte`},
	}
	for _, tt := range tests {
		got, ok, err := ParseVar(tt.arg)
		check.That(t, err != nil && err.Error() == tt.wantErr && !ok && got == (Var{}), "ParseVar(%q) = %q, %v, %v; want error %s", tt.arg, got, ok, err, tt.wantErr)
	}
}

func TestParseVars(t *testing.T) {
	host(t)
	tests := []struct {
		name string
		in   string
		want []Var
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
		t.Run(tt.name, func(t *testing.T) {
			got, err := ParseVars([]byte(tt.in), "f")
			check.Must(t, err)
			check.NoDiff(t, cmp.Diff(tt.want, got), "(-want +got)")
		})
	}
}

func TestParseVarsRefused(t *testing.T) {
	const badName = "invalid name: want letters, digits and underscores, not a digit first"
	tests := []struct {
		name    string
		in      string
		wantErr string
	}{
		{"bad name", "# c\n\nA=1\n9=hunter2\n", `read environment file "my env": line 4: ` + badName},
		{"shell syntax", "export A=hunter2\n", `read environment file "my env": line 1: ` + badName},
		{"no name", "A=1\n=hunter2\n", `read environment file "my env": line 2: ` + badName},
		{"blank before equals", "A =hunter2\n", `read environment file "my env": line 1: ` + badName},
		{"blank after a name alone", "LANG \n", `read environment file "my env": line 1: ` + badName},
		{"value over several lines", "KEY=-----BEGIN\nhunter2/+==\n", `read environment file "my env": line 2: ` + badName},
		{"second byte order mark", "A=1\n\ufeffB=2\n", `read environment file "my env": line 2: ` + badName},
		{"UTF-16", "\xff\xfeA\x00=\x001\x00", `read environment file "my env": line 1: ` + badName},
		{"NUL in a value", "A=1\nB=hunter2\x00\n", `read environment file "my env": line 2: value contains a NUL byte`},
		{"NUL in a name", "A\x00=hunter2\n", `read environment file "my env": line 1: ` + badName},
		{"too large", "A=" + strings.Repeat("x", MaxVarsSize-1), `read environment file "my env": larger than 1048576 bytes`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := ParseVars([]byte(tt.in), "my env")
			check.That(t, err != nil && err.Error() == tt.wantErr && got == nil, "got %q, error %v\nwant error %s", got, err, tt.wantErr)
		})
	}
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
