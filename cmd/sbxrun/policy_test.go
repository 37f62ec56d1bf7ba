package main

import (
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/tests/check"
)

func TestParseUser(t *testing.T) {
	tests := []struct {
		in   string
		want *room.User // nil is an error, except for the empty string
	}{
		{"", nil},
		{"0", &room.User{}},
		{"1000", &room.User{UID: 1000, GID: 1000}},
		{"1000:100", &room.User{UID: 1000, GID: 100}},
		{"0:7", &room.User{GID: 7}},
		{"4294967294:4294967294", &room.User{UID: 1<<32 - 2, GID: 1<<32 - 2}},
		{"4294967295", nil}, // -1 to the kernel: no change
		{"1:4294967295", nil},
		{"4294967296", nil},
		{"-1", nil}, {"+1", nil}, {" 1", nil}, {"1 ", nil}, {"1:", nil}, {":", nil}, {":1", nil}, {"1:2:3", nil}, {"root", nil}, {"1:root", nil},
		{"0x10", nil}, {"1_0", nil}, {"1.0", nil}, {"1\n", nil}, {"١", nil},
	}
	for _, tt := range tests {
		got, err := parseUser(tt.in)
		check.NoDiff(t, cmp.Diff(tt.want, got), "parseUser(%q) (-want +got)", tt.in)
		check.That(t, (err != nil) == (tt.want == nil && tt.in != ""), "parseUser(%q): error %v", tt.in, err)
	}
}

// alone replaces the environment with these variables.
func alone(t *testing.T, pairs ...string) {
	t.Helper()
	for _, pair := range os.Environ() {
		name, value, _ := strings.Cut(pair, "=")
		t.Setenv(name, value) // restores it in the end
	}
	os.Clearenv()
	for _, pair := range pairs {
		name, value, _ := strings.Cut(pair, "=")
		t.Setenv(name, value)
	}
}

func TestEnvironment(t *testing.T) {
	alone(t, "API_KEY=secret", "LANG=C.UTF-8", "LC_ALL=de", "LANGUAGE=de", "TERM=xterm", "TZ=UTC", "LCX=1", "LANGX=1", "PATH=/p", "HOME=/h", "USER=u", "LOGNAME=u",
		"PWD=/x", "OLDPWD=/y", "A=host", "EMPTY=", "NEWLINE=a\nb=c", "BASH_FUNC_f%%=() { :; }")
	file := func(text string) string {
		name := filepath.Join(t.TempDir(), "env")
		check.Must(t, os.WriteFile(name, []byte(text), 0o600))
		return name
	}
	inherited := map[string]string{"LANG": "C.UTF-8", "LC_ALL": "de", "LANGUAGE": "de", "TERM": "xterm", "TZ": "UTC"}
	with := func(pairs ...string) map[string]string {
		m := map[string]string{}
		maps.Copy(m, inherited)
		for _, pair := range pairs {
			name, value, _ := strings.Cut(pair, "=")
			m[name] = value
		}
		return m
	}
	tests := []struct {
		name  string
		flags cli.Vars
		want  map[string]string
		err   string // beginning
	}{
		{name: "default", want: inherited},
		{name: "set and passed through", flags: cli.Vars{Env: []string{"A=1", "NEWLINE", "EMPTY", "UNSET", "B=", "C=x=y"}},
			want: with("A=1", "NEWLINE=a\nb=c", "EMPTY=", "B=", "C=x=y")},
		{name: "the last one wins", flags: cli.Vars{Env: []string{"A=1", "A=2", "A"}}, want: with("A=host")},
		{name: "unset passes nothing and removes nothing", flags: cli.Vars{Env: []string{"UNSET=1", "UNSET"}}, want: with("UNSET=1")},
		{name: "over what is inherited", flags: cli.Vars{Env: []string{"LANG=C", "TZ="}}, want: with("LANG=C", "TZ=")},
		{name: "file", flags: cli.Vars{EnvFile: []string{file("# x\nA=1\nAPI_KEY\nLANG=C\n")}}, want: with("A=1", "API_KEY=secret", "LANG=C")},
		{name: "files in order", flags: cli.Vars{EnvFile: []string{file("A=1\nB=1\n"), file("A=2\n")}}, want: with("A=2", "B=1")},
		{name: "options over files", flags: cli.Vars{EnvFile: []string{file("A=1\nB=1\n")}, Env: []string{"A=2"}}, want: with("A=2", "B=1")},
		{name: "all, but for what describes the host", flags: cli.Vars{InheritEnv: true},
			want: with("API_KEY=secret", "LCX=1", "LANGX=1", "A=host", "EMPTY=", "NEWLINE=a\nb=c", "BASH_FUNC_f%%=() { :; }")},
		{name: "options over all", flags: cli.Vars{InheritEnv: true, Env: []string{"A=1"}, EnvFile: []string{file("API_KEY=other\n")}},
			want: with("API_KEY=other", "LCX=1", "LANGX=1", "A=1", "EMPTY=", "NEWLINE=a\nb=c", "BASH_FUNC_f%%=() { :; }")},
		{name: "asked for by name", flags: cli.Vars{Env: []string{"PATH", "HOME", "USER=me"}}, want: with("PATH=/p", "HOME=/h", "USER=me")},
		{name: "bad name", flags: cli.Vars{Env: []string{"1A=secret"}}, err: `--env: environment variable "1A": invalid name`},
		{name: "NUL", flags: cli.Vars{Env: []string{"A=secret\x00"}}, err: `--env: environment variable "A": value contains a NUL byte`},
		{name: "bad line", flags: cli.Vars{EnvFile: []string{file("A=1\nsecret line\n")}}, err: "--env-file: read environment file "},
		{name: "missing file", flags: cli.Vars{EnvFile: []string{"/nonexistent/env"}}, err: "--env-file: open /nonexistent/env: no such file"},
		{name: "a directory", flags: cli.Vars{EnvFile: []string{"/"}}, err: `--env-file: "/" is not a regular file`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			base, set, err := environment(&tt.flags, 0, nil, nil)
			if tt.err != "" {
				check.Require(t, err != nil && strings.HasPrefix(err.Error(), tt.err), "got error %v, want %s", err, tt.err)
				check.That(t, !strings.Contains(err.Error(), "secret"), "the error tells the value: %v", err)
				return
			}
			check.Must(t, err)
			got := map[string]string{}
			for _, v := range append(base.Vars(), set.Vars()...) {
				got[v.Name] = v.Value
			}
			check.NoDiff(t, cmp.Diff(tt.want, got), "(-want +got)")
		})
	}
}

