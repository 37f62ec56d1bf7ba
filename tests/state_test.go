package tests

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// When its supervisor is killed, a sandbox ends at once with its execs and is lost. cleanup
// removes every trace.
func TestSupervisorKilled(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{}, "--name", "orphan", "/fixtures/tree-term-immune")
	b.Dying = true
	p := b.StartExec(harness.Options{}, []string{"--timeout", "50"}, "/fixtures/tree-daemon")
	p.WaitOutput("ready 2\n")
	waiter := s.Start(harness.Options{}, "wait", "orphan")
	follower := s.Start(harness.Options{}, "logs", "-f", "orphan")
	follower.WaitOutput("ready 2\n")
	begin := time.Now()
	b.KillSupervisor()
	p.Wait().Expect(t, 137, "killed")
	harness.Within(t, "the end", time.Since(begin), 0, 300*time.Millisecond)
	rec := b.Ended()
	check.That(t, rec.Status == "lost" && !rec.Alive && rec.Report == nil, "%+v", rec)
	r := waiter.Wait()
	check.That(t, r.ExitCode == 137 || r.ExitCode == 125, "wait: exit code %d: %s", r.ExitCode, r.Stderr)
	follower.Wait().Exits(t, 0)
	s.Run("ps", "--names").Out(t, "")
	s.Run("ps", "--all").OutHas(t, "lost")
	s.Run("exec", "orphan", "true").Exits(t, 125).ErrHas(t, "lost")
	k := kill(t, s, 0, "orphan")
	check.That(t, k[0].Already && k[0].Status == "lost" && k[0].Verdict == "proven", "%+v", k)
	again := s.Sandbox(harness.Options{}, "--name", "orphan") // the name is free
	r = s.Run("cleanup")
	check.That(t, r.ExitCode == 0 && strings.Contains(string(r.Stdout), b.ID) && !strings.Contains(string(r.Stdout), again.ID), "cleanup: exit code %d: %s", r.ExitCode, r.Stdout)
	again.Alive()
	s.Run("inspect", b.ID).Exits(t, 125)
}

// An idle sandbox ends with its room, even if its keeper still has cgroups to remove.
func TestIdleRoomKilled(t *testing.T) {
	t.Parallel()
	for _, flags := range [][]string{nil, {"--pids", "64"}} {
		if len(flags) > 0 && !enforced(t, limits.Request{Pids: 64}, flags...) {
			return
		}
		b := harness.NewState(t).Sandbox(harness.Options{}, flags...)
		b.Dying = true
		harness.Must(t, b.Init.Signal(unix.SIGKILL))
		rec := b.Ended()
		check.That(t, !rec.Alive && rec.Report != nil && rec.Report.Cause == "lost" && rec.Report.Teardown.Verdict == "proven", "%q: %+v", flags, rec)
	}
}

// crashed returns the directory of a sandbox whose supervisor was killed.
func crashed(t *testing.T, s *harness.State) (b *harness.Sandbox, dir string) {
	t.Helper()
	b = s.Sandbox(harness.Options{}, "--name", "crashed")
	b.KillSupervisor()
	return b, filepath.Join(s.Dir, b.ID)
}

// A truncated, empty or missing record is skipped with a warning, other sandboxes are listed, and
// cleanup removes it.
func TestRecordDamaged(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	live := s.Sandbox(harness.Options{}, "--name", "live")
	for _, cut := range []float64{0, 0.01, 0.5, 0.99, -1} {
		b, dir := crashed(t, s)
		file := filepath.Join(dir, "record.json")
		data, err := os.ReadFile(file)
		harness.Must(t, err)
		if cut < 0 {
			harness.Must(t, os.Remove(file))
		} else {
			harness.Must(t, os.Truncate(file, int64(cut*float64(len(data)))))
		}
		r := s.Run("ps", "--all", "--names")
		check.That(t, r.ExitCode == 0 && string(r.Stdout) == "live\n" && (cut < 0 || len(harness.Lines(r.Stderr)) == 1),
			"cut at %v: ps: exit code %d: %q %q", cut, r.ExitCode, r.Stdout, r.Stderr)
		for _, args := range [][]string{{"kill", b.ID}, {"exec", b.ID, "true"}, {"inspect", b.ID}, {"wait", b.ID}, {"logs", b.ID}} {
			s.Run(args...).Exits(t, 125).ErrLines(t, 1)
		}
		b.Forget()
		s.Run("cleanup").Exits(t, 0)
		_, err = os.Lstat(dir)
		check.That(t, err != nil, "cut at %v: cleanup has left it", cut)
	}
	live.Exec(harness.Options{}, nil, "true").Expect(t, 0, "exited")
}

