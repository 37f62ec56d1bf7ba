package room

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

func TestEmbeddedVersion(t *testing.T) {
	tests := []struct{ name, text, want string }{
		{"empty", "", ""},
		{"the real thing", "\x00x\x00bubblewrap 0.8.0\x00y", "0.8.0"},
		{"two digits", "bubblewrap 0.11.1\x00", "0.11.1"},
		{"two parts", "bubblewrap 1.0\x00", "1.0"},
		{"first of two", "bubblewrap 0.8.0\x00bubblewrap 0.9.0\x00", "0.8.0"},
		{"after other text", "bubblewrap is\x00bubblewrap \x00bubblewrap %s\x00bubblewrap 0.8.0\x00", "0.8.0"},
		{"name right before it", "bubblewrap bubblewrap 0.8.0\x00", "0.8.0"},
		{"not ended", "bubblewrap 0.8.0", ""},
		{"ended by a newline", "bubblewrap 0.8.0\n\x00", ""},
		{"no version", "bubblewrap \x00", ""},
		{"no point", "bubblewrap 8\x00", ""},
		{"letters", "bubblewrap 0.8.0-rc1\x00", ""},
		{"sign", "bubblewrap -0.8\x00", ""},
		{"escape sequence", "bubblewrap 0.8\x1b[2J\x00", ""},
		{"too long", "bubblewrap 0.00000000000000000008\x00", ""},
		{"cut name", "bubblewra", ""},
		{"name at the end", "bubblewrap ", ""},
	}
	for _, tt := range tests {
		if got := embeddedVersion([]byte(tt.text)); got != tt.want {
			t.Errorf("%s: got %q, want %q", tt.name, got, tt.want)
		}
	}
}

func TestOlder(t *testing.T) {
	tests := map[string]struct{ least, whole bool }{
		"0.4.0": {true, false}, "0.4": {true, false}, "0.4.99": {true, false}, "0.6.3": {true, false}, "0.7.0": {true, false},
		"0.8.0": {true, true}, "0.8": {true, true}, "0.11.1": {true, true}, "0.10": {true, true}, "1.0": {true, true}, "1.0.0": {true, true}, "10.2.3": {true, true},
		"0.0": {}, "0.1.8": {}, "0.3.9": {}, "": {}, "0": {}, ".": {}, "1": {}, "0.": {}, "x.8": {}, "0.x": {}, "99999999999999999999.0": {},
	}
	for version, want := range tests {
		p := Program{Version: version}
		if got := !p.older(leastMinor); got != want.least {
			t.Errorf("%q is new enough: %v, want %v", version, got, want.least)
		}
		if got := p.Whole() == nil; got != want.whole {
			t.Errorf("%q builds a room without sbxrun: %v, want %v", version, got, want.whole)
		}
	}
}

