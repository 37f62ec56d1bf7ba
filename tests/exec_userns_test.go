package tests

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// olderBwrap is a directory with a bwrap that does not have --disable-userns, which came
// with bubblewrap 0.8: this machine's, with another name for it.
func olderBwrap(t *testing.T) string {
	t.Helper()
	path, err := exec.LookPath("bwrap")
	harness.Must(t, err)
	program, err := os.ReadFile(path)
	harness.Must(t, err)
	if !bytes.Contains(program, []byte("--disable-userns")) {
		return filepath.Dir(path)
	}
	dir := harness.Dir(t)
	harness.Must(t, os.Chmod(dir, 0o755)) // of root's another identity executes it
	harness.Must(t, os.WriteFile(filepath.Join(dir, "bwrap"), bytes.ReplaceAll(program, []byte("--disable-userns"), []byte("--disabled-thing")), 0o755))
	return dir
}

// A sandbox of an older bubblewrap is entered like any other, and nobody makes a user
// namespace in it either: the filter for system calls sees to that.
func TestExecOlderBwrap(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	env := harness.Options{Env: []string{"PATH=" + olderBwrap(t) + ":" + harness.Path}}
	r := harness.Run(t, harness.Options{Env: env.Env, Bare: true, Dir: "/usr"}, "--print-command", "true")
	if r.ExitCode != 0 || strings.Contains(string(r.Stdout), "--disable-userns") {
		t.Fatalf("not an older one: exit code %d, %s", r.ExitCode, r.Stdout)
	}
	b := s.Sandbox(env)
	r = b.Exec(harness.Options{}, nil, "sh", "-c", "echo $$; id -u; exit 7")
	r.Expect(t, 7, "exited")
	if uid := map[bool]string{true: "65534"}[harness.Root()]; !strings.HasPrefix(string(r.Stdout), "2\n"+uid) {
		t.Errorf("stdout %q", r.Stdout)
	}
	r = b.Exec(harness.Options{}, nil, "unshare", "--user", "true")
	if r.ExitCode == 0 || !strings.Contains(string(r.Stderr), "unshare failed") {
		t.Errorf("a user namespace in the sandbox: exit code %d, stderr %q", r.ExitCode, r.Stderr)
	}
	r = b.Exec(harness.Options{}, []string{"--timeout", "1"}, "/fixtures/tree-setsid")
	r.Expect(t, 124, "timeout")
	harness.Within(t, "the deadline", r.Elapsed, time.Second, 2*time.Second)
	b.Alive()
	// To signal all of it somebody has to enter, too.
	if k := s.Run("kill", "--grace", "1", b.ID); k.ExitCode != 0 {
		t.Errorf("kill: %d, %s", k.ExitCode, k.Stderr)
	}
	b.Ended()
}
