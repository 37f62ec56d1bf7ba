package safeopen

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
)

// Program rejects a program if other users can change it, its directories, or the links on the way.
func TestProgram(t *testing.T) {
	root := os.Geteuid() == 0
	for _, tt := range []struct {
		name    string
		prepare func(top string) (path string)
		trusted bool // if only the caller could have changed it
		foreign bool // needs root to prepare
	}{
		{"a file", func(top string) string { return top + "/dir/program" }, true, false},
		{"a relative link", func(top string) string { check.Must(t, os.Symlink("dir/../dir/program", top+"/x")); return top + "/x" }, true, false},
		{"an absolute link", func(top string) string { check.Must(t, os.Symlink(top+"/dir", top+"/x")); return top + "/x/program" }, true, false},
		{"a group may write", func(top string) string {
			check.Must(t, os.Chmod(top+"/dir/program", 0o775))
			return top + "/dir/program"
		}, false, false},
		{"others may write", func(top string) string {
			check.Must(t, os.Chmod(top+"/dir/program", 0o757))
			return top + "/dir/program"
		}, false, false},
		{"its directory", func(top string) string { check.Must(t, os.Chmod(top+"/dir", 0o777)); return top + "/dir/program" }, false, false},
		{"the directory above", func(top string) string { check.Must(t, os.Chmod(top, 0o770)); return top + "/dir/program" }, false, false},
		{"a sticky directory", func(top string) string {
			check.Must(t, os.Chmod(top+"/dir", 0o777|os.ModeSticky))
			return top + "/dir/program"
		}, true, false},
		{"the directory of a link", func(top string) string {
			check.Must(t, os.Mkdir(top+"/open", 0o755), os.Chmod(top+"/open", 0o777), os.Symlink(top+"/dir/program", top+"/open/x"))
			return top + "/open/x"
		}, false, false},
		{"another's file", func(top string) string {
			check.Must(t, os.Chown(top+"/dir/program", 1234, 1234))
			return top + "/dir/program"
		}, false, true},
		{"nobody's file", func(top string) string {
			check.Must(t, os.Chown(top+"/dir/program", 65534, 65534))
			return top + "/dir/program"
		}, false, true},
		{"another's directory", func(top string) string { check.Must(t, os.Chown(top+"/dir", 1234, 1234)); return top + "/dir/program" }, false, true},
		{"another's file in a sticky directory", func(top string) string {
			check.Must(t, os.Chmod(top+"/dir", 0o777|os.ModeSticky), os.Lchown(top+"/dir/program", 1234, 1234))
			return top + "/dir/program"
		}, false, true},
	} {
		if tt.foreign && !root {
			continue
		}
		top := t.TempDir()
		check.Must(t, os.Mkdir(top+"/dir", 0o755), os.WriteFile(top+"/dir/program", nil, 0o755))
		path := tt.prepare(top)
		for _, own := range []bool{false, true} {
			real, err := Program(path, own)
			switch untrusted := (*UntrustedError)(nil); {
			case tt.trusted && (own || root):
				check.That(t, err == nil && real == top+"/dir/program", "%s, own %v: %q, %v", tt.name, own, real, err)
			case !errors.As(err, &untrusted):
				t.Errorf("%s, own %v: %q, %v; want an UntrustedError", tt.name, own, real, err)
			}
		}
	}
	top := t.TempDir()
	check.Must(t, os.WriteFile(top+"/file", nil, 0o644), os.Symlink("loop", top+"/loop"), unix.Mkfifo(top+"/fifo", 0o755))
	for path, want := range map[string]error{
		"": unix.EINVAL, "x": unix.EINVAL, top + "/none": unix.ENOENT, top + "/file": unix.EACCES, top: unix.EACCES, top + "/loop": unix.ELOOP,
		top + "/file/x": unix.ENOTDIR, top + "/fifo": unix.EACCES,
	} {
		real, err := Program(path, true)
		check.That(t, errors.Is(err, want), "%q: %q, %v; want %v", path, real, err, want)
	}
	if sh, err := filepath.EvalSymlinks("/bin/sh"); err != nil {
		t.Error(err)
	} else if real, err := Program("/bin/sh", false); err != nil || real != sh {
		t.Errorf("/bin/sh: %q, %v; want %s", real, err, sh)
	}
}
