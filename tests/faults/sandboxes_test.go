package faults

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// More victims of TestSandboxesKilledRandomly. roleSbxrun is the supervisor there.
const (
	victimClient = roles + iota
	victimBoth   // supervisor and keeper at once
	victims
)

// Any process of many sandboxes is killed at a random moment, and each supervisor in the end. One
// cleanup leaves nothing.
func TestSandboxesKilledRandomly(t *testing.T) {
	const atOnce = 5
	left := scaled(t, 60)
	if soak(t) > 100 {
		left = soak(t) // number of sandboxes
	}
	stranger := newBystander(t)
	var hits, running atomic.Int64
	for left > 0 && !t.Failed() {
		n := min(left, 60)
		left -= n
		e := newEnv(t)
		var work sync.WaitGroup
		next := make(chan int, n)
		for i := range n {
			next <- i
		}
		close(next)
		for range atOnce {
			work.Go(func() {
				for i := range next {
					if e.strikeOne(i) {
						hits.Add(1)
					}
				}
			})
		}
		work.Wait()
		running.Add(int64(e.killSupervisors()))
		s := e.ok("cleanup")
		found := e.members()
		check.That(t, len(found) == 0, "alive when cleanup had ended:\n%s%v", harness.List(found), s)
		e.cleared()
		e.gone(settle)
		stranger.unharmed()
		e.finish()
	}
	t.Logf("%d were hit alive, %d supervisors were killed in the end", hits.Load(), running.Load())
	check.That(t, soak(t) < enough || hits.Load() != 0 && running.Load() != 0, "the moments are all wrong")
}

// strikeOne starts a sandbox and kills one of its processes at a random moment. It reports whether
// that was alive.
func (e *env) strikeOne(i int) (alive bool) {
	payloads := [][]string{{}, busy, deaf, leaver}
	args := e.startFlags()
	if i%6 == 0 {
		args = append(args, "--name", fmt.Sprintf("box-%d", i%7)) // some names collide, so that start fails
	}
	if p := payloads[i%len(payloads)]; len(p) > 0 {
		args = append(append(args, "--"), p...)
	}
	c, err := e.begin(args...)
	if err != nil {
		e.t.Errorf("%v", err)
		return false
	}
	victim, after := rand.IntN(victims), rand.N(40*time.Millisecond)
	supervisor := 0
	for time.Since(c.begin) < after {
		if supervisor == 0 {
			if pids := harness.Children(c.pid); len(pids) > 0 {
				supervisor = pids[0]
			}
		}
		time.Sleep(300 * time.Microsecond)
	}
	parent := func() int {
		if c.over() {
			return os.Getpid()
		}
		return c.pid
	}
	pids := family(supervisor)
	var targets []*harness.Target
	hit := func(pid, parent int) {
		if target, ok := harness.Strike(pid, parent, unix.SIGKILL); ok {
			targets = append(targets, target)
		}
	}
	switch {
	case victim == victimClient:
		alive = !c.over() && c.cmd.Process.Kill() == nil
	case supervisor == 0: // not there yet, or never seen
	case victim == victimBoth:
		hit(pids[roleSbxrun], parent())
		hit(pids[roleKeeper], pids[roleSbxrun])
	case victim == roleSbxrun:
		hit(supervisor, parent())
	default:
		hit(pids[victim], pids[above[victim]])
	}
	for _, target := range targets {
		target.Close()
	}
	e.wait(c)
	return alive || len(targets) > 0
}

// killSupervisors kills all remaining supervisors, every other one with its keeper, and waits
// until they have exited. It returns their number.
func (e *env) killSupervisors() (n int) {
	var targets []*harness.Target
	for i, pid := range harness.Children(os.Getpid()) {
		mine := harness.Registered(pid)
		p, ok := harness.ReadProc(pid)
		// Keepers whose supervisor is dead are still at work.
		if mine || !ok || len(harness.PIDs(pid)) != 1 || strings.HasSuffix(p.Comm, "-keeper") || p.Comm == "bwrap" {
			continue
		}
		pids := family(pid)
		if target, ok := harness.Strike(pid, os.Getpid(), unix.SIGKILL); ok {
			targets = append(targets, target)
			n++
		}
		if i%2 == 0 {
			if target, ok := harness.Strike(pids[roleKeeper], pid, unix.SIGKILL); ok {
				targets = append(targets, target)
			}
		}
	}
	for _, target := range targets {
		e.until(settle, "the end of a process that was killed", target.Ended)
		target.Close()
	}
	return n
}

