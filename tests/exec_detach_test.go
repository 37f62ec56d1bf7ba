package tests

import (
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// exec --detach returns while the command runs. The command ends at its deadline and its report is written then.
func TestExecDetach(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{})
	deadline, begin := harness.Scaled(time.Second), time.Now()
	d := b.Detach([]string{"--timeout", deadline.String()}, "sh", "-c", "echo up >/tmp/up; setsid sleep 600 & sleep 600")
	check.That(t, !d.Supervisor.Ended() || time.Since(begin) >= deadline, "it has ended")
	r := d.Ended().Expect(t, 124, "timeout")
	check.Equal(t, r.Teardown.Verdict, "proven")
	harness.Within(t, "the command", time.Duration(r.DurationMS*float64(time.Millisecond)), deadline, deadline+300*time.Millisecond)
	check.Equal(t, string(b.Exec(harness.Options{}, nil, "cat", "/tmp/up").Stdout), "up\n")
	// It keeps the sandbox from being idle.
	b = s.Sandbox(harness.Options{}, "--idle-timeout", harness.Scaled(time.Second).String())
	d = b.Detach(nil, "sleep", strconv.FormatFloat(harness.Scaled(2*time.Second).Seconds(), 'f', -1, 64))
	d.Ended().Expect(t, 0, "exited")
	b.Ended()
	// A command that cannot start is reported at once.
	b = s.Sandbox(harness.Options{})
	for _, args := range [][]string{{"exec", "-d", "nobody", "true"}, {"exec", "-d", b.ID, "nosuch-command"}, {"exec", "-d", "-t", b.ID, "true"}} {
		r := s.Run(args...)
		check.That(t, (r.ExitCode == 125 || r.ExitCode == 127) && len(harness.Lines(r.Stderr)) == 1, "%q: exit code %d: %s", args, r.ExitCode, r.Stderr)
	}
}

// exec --tty gives the command a terminal of its own, and restores the caller's on every end.
func TestExecTerminal(t *testing.T) {
	t.Parallel()
	b := harness.NewState(t).Sandbox(harness.Options{})
	s := newExecScreen(t, b, nil, "sh", "-c", `test -t 0 && test -t 1 && test -t 2 && (: </dev/tty) && echo all of it; read line; echo "<$line>"; read line; exit 3`)
	s.waitFor("all of it\r\n")
	s.typeIn("word\r")
	s.waitFor("<word>\r\n")
	s.typeIn("\r") // not earlier: see TestTerminalOutputComplete
	s.p.Wait().Expect(t, 3, "exited")
	n := strings.Count(s.shows(), "word")
	check.That(t, n == 2, "%q", s.shows())
	s.restored()

	// The keeper restores it when sbxrun cannot.
	s = newExecScreen(t, b, nil, "sh", "-c", "echo up; exec sleep 600")
	s.waitFor("up\r\n")
	s.p.Kill()
	s.p.Wait()
	s.restored()

	// The sandbox ends while it is in use.
	b.Dying = true
	s = newExecScreen(t, b, nil, "sh", "-c", "echo up; exec sleep 600")
	s.waitFor("up\r\n")
	kill(t, b.State, 0, "--grace", "0", b.ID)
	s.p.Wait().Expect(t, 137, "killed")
	s.restored()
}

// execRecord is an exec in the output of ps, inspect or wait.
type execRecord struct {
	harness.Record
	Sandbox string `json:"sandbox"`
}