// fake puts a program called bwrap into a new directory.
func fake(t *testing.T, text string, mode os.FileMode) (dir string) {
	t.Helper()
	dir = t.TempDir()
	name := filepath.Join(dir, "bwrap")
	if err := os.WriteFile(name, []byte(text), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(name, mode); err != nil {
		t.Fatal(err)
	}
	return dir
}

// script is a bwrap that is not the program itself but something around it.
func script(version string) string {
	return "#!/bin/sh\ncase $1 in\n--version) " + version + ";;\n*) exit 99;;\nesac\n"
}

func TestFind(t *testing.T) {
	t.Setenv("PATH", "/bin:/usr/bin")
	hint := "install it: " + installHint()
	newer := strings.Replace(hint, "install it", "install a newer one", 1)
	tests := []struct {
		name, text string
		mode       os.FileMode
		want       Program       // DIR is where the fake is
		err        *result.Error // ditto
	}{
		{name: "wrapper script", text: script("echo bubblewrap 0.8.0"), mode: 0o755,
			want: Program{Path: "DIR/bwrap", Version: "0.8.0"}},
		{name: "the oldest", text: script("echo bubblewrap 0.4.0"), mode: 0o755,
			want: Program{Path: "DIR/bwrap", Version: "0.4.0"}},
		{name: "version inside the program", text: "bubblewrap 0.9.0\x00--as-pid-1\x00", mode: 0o755,
			want: Program{Path: "DIR/bwrap", Version: "0.9.0"}}, // and cannot be executed, so it was not
		{name: "too old", text: script("echo bubblewrap 0.3.1"), mode: 0o755,
			err: &result.Error{Code: "bwrap-too-old", Message: "bubblewrap 0.3.1 at DIR/bwrap is too old: 0.4 or later is needed", Hint: newer}},
		{name: "too old, by its text", text: "bubblewrap 0.3.3\x00--as-pid-1\x00", mode: 0o755,
			err: &result.Error{Code: "bwrap-too-old", Message: "bubblewrap 0.3.3 at DIR/bwrap is too old: 0.4 or later is needed", Hint: newer}},
		{name: "garbage", text: script(`printf 'hello\n\033[2J'`), mode: 0o755,
			err: &result.Error{Code: "bwrap-unusable", Message: `cannot use DIR/bwrap: DIR/bwrap --version printed "hello\n\x1b[2J"`}},
		{name: "much garbage", text: script(`printf %0999d 0`), mode: 0o755,
			err: &result.Error{Code: "bwrap-unusable", Message: `cannot use DIR/bwrap: DIR/bwrap --version printed "` + strings.Repeat("0", 60) + `"`}},
		{name: "not a version", text: script("echo bubblewrap x.y"), mode: 0o755,
			err: &result.Error{Code: "bwrap-too-old", Message: "bubblewrap x.y at DIR/bwrap is too old: 0.4 or later is needed", Hint: newer}},
		{name: "nothing", text: script(":"), mode: 0o755,
			err: &result.Error{Code: "bwrap-unusable", Message: `cannot use DIR/bwrap: DIR/bwrap --version printed ""`}},
		{name: "fails", text: script("exit 3"), mode: 0o755,
			err: &result.Error{Code: "bwrap-unusable", Message: "cannot use DIR/bwrap: DIR/bwrap --version: exit status 3"}},
		{name: "setuid", text: script("echo bubblewrap 0.8.0"), mode: 0o755 | os.ModeSetuid,
			err: &result.Error{Code: "bwrap-setuid", Message: "DIR/bwrap is setuid: sbxrun could not end what it starts",
				Hint: "chmod u-s,g-s DIR/bwrap, and allow user namespaces (sbxrun doctor tells how)"}},
		{name: "setgid", text: script("echo bubblewrap 0.8.0"), mode: 0o755 | os.ModeSetgid,
			err: &result.Error{Code: "bwrap-setuid", Message: "DIR/bwrap is setuid: sbxrun could not end what it starts",
				Hint: "chmod u-s,g-s DIR/bwrap, and allow user namespaces (sbxrun doctor tells how)"}},
		{name: "not executable", text: script("echo bubblewrap 0.8.0"), mode: 0o644,
			err: &result.Error{Code: "bwrap-missing", Message: "bubblewrap is not installed: no bwrap in PATH DIR", Hint: hint}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := fake(t, tt.text, tt.mode)
			got, err := Find(t.Context(), dir)
			var failed *result.Error
			if err != nil && !errors.As(err, &failed) {
				t.Fatalf("untyped error %v", err)
			}
			place := func(s string) string { return strings.ReplaceAll(s, "DIR", dir) }
			tt.want.Path = place(tt.want.Path)
			if tt.err != nil {
				tt.err.Message, tt.err.Hint = place(tt.err.Message), place(tt.err.Hint)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("program (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tt.err, failed, cmpopts.IgnoreFields(result.Error{}, "Err")); diff != "" {
				t.Errorf("error (-want +got):\n%s", diff)
			}
		})
	}
}

// Root runs no bwrap that somebody else could have written, not even to ask for
// its version. Anybody else may have one of their own.
func TestFindBwrapOfAnotherUser(t *testing.T) {
	root := os.Geteuid() == 0
	tests := []struct {
		mode  os.FileMode
		owner int
		ok    bool
	}{
		{0o755, 0, true},
		{0o555, 0, true},
		{0o775, 0, false},
		{0o757, 0, false},
		{0o777, 0, false},
		{0o755, Nobody, false},
		{0o555, Nobody, false}, // its owner can chmod it
		{0o755, 1000, false},
	}
	for _, tt := range tests {
		marker := filepath.Join(t.TempDir(), "asked")
		dir := fake(t, script("echo bubblewrap 0.8.0; : >"+marker), tt.mode)
		name := filepath.Join(dir, "bwrap")
		if root {
			if err := os.Chown(name, tt.owner, tt.owner); err != nil {
				t.Fatal(err)
			}
		}
		// By a link of root's, too.
		for _, dir := range []string{dir, laidOut(t, "bwrap -> "+name)} {
			p, err := Find(t.Context(), dir)
			if tt.ok || !root {
				if err != nil || p.Version != "0.8.0" {
					t.Errorf("mode %o, owner %d: got %+v, %v", tt.mode, tt.owner, p, err)
				}
				continue
			}
			var e *result.Error
			if !errors.As(err, &e) || e.Code != "bwrap-untrusted" || !strings.Contains(e.Message, dir+"/bwrap") || e.Hint == "" {
				t.Errorf("mode %o, owner %d: got %+v, %v; want bwrap-untrusted", tt.mode, tt.owner, p, err)
			}
			if _, err := os.Stat(marker); err == nil {
				t.Errorf("mode %o, owner %d: it was executed", tt.mode, tt.owner)
			}
		}
	}
}

// A named pipe that is called bwrap is passed over and not waited for.
func TestFindNamedPipe(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mkfifo(filepath.Join(dir, "bwrap"), 0o755); err != nil {
		t.Fatal(err)
	}
	if got := lookHost("bwrap", dir); got != "" {
		t.Errorf("found %q", got)
	}
}

func TestLookup(t *testing.T) {
	good, second := fake(t, "x", 0o755), fake(t, "x", 0o755)
	denied := fake(t, "x", 0o644)
	directory := laidOut(t, "bwrap/")
	linked := laidOut(t, "bwrap -> "+filepath.Join(good, "bwrap"))
	dangling := laidOut(t, "bwrap -> none")
	t.Chdir(second) // a bwrap in the current directory
	tests := []struct {
		name string
		path []string
		want string
	}{
		{"empty", nil, ""},
		{"one", []string{good}, good},
		{"first of two", []string{second, good}, second},
		{"not executable", []string{denied, good}, good},
		{"a directory of that name", []string{directory, good}, good},
		{"a link", []string{linked}, linked},
		{"a dangling link", []string{dangling, good}, good},
		{"missing directory", []string{filepath.Join(good, "none"), good}, good},
		{"empty entries", []string{"", "", good}, good},
		{"relative entries", []string{".", "./", "../" + filepath.Base(second), good}, good},
		{"relative entries only", []string{".", "", "bwrap"}, ""},
	}
	for _, tt := range tests {
		want := tt.want
		if want != "" {
			want = filepath.Join(want, "bwrap")
		}
		if got := lookHost("bwrap", strings.Join(tt.path, ":")); got != want {
			t.Errorf("%s: lookup = %q, want %q", tt.name, got, want)
		}
	}
}

// The version read out of the file is the one that the program prints.
func TestFindInstalled(t *testing.T) {
	p, err := Find(t.Context(), os.Getenv("PATH"))
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(p.Path)
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(p.Path, "--version").Output()
	if err != nil {
		t.Fatal(err)
	}
	if got, want := "bubblewrap "+embeddedVersion(text)+"\n", string(out); got != want {
		t.Errorf("embedded %q, printed %q", got, want)
	}
}

func TestInstallHint(t *testing.T) {
	for program, want := range map[string]string{
		"apt-get": "apt-get install bubblewrap",
		"dnf":     "dnf install bubblewrap",
		"apk":     "apk add bubblewrap",
		"pacman":  "pacman -S bubblewrap",
		"zypper":  "zypper install bubblewrap",
		"emerge":  "your distribution's package bubblewrap",
	} {
		t.Setenv("PATH", laidOut(t, program))
		if got := installHint(); got != want {
			t.Errorf("with %s: %q, want %q", program, got, want)
		}
	}
}
