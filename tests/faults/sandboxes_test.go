package faults

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// forge writes a record with the given processes. If alive, it holds the lock of the supervisor until release.
func (e *env) forge(id, name, phase string, supervisor, init harness.Identity, alive bool) (release func()) {
	e.t.Helper()
	dir := filepath.Join(e.state, id)
	check.Must(e.t, os.MkdirAll(dir, 0o700))
	check.Must(e.t, os.MkdirAll(filepath.Join(e.state, "names"), 0o700))
	_ = os.Remove(filepath.Join(e.state, "names", name)) // from an earlier call
	check.Must(e.t, os.Symlink(id, filepath.Join(e.state, "names", name)))
	data := harness.JSON(e.t, map[string]any{"version": 1, "id": id, "name": name, "argv": []string{}, "created_at": "2026-11-20T00:00:00.000Z",
		"phase": phase, "supervisor": supervisor, "init": init, "workdir": "/", "net": "none"})
	check.Must(e.t, os.WriteFile(filepath.Join(dir, "record.json"), data, 0o600))
	for _, file := range []string{"activity", "env", "stdout.log", "stderr.log"} {
		check.Must(e.t, os.WriteFile(filepath.Join(dir, file), nil, 0o600))
	}
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	check.Must(e.t, err)
	if alive {
		check.Must(e.t, unix.FcntlFlock(lock.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK}))
	}
	return func() { lock.Close() }
}

const forgedID = "00112233aabbccdd"

// everyCommand returns each command that takes a sandbox.
func everyCommand(name string) [][]string {
	return [][]string{
		{"ps", "--all"}, {"inspect", name}, {"logs", name}, {"exec", "--timeout", "5", name, "true"},
		{"wait", "--timeout", "0.3", name}, {"kill", "--grace", "0", "--proof-timeout", "0.3", name},
		{"kill", "--all", "--grace", "0", "--proof-timeout", "0.3"}, {"cleanup", "--dry-run"}, {"cleanup"},
	}
}

// When the PIDs of a record were reused, no command signals or enters those processes, whether the
// sandbox looks alive or not.
func TestRecordRecycled(t *testing.T) {
	stranger := newBystander(t)
	exact := stranger.id
	change := func(f func(*harness.Identity)) harness.Identity {
		id := exact
		f(&id)
		return id
	}
	others := []struct {
		name string
		id   harness.Identity
	}{
		{"start time", change(func(id *harness.Identity) { id.Start++ })},
		{"boot", change(func(id *harness.Identity) { id.BootID = "00000000-0000-0000-0000-000000000000" })},
		{"namespace", change(func(id *harness.Identity) { id.Namespace++ })},
		{"not an init", exact},
	}
	for _, other := range others {
		for _, alive := range []bool{true, false} {
			if alive && other.id == exact {
				continue // it would be its supervisor
			}
			t.Run(fmt.Sprint(other.name, " alive ", alive), func(t *testing.T) {
				e := newEnv(t)
				stranger := &bystander{t: t, id: stranger.id}
				for _, args := range everyCommand(forgedID) {
					release := e.forge(forgedID, "forged", "running", other.id, other.id, alive)
					s := e.do(args...)
					release()
					check.Require(t, stranger.unharmed(), "by %v", s)
					check.That(t, args[0] != "exec" || s.ExitCode == 125, "entered a stranger: %v", s)
					// cleanup may report failures for rooms of other tests on stdout.
					if s.ExitCode != 0 && args[0] != "cleanup" {
						e.refused(s, s.ExitCode)
					}
				}
			})
		}
	}
	// The reverse, to show that the test can fail.
	t.Run("exact", func(t *testing.T) {
		e := newEnv(t)
		mortal := newInit(t)
		defer e.forge(forgedID, "forged", "running", change(func(id *harness.Identity) { id.Start++ }), mortal.id, false)()
		e.ok("cleanup")
		check.That(t, harness.Exited(mortal.id.PID), "a process that matches its record was not ended")
		e.cleared()
	})
}

