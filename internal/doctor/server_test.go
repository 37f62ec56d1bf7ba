package doctor

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestServerDir(t *testing.T) {
	dir := t.TempDir()
	own := filepath.Join(dir, "own")
	open := filepath.Join(dir, "open")
	for name, mode := range map[string]os.FileMode{own: 0o700, open: 0o755} {
		if err := os.Mkdir(name, mode); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(name, mode); err != nil { // whatever the umask
			t.Fatal(err)
		}
	}
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(dir, "link")
	if err := os.Symlink(own, link); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{own: "", filepath.Join(own, "a", "b"): "", open: "mode 0700", link: "mode 0700", filepath.Join(file, "x"): "not a directory"} {
		_, err := checkServerDir(name)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v", name, err)
		}
		if f := (failure{}); err != nil && (!errors.As(err, &f) || f.step != stepServerDir) {
			t.Errorf("%s: %#v", name, err)
		}
	}
	if _, err := os.Lstat(filepath.Join(own, "a")); err == nil {
		t.Error("something was made")
	}
}

// A limit that is too low is a warning with a remedy, and a run works all the same.
func TestServerWarnings(t *testing.T) {
	var before unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
		t.Fatal(err)
	}
	if _, err := checkServerDescriptors(); (err != nil) != (before.Max < serverDescriptors) {
		t.Errorf("%d: %v", before.Max, err)
	}
	e := newExam(t.Context(), caller())
	e.server() // beside a test there is no sbxrund
	if len(e.Checks) != 4 || e.Failed() != nil {
		t.Fatalf("%+v", e.Checks)
	}
	if f := e.Checks[0]; f.Verdict != Warning || !strings.Contains(f.Cause, "sbxrund: no such file") || !strings.Contains(f.Fix, "beside sbxrun") {
		t.Errorf("%+v", f)
	}
}
