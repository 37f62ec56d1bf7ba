package faults

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// exec starts an exec in the sandbox. It is a run without monitor and room.
func (b *sandbox) exec(flags []string, payload ...string) *run {
	b.e.t.Helper()
	b.e.n++
	r := &run{traces: traces{t: b.e.t, out: b.e.out, marker: fmt.Sprintf("%s-%d-", b.e.marker, b.e.n)}, living: []*sandbox{b},
		report: filepath.Join(b.e.top, fmt.Sprintf("report-%d", b.e.n))}
	args := slices.Concat([]string{"exec", "--report", r.report, "--env", harness.MarkerName + "=" + r.marker}, flags, []string{b.ID, "--"}, payload)
	var err error
	r.Process, err = b.e.begin(args...)
	check.Must(b.e.t, err)
	return r
}

// An exec whose sandbox is killed exits with 137 and cause killed, or with 125 if its command had not started.
func TestExecWhileKilled(t *testing.T) {
	ways := []struct {
		name string
		end  func(b *sandbox) *harness.Process
	}{
		{"kill", func(b *sandbox) *harness.Process {
			c, err := b.e.begin("kill", "--grace", "0", b.ID)
			check.Must(t, err)
			return c
		}},
		// On a busy machine one look may miss the process.
		{"room", func(b *sandbox) *harness.Process {
			harness.Until(t, harness.Bound, "PID 1 of the room", func() bool {
				pids := family(b.PID)
				return struck(pids[roleRoom], pids[roleMonitor], unix.SIGKILL)
			})
			return nil
		}},
		{"supervisor", func(b *sandbox) *harness.Process {
			harness.Until(t, harness.Bound, "the supervisor", func() bool { return b.strikeSupervisor(unix.SIGKILL) })
			return nil
		}},
	}
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			e := newEnv(t)
			for i := range scaled(t, 24) {
				_ = os.Remove(filepath.Join(e.out, "ran"))
				b := e.start(nil)
				x := b.exec(nil, busy...)
				for after := rand.N(14 * time.Millisecond); time.Since(x.Begin) < after; {
					x.processes()
				}
				kill := way.end(b)
				o := e.wait(x.Process)
				readReport(t, o, x.report)
				check.Require(t, o.Report != nil, "no report: %v", o)
				switch {
				case o.ExitCode == 137 && o.Report.Cause == "killed" && o.Report.Teardown.Verdict == "proven":
				case o.ExitCode == 125 && o.Report.Error != nil && slices.Contains([]string{"ended", "no-such-sandbox"}, o.Report.Error.Code) && !e.wrote("ran"):
					oneLine(t, o)
				default:
					t.Errorf("try %d: want 137 killed, or 125 ended: %v: %.600s", i, o, o.Report.Raw())
				}
				if kill != nil {
					e.wait(kill).Exits(t, 0)
				}
				b.ended(3 * time.Second)
				e.gone(settle)
				reapZombies()
				if t.Failed() {
					break
				}
			}
			e.clean()
		})
	}
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
			harness.Until(e.t, settle, "the payload", func() bool { pids = x.processes(); return pids[rolePayload] > 0 && e.wrote("ran") })
			target, hit := harness.Strike(pids[c.stopped], pids[above[c.stopped]], unix.SIGSTOP)
			check.Require(t, hit, "there is no %s", roleNames[c.stopped])
			defer target.Close()
			harness.Until(e.t, settle, "a stop", func() bool { return harness.Stopped(pids[c.stopped]) })
			for _, victim := range c.killed {
				// Without its keeper sbxrun soon ends by itself.
				check.Require(t, x.hit(pids, victim, unix.SIGKILL) || victim == roleSbxrun && x.Over(), "there is no %s", roleNames[victim])
			}
			harness.Until(e.t, settle, "the end of the payload", func() bool { return harness.Exited(pids[rolePayload]) })
			_ = target.Signal(unix.SIGCONT) // fails only if init has exited
			x.Wait()
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
