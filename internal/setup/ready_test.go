package setup

import (
	"cmp"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
)

// ready.sh finds a go that is missing, too old or badly set up.
func TestReady(t *testing.T) {
	f := newFakes(t, "")
	for name, tt := range map[string]struct{ version, list, cache, tmp, want string }{
		"all is there":   {version: "go1.26.1", cache: filepath.Join(f.dir, "new/cache")},
		"TMPDIR":         {tmp: "/no/such", want: "setup: error: cannot write to the directory for temporary files, /no/such\nsetup: hint: set TMPDIR"},
		"no HOME":        {cache: "off", want: "HOME is not set\nsetup: hint: export HOME="},
		"HOME read-only": {cache: "/proc/no/such", want: "cannot write to the directory for go's cache, /proc/no/such\nsetup: hint: set GOCACHE"},
		"old":            {version: "go1.19.8", want: "go version go1.19.8 linux/amd64 is too old\nsetup: hint: install Go 1.26"},
		"may fetch none": {list: "false", want: "go version go1.26.1 linux/amd64 cannot build this\nsetup: hint: install Go 1.26 or later, https://go.dev/doc/install, or let it fetch one"},
		"just new":       {version: "go1.21", cache: f.dir},
	} {
		t.Run(name, func(t *testing.T) {
			if tt.version == "" {
				tt.version = "go1.26.1"
			}
			if tt.tmp == "" {
				tt.tmp = f.dir
			}
			f.program("go", `case $1 in version) echo go version `+tt.version+` linux/amd64 ;; list) `+cmp.Or(tt.list, "true")+` ;; *) echo "`+tt.cache+`" ;; esac`)
			f.env = []string{"TMPDIR=" + tt.tmp}
			code, out := f.run("ready.sh")
			check.That(t, (code != 0) == (tt.want != "") && strings.Contains(out, tt.want) && strings.Count(out, "\n") <= 2, "exit code %d, printed %q, want %q", code, out, tt.want)
		})
	}
}

// A relative directory for setup.sh is relative to the caller's current directory.
func TestRelativeDirectory(t *testing.T) {
	f := newFakes(t, "")
	f.program("go", `echo "$@"`)
	t.Chdir(f.dir)
	for _, tt := range []struct{ dir, want string }{{"out/man", f.dir + "/out/man"}, {"/out", "/out"}, {"", "bin/share/man/man1"}} {
		code, out := f.run("../../setup.sh", "man", tt.dir)
		check.That(t, code == 0 && out == "run ./internal/clidoc . man "+tt.want+"\n", "%q: exit code %d, printed %q", tt.dir, code, out)
	}
}
