package tests

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// The error names IDs that bubblewrap cannot handle as the cause.
func TestLargeIDs(t *testing.T) {
	t.Parallel()
	for _, id := range []string{"2147483648", "1000:4294967294"} {
		for _, command := range []string{"run", "start"} {
			r := harness.Start(t, harness.Options{Bare: true, Dir: "/usr", Env: []string{"SBXRUN_STATE_DIR=" + harness.SharedDir(t) + "/state"}}, command, "--user", id, "true").Wait()
			_, large, _ := strings.Cut("1000:"+id, ":")
			large = large[strings.LastIndex(large, ":")+1:]
			want := fmt.Sprintf("sbxrun: error: bubblewrap cannot set up a sandbox for uid or gid %s: ids must be below 2147483648; name other ids with --user\n", large)
			if r.ExitCode != 125 || string(r.Stderr) != want {
				t.Errorf("%s --user %s: exit code %d, stderr %s, want %s", command, id, r.ExitCode, r.Stderr, want)
			}
		}
	}
	if !harness.Root() {
		return
	}
	const large = 1<<31 + 5
	o := harness.Options{Bare: true, Dir: "/usr", Attr: &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: large, Gid: large}}}
	r := harness.Start(t, o, "true").Wait()
	if r.ExitCode != 125 || !strings.Contains(string(r.Stderr), fmt.Sprintf("for uid or gid %d: ids must be below", large)) {
		t.Errorf("run: exit code %d, stderr %s", r.ExitCode, r.Stderr)
	}
	r = harness.Start(t, o, "doctor").Wait()
	if r.ExitCode != 125 || !strings.Contains(string(r.Stdout), fmt.Sprintf("bubblewrap cannot handle uid %d: ids must be below 2147483648: setting up", large)) || strings.Contains(string(r.Stdout), "dmesg") {
		t.Errorf("doctor: exit code %d, stdout %s", r.ExitCode, r.Stdout)
	}
}

// The error names a missing /tmp, which bubblewrap needs, as the cause.
func TestRootWithoutTmp(t *testing.T) {
	t.Parallel()
	wrap := []string{"bwrap", "--dev-bind", "/dev", "/dev", "--ro-bind", "/usr", "/usr", "--ro-bind", "/etc", "/etc", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64",
		"--bind", "/proc", "/proc", "--ro-bind", harness.Binary(t), "/sbxrun", "--dir", "/run", "--chdir", "/usr", "--unshare-user"}
	// The harness appends the program's path on the host.
	o := harness.Options{Bare: true, Dir: "/usr", Wrap: append(wrap, "sh", "-c", `shift; exec /sbxrun "$@"`, "-")}
	if harness.Root() {
		o.Attr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 61000, Gid: 61000}}
	}
	r := harness.Start(t, o, "true").Wait()
	if r.ExitCode != 125 || !strings.Contains(string(r.Stderr), "bubblewrap needs a directory /tmp: ") || !strings.Contains(string(r.Stderr), "mkdir -m 1777 /tmp") {
		t.Errorf("exit code %d, stderr %s", r.ExitCode, r.Stderr)
	}
}

// Without a known cause, sbxrun passes on bubblewrap's own message.
func TestUnknownEarlyFailure(t *testing.T) {
	t.Parallel()
	dir := harness.Dir(t)
	harness.Must(t, os.WriteFile(dir+"/bwrap", []byte("#!/bin/sh\ncase $1 in --version) echo bubblewrap 0.8.0; exit;; esac\necho 'bwrap: no luck today' >&2; exit 1"), 0o755))
	r := harness.Start(t, harness.Options{Bare: true, Dir: "/usr", Env: []string{"SBXRUN_BWRAP=" + dir + "/bwrap"}}, "true").Wait()
	if r.ExitCode != 125 || !strings.Contains(string(r.Stderr), "no luck today") || strings.Contains(string(r.Stderr), "kernel refuses") || strings.Contains(string(r.Stderr), "user namespace:") {
		t.Errorf("exit code %d, stderr %s", r.ExitCode, r.Stderr)
	}
}