// forge writes a record with the given processes. If alive, it holds the lock of the supervisor
// until release.
func (e *env) forge(id, name, phase string, supervisor, init harness.Identity, alive bool) (release func()) {
	e.t.Helper()
	dir := filepath.Join(e.state, id)
	check.Must(e.t, os.MkdirAll(dir, 0o700))
	check.Must(e.t, os.MkdirAll(filepath.Join(e.state, "names"), 0o700))
	_ = os.Remove(filepath.Join(e.state, "names", name)) // from an earlier call
	check.Must(e.t, os.Symlink(id, filepath.Join(e.state, "names", name)))
	data, err := json.Marshal(map[string]any{"version": 1, "id": id, "name": name, "argv": []string{}, "created_at": "2026-11-20T00:00:00.000Z",
		"phase": phase, "supervisor": supervisor, "init": init, "workdir": "/", "net": "none"})
	check.Must(e.t, err)
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
		{"earlier", change(func(id *harness.Identity) { id.Start-- })},
		{"no start time", change(func(id *harness.Identity) { id.Start = 0 })},
		{"boot", change(func(id *harness.Identity) { id.BootID = "00000000-0000-0000-0000-000000000000" })},
		{"no boot", change(func(id *harness.Identity) { id.BootID = "" })},
		{"namespace", change(func(id *harness.Identity) { id.Namespace++ })},
		{"no namespace", change(func(id *harness.Identity) { id.Namespace = 0 })},
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
					check.That(t, args[0] != "exec" || s.code == 125, "entered a stranger: %v", s)
					// cleanup may report failures for rooms of other tests on stdout.
					if s.code != 0 && args[0] != "cleanup" {
						e.refused(s, s.code)
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

// When a process of a running sandbox is killed, the supervisor reports how it ended, and cleanup
// removes the rest.
func TestSandboxKilledRunning(t *testing.T) {
	for victim := roleSbxrun; victim < roles; victim++ {
		t.Run(roleNames[victim], func(t *testing.T) {
			e := newEnv(t)
			for range scaled(t, 3) {
				b := e.start([]string{"--name", "box"}, busy...)
				pids := family(b.PID)
				e.until(settle, "the payload", func() bool {
					pids = family(b.PID)
					return pids[rolePayload] > 0 && e.wrote("ran")
				})
				e.rememberAll(pids)
				parent := os.Getpid()
				if victim > roleSbxrun {
					parent = pids[above[victim]]
				}
				target, hit := harness.Strike(pids[victim], parent, unix.SIGKILL)
				if !hit {
					t.Fatalf("there is no %s", roleNames[victim])
				}
				target.Close()
				_ = os.Remove(filepath.Join(e.out, "ran"))
				b.ended(3 * time.Second)
				e.gone(settle)
				if victim == roleSbxrun {
					e.refused(e.do("wait", b.ID), 137)
					s := e.ok("ps", "--all")
					check.That(t, strings.Contains(s.stdout, "lost"), "want lost: %v", s)
				} else {
					r := b.record()
					want := "lost"
					if victim == rolePayload {
						want = "signaled"
					}
					check.That(t, r.Report != nil && r.Report.Cause == want && r.Report.ExitCode == 137, "want %s and 137: %+v", want, r.Report)
					s := e.do("wait", b.ID)
					check.That(t, s.code == 137, "want 137: %v", s)
				}
				e.ok("cleanup")
				e.cleared()
				reapZombies()
			}
		})
	}
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
				for !c.over() && pids[deepest] == 0 {
					if below := harness.Children(c.pid); len(below) > 0 {
						pids = family(below[0])
					}
					runtime.Gosched()
				}
				stopped, hit := harness.Strike(pids[roleSbxrun], c.pid, unix.SIGSTOP)
				if !hit {
					e.wait(c) // start was faster
					return false
				}
				e.until(settle, "a stop", func() bool {
					p, ok := harness.ReadProc(pids[roleSbxrun])
					return !ok || p.State == "T" || p.State == "Z"
				})
				// Without a payload the client cannot have been told.
				before := family(pids[roleSbxrun])[rolePayload] == 0 && !c.over()
				_ = c.cmd.Process.Signal(sig) // fails only if it has exited
				s := e.wait(c)
				check.Must(t, stopped.Signal(unix.SIGCONT))
				if before && s.signal == sig {
					early = true
					e.until(settle, "the end of the supervisor", stopped.Ended)
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
	check.Must(e.t, json.Unmarshal([]byte(s.stdout), &list))
	for _, one := range list {
		boxes = append(boxes, &sandbox{e: e, ID: one.ID, PID: one.Supervisor.PID})
	}
	return boxes
}

// When the client of start is killed at a random moment, everything ends, or the sandbox is like
// any other.
func TestStartClientKilledRandom(t *testing.T) {
	e := newEnv(t)
	for range scaled(t, 30) {
		c, err := e.begin(append(e.startFlags(), busy...)...)
		check.Must(t, err)
		for after := rand.N(25 * time.Millisecond); time.Since(c.begin) < after; {
			runtime.Gosched()
		}
		_ = c.cmd.Process.Kill() // fails only if it has exited
		e.wait(c)
	}
	// Sandboxes whose client was not told end by themselves.
	e.until(settle, "the supervisors that nobody waits for", func() bool {
		living := map[int]bool{}
		for _, b := range e.running() {
			living[b.PID] = true
		}
		return !slices.ContainsFunc(harness.Children(os.Getpid()), func(pid int) bool {
			return !living[pid] && !harness.Registered(pid) && !harness.Exited(pid)
		})
	})
	e.clean()
}

// kill ends a sandbox whose supervisor is stopped. When the supervisor continues, it exits by
// itself.
func TestStoppedSupervisor(t *testing.T) {
	e := newEnv(t)
	b := e.start(nil, deaf...)
	e.until(settle, "the payload", func() bool { return e.wrote("ran") })
	target, hit := b.strikeSupervisor(unix.SIGSTOP)
	check.Require(t, hit, "there is no supervisor")
	defer target.Close()
	s := e.do("kill", "--grace", "0", "--json", b.ID)
	var told []struct {
		Verdict string `json:"verdict"`
	}
	err := json.Unmarshal([]byte(s.stdout), &told)
	check.That(t, err == nil && s.code == 0 && len(told) == 1 && told[0].Verdict == "proven", "want 0 and proven: %v", s)
	harness.Within(t, "kill", s.took, 0, 4*time.Second)
	var inside []harness.Proc
	for _, p := range e.members() {
		if p.State != "Z" {
			inside = append(inside, p)
		}
	}
	check.That(t, len(inside) == 0, "kill has ended, and these live:\n%s", harness.List(inside))
	check.Must(t, target.Signal(unix.SIGCONT))
	b.ended(3 * time.Second)
	r := b.record()
	check.That(t, r.Report != nil && r.Report.Cause == "killed", "want killed: %+v", r.Report)
	e.ok("cleanup")
	e.cleared()
}

// kill ends a sandbox with any other stopped process too.
func TestStoppedBelowSupervisor(t *testing.T) {
	for _, victim := range []int{roleKeeper, roleMonitor, roleRoom, roleInit, rolePayload} {
		t.Run(roleNames[victim], func(t *testing.T) {
			e := newEnv(t)
			b := e.start([]string{"--proof-timeout", proof.String()}, busy...)
			e.until(settle, "the payload", func() bool { return e.wrote("ran") })
			pids := family(b.PID)
			target, hit := harness.Strike(pids[victim], pids[above[victim]], unix.SIGSTOP)
			if !hit {
				t.Fatalf("there is no %s", roleNames[victim])
			}
			defer target.Close()
			s := e.do("kill", "--grace", "0", "--proof-timeout", proof.String(), b.ID)
			harness.Within(t, "kill", s.took, 0, 2500*time.Millisecond+2*proof)
			// A stopped keeper cannot give its proof; kill may find one itself.
			check.That(t, s.code == 0 || victim == roleKeeper && s.code == 123, "want 0: %v", s)
			check.Must(t, target.Signal(unix.SIGCONT))
			b.ended(3 * time.Second)
			e.ok("cleanup")
			e.cleared()
		})
	}
}

// A signal to the supervisor ends its sandbox in good order.
func TestSignalledSupervisor(t *testing.T) {
	for _, sig := range []unix.Signal{unix.SIGTERM, unix.SIGINT, unix.SIGQUIT, unix.SIGHUP} {
		t.Run(sig.String(), func(t *testing.T) {
			e := newEnv(t)
			b := e.start(nil, busy...)
			target, hit := b.strikeSupervisor(sig)
			check.Require(t, hit, "there is no supervisor")
			target.Close()
			if sig == unix.SIGHUP { // from a terminal that is not its own
				b.alive()
				e.clean()
				return
			}
			b.ended(3 * time.Second)
			r := b.record()
			check.That(t, r.Report != nil && r.Report.Cause == "canceled" && r.Report.ExitCode == 128+int(sig) && r.Report.Teardown.Verdict == "proven",
				"want canceled, %d, proven: %+v", 128+int(sig), r.Report)
			s := e.do("wait", b.ID)
			check.That(t, s.code == 128+int(sig), "want %d: %v", 128+int(sig), s)
			e.clean()
		})
	}
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

// cleanup --dry-run prints what it would do and changes nothing.
func TestCleanupDryRun(t *testing.T) {
	e := newEnv(t)
	lost := e.start([]string{"--name", "lost"})
	if target, hit := lost.strikeSupervisor(unix.SIGKILL); hit {
		e.until(settle, "its end", target.Ended)
		target.Close()
	}
	// A supervisor sweeps once, soon after its start. Wait until it has ended the init of this
	// record, so that it leaves later ones alone.
	first := newInit(t)
	e.forge("11112233aabbccdd", "first", "running", harness.Identity{PID: first.id.PID, Start: 1, BootID: "x", Namespace: 1}, first.id, false)()
	living := e.start([]string{"--name", "living"})
	e.until(settle, "the sweep of the living one", func() bool { return harness.Exited(first.id.PID) })
	e.gone(settle, living)
	mortal := newInit(t)
	e.forge(forgedID, "forged", "running", harness.Identity{PID: mortal.id.PID, Start: 1, BootID: "x", Namespace: 1}, mortal.id, false)()
	damaged := filepath.Join(e.state, "fedcba9876543210")
	check.Must(t, os.Mkdir(damaged, 0o700))
	check.Must(t, os.WriteFile(filepath.Join(damaged, "record.json"), []byte("{"), 0o600))
	check.Must(t, os.Mkdir(filepath.Join(e.state, ".0123456789abcdef"), 0o700))
	before := entries(t, e.state)
	s := e.ok("cleanup", "--dry-run")
	after := entries(t, e.state)
	check.That(t, slices.Equal(before, after), "it changed something: %q, %q: %v", before, after, s)
	mortal.unharmed()
	for _, what := range []string{lost.ID, forgedID, "damaged"} {
		check.That(t, strings.Contains(s.stdout, what), "%s is not listed: %v", what, s)
	}
	check.That(t, !strings.Contains(s.stdout, living.ID), "a living sandbox is listed: %v", s)
	living.alive()
	e.ok("cleanup")
	check.That(t, harness.Exited(mortal.id.PID), "cleanup did not end the init that is left")
	living.alive()
	e.clean()
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
			s := e.wait(c)
			check.That(t, s.code == 0, "want 0: %v", s)
		}
	})
	defer sweeper.Wait()
	defer close(stop)
	for range scaled(t, 10) {
		var batch []*call
		for i := range 10 {
			args := e.startFlags()
			if i%2 == 0 {
				args = append(args, "--name", fmt.Sprintf("box-%d", i))
			}
			c, err := e.begin(append(args, "--", "sh", "-c", "sleep 600; exit 3")...)
			check.Must(t, err)
			batch = append(batch, c)
			if len(batch) >= 3 { // three at a time
				<-batch[len(batch)-3].exited
			}
		}
		for _, c := range batch {
			s := e.wait(c)
			b := &sandbox{e: e}
			if err := json.Unmarshal([]byte(s.stdout), b); s.code != 0 || err != nil {
				t.Errorf("a start has failed: %v", s)
				continue
			}
			if harness.Exited(b.PID) {
				t.Errorf("a sandbox has ended: %v; %s", s, harness.List(e.members()))
			}
			r := b.record()
			check.That(t, r.Init != nil && !harness.Exited(r.Init.PID) && r.Phase == "running", "a sandbox is not whole: %+v", r)
		}
		// The same for a run, which has no record.
		s := e.do("run", "--env", harness.MarkerName+"="+e.marker, "sh", "-c", "exit 7")
		check.That(t, s.code == 7, "want 7: %v", s)
		s = e.ok("kill", "--all", "--grace", "0")
		check.That(t, strings.Contains(s.stdout, "10 killed") || t.Failed(), "want 10 killed: %v", s)
		reapZombies()
	}
	e.clean()
}