// When a process of a running sandbox is killed or stopped, or the supervisor gets another signal, the sandbox ends by
// itself or with kill, the record has the cause, and cleanup removes the rest.
func TestSandboxStruck(t *testing.T) {
	for victim := roleSbxrun; victim < roles; victim++ {
		for _, sig := range []unix.Signal{unix.SIGKILL, unix.SIGSTOP, unix.SIGTERM, unix.SIGINT, unix.SIGQUIT, unix.SIGHUP} {
			if victim != roleSbxrun && sig != unix.SIGKILL && sig != unix.SIGSTOP {
				continue
			}
			t.Run(roleNames[victim]+"/"+unix.SignalName(sig), func(t *testing.T) {
				e := newEnv(t)
				for range scaled(t, 3) {
					e.strikeSandbox(victim, sig)
				}
			})
		}
	}
}

// strikeSandbox sends a signal to a process of a new sandbox when its command runs.
func (e *env) strikeSandbox(victim int, sig unix.Signal) {
	e.t.Helper()
	b := e.start([]string{"--name", "box"}, deaf...)
	var pids [roles]int
	harness.Until(e.t, settle, "the payload", func() bool { pids = e.family(b.PID); return pids[rolePayload] > 0 && e.wrote("ran") })
	_ = os.Remove(filepath.Join(e.out, "ran"))
	parent := os.Getpid()
	if victim > roleSbxrun {
		parent = pids[above[victim]]
	}
	target, hit := harness.Strike(pids[victim], parent, sig)
	check.Require(e.t, hit, "there is no %s", roleNames[victim])
	defer target.Close()
	cause, code := "canceled", 128+int(sig)
	switch {
	case sig == unix.SIGHUP: // from a terminal that is not its own
		b.alive()
		e.clean()
		return
	case sig == unix.SIGSTOP:
		s := e.do("kill", "--grace", "0", "--proof-timeout", proof.String(), "--json", b.ID)
		harness.Within(e.t, "kill", s.Elapsed, 0, 2500*time.Millisecond+2*proof)
		// A stopped keeper cannot give its proof; kill may find one itself.
		check.That(e.t, s.ExitCode == 0 && strings.Contains(string(s.Stdout), `"verdict":"proven"`) || victim == roleKeeper && s.ExitCode == 123, "want 0 and proven: %v", s)
		alive := slices.DeleteFunc(e.members(), func(p harness.Proc) bool { return p.State == "Z" || harness.Registered(p.PID) })
		check.That(e.t, victim != roleSbxrun || len(alive) == 0, "kill has ended, and these live:\n%s", harness.List(alive))
		check.Must(e.t, target.Signal(unix.SIGCONT))
		cause, code = "killed", 137
	case victim == rolePayload:
		cause = "signaled"
	case sig == unix.SIGKILL:
		cause = "lost"
	}
	b.ended(3 * time.Second)
	e.gone(settle)
	if victim == roleSbxrun && sig == unix.SIGKILL {
		e.ok("ps", "--all").OutHas(e.t, "lost")
	} else {
		r := b.record().Report
		check.That(e.t, r != nil && r.Cause == cause && r.ExitCode == code && r.Teardown.Verdict == "proven" || victim == roleKeeper && sig == unix.SIGSTOP, "want %s and %d: %+v", cause, code, r)
	}
	s := e.do("wait", b.ID)
	check.That(e.t, s.ExitCode == code || victim == roleKeeper && sig == unix.SIGSTOP && s.ExitCode == 123, "want %d: %v", code, s)
	e.ok("cleanup")
	e.cleared()
	reapZombies()
}

