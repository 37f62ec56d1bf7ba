package faults

import (
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// busy is a payload that creates a file, starts a process in its own session, and writes as long as it lives.
var busy = []string{"sh", "-c", `: >/out/ran; setsid sleep 600 & while echo x; do sleep 0.05; done >>/out/log`}

// leaver exits with 7 and leaves a process.
var leaver = []string{"sh", "-c", `: >/out/ran; setsid sleep 600 & exit 7`}

// deaf ignores SIGTERM, and records that it got one.
var deaf = []string{"sh", "-c", `trap ': >/out/term' TERM; : >/out/ran; setsid sh -c 'trap "" TERM; sleep 600' & while echo x; do sleep 0.05; done >>/out/log`}

// crowd is 500 processes, each in its own session.
var crowd = []string{"python3", "-c", `
import os, time
for _ in range(500):
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
        os._exit(0)
open("/out/ran", "w").close()
time.sleep(600)
`}

// phase is a moment of a run, recognised from outside.
type phase struct {
	name    string
	payload []string
	// reached reports whether the run has reached the phase, given its processes.
	reached func(r *run, pids [roles]int) bool
	// before, if not nil, brings the run there.
	before  func(r *run)
	victims []int
	tries   int
	exec    bool // an exec has this phase too
}

var phases = []phase{
	{name: "started", reached: func(*run, [roles]int) bool { return true }, victims: []int{roleSbxrun}, exec: true},
	{name: "keeper", reached: exists(roleKeeper), victims: []int{roleSbxrun, roleKeeper}, exec: true},
	{name: "child", reached: func(_ *run, pids [roles]int) bool { return len(harness.Children(pids[roleKeeper])) > 0 }, victims: []int{roleSbxrun, roleKeeper}, exec: true},
	{name: "monitor", reached: exists(roleMonitor), victims: []int{roleSbxrun, roleKeeper, roleMonitor}},
	{name: "bwrap", reached: func(_ *run, pids [roles]int) bool {
		p, ok := harness.ReadProc(pids[roleMonitor])
		return ok && p.Comm == "bwrap"
	}, victims: []int{roleSbxrun, roleKeeper, roleMonitor}},
	{name: "room", reached: exists(roleRoom), victims: []int{roleSbxrun, roleKeeper, roleMonitor, roleRoom}},
	{name: "built", reached: func(_ *run, pids [roles]int) bool { return pids[roleRoom] > 0 && built(pids[roleRoom]) },
		victims: []int{roleSbxrun, roleKeeper, roleMonitor, roleRoom}},
	{name: "init", reached: exists(roleInit), victims: []int{roleSbxrun, roleKeeper, roleMonitor, roleRoom, roleInit}, exec: true},
	{name: "held", reached: exists(rolePayload), victims: []int{roleSbxrun, roleKeeper, roleMonitor, roleRoom, roleInit, rolePayload}, exec: true},
	{name: "running", reached: func(r *run, pids [roles]int) bool { return pids[rolePayload] > 0 && r.wrote("ran") },
		victims: []int{roleSbxrun, roleKeeper, roleMonitor, roleRoom, roleInit, rolePayload}, exec: true},
	{name: "ended", payload: leaver, reached: func(r *run, pids [roles]int) bool {
		return r.wrote("ran") && (pids[rolePayload] == 0 || harness.Exited(pids[rolePayload]))
	}, victims: []int{roleSbxrun, roleKeeper}},
	{name: "grace", payload: deaf,
		reached: func(r *run, pids [roles]int) bool { return r.wrote("term") },
		victims: []int{roleSbxrun, roleKeeper, roleMonitor, roleRoom, roleInit}},
	{name: "teardown", payload: crowd, before: func(r *run) {
		if r.until("500 processes", func() bool { return r.wrote("ran") }) {
			r.processes() // remembers its namespace
			r.signal(unix.SIGTERM)
		}
	}, reached: func(r *run, pids [roles]int) bool {
		return pids[roleInit] == 0 || pids[rolePayload] == 0 || harness.Exited(pids[rolePayload])
	}, victims: []int{roleSbxrun, roleKeeper}, tries: 2},
}

func exists(role int) func(*run, [roles]int) bool {
	return func(_ *run, pids [roles]int) bool { return pids[role] > 0 }
}

// When any process of a run or an exec is killed in any phase, it ends completely and reports the truth. The sandbox of
// an exec keeps running.
func TestKilledInPhases(t *testing.T) {
	for _, ph := range phases {
		for _, victim := range ph.victims {
			tries := 5
			if ph.tries > 0 {
				tries = ph.tries
			}
			t.Run(ph.name+"/"+roleNames[victim], func(t *testing.T) {
				hunt(t, scaled(t, tries), "the "+roleNames[victim], func(try int) bool {
					return ph.strike(t, try, victim, func(words ...string) *run { return start(t, harness.Options{}, words...) })
				})
			})
			if !ph.exec || victim == roleMonitor || victim == roleRoom {
				continue
			}
			t.Run("exec/"+ph.name+"/"+roleNames[victim], func(t *testing.T) {
				e := newEnv(t)
				b := e.start(nil)
				if victim == roleKeeper || victim == roleInit {
					tries = 1 // sbxrun takes half a second more, to see whether the sandbox has ended
				}
				hunt(t, scaled(t, tries), "the "+roleNames[victim], func(try int) bool {
					_ = os.Remove(filepath.Join(e.out, "ran"))
					return ph.strike(t, try, victim, func(words ...string) *run { return b.exec(words[:2], words[2:]...) })
				})
				b.alive()
				e.clean()
			})
		}
	}
}

// strike does one run, and kills the victim when the phase is reached. It reports whether the
// victim was alive. start gets two flags at least, and the command.
func (ph phase) strike(t *testing.T, try, victim int, start func(words ...string) *run) bool {
	t.Helper()
	payload := ph.payload
	if payload == nil {
		payload = busy
	}
	flags := []string{"--timeout", "5"}
	if ph.name == "grace" { // the command must set its trap before the timeout, which therefore grows
		flags = []string{"--timeout", (50 * time.Millisecond << min(try, 6)).String(), "--grace", "2"}
	}
	r := start(slices.Concat(flags, payload)...)
	if ph.before != nil {
		ph.before(r)
	}
	var pids [roles]int
	for deadline := time.Now().Add(bound); !r.Over() && time.Now().Before(deadline); runtime.Gosched() {
		if pids = r.processes(); ph.reached(r, pids) {
			break
		}
	}
	hit := r.hit(pids, victim, unix.SIGKILL)
	o := r.Wait()
	if victim == roleSbxrun && o.Signal != unix.SIGKILL {
		hit = false // it was exiting already, and the signal came too late
	}
	if hit {
		judge(t, o, victim, r.wrote("ran"))
	}
	return hit
}

// judge asserts that sbxrun tells the truth about a run or exec of which one process was
// killed. ran says whether the command has left its trace. The exit code depends on the moment:
//
//	125  nothing was started
//	137  lost: the command was killed with init; or signaled: it was the victim
//	123  it may have ended, but that cannot be proven
//
// or it is that of a run that had ended before.
func judge(t testing.TB, o *harness.Result, victim int, ran bool) {
	t.Helper()
	if victim == roleSbxrun {
		check.That(t, o.Signal == unix.SIGKILL, "sbxrun was killed: %v", o)
		return
	}
	if o.Report == nil {
		t.Errorf("no report: %v", o)
		return
	}
	want := ""
	switch o.ExitCode {
	case 125:
		want = "start-failed"
		if string(o.Stderr) != "" {
			errorLine(t, o) // the victim may be the keeper
		}
		check.That(t, !ran, "the command has run: %v", o)
	case 137:
		want = "lost"
		if victim == rolePayload {
			want = "signaled"
		}
	case 124:
		want = "timeout"
	case 128 + 15:
		want = "canceled"
	case 7:
		want = "exited"
	case 123:
		check.That(t, o.Report.Teardown.Verdict == "unproven" && o.Report.Error != nil, "123 means unproven: %v", o)
		return
	default:
		t.Errorf("the %s was killed: %v", roleNames[victim], o)
		return
	}
	check.That(t, o.Report.Cause == want, "the %s was killed: cause %q, want %q: %v", roleNames[victim], o.Report.Cause, want, o)
	check.That(t, !o.Report.Started || o.Report.Teardown.Verdict == "proven", "not proven, and not said by the exit code: %v", o)
}