// Planted symbolic links are not followed: their targets are neither read nor removed.
func TestStateLinks(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	outside := harness.Dir(t)
	treasure := filepath.Join(outside, "record.json")
	b, dir := crashed(t, s)
	data, err := os.ReadFile(filepath.Join(dir, "record.json"))
	harness.Must(t, err)
	harness.Must(t, os.WriteFile(treasure, data, 0o600))
	harness.Must(t, os.WriteFile(filepath.Join(outside, "lock"), nil, 0o600))
	harness.Must(t, os.Remove(filepath.Join(dir, "record.json")))
	harness.Must(t, os.Symlink(treasure, filepath.Join(dir, "record.json")))
	harness.Must(t, os.Remove(filepath.Join(dir, "stdout.log")))
	harness.Must(t, os.Symlink("/etc/passwd", filepath.Join(dir, "stdout.log")))
	harness.Must(t, os.Symlink(outside, filepath.Join(s.Dir, "0123456789abcdef")))
	harness.Must(t, os.Symlink("../"+filepath.Base(outside), filepath.Join(s.Dir, "names", "planted")))
	b.Forget()
	for _, args := range [][]string{{"ps", "--all"}, {"inspect", b.ID}, {"inspect", "0123456789abcdef"}, {"inspect", "planted"}, {"logs", b.ID}, {"kill", "--all"}} {
		r := s.Run(args...)
		check.That(t, !strings.Contains(string(r.Stdout), "root:") && !strings.Contains(string(r.Stdout), "boot_id"), "%q has followed a link: %s", args, r.Stdout)
	}
	s.Run("cleanup").Exits(t, 0)
	entries, err := os.ReadDir(outside)
	harness.Must(t, err)
	now, err := os.ReadFile(treasure)
	check.That(t, err == nil && string(now) == string(data) && len(entries) == 2, "what a link led to was touched: %v, %v", entries, err)
}

// No user, not even root, sees or changes another user's sandboxes.
func TestAnotherUser(t *testing.T) {
	t.Parallel()
	commands := [][]string{{"ps"}, {"ps", "--all"}, {"inspect", "box"}, {"kill", "box"}, {"kill", "--all"}, {"exec", "box", "true"}, {"logs", "box"}, {"wait", "box"}, {"cleanup"}, {"start"}}
	refused := func(s *harness.State, wrap []string) {
		for _, args := range commands {
			r := s.Start(harness.Options{Wrap: wrap}, args...).Wait()
			check.That(t, r.ExitCode == 125 && !strings.Contains(string(r.Stdout), "box") && len(harness.Lines(r.Stderr)) == 1 && strings.Contains(string(r.Stderr), s.Dir),
				"%q %q: exit code %d: %s%s", wrap, args, r.ExitCode, r.Stdout, r.Stderr)
		}
	}
	if !harness.Root() {
		// Another user's directory is refused as a state directory.
		refused(&harness.State{Dir: "/usr", Work: harness.Dir(t), T: t}, nil)
		return
	}
	s := harness.NewState(t)
	s.Wrap = harness.As(23456)
	b := s.Sandbox(harness.Options{}, "--name", "box")
	s.Run("exec", "box", "id", "-u").Out(t, "23456\n")
	others := harness.Shared(s)
	refused(others, nil)
	refused(others, harness.As(34567))
	b.Alive()
}

