package tests

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// olderBwrap returns a bwrap that claims to be bubblewrap 0.4.1 and rejects later options:
// --perms, --size, --disable-userns. setup.sh bwraps tests real old versions.
func olderBwrap(t *testing.T) string {
	t.Helper()
	dir := harness.Dir(t)
	check.Must(t, os.Chmod(dir, 0o755)) // root's sandboxes execute it as another user
	name := filepath.Join(dir, "bwrap")
	check.Must(t, os.WriteFile(name, []byte(`#!/bin/sh
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

// A room built by an older bubblewrap is as strong, because sbxrun itself does the work of the missing options. The test
// turns the system-call filter off, because that would hide a difference.
func TestOlderBwrap(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	env := harness.Options{Env: []string{"SBXRUN_BWRAP=" + olderBwrap(t)}}
	harness.Run(t, harness.Options{Env: env.Env, Bare: true, Dir: "/usr"}, "--print-command", "true").Exits(t, 125).Out(t, "").ErrHas(t, "a command without sbxrun requires bubblewrap 0.8")
	// doctor objects to a bwrap below /tmp as root.
	harness.Run(t, harness.Options{Env: env.Env, Bare: true, Dir: "/usr"}, "doctor").OutHas(t, "/bwrap, version 0.4.1, too old for --print-command")
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
644 /etc/passwd
1048576
67108864
65536
`
	flags := []string{"--seccomp", "off", "--tmp-size", "1M", "--tmpfs", "/mnt:64K"}
	for _, user := range [][]string{nil, {"--user", "0:0"}} { // bwrap creates one user namespace less
		flags := append(flags, user...)
		harness.Run(t, env, append(flags, "sh", "-c", script)...).Expect(t, 7, "exited").Out(t, want)
		b := s.Sandbox(env, flags...)
		b.Exec(harness.Options{}, nil, "sh", "-c", script).Expect(t, 7, "exited").Out(t, want)
		r := b.Exec(harness.Options{}, []string{"--timeout", "1"}, "/fixtures/tree-setsid").Expect(t, 124, "timeout")
		harness.Within(t, "the deadline", r.Elapsed, time.Second, 2*time.Second)
		b.Alive()
		// kill enters the sandbox too, to signal its processes.
		s.Run("kill", "--grace", "1", b.ID).Exits(t, 0)
		b.Ended()
	}
}

// When a command has planted programs in a directory of PATH, the next sbxrun executes none of them on the host.
func TestPlantedProgramsInPath(t *testing.T) {
	t.Parallel()
	project := harness.Dir(t)
	bin := filepath.Join(project, ".venv/bin")
	check.Must(t, os.MkdirAll(bin, 0o755))
	marker := filepath.Join(project, "executed")
	plant := `for name in bwrap sbxrund newuidmap newgidmap setpriv unshare nsenter systemd-run loginctl mount umount fusermount3 getent sh env id git tar; do
	printf '#!/bin/sh\n: >"` + marker + `-$0"\nexit 1\n' | sed "s,\$0,$name," >.venv/bin/$name; chmod 755 .venv/bin/$name; done`
	harness.Run(t, harness.Options{Dir: project}, "-w", "sh", "-c", plant).Expect(t, 0, "exited")
	o := harness.Options{Dir: project, Env: []string{"PATH=" + bin + ":" + harness.Path}}
	harness.Run(t, o, "--cwd", "none", "/bin/true").Expect(t, 0, "exited")
	harness.Run(t, o, "-w", "/bin/true").Expect(t, 0, "exited")
	harness.NewState(t).Sandbox(o).Exec(o, nil, "/bin/true").Expect(t, 0, "exited")
	o.Bare = true
	for _, args := range [][]string{{"doctor"}, {"--print-command", "/bin/true"}} {
		r := harness.Start(t, o, args...).Wait()
		check.That(t, r.ExitCode == 0 || strings.Contains(string(r.Stderr), "a command without sbxrun requires bubblewrap 0.8"), "%q: exit code %d, stderr %s", args, r.ExitCode, r.Stderr)
	}
	found, _ := filepath.Glob(marker + "*")
	check.That(t, len(found) == 0, "executed: %q", found)
}

// sbxrun refuses a named bwrap that a sandbox could replace.
func TestNamedBwrapExposed(t *testing.T) {
	t.Parallel()
	dir, marker := harness.Dir(t), filepath.Join(harness.SharedDir(t), "executed")
	bwrap := filepath.Join(dir, "bwrap")
	check.Must(t, os.WriteFile(bwrap, []byte("#!/bin/sh\n: >"+marker+"\nexec /usr/bin/bwrap \"$@\"\n"), 0o755))
	for _, c := range []struct {
		dir  string
		args []string
		code int
	}{
		{"/usr", []string{"true"}, 0},
		{dir, []string{"true"}, 125},
		{dir, []string{"-w", "true"}, 125},
		{"/usr", []string{"--bind", dir, "true"}, 125},
		{"/usr", []string{"--bind", bwrap + ":/mnt/x", "true"}, 125},
		{"/usr", []string{"start", "--bind", dir + ":/mnt", "sleep", "600"}, 125},
	} {
		_ = os.Remove(marker)
		r := harness.Start(t, harness.Options{Dir: c.dir, Bare: true, Env: []string{"SBXRUN_BWRAP=" + bwrap}}, c.args...).Wait()
		_, err := os.Stat(marker)
		if executed := err == nil; r.ExitCode != c.code || c.code != 0 && (executed || !strings.Contains(string(r.Stderr), "cannot be trusted")) {
			t.Errorf("%q in %s: exit code %d, executed %v, stderr %s", c.args, c.dir, r.ExitCode, executed, r.Stderr)
		}
	}
}

// bareHost returns options to run /sbxrun, as an ordinary user, on a host that has only the directories of the system, and those
// that flags of bwrap add.
func bareHost(t *testing.T, flags ...string) harness.Options {
	t.Helper()
	o := harness.Options{Bare: true, Dir: "/usr", Wrap: append([]string{"bwrap", "--dev-bind", "/dev", "/dev", "--ro-bind", "/usr", "/usr", "--ro-bind", "/etc", "/etc", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib",
		"--symlink", "usr/lib64", "/lib64", "--bind", "/proc", "/proc", "--ro-bind", harness.Binary(t), "/sbxrun", "--dir", "/run", "--chdir", "/usr", "--unshare-user"}, flags...)}
	if harness.Root() {
		o.Attr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 61000, Gid: 61000}}
	}
	return o
}

// The error names a missing /tmp, which bubblewrap needs, as the cause.
func TestRootWithoutTmp(t *testing.T) {
	t.Parallel()
	o := bareHost(t)
	// The harness appends the program's path on the host.
	o.Wrap = append(o.Wrap, "sh", "-c", `shift; exec /sbxrun "$@"`, "-")
	harness.Start(t, o, "true").Wait().Exits(t, 125).ErrHas(t, "bubblewrap needs a directory /tmp: ").ErrHas(t, "mkdir -m 1777 /tmp")
}
