//go:build systemd

package systemd

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

func TestMain(m *testing.M) { harness.Main(m) }

const hog = "x = bytearray(200 << 20); print(len(x))"

// session asserts that only systemd can create cgroups in this session, and at the end that no
// scope is left.
func session(t *testing.T) {
	t.Helper()
	data := harness.ReadFile(t, "/proc/self/cgroup")
	own := "/sys/fs/cgroup" + strings.TrimPrefix(strings.TrimSpace(string(data)), "0::")
	check.Require(t, strings.Contains(own, "/session-"), "not in a session of systemd's: %s", own)
	for _, dir := range []string{own, filepath.Dir(own)} {
		err := os.Mkdir(filepath.Join(dir, "mine"), 0o755)
		check.Require(t, errors.Is(err, unix.EACCES), "a cgroup can be made in %s: %v", dir, err)
	}
	t.Cleanup(func() {
		harness.Until(t, 20*time.Second, "systemd has collected the scopes", func() bool { return len(scopes(t)) == 0 })
	})
}

// scopes returns the cgroups of sandboxes.
func scopes(t *testing.T) (found []string) {
	t.Helper()
	// Cgroups may vanish during the walk.
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d os.DirEntry, err error) error {
		if err == nil && d.IsDir() && strings.HasPrefix(d.Name(), limits.Prefix) {
			found = append(found, path)
		}
		return nil
	})
	return found
}

// enforced asserts that cgroup v2 enforces a limit, and reports whether it was hit.
func enforced(t *testing.T, r *harness.Report, name string) (hit bool) {
	t.Helper()
	for _, l := range r.Limits {
		if l.Name == name {
			check.That(t, l.Enforced && strings.HasPrefix(l.Mechanism, "cgroup v2 "), "%s is not enforced by cgroup v2: %s", name, r.Raw())
			return l.Hit
		}
	}
	t.Errorf("no limit %s in %s", name, r.Raw())
	return false
}

// A run's limits are enforced by a scope of its own.
func TestRun(t *testing.T) {
	session(t)
	r := harness.Run(t, harness.Options{}, "--memory", "64M", "--pids", "20", "--cpus", "0.5", "true")
	r.Expect(t, 0, "exited")
	for _, name := range []string{"memory", "pids", "cpus"} {
		enforced(t, r.Report, name)
	}
	r = harness.Run(t, harness.Options{}, "--memory", "64M", "python3", "-c", hog)
	r.Expect(t, 137, "oom")
	check.That(t, enforced(t, r.Report, "memory") && len(r.Stdout) == 0, "stdout %q, %s", r.Stdout, r.Report.Raw())
	r = harness.Run(t, harness.Options{}, "--pids", "32", "--timeout", "5", "bash", "-c", ":(){ :|:& };: ; sleep 60")
	r.Expect(t, 124, "timeout")
	check.That(t, enforced(t, r.Report, "pids"), "the bound was not hit: %s", r.Report.Raw())
}

// systemd removes the scope, whichever process is killed.
func TestKilled(t *testing.T) {
	session(t)
	p := harness.Start(t, harness.Options{}, "--memory", "64M", "sh", "-c", "echo up; sleep 300")
	p.WaitOutput("up\n")
	check.That(t, len(scopes(t)) != 0, "there is no scope")
	p.Kill()
	p.Wait()
}

// A sandbox has a scope, and its execs have theirs in it.
func TestSandbox(t *testing.T) {
	session(t)
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{}, "--memory", "256M", "--pids", "40")
	r := b.Exec(harness.Options{}, []string{"--memory", "32M"}, "python3", "-c", hog)
	r.Expect(t, 137, "oom")
	check.That(t, enforced(t, r.Report, "memory"), "%s", r.Report.Raw())
	b.Alive()
	r = b.Exec(harness.Options{}, []string{"--pids", "12"}, "true")
	r.Expect(t, 0, "exited")
	enforced(t, r.Report, "pids")
	s.Run("kill", b.ID).Exits(t, 0)
	b.Ended()
}