// A state directory that others can enter, or that is not a directory, is refused.
func TestStateDirectoryRefused(t *testing.T) {
	t.Parallel()
	dir := harness.Dir(t) // others can enter it
	link, file := filepath.Join(dir, "link"), filepath.Join(dir, "file")
	own := filepath.Join(dir, "own")
	harness.Must(t, os.Mkdir(own, 0o700))
	harness.Must(t, os.Symlink(own, link))
	harness.Must(t, os.WriteFile(file, nil, 0o600))
	for _, place := range []string{dir, link, file, "relative", filepath.Join(dir, "no", "such")} {
		s := &harness.State{Dir: place, Work: harness.Dir(t), T: t}
		s.Run("start").Exits(t, 125).ErrLines(t, 1).ErrHas(t, place)
	}
}

// Another user cannot disable commands by taking the name of the state directory in /tmp. Without
// another place for it, --apply fails before the command runs.
func TestTakenStateDirectory(t *testing.T) {
	t.Parallel()
	// The binaries may be below /tmp, so they are shown at /mnt.
	const script = `set -e
mount --bind "$1" /mnt; mount -t tmpfs -o mode=1777 tmpfs /tmp; mkdir -m 755 /tmp/home /tmp/home/work
uid=$(id -u); [ $uid != 0 ] || { uid=61000; chown -R 61000:61000 /tmp/home; }
case $2 in
directory) mkdir -m 700 /tmp/sbxrun-$uid ;;
link) mkdir -m 700 /tmp/other; ln -s other /tmp/sbxrun-$uid ;;
file) : >/tmp/sbxrun-$uid ;;
open) mkdir -m 777 /tmp/sbxrun-$uid; chown $uid /tmp/sbxrun-$uid; chmod 777 /tmp/sbxrun-$uid ;;
esac
cd /tmp/home/work
as() { home=$1; shift; set -- env -u SBXRUN_STATE_DIR -u XDG_RUNTIME_DIR HOME=$home /mnt/sbxrun "$@"
  [ $(id -u) = $uid ] || set -- setpriv --reuid $uid --regid $uid --clear-groups "$@"
  setpriv --ambient-caps=-all --inh-caps=-all "$@"; }
as /tmp/home --max-parallel 1 true; echo max-parallel
as /tmp/home ps >/dev/null; echo ps
as /tmp/home --cwd overlay --apply sh -c 'echo applied >a'; cat a
[ "$3" = alone ] || { as /tmp/home start --name box >/dev/null; as /tmp/home ps | grep -q box; as /tmp/home exec box true; as /tmp/home kill box >/dev/null; echo start; }
rc=0; as /nonexistent --cwd overlay --apply sh -c 'echo ran >&2' 2>/tmp/err || rc=$?
echo $rc; grep -c ran /tmp/err || true; grep -c "sbxrun: error: .*state directory" /tmp/err
ls -A /tmp/sbxrun-$uid/ /tmp/other 2>/dev/null | grep -v : || true
`
	kinds := []string{"link", "file", "open"}
	wrap, alone := []string{"unshare", "--mount", "--user", "--map-current-user", "--keep-caps"}, "alone"
	want := "max-parallel\nps\napplied\n"
	if harness.Root() {
		// Only root can give a directory to another user, and see the supervisor end with a PID
		// namespace.
		kinds = append(kinds, "directory")
		wrap, alone = []string{"unshare", "--mount", "--pid", "--fork", "--mount-proc"}, ""
		want += "start\n"
	}
	want += "125\n0\n1\n"
	for _, kind := range kinds {
		args := append(wrap[1:len(wrap):len(wrap)], "bash", "-c", script, "bash", filepath.Dir(harness.Binary(t)), kind, alone)
		out, err := exec.Command(wrap[0], args...).CombinedOutput()
		got := strings.TrimRight(string(out), "\n") + "\n"
		check.That(t, err == nil && got == want, "%s: %v\n%s", kind, err, got)
	}
}
