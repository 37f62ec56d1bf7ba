package tests

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// olderBwrap returns a bwrap that claims to be bubblewrap 0.4.1 and rejects later options:
// --perms, --size, --disable-userns. setup.sh bwraps tests real old versions.
func olderBwrap(t *testing.T) string {
	t.Helper()
	dir := harness.Dir(t)
	harness.Must(t, os.Chmod(dir, 0o755)) // root's sandboxes execute it as another user
	name := filepath.Join(dir, "bwrap")
	harness.Must(t, os.WriteFile(name, []byte(`#!/bin/sh
args=$(mktemp)
cat <&3 >$args
exec 3<$args
rm $args
for word in "$@" $(tr '\0' '\n' </proc/self/fd/3); do
	case $word in
	--perms | --size | --chmod | --disable-userns | --bind-fd | --ro-bind-fd)
		echo "bwrap: Unknown option $word" >&2
		exit 1
		;;
	esac
done
exec /usr/bin/bwrap "$@"
`+"\x00bubblewrap 0.4.1\x00--as-pid-1\n"), 0o755))
	return name
}

// A room made by an older bubblewrap is as strong: sbxrun does what it has no options for. The
// test turns the system-call filter off, which would hide a difference.
func TestOlderBwrap(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	env := harness.Options{Env: []string{"SBXRUN_BWRAP=" + olderBwrap(t)}}
	r := harness.Run(t, harness.Options{Env: env.Env, Bare: true, Dir: "/usr"}, "--print-command", "true")
	if r.ExitCode != 125 || len(r.Stdout) != 0 || !strings.Contains(string(r.Stderr), "a command without sbxrun takes bubblewrap 0.8") {
		t.Errorf("--print-command: exit code %d, stdout %q, stderr %q", r.ExitCode, r.Stdout, r.Stderr)
	}
	// doctor objects to a bwrap below /tmp as root.
	r = harness.Run(t, harness.Options{Env: env.Env, Bare: true, Dir: "/usr"}, "doctor")
	if !strings.Contains(string(r.Stdout), "/bwrap, version 0.4.1, too old for --print-command") {
		t.Errorf("doctor: exit code %d, stdout %s, stderr %q", r.ExitCode, r.Stdout, r.Stderr)
	}
	const script = `stat -c '%a %n' / /tmp /dev/shm $HOME /mnt /etc/passwd
for dir in /tmp /dev/shm /mnt; do set -- $(stat -f -c '%b %S' $dir); echo $(($1 * $2)); done
for file in /x /dev/x /etc/passwd; do ! echo x 2>/dev/null >$file || echo written: $file; done
unshare --user true 2>/dev/null && echo user namespace
exit 7`
	const want = `755 /
1777 /tmp
1777 /dev/shm
700 /home/sandbox
755 /mnt
444 /etc/passwd
1048576
67108864
65536
`
	flags := []string{"--seccomp", "off", "--tmp-size", "1M", "--tmpfs", "/mnt:64K"}
	for _, user := range [][]string{nil, {"--user", "0:0"}} { // bwrap creates one user namespace less
		flags := append(flags, user...)
		r = harness.Run(t, env, append(flags, "sh", "-c", script)...)
		r.Expect(t, 7, "exited")
		if string(r.Stdout) != want {
			t.Errorf("run %v: %s%s", user, r.Stdout, r.Stderr)
		}
		b := s.Sandbox(env, flags...)
		r = b.Exec(harness.Options{}, nil, "sh", "-c", script)
		r.Expect(t, 7, "exited")
		if string(r.Stdout) != want {
			t.Errorf("exec %v: %s%s", user, r.Stdout, r.Stderr)
		}
		r = b.Exec(harness.Options{}, []string{"--timeout", "1"}, "/fixtures/tree-setsid")
		r.Expect(t, 124, "timeout")
		harness.Within(t, "the deadline", r.Elapsed, time.Second, 2*time.Second)
		b.Alive()
		// kill enters the sandbox too, to signal its processes.
		if k := s.Run("kill", "--grace", "1", b.ID); k.ExitCode != 0 {
			t.Errorf("kill: %d, %s", k.ExitCode, k.Stderr)
		}
		b.Ended()
	}
}
