package tests

import (
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// start --rm leaves no record, however the sandbox ends, and clients that already wait still get
// its result.
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
	held(t, waiter, s.Dir+"/"+b.ID+"/lock")
	held(t, ready, s.Dir+"/"+b.ID+"/lock")
	harness.Must(t, os.WriteFile(dir+"/on", nil, 0o644))
	var said struct {
		Status   string          `json:"status"`
		ExitCode int             `json:"exit_code"`
		Report   *harness.Report `json:"report"`
	}
	r := waiter.Wait()
	decode(t, r, &said)
	check.That(t, r.ExitCode == 5 && said.ExitCode == 5 && said.Status == "failed" && said.Report != nil, "wait: exit code %d: %s%s", r.ExitCode, r.Stdout, r.Stderr)
	follower.Wait().Exits(t, 0).Out(t, "begun\ndone\n")
	if r := ready.Wait(); r.ExitCode != 125 || !strings.Contains(string(r.Stderr), "has ended without such a line: failed, with exit code 5") {
		t.Errorf("wait --log: exit code %d: %s", r.ExitCode, r.Stderr)
	}
	gone(b)

	// Killed, with a detached exec whose record is removed too.
	b = s.Sandbox(harness.Options{}, "--rm")
	d := b.Detach(nil, "/fixtures/tree-daemon")
	b.Dying = true
	all := kill(t, s, 0, "--grace", "0", b.ID)
	check.That(t, len(all) == 1 && all[0].Status == "killed" && all[0].Verdict == "proven" && all[0].ExitCode != nil && *all[0].ExitCode == 137, "kill: %+v", all)
	if r := d.Ended(); r.Cause != "killed" {
		t.Errorf("the exec: %s", r.Raw())
	}
	gone(b)

	// At its deadline, late enough to look at it before.
	b = s.Sandbox(harness.Options{}, "--rm", "--timeout", "3")
	gone(b)

	// Lost, with a record that stays.
	b = s.Sandbox(harness.Options{}, "--rm")
	b.KillSupervisor()
	rec := b.Inspect()
	check.That(t, rec.Status == "lost", "its supervisor was killed: %+v", rec)
}

// held waits until a process has a file open.
func held(t *testing.T, p *harness.Process, name string) {
	t.Helper()
	dir := "/proc/" + strconv.Itoa(p.PID) + "/fd/"
	harness.Until(t, time.Minute, "a descriptor of "+name, func() bool {
		fds, _ := os.ReadDir(dir)
		return slices.ContainsFunc(fds, func(fd os.DirEntry) bool {
			target, _ := os.Readlink(dir + fd.Name())
			return target == name
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
	harness.Must(t, keeper.Signal(unix.SIGSTOP))
	kill(t, s, 123, "--grace", "0", "--proof-timeout", "0.2", b.ID)
	harness.Must(t, keeper.Signal(unix.SIGCONT))
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
	p := s.Start(harness.Options{}, "start", "--json", "--max-parallel", "1", "--on-pressure", "wait", "sleep", "60")
	harness.Until(t, harness.Bound, "somebody who waits", func() bool { return queued(t, s.Dir) == 1 })
	supervisor, err := harness.Open(harness.Descendants(p.PID)[0])
	harness.Must(t, err)
	defer supervisor.Close()
	harness.Must(t, supervisor.Signal(unix.SIGSTOP))
	if r := p.Wait(); r.ExitCode != 125 || !strings.Contains(string(r.Stderr), "exited before reporting") || !strings.Contains(string(r.Stdout), `"error":{"code":"detach"`) || !strings.Contains(string(r.Stdout), `"exit_code":125`) {
		t.Errorf("exit code %d: %s%s", r.ExitCode, r.Stdout, r.Stderr)
	}
	s.Run("ps", "-aq").Out(t, "")
	holder.Signal(unix.SIGTERM)
	holder.Wait()
}
