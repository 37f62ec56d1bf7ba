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
	"github.com/sbxrun/sbxrun/tests/check"
)

func TestEmbeddedVersion(t *testing.T) {
	tests := []struct{ name, text, want string }{
		{"empty", "", ""},
		{"the real thing", "\x00x\x00bubblewrap 0.8.0\x00y", "0.8.0"},
		{"first of two", "bubblewrap 0.8.0\x00bubblewrap 0.9.0\x00", "0.8.0"},
		{"after other text", "bubblewrap is\x00bubblewrap \x00bubblewrap %s\x00bubblewrap 0.8.0\x00", "0.8.0"},
		{"name right before it", "bubblewrap bubblewrap 0.8.0\x00", "0.8.0"},
		{"not ended", "bubblewrap 0.8.0", ""},
		{"ended by a newline", "bubblewrap 0.8.0\n\x00", ""},
		{"no version", "bubblewrap \x00", ""},
		{"letters", "bubblewrap 0.8.0-rc1\x00", ""},
		{"sign", "bubblewrap -0.8\x00", ""},
		{"escape sequence", "bubblewrap 0.8\x1b[2J\x00", ""},
		{"too long", "bubblewrap 0.00000000000000000008\x00", ""},
		{"name at the end", "bubblewrap ", ""},
	}
	for _, tt := range tests {
		check.Equal(t, embeddedVersion([]byte(tt.text)), tt.want, "%s", tt.name)
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
		got := !p.older(leastMinor)
		check.That(t, got == want.least, "%q is new enough: %v, want %v", version, got, want.least)
		got = p.Whole() == nil
		check.That(t, got == want.whole, "%q builds a room without sbxrun: %v, want %v", version, got, want.whole)
	}
}

// fake creates a program called bwrap in a new directory.
func fake(t *testing.T, text string, mode os.FileMode) (dir string) {
	t.Helper()
	dir = t.TempDir()
	name := filepath.Join(dir, "bwrap")
	check.Must(t, os.WriteFile(name, []byte(text), 0o700))
	check.Must(t, os.Chmod(name, mode))
	return dir
}

// script is a wrapper script around bwrap, which contains no version.
func script(does string) string { return "#!/bin/sh\n" + does + "\n" }

// named returns a caller that names a bwrap.
func named(bwrap string) Caller { return Caller{Bwrap: bwrap, UID: os.Geteuid(), GID: os.Getegid()} }

// program returns the contents of a bwrap of this version.
func program(version string) string { return "bubblewrap " + version + "\x00--as-pid-1\x00" }

func TestFind(t *testing.T) {
	hint := "install a newer one: " + installHint()
	tests := []struct {
		name, text string
		mode       os.FileMode
		want       Program       // DIR is the directory of the fake
		err        *result.Error // ditto
	}{
		{name: "the program", text: program("0.9.0"), mode: 0o755, want: Program{Path: "DIR/bwrap", Version: "0.9.0"}},
		{name: "the oldest", text: program("0.4.0"), mode: 0o755, want: Program{Path: "DIR/bwrap", Version: "0.4.0"}},
		{name: "wrapper script", text: script("exec bwrap"), mode: 0o755, want: Program{Path: "DIR/bwrap"}},
		{name: "too old", text: program("0.3.3"), mode: 0o755,
			err: &result.Error{Code: "bwrap-too-old", Message: "bubblewrap 0.3.3 at DIR/bwrap is too old: 0.4 or later is needed", Hint: hint}},
		{name: "setuid", text: program("0.8.0"), mode: 0o755 | os.ModeSetuid,
			err: &result.Error{Code: "bwrap-setuid", Message: "DIR/bwrap is setuid: sbxrun could not end its processes",
				Hint: "chmod u-s,g-s DIR/bwrap, and allow user namespaces (see sbxrun doctor)"}},
		{name: "setgid", text: program("0.8.0"), mode: 0o755 | os.ModeSetgid,
			err: &result.Error{Code: "bwrap-setuid", Message: "DIR/bwrap is setuid: sbxrun could not end its processes",
				Hint: "chmod u-s,g-s DIR/bwrap, and allow user namespaces (see sbxrun doctor)"}},
		{name: "not executable", text: program("0.8.0"), mode: 0o644,
			err: &result.Error{Code: "bwrap-missing", Message: "cannot use the bubblewrap that SBXRUN_BWRAP names: execute DIR/bwrap: permission denied",
				Hint: "unset the variable, or name the program by its absolute path"}},
		{name: "writable by a group", text: program("0.8.0"), mode: 0o775,
			err: &result.Error{Code: "bwrap-untrusted", Message: "bubblewrap cannot be trusted: DIR/bwrap is writable by others (mode 0775)",
				Hint: "install it in a directory that only root can write to, such as /usr/bin"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := fake(t, tt.text, tt.mode)
			got, err := Find(named(filepath.Join(dir, "bwrap")), "", nil)
			var failed *result.Error
			check.Require(t, err == nil || errors.As(err, &failed), "untyped error %v", err)
			place := func(s string) string { return strings.ReplaceAll(s, "DIR", dir) }
			tt.want.Path = place(tt.want.Path)
			if tt.err != nil {
				tt.err.Message, tt.err.Hint = place(tt.err.Message), place(tt.err.Hint)
			}
			check.NoDiff(t, cmp.Diff(tt.want, got), "program (-want +got)")
			check.NoDiff(t, cmp.Diff(tt.err, failed, cmpopts.IgnoreFields(result.Error{}, "Err")), "error (-want +got)")
		})
	}
}