// When the client of start is killed before it learns of its sandbox, everything ends. The test
// stops the supervisor to be sure of the order.
func TestStartClientKilled(t *testing.T) {
	for _, sig := range []unix.Signal{unix.SIGKILL, unix.SIGINT, unix.SIGTERM} {
		t.Run(sig.String(), func(t *testing.T) {
			e := newEnv(t)
			hunt(t, scaled(t, 6), "the client", func(i int) (early bool) {
				defer e.clean()
				c, err := e.begin(append(e.startFlags(), busy...)...)
				check.Must(t, err)
				// From the supervisor's first moment to just before the payload starts.
				deepest := []int{roleSbxrun, roleKeeper, roleMonitor, roleRoom, roleInit}[i%5]
				var pids [roles]int
				for !c.Over() && pids[deepest] == 0 {
					if below := harness.Children(c.PID); len(below) > 0 {
						pids = family(below[0])
					}
					runtime.Gosched()
				}
				stopped, hit := harness.Strike(pids[roleSbxrun], c.PID, unix.SIGSTOP)
				if !hit {
					e.wait(c) // start was faster
					return false
				}
				harness.Until(e.t, settle, "a stop", func() bool { return harness.Stopped(pids[roleSbxrun]) })
				// Without a payload the client cannot have been told.
				before := family(pids[roleSbxrun])[rolePayload] == 0 && !c.Over()
				c.Signal(sig)
				s := e.wait(c)
				check.Must(t, stopped.Signal(unix.SIGCONT))
				if before && s.Signal == sig {
					early = true
					harness.Until(e.t, settle, "the end of the supervisor", stopped.Ended)
					e.gone(settle, e.running()...)
				}
				stopped.Close()
				return early
			})
		})
	}
}

// running returns the sandboxes that ps lists.
func (e *env) running() (boxes []*sandbox) {
	e.t.Helper()
	var list []struct {
		ID         string           `json:"id"`
		Supervisor harness.Identity `json:"supervisor"`
	}
	s := e.ok("ps", "--json")
	check.Must(e.t, json.Unmarshal(s.Stdout, &list))
	for _, one := range list {
		boxes = append(boxes, &sandbox{e: e, ID: one.ID, PID: one.Supervisor.PID})
	}
	return boxes
}

// entries lists a directory tree with everything that would show a change.
func entries(t testing.TB, dir string) (list []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		text := ""
		if d.Type().IsRegular() {
			data, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			text = string(data)
		}
		list = append(list, fmt.Sprintf("%s %v %d %v %q", path, info.Mode(), info.Size(), info.ModTime().UnixNano(), text))
		return nil
	})
	check.That(t, err == nil, "%v", err)
	return list
}

// Concurrent cleanups harm no sandbox that is being started.
func TestCleanupWhileStarting(t *testing.T) {
	e := newEnv(t)
	stop := make(chan struct{})
	var sweeper sync.WaitGroup
	sweeper.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			c, err := e.begin("cleanup")
			if err != nil {
				t.Errorf("%v", err)
				return
			}
			e.wait(c).Exits(t, 0)
		}
	})
	defer sweeper.Wait()
	defer close(stop)
	for range scaled(t, 10) {
		var batch []*harness.Process
		for i := range 10 {
			args := e.startFlags()
			if i%2 == 0 {
				args = append(args, "--name", fmt.Sprintf("box-%d", i))
			}
			c, err := e.begin(append(args, "--", "sh", "-c", "sleep 600; exit 3")...)
			check.Must(t, err)
			batch = append(batch, c)
			if len(batch) >= 3 { // three at a time
				<-batch[len(batch)-3].Exited()
			}
		}
		for _, c := range batch {
			b := e.started(e.wait(c))
			check.That(t, !harness.Exited(b.PID), "a sandbox has ended: %s", harness.List(e.members()))
			r := b.record()
			check.That(t, r.Init != nil && !harness.Exited(r.Init.PID) && r.Phase == "running", "a sandbox is not whole: %+v", r)
		}
		// The same for a run, which has no record.
		e.do("run", "--env", harness.MarkerName+"="+e.marker, "sh", "-c", "exit 7").Exits(t, 7)
		e.ok("kill", "--all", "--grace", "0").OutHas(t, "10 killed")
		reapZombies()
	}
	e.clean()
}
