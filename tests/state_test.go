package tests

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// When its supervisor is killed, a sandbox ends at once with its execs and is lost. cleanup removes every trace.
func TestSupervisorKilled(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{}, "--name", "orphan", "/fixtures/tree-term-immune")
	b.Dying = true
	p := b.StartExec(harness.Options{}, []string{"--timeout", "600"}, "/fixtures/tree-daemon")
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
		check.Must(t, b.Init.Signal(unix.SIGKILL))
		rec := b.Ended()
		check.That(t, !rec.Alive && rec.Report != nil && rec.Report.Cause == "lost" && rec.Report.Teardown.Verdict == "proven", "%q: %+v", flags, rec)
	}
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
upper=; [ -z "$4" ] || { chown $uid "$4"; upper="--upper $4/layer"; }
cd /tmp/home/work
as() { home=$1; shift; set -- env -u SBXRUN_STATE_DIR -u XDG_RUNTIME_DIR HOME=$home /mnt/sbxrun "$@"
  [ $(id -u) = $uid ] || set -- setpriv --reuid $uid --regid $uid --clear-groups "$@"
  setpriv --ambient-caps=-all --inh-caps=-all "$@"; }
as /tmp/home --max-parallel 1 true; echo max-parallel
as /tmp/home ps >/dev/null; echo ps
as /tmp/home $upper --cwd overlay --apply sh -c 'echo applied >a'; cat a
[ "$3" = alone ] || { as /tmp/home start --name box >/dev/null; as /tmp/home ps | grep -q box; as /tmp/home exec box true; as /tmp/home kill box >/dev/null; echo start; }
rc=0; as /nonexistent --cwd overlay --apply sh -c 'echo ran >&2' 2>/tmp/err || rc=$?
echo $rc; grep -c ran /tmp/err || true; grep -c "sbxrun: error: .*state directory" /tmp/err
ls -A /tmp/sbxrun-$uid/ /tmp/other 2>/dev/null | grep -v : || true
`
	kinds := []string{"link", "file", "open"}
	wrap, alone := []string{"unshare", "--mount", "--user", "--map-current-user", "--keep-caps"}, "alone"
	want := "max-parallel\nps\napplied\n"
	if harness.Root() {
		// Only root can give a directory to another user, and see the supervisor end with a PID namespace.
		kinds = append(kinds, "directory")
		wrap, alone = []string{"unshare", "--mount", "--pid", "--fork", "--mount-proc"}, ""
		want += "start\n"
	}
	want += "125\n0\n1\n"
	for _, kind := range kinds {
		upper := ""
		if !kernel(t, 6, 6) { // layers in memory need extended attributes
			upper = harness.SharedDir(t)
		}
		args := append(wrap[1:len(wrap):len(wrap)], "bash", "-c", script, "bash", filepath.Dir(harness.Binary(t)), kind, alone, upper)
		out, err := harness.Command(t, exec.Command(wrap[0], args...), harness.Bound)
		got := strings.TrimRight(out, "\n") + "\n"
		check.That(t, err == nil && got == want, "%s: %v\n%s", kind, err, got)
	}
}

// start --rm leaves no record, however the sandbox ends, and clients that already wait still get its result.
func TestStartRm(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	dir := harness.SharedDir(t)
	gone := func(b *harness.Sandbox) {
		t.Helper()
		b.AwaitEnd()
		_, err := os.Stat(s.Dir + "/" + b.ID)
		check.That(t, os.IsNotExist(err), "its record is still there: %v", err)
		r := s.Run("ps", "--all")
		check.That(t, len(harness.Lines(r.Stdout)) == 1, "ps: %s", r.Stdout)
	}

	b := s.Sandbox(harness.Options{}, "--rm", "--name", "job", "--bind", dir+":/go", "sh", "-c", "echo begun; while [ ! -e /go/on ]; do sleep 0.02; done; echo done; exit 5")
	b.Busy = true
	waiter, follower := s.Start(harness.Options{}, "wait", "--json", "job"), s.Start(harness.Options{}, "logs", "-f", "job")
	follower.WaitOutput("begun\n")
	ready := s.Start(harness.Options{}, "wait", "--log", "nosuch", "job")
	// Both have opened the sandbox's record for good before these. They open it for a moment earlier.
	held(t, waiter, "pidfd") // of the supervisor
	held(t, ready, b.ID+"/stderr.log")
	check.Must(t, os.WriteFile(dir+"/on", nil, 0o644))
	var said struct {
		Status   string          `json:"status"`
		ExitCode int             `json:"exit_code"`
		Report   *harness.Report `json:"report"`
	}
	r := waiter.Wait()
	decode(t, r, &said)
	check.That(t, r.ExitCode == 5 && said.ExitCode == 5 && said.Status == "failed" && said.Report != nil, "wait: exit code %d: %s%s", r.ExitCode, r.Stdout, r.Stderr)
	follower.Wait().Exits(t, 0).Out(t, "begun\ndone\n")
	ready.Wait().Exits(t, 125).ErrHas(t, "has ended without such a line: failed, with exit code 5")
	gone(b)

	// Killed, with a detached exec whose record is removed too.
	b = s.Sandbox(harness.Options{}, "--rm")
	d := b.Detach(nil, "/fixtures/tree-daemon")
	b.Dying = true
	all := kill(t, s, 0, "--grace", "0", b.ID)
	check.That(t, len(all) == 1 && all[0].Status == "killed" && all[0].Verdict == "proven" && all[0].ExitCode != nil && *all[0].ExitCode == 137, "kill: %+v", all)
	d.Ended().Expect(t, 137, "killed")
	gone(b)

	// At its deadline, late enough to look at it before.
	b = s.Sandbox(harness.Options{}, "--rm", "--timeout", harness.Scaled(3*time.Second).String())
	gone(b)

	// Lost, with a record that stays.
	b = s.Sandbox(harness.Options{}, "--rm")
	b.KillSupervisor()
	rec := b.Inspect()
	check.That(t, rec.Status == "lost", "its supervisor was killed: %+v", rec)
}

// held waits until a process has a file open, whose link in /proc/PID/fd contains name.
func held(t *testing.T, p *harness.Process, name string) {
	t.Helper()
	dir := "/proc/" + strconv.Itoa(p.PID) + "/fd/"
	harness.Until(t, harness.Bound, "a descriptor of "+name, func() bool {
		fds, _ := os.ReadDir(dir)
		return slices.ContainsFunc(fds, func(fd os.DirEntry) bool {
			target, _ := os.Readlink(dir + fd.Name())
			return strings.Contains(target, name)
		})
	})
}

// An unproven sandbox keeps its record, which lists the survivors.
func TestStartRmUnproven(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{}, "--rm", "--proof-timeout", "0.2")
	x := b.StartExec(harness.Options{}, nil, "/fixtures/tree-daemon")
	b.Dying = true
	x.WaitOutput("ready 2\n") // so that there is something to reap
	keeper := x.Role(1)
	b.AdoptAll()
	check.Must(t, keeper.Signal(unix.SIGSTOP))
	kill(t, s, 123, "--grace", "0", "--proof-timeout", "0.2", b.ID)
	check.Must(t, keeper.Signal(unix.SIGCONT))
	x.Wait()
	rec := b.Ended()
	check.That(t, rec.Report != nil && rec.Report.Teardown.Verdict == "unproven", "%+v", rec)
}

// cleanup with names removes only these records, and no running sandbox.
func TestCleanupNames(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	one, two, three := s.Sandbox(harness.Options{}, "--name", "one"), s.Sandbox(harness.Options{}), s.Sandbox(harness.Options{}, "--name", "three")
	d := three.Detach(nil, "true")
	e := three.Detach(nil, "true")
	d.Ended()
	e.Ended()
	kill(t, s, 0, "--grace", "0", one.ID, two.ID)
	s.Run("cleanup", "one", three.ID+"/"+d.ID).Exits(t, 0).Out(t, "removed  record "+one.ID+" one: record, logs and name: killed\nremoved  record "+d.ID+": record, logs and name: completed\n")
	r := s.Run("cleanup", "three", "nobody")
	check.That(t, r.ExitCode == 125 && strings.HasPrefix(string(r.Stdout), "failed   record "+three.ID+" three: the sandbox three: still running") && string(r.Stderr) == "sbxrun: error: no sandbox named \"nobody\" in "+s.Dir+"; list them: sbxrun ps --all\n" && !strings.Contains(string(r.Stdout), "nobody"),
		"exit code %d: %s%s", r.ExitCode, r.Stdout, r.Stderr)
	three.Alive()
	check.Equal(t, string(s.Run("ps", "-aq").Stdout), two.ID+"\n"+three.ID+"\n", "sandboxes")
	check.Equal(t, string(s.Run("ps", "-aq", "three").Stdout), three.ID+"/"+e.ID+"\n", "execs")
}

// start gives up on a supervisor that was stopped, and leaves nothing.
func TestStartStopped(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	holder := s.Start(harness.Options{}, "run", "--max-parallel", "1", "sh", "-c", "echo up; sleep 300")
	holder.WaitOutput("up\n")
	p := s.Start(harness.Options{}, "start", "--json", "--max-parallel", "1", "--on-pressure", "wait", "sleep", "600")
	harness.Until(t, harness.Bound, "somebody who waits", func() bool { return queued(t, s.Dir) == 1 })
	supervisor, err := harness.Open(harness.FirstChild(t, p.PID))
	check.Must(t, err)
	defer supervisor.Close()
	check.Must(t, supervisor.Signal(unix.SIGSTOP))
	p.Wait().Exits(t, 125).ErrHas(t, "exited before reporting").OutHas(t, `"error":{"code":"detach"`).OutHas(t, `"exit_code":125`)
	s.Run("ps", "-aq").Out(t, "")
	holder.Signal(unix.SIGTERM)
	holder.Wait()
}

// Control characters in a command line don't reach the terminal.
func TestPsPrintable(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	s.Sandbox(harness.Options{}, "sh", "-c", "exec sleep 600 # \x1b[31m\nsecond line")
	r := s.Run("ps")
	check.That(t, !strings.ContainsAny(string(r.Stdout), "\x1b") && len(harness.Lines(r.Stdout)) == 2, "%q", r.Stdout)
}