// PATH does not decide which bwrap is executed.
func TestFindIgnoresPath(t *testing.T) {
	marker := filepath.Join(t.TempDir(), "executed")
	dir := fake(t, script(": >"+marker), 0o755)
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	c := ThisCaller()
	c.Bwrap = ""
	p, err := Find(c, "", nil)
	check.That(t, err != nil || filepath.Dir(p.Path) != dir, "found %+v in PATH", p)
	// Find does not execute a named bwrap to get its version either.
	_, err = Find(named(filepath.Join(dir, "bwrap")), "", nil)
	check.That(t, err == nil, "%v", err)
	_, err = os.Stat(marker)
	check.That(t, err != nil, "it was executed")
}

// A sandbox cannot replace the bwrap of the next sandbox.
func TestFindExposed(t *testing.T) {
	dir := fake(t, program("0.8.0"), 0o755)
	bwrap, elsewhere := filepath.Join(dir, "bwrap"), t.TempDir()
	link := laidOut(t, "dir -> "+dir)
	tests := []struct {
		name   string
		cwd    string
		mounts []Mount
		ok     bool
	}{
		{"no mounts", "", nil, true},
		{"other mounts", elsewhere, []Mount{{Kind: ReadWrite, Source: elsewhere}, {Kind: ReadWrite, Source: filepath.Join(elsewhere, "none")}, {Kind: Tmpfs, Dest: dir}}, true},
		{"read-only", "", []Mount{{Kind: ReadOnly, Source: dir}}, true},
		{"in the current directory", dir, nil, false},
		{"below the current directory", filepath.Dir(dir), nil, false},
		{"writable", "", []Mount{{Kind: ReadOnly, Source: elsewhere}, {Kind: ReadWrite, Source: dir}}, false},
		{"below a writable one", "", []Mount{{Kind: ReadWrite, Source: filepath.Dir(dir)}}, false},
		{"the file itself", "", []Mount{{Kind: ReadWrite, Source: bwrap}}, false},
		{"writable by a link", "", []Mount{{Kind: ReadWrite, Source: link + "/dir"}}, false},
	}
	for _, tt := range tests {
		_, err := Find(named(bwrap), tt.cwd, tt.mounts)
		check.That(t, tt.ok && err == nil || !tt.ok && result.CodeOf(err) == "bwrap-untrusted", "%s: %v", tt.name, err)
	}
	// Root's sandboxes could write to root's directories.
	for _, source := range []string{"/usr", "/usr/bin", "/"} {
		_, err := Find(named(""), "", []Mount{{Kind: ReadWrite, Source: source}})
		root := os.Geteuid() == 0
		check.That(t, root == (err != nil), "%s is writable for the sandbox: %v", source, err)
	}
}

func TestLookup(t *testing.T) {
	good, second := fake(t, "x", 0o755), fake(t, "x", 0o755)
	denied := fake(t, "x", 0o644)
	directory := laidOut(t, "bwrap/")
	linked := laidOut(t, "bwrap -> "+filepath.Join(good, "bwrap"))
	dangling := laidOut(t, "bwrap -> none")
	pipe := t.TempDir()
	check.Must(t, unix.Mkfifo(filepath.Join(pipe, "bwrap"), 0o755))
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
		{"a named pipe", []string{pipe, good}, good}, // without blocking
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
		check.Equal(t, lookHost("bwrap", strings.Join(tt.path, ":")), want, "%s: lookup", tt.name)
	}
}

// The version found in the file is the one that the program prints.
func TestFindInstalled(t *testing.T) {
	p, err := Find(named(os.Getenv(ProgramVariable)), "", nil)
	check.Must(t, err)
	text, err := os.ReadFile(p.Path)
	check.Must(t, err)
	out, err := exec.Command(p.Path, "--version").Output()
	check.Must(t, err)
	got, want := "bubblewrap "+embeddedVersion(text)+"\n", string(out)
	check.That(t, got == want, "embedded %q, printed %q", got, want)
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
		if os.Geteuid() != 0 && program != "emerge" {
			want = "sudo " + want
		}
		check.Equal(t, installHint(), want, "with %s", program)
	}
}