// The handle of a detached command is one word. ps, logs, wait, inspect and kill accept it until
// its sandbox's record is removed.
func TestExecHandle(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	dir := harness.SharedDir(t)
	b := s.Sandbox(harness.Options{}, "--bind", dir+":/go", "--name", "web")
	ps := func(flags ...string) (found []execRecord) {
		t.Helper()
		r := s.Run(append([]string{"ps", "--json", "web"}, flags...)...)
		decode(t, r, &found)
		return found
	}
	s.Run("ps", "-aq", "web").Exits(t, 0).Out(t, "")
	one := b.Detach(nil, "sh", "-c", "echo out; echo err >&2; while [ ! -e /go/on ]; do sleep 0.02; done; printf '\\0end'; exit 7")
	two := b.Detach([]string{"--json"}, "/fixtures/tree-term-immune")
	check.That(t, (one.Handle == "web/"+one.ID || one.Handle == b.ID+"/"+one.ID) && two.Handle == b.ID+"/"+two.ID, "handles %q and %q", one.Handle, two.Handle)
	r := s.Run("ps")
	check.That(t, len(harness.Lines(r.Stdout)) == 2, "sandboxes and execs in one list:\n%s", r.Stdout)
	all := ps()
	check.That(t, len(all) == 2 && all[0].ID == one.ID && all[0].Sandbox == b.ID && all[0].Status == "running" && all[0].Alive && all[0].Argv[0] == "sh" && all[1].ID == two.ID, "ps: %+v", all)
	s.Run("ps", "web").OutHas(t, "web/"+two.ID+"  running  ")
	follower := s.Start(harness.Options{}, "logs", "-f", "web/"+one.ID[:8])
	follower.WaitOutput("out\n")
	follower.WaitStderr("err\n")
	waiter := s.Start(harness.Options{}, "wait", one.Handle)
	s.Run("wait", "--log", "^out$", one.Handle).Exits(t, 0)
	if r := s.Run("wait", "--timeout", "0.01", one.Handle); r.ExitCode != 124 || !strings.Contains(string(r.Stderr), "the exec web/"+one.ID+" keeps running") && !strings.Contains(string(r.Stderr), one.Handle+" keeps running") {
		t.Errorf("wait --timeout: exit code %d: %s", r.ExitCode, r.Stderr)
	}
	check.Must(t, os.WriteFile(dir+"/on", nil, 0o644))
	waiter.Wait().Exits(t, 7)
	follower.Wait().Exits(t, 0).Out(t, "out\n\x00end").Err(t, "err\n")
	one.Ended()
	all = ps()
	check.That(t, len(all) == 1 && all[0].ID == two.ID, "ps when one has ended: %+v", all)
	all = ps("--all")
	check.That(t, len(all) == 2 && all[0].Status == "failed" && *all[0].ExitCode == 7 && all[0].Report.Teardown.Verdict == "proven", "ps --all: %+v", all)
	var inspected []execRecord
	decode(t, s.Run("inspect", b.ID+"/"+one.ID), &inspected)
	check.That(t, len(inspected) == 1 && inspected[0].Report.ID == one.ID && inspected[0].Logs.StdoutBytes == 8, "inspect: %+v", inspected)

	// kill ends only this one. A second kill succeeds and reports how it ended.
	three := b.Detach(nil, "sleep", "600")
	k := kill(t, s, 0, "--grace", "0.1", "web/"+two.ID)
	check.That(t, len(k) == 1 && k[0].ID == two.ID && k[0].Status == "killed" && k[0].Verdict == "proven" && !k[0].Already, "kill: %+v", k)
	two.Ended().Expect(t, 137, "killed")
	k = kill(t, s, 0, two.Handle)
	check.That(t, k[0].Already && *k[0].ExitCode == 137, "kill again: %+v", k)
	b.Alive()
	check.That(t, !three.Supervisor.Ended(), "another one has ended as well")
	s.Run("kill", "--signal", "INT", three.Handle).Exits(t, 0).Out(t, "web/"+three.ID+" killed, everything of it is gone (proven)\n")
	s.Run("wait", three.Handle).Exits(t, 137)
	three.Ended()

	// Invalid handles.
	for _, args := range []string{"wait web/0000", "logs web/", "inspect web/" + b.ID, "kill nobody/" + one.ID, "ps nobody", "exec " + one.Handle + " true", "wait --ready " + one.Handle, "ps web web", "logs web/../" + b.ID} {
		s.Run(strings.Fields(args)...).Exits(t, 125).ErrLines(t, 1)
	}

	// cleanup keeps them while the sandbox runs, and removes them with it.
	s.Run("cleanup")
	all = ps("--all")
	check.That(t, len(all) == 3, "after cleanup: %+v", all)
	kill(t, s, 0, "--grace", "0", "web")
	all = ps("--all")
	check.That(t, len(all) == 3, "after the sandbox has ended: %+v", all)
	s.Run("cleanup")
	s.Run("inspect", one.Handle).Exits(t, 125)
}

// --max-output limits an exec's log as a sandbox's.
func TestExecHandleLogMax(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{})
	d := b.Detach([]string{"--max-output", "10"}, "sh", "-c", "echo 0123456789abcdef; echo short >&2")
	d.Ended().Expect(t, 0, "exited")
	r := s.Run("logs", d.Handle)
	check.That(t, string(r.Stdout) == "0123456789" && strings.HasPrefix(string(r.Stderr), "short\nsbxrun: stdout is incomplete: the command wrote 17 bytes"), "%q %q", r.Stdout, r.Stderr)
	d = b.Detach([]string{"--max-output", "10", "--output-limit", "kill"}, "sh", "-c", "echo 0123456789abcdef; exec sleep 600")
	d.Ended().Expect(t, 153, "output-limit")
	s.Run("wait", d.Handle).Exits(t, 153)
}

// When the supervisor of an exec is killed, its keeper ends the exec, which is then lost; no
// record says otherwise. cleanup removes the record.
func TestExecHandleLost(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{})
	d := b.Detach(nil, "/fixtures/tree-term-immune")
	kept := b.Detach(nil, "true")
	kept.Ended()
	d.Kill()
	s.Run("wait", d.Handle).Exits(t, 137).ErrHas(t, "the supervisor of the exec "+d.Handle+" was killed")
	all := kill(t, s, 0, d.Handle)
	check.That(t, all[0].Already && all[0].Status == "lost" && all[0].Verdict == "proven", "kill: %+v", all)
	b.Alive()
	s.Run("cleanup").OutHas(t, "removed  record "+d.ID+": record, logs and name: lost\n")
	check.Equal(t, string(s.Run("ps", "--all", "--quiet", b.ID).Stdout), kept.Handle+"\n", "after cleanup")
}

// kill ends an exec whose supervisor is stopped.
func TestExecHandleStopped(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{})
	d := b.Detach(nil, "/fixtures/tree-daemon")
	check.Must(t, d.Supervisor.Signal(unix.SIGSTOP))
	all := kill(t, s, 0, "--grace", "0", d.Handle)
	check.That(t, all[0].Status == "killed" && all[0].Verdict == "proven" && all[0].Error == nil, "kill: %+v", all)
	check.Must(t, d.Supervisor.Signal(unix.SIGCONT))
	d.Ended().Expect(t, 137, "killed")
	b.Alive()
}
