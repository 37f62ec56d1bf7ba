package faults

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// execution is an exec in progress. Its roles are those of a run without monitor and room.
type execution struct {
	*call
	e      *env
	report string
}

// exec starts an exec in the sandbox.
func (b *sandbox) exec(flags []string, payload ...string) *execution {
	b.e.t.Helper()
	b.e.n++
	x := &execution{e: b.e, report: filepath.Join(b.e.top, fmt.Sprintf("report-%d", b.e.n))}
	args := slices.Concat([]string{"exec", "--report", x.report, "--env", harness.MarkerName + "=" + b.e.marker}, harness.Proof(), flags, []string{b.ID, "--"}, payload)
	c, err := b.e.begin(args...)
	check.Must(b.e.t, err)
	x.call = c
	return x
}

// processes returns the PIDs of the exec's processes by role, 0 for those that do not exist.
func (x *execution) processes() [roles]int {
	pids := family(x.pid)
	x.e.rememberAll(pids)
	return pids
}

// hit kills a process, and reports whether it was alive.
func (x *execution) hit(pids [roles]int, victim int) bool {
	if victim == roleSbxrun {
		return !x.over() && x.cmd.Process.Kill() == nil
	}
	target, ok := harness.Strike(pids[victim], pids[above[victim]], unix.SIGKILL)
	if ok {
		target.Close()
	}
	return ok
}

// finish waits until the exec ends, and asserts that all its processes have exited: at once,
// or soon if sbxrun was killed.
func (x *execution) finish(living ...*sandbox) result {
	x.e.t.Helper()
	o := x.e.wait(x.call)
	within := time.Duration(0)
	if o.signal == unix.SIGKILL {
		within = settle
	}
	x.e.gone(within, living...)
	o.readReport(x.e.t, x.report)
	check.That(x.e.t, o.report != nil || o.signal != 0, "no report: %v", o)
	reapZombies(living...)
	return o
}

// When a process of an exec is killed in any phase, the exec ends completely and its sandbox goes
// on.
func TestExecKilledInPhases(t *testing.T) {
	for _, ph := range []struct {
		name    string
		reached func(e *env, pids [roles]int) bool
		victims []int
	}{
		{"started", func(*env, [roles]int) bool { return true }, []int{roleSbxrun}},
		{"keeper", func(_ *env, pids [roles]int) bool { return pids[roleKeeper] > 0 }, []int{roleSbxrun, roleKeeper}},
		{"entering", func(_ *env, pids [roles]int) bool { return len(harness.Children(pids[roleKeeper])) > 0 }, []int{roleSbxrun, roleKeeper}},
		{"init", func(_ *env, pids [roles]int) bool { return pids[roleInit] > 0 }, []int{roleSbxrun, roleKeeper, roleInit}},
		{"payload", func(_ *env, pids [roles]int) bool { return pids[rolePayload] > 0 }, []int{roleSbxrun, roleKeeper, roleInit, rolePayload}},
		{"running", func(e *env, pids [roles]int) bool { return pids[rolePayload] > 0 && e.wrote("ran") },
			[]int{roleSbxrun, roleKeeper, roleInit, rolePayload}},
	} {
		for _, victim := range ph.victims {
			t.Run(ph.name+"/"+roleNames[victim], func(t *testing.T) {
				e := newEnv(t)
				b := e.start(nil)
				tries := scaled(t, 4)
				if victim == roleKeeper || victim == roleInit {
					tries = scaled(t, 1) // sbxrun takes half a second more, to see whether the sandbox has ended
				}
				hunt(t, tries, "the "+roleNames[victim], func(int) bool {
					_ = os.Remove(filepath.Join(e.out, "ran"))
					x := b.exec([]string{"--timeout", lifetime}, busy...)
					var pids [roles]int
					for !x.over() {
						if pids = x.processes(); ph.reached(e, pids) {
							break
						}
						runtime.Gosched()
					}
					hit := x.hit(pids, victim)
					if !hit && !x.over() {
						_ = x.cmd.Process.Signal(unix.SIGTERM) // try again
					}
					o := x.finish(b)
					if hit {
						judge(t, o, victim, e.wrote("ran"))
					}
					return hit
				})
				b.alive()
				e.clean()
			})
		}
	}
}

// An exec whose sandbox is killed exits with 137 and cause killed, or with 125 if its command had
// not started.
func TestExecWhileKilled(t *testing.T) {
	ways := []struct {
		name string
		end  func(b *sandbox) *call
	}{
		{"kill", func(b *sandbox) *call {
			c, err := b.e.begin("kill", "--grace", "0", b.ID)
			check.Must(t, err)
			return c
		}},
		// On a busy machine one look may miss the process.
		{"room", func(b *sandbox) *call {
			harness.Until(t, harness.Bound, "PID 1 of the room", b.strikeRoom)
			return nil
		}},
		{"supervisor", func(b *sandbox) *call {
			harness.Until(t, harness.Bound, "the supervisor", func() bool {
				target, ok := b.strikeSupervisor(unix.SIGKILL)
				if ok {
					target.Close()
				}
				return ok
			})
			return nil
		}},
	}
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			e := newEnv(t)
			begun, ended, killed := 0, 0, 0
			for i := range scaled(t, 24) {
				_ = os.Remove(filepath.Join(e.out, "ran"))
				b := e.start(nil)
				x := b.exec(nil, busy...)
				for after := rand.N(14 * time.Millisecond); time.Since(x.begin) < after; {
					x.processes()
				}
				kill := way.end(b)
				o := e.wait(x.call)
				o.readReport(t, x.report)
				check.Require(t, o.report != nil, "no report: %v", o)
				report := o.report
				switch {
				case o.code == 137 && report.Cause == "killed" && report.Teardown.Verdict == "proven":
					killed++
				case o.code == 125 && report.Error != nil && slices.Contains([]string{"ended", "no-such-sandbox"}, report.Error.Code) && !e.wrote("ran"):
					ended++
					o.oneLine(t)
				default:
					t.Errorf("try %d: want 137 killed, or 125 ended: %v: %.600s", i, o, report.Raw())
				}
				if report.Started {
					begun++
				}
				if kill != nil {
					s := e.wait(kill)
					check.That(t, s.code == 0, "want 0: %v", s)
				}
				b.ended(3 * time.Second)
				e.gone(settle)
				reapZombies()
				if t.Failed() {
					break
				}
			}
			t.Logf("%d killed, %d not begun", killed, ended)
			e.clean()
		})
	}
}

