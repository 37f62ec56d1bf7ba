package tests

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// exchange exchanges two names until stop is called. Each state lasts for a moment.
func exchange(t *testing.T, a, b string) (stop func()) {
	t.Helper()
	quit, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-quit:
				return
			case <-time.After(400 * time.Microsecond):
				_ = unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE) // the test sees the result
			}
		}
	}()
	stop = func() {
		select {
		case <-quit:
		default:
			close(quit)
		}
		<-stopped
	}
	t.Cleanup(stop)
	return stop
}

// When another process exchanges a directory on the way with a link to the host's root, as bwrap
// sees it, mount points appear only inside the sandbox's own directories (CVE-2026-87766).
func TestMountRace(t *testing.T) {
	t.Parallel()
	for name, flags := range map[string][]string{
		"tmpfs":          {"--tmpfs", "P/cache/x"},
		"file":           {"--ro-bind", "/etc/hostname:P/cache/x"},
		"directory":      {"--bind", "S:P/cache/x"},
		"deep":           {"--ro-bind", "S:P/cache/x/y/z"},
		"in another":     {"--bind", "S:P/cache", "--tmpfs", "P/cache/x"},
		"in a read-only": {"--ro-bind", "P:/mnt/ro", "--tmpfs", "/mnt/ro/cache/there"},
		"overlay":        {"--overlay", "S:P/cache/x"},
		"upper":          {"--overlay", "S:P/cache/x", "--upper", "U"},
		"volume":         {"--volume", "v:P/cache/x"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			top := harness.SharedDir(t)
			// Not below /tmp: where root's own paths are bound, bwrap does not see the host's.
			outside, err := os.MkdirTemp("/var/tmp", "sbxrun-test-")
			harness.Must(t, err)
			t.Cleanup(func() { _ = os.RemoveAll(outside) })
			project, source := top+"/project", top+"/source"
			for _, dir := range []string{project, project + "/cache", project + "/cache/there", source} {
				harness.Must(t, os.Mkdir(dir, 0o755))
			}
			for _, dir := range []string{project, project + "/cache", project + "/cache/there", source, outside} {
				harness.Must(t, os.Chmod(dir, 0o777)) // bwrap may run as another user
			}
			harness.Must(t, os.Symlink("/oldroot"+outside, project+"/link"))
			state := "SBXRUN_STATE_DIR=" + top + "/state"
			args := []string{"run", "-w"}
			for _, f := range flags {
				if rest, ok := strings.CutPrefix(f, "P"); ok {
					f = project + rest
				}
				f = strings.Replace(strings.Replace(f, "S:", source+":", 1), ":P/", ":"+project+"/", 1)
				if f == "U" {
					f = top + "/upper"
				}
				args = append(args, f)
			}
			args = append(args, "true")
			run := func() *harness.Result {
				return harness.Run(t, harness.Options{Dir: project, Env: []string{state, "XDG_DATA_HOME=" + top + "/data"}}, args...)
			}
			r := run()
			check.Require(t, r.ExitCode == 0, "with nobody in its way: %d, %s", r.ExitCode, r.Stderr)
			stop := exchange(t, project+"/cache", project+"/link")
			failed := 0
			for range max(20, harness.Soak(t)) {
				r := run()
				if r.ExitCode != 0 {
					failed++
				}
				check.That(t, (r.ExitCode == 0 || r.ExitCode == 125) && bytes.Count(r.Stderr, []byte("\n")) <= 2, "exit code %d: %s", r.ExitCode, r.Stderr)
				names, _ := filepath.Glob(outside + "/*")
				check.Require(t, len(names) == 0, "made outside of the sandbox: %q", names)
			}
			t.Logf("%d failed", failed)
			stop()
		})
	}
}

// When another process exchanges the current directory with one that only sbxrun's caller may
// enter, the sandbox shows the directory that was current at sbxrun's start, or does not start.
func TestCurrentDirectoryExchanged(t *testing.T) {
	t.Parallel()
	for _, flags := range [][]string{
		{"-w"}, {"--cwd", "ro"}, {"--cwd", "overlay"},
		{"--bind", ".:/mnt/x", "--workdir", "/mnt/x"}, {"--ro-bind", ".:/mnt/x", "--workdir", "/mnt/x"}, {"--overlay", ".:/mnt/x", "--workdir", "/mnt/x"},
	} {
		t.Run(strings.Join(flags, " "), func(t *testing.T) {
			t.Parallel()
			top := harness.Dir(t) + "/top"
			mine, secret := top+"/mine", top+"/secret"
			for _, dir := range []string{top, mine, secret} {
				harness.Must(t, os.Mkdir(dir, 0o755))
			}
			harness.Must(t, os.WriteFile(mine+"/mark", []byte("mine"), 0o644))
			harness.Must(t, os.WriteFile(secret+"/mark", []byte("secret"), 0o600))
			harness.Must(t, os.Chmod(secret, 0o700))
			if harness.Root() {
				const owner = 12345
				harness.Must(t, os.Chown(top, owner, owner))
				harness.Must(t, os.Chown(mine, owner, owner))
			}
			dir, err := os.Open(mine)
			harness.Must(t, err)
			defer dir.Close()
			stop := exchange(t, mine, secret)
			right := 0
			for range max(30, harness.Soak(t)) {
				// The directory itself, whatever its name is now.
				r := harness.Run(t, harness.Options{Dir: fmt.Sprintf("/proc/self/fd/%d", dir.Fd())}, append(flags, "cat", "mark")...)
				switch {
				case r.ExitCode == 0 && string(r.Stdout) == "mine":
					right++
				case bytes.Contains(append(r.Stdout, r.Stderr...), []byte("secret\n")), r.ExitCode == 0, r.ExitCode != 125:
					t.Errorf("exit code %d, %q: %s", r.ExitCode, r.Stdout, r.Stderr)
				}
			}
			t.Logf("%d showed the directory", right)
			stop()
		})
	}
}