func TestMounts(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	tests := []struct {
		name  string
		flags cli.View
		want  []room.Mount
		err   string
	}{
		{name: "none"},
		{name: "every kind", flags: cli.View{
			RoBind: []string{"/a", "b"}, Bind: []string{"/c:/d"}, RoBindTry: []string{"/e"}, BindTry: []string{"/f:/g"}, Tmpfs: []string{"/h", "/i:1M"},
		}, want: []room.Mount{
			{Source: "/a", Dest: "/a"},
			{Source: dir + "/b", Here: "b", Dest: dir + "/b"},
			{Kind: room.ReadWrite, Source: "/c", Dest: "/d"},
			{Source: "/e", Dest: "/e", Try: true},
			{Kind: room.ReadWrite, Source: "/f", Dest: "/g", Try: true},
			{Kind: room.Tmpfs, Dest: "/h"},
			{Kind: room.Tmpfs, Dest: "/i", Size: 1 << 20},
		}},
		{name: "comma", flags: cli.View{Bind: []string{"/a,b:/c,d"}}, want: []room.Mount{{Kind: room.ReadWrite, Source: "/a,b", Dest: "/c,d"}}},
		{name: "bad bind", flags: cli.View{BindTry: []string{"/a:b"}}, err: `bind "/a:b": the path in the sandbox, "b", must be absolute; write \: for a colon that belongs to a path`},
		{name: "bad tmpfs", flags: cli.View{Tmpfs: []string{"x"}}, err: `tmpfs "x": the path in the sandbox, "x", must be absolute`},
		{name: "bad size", flags: cli.View{Tmpfs: []string{"/x:much"}}, err: `tmpfs "/x:much": invalid size "much"`},
		{name: "no size", flags: cli.View{Tmpfs: []string{"/x:0"}}, err: `tmpfs "/x:0": the size must be greater than 0`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := mounts(&tt.flags)
			if tt.err != "" {
				check.That(t, err != nil && strings.HasPrefix(err.Error(), tt.err), "got error %v, want %s", err, tt.err)
				return
			}
			check.Must(t, err)
			check.NoDiff(t, cmp.Diff(tt.want, got), "(-want +got)")
		})
	}
}