// strikeRoom kills PID 1 of the sandbox's room.
func (b *sandbox) strikeRoom() bool {
	pids := family(b.PID)
	target, ok := harness.Strike(pids[roleRoom], pids[roleMonitor], unix.SIGKILL)
	if ok {
		target.Close()
	}
	return ok
}

// An exec ends without help while its sandbox keeps running: the keeper's death kills a stopped init
// (PR_SET_PDEATHSIG), and an init whose keeper is stopped notices that sbxrun's socket closes.
func TestExecEndsAlone(t *testing.T) {
	for _, c := range []struct {
		stopped int
		killed  []int
	}{
		{roleInit, []int{roleKeeper, roleSbxrun}},
		{roleKeeper, []int{roleSbxrun}},
	} {
		t.Run(roleNames[c.stopped]+" stopped", func(t *testing.T) {
			e := newEnv(t)
			b := e.start(nil)
			x := b.exec(nil, busy...)
			var pids [roles]int
			e.until(settle, "the payload", func() bool { pids = x.processes(); return pids[rolePayload] > 0 && e.wrote("ran") })
			target, hit := harness.Strike(pids[c.stopped], pids[above[c.stopped]], unix.SIGSTOP)
			if !hit {
				t.Fatalf("there is no %s", roleNames[c.stopped])
			}
			defer target.Close()
			e.until(settle, "a stop", func() bool { p, ok := harness.ReadProc(pids[c.stopped]); return ok && p.State == "T" })
			for _, victim := range c.killed {
				if !x.hit(pids, victim) {
					t.Fatalf("there is no %s", roleNames[victim])
				}
			}
			e.until(settle, "the end of the payload", func() bool {
				p, ok := harness.ReadProc(pids[rolePayload])
				return !ok || p.State == "Z" || p.State == "X"
			})
			_ = target.Signal(unix.SIGCONT) // fails only if init has exited
			x.finish(b)
			b.alive()
			e.ok("kill", "--grace", "0", b.ID)
			b.ended(3 * time.Second)
			e.ok("cleanup")
			e.cleared()
		})
	}
}

// The processes of a run. A started sandbox has a supervisor instead of sbxrun, and neither init
// nor payload while idle. An exec has no monitor and no room.
const (
	roleSbxrun = iota
	roleKeeper
	roleMonitor
	roleRoom
	roleInit
	rolePayload
	roles
)

// roleNames also has the two helpers that only the tracer sees.
var roleNames = []string{"sbxrun", "keeper", "monitor", "room", "init", "payload", "enters", "inside"}

// above maps a process to its parent. The keeper has two lasting children.
var above = [roles]int{roleKeeper: roleSbxrun, roleMonitor: roleKeeper, roleRoom: roleMonitor, roleInit: roleKeeper, rolePayload: roleInit}

// family returns the PIDs of the processes by role, 0 for those that do not exist. It finds them
// by descent from sbxrun or a supervisor and by their PIDs in the namespaces, not by name.
func family(sbxrun int) (pids [roles]int) {
	pids[roleSbxrun] = sbxrun
	if sbxrun <= 1 {
		return pids
	}
	keepers := harness.Children(sbxrun)
	if len(keepers) == 0 {
		return pids
	}
	pids[roleKeeper] = keepers[0]
	// During set-up the keeper may have two more children for a moment: one that will enter,
	// younger than the monitor, and one that has entered, which is not PID 1.
	for _, pid := range harness.Children(pids[roleKeeper]) {
		switch numbers := harness.PIDs(pid); {
		case len(numbers) == 3 && numbers[2] == "1":
			pids[roleInit] = pid
		case len(numbers) == 1 && pids[roleMonitor] == 0:
			pids[roleMonitor] = pid
		}
	}
	for _, pid := range harness.Children(pids[roleMonitor]) {
		if numbers := harness.PIDs(pid); len(numbers) == 2 && numbers[1] == "1" {
			pids[roleRoom] = pid
		}
	}
	if below := harness.Children(pids[roleInit]); len(below) > 0 {
		pids[rolePayload] = below[0]
	}
	return pids
}

// built reports whether PID 1 of a room executes its own program.
func built(pid int) bool {
	target, err := os.Readlink("/proc/" + strconv.Itoa(pid) + "/exe")
	if err != nil { // another user's process: compare its name
		p, ok := harness.ReadProc(pid)
		return ok && p.Comm == "sbxrun-room"
	}
	return strings.HasPrefix(target, "/memfd:")
}
