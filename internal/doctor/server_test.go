package doctor

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/admission"
	"github.com/sbxrun/sbxrun/tests/check"
)

func TestServerDir(t *testing.T) {
	dir := t.TempDir()
	own := filepath.Join(dir, "own")
	open := filepath.Join(dir, "open")
	for name, mode := range map[string]os.FileMode{own: 0o700, open: 0o755} {
		check.Must(t, os.Mkdir(name, mode))
		err := os.Chmod(name, mode)
		check.Must(t, err) // regardless of the umask
	}
	file := filepath.Join(dir, "file")
	check.Must(t, os.WriteFile(file, nil, 0o600))
	link := filepath.Join(dir, "link")
	check.Must(t, os.Symlink(own, link))
	for name, want := range map[string]string{own: "", filepath.Join(own, "a", "b"): "", open: "mode 0700", link: "mode 0700", filepath.Join(file, "x"): "not a directory"} {
		_, err := checkDir(stepServerDir, name)
		check.That(t, (want != "" || err == nil) && (want == "" || err != nil && strings.Contains(err.Error(), want)), "%s: %v", name, err)
		f := (failure{})
		check.That(t, err == nil || errors.As(err, &f) && f.step == stepServerDir, "%s: %#v", name, err)
	}
	_, err := os.Lstat(filepath.Join(own, "a"))
	check.That(t, err != nil, "something was made")
}

// A run is refused if too few tasks are left, or if most are in use.
func TestRoomForRun(t *testing.T) {
	machine := admission.Bound{Path: "/proc/sys/kernel/pid_max", Current: 100, Max: 32768}
	for _, tt := range []struct {
		cgroup admission.Bound
		want   string // of the error, "" for none
	}{
		{admission.Bound{Path: "/c/pids.max", Current: 8, Max: 100}, ""},
		{admission.Bound{Path: "/c/pids.max", Current: 8, Max: 15}, "8 of 15 tasks in use, by /c/pids.max: a run needs about 16"},
		{admission.Bound{Path: "/c/pids.max", Current: 900, Max: 1000}, "900 of 1000 tasks in use, by /c/pids.max: runs are refused from 80 %"},
	} {
		detail, err := roomForRun(admission.Reading{Bounds: []admission.Bound{tt.cgroup, machine}})
		check.That(t, (tt.want != "" || err == nil && strings.HasPrefix(detail, "8 of 100 tasks")) && (tt.want == "" || err != nil && err.Error() == tt.want),
			"%+v: %q, %v", tt.cgroup, detail, err)
	}
}

// A limit that is too low for a server is a warning with a remedy.
func TestServerWarnings(t *testing.T) {
	var before unix.Rlimit
	check.Must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &before))
	_, err := checkServerDescriptors()
	check.That(t, (err != nil) == (before.Max < serverDescriptors), "%d: %v", before.Max, err)
	e := newExam(t.Context(), caller())
	e.server() // the test binary has no sibling sbxrund
	check.Require(t, len(e.Checks) == 4 && e.Failed() == nil, "%+v", e.Checks)
	f := e.Checks[0]
	check.That(t, f.Verdict == Warning && strings.Contains(f.Cause, "sbxrund: no such file") && strings.Contains(f.Fix, "next to sbxrun"), "%+v", f)
}
