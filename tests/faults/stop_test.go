package faults

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// begun starts a run, and returns when its command has left its trace.
func begun(t *testing.T, flags, payload []string) (*run, [roles]int) {
	t.Helper()
	r := start(t, options{}, slices.Concat(flags, payload)...)
	var pids [roles]int
	r.until("the command", func() bool {
		pids = r.processes()
		return pids[rolePayload] > 0 && r.wrote("ran")
	})
	return r, pids
}

// proof is how long a proof may take that who is stopped cannot give. It is waited for, and what can be
// proven is proven in that time also where a process may be left without a CPU for seconds.
var proof = harness.Scaled(800 * time.Millisecond)

// stoppedBefore starts a run, and stops one of its processes when its command has left its trace, and
// before its deadline. If the deadline came first, the next one is twice as long.
func stoppedBefore(t *testing.T, deadline time.Duration, victim int, flags ...string) (*run, [roles]int, time.Duration) {
	t.Helper()
	for ; deadline < bound; deadline *= 2 {
		r, pids := begun(t, append([]string{"--timeout", deadline.String()}, flags...), busy)
		if r.hit(pids, victim, unix.SIGSTOP) {
			r.stopped(pids[victim])
			if time.Since(r.begin) < deadline {
				return r, pids, deadline
			}
			r.hit(pids, victim, unix.SIGCONT)
		}
		r.wait()
	}
	t.Fatalf("there is no %s", roleNames[victim])
	return nil, [roles]int{}, 0
}

// stopped asserts that a process of a run has come to a stop.
func (r *run) stopped(pid int) {
	r.t.Helper()
	r.until("a stop", func() bool {
		p, ok := harness.ReadProc(pid)
		return ok && p.State == "T"
	})
}

// The deadline works while a process between is stopped: the monitor, the room,
// init, the command.
func TestStoppedBelow(t *testing.T) {
	for _, victim := range []int{roleMonitor, roleRoom, roleInit, rolePayload} {
		for _, flags := range [][]string{nil, {"--grace", "0.2"}} {
			t.Run(roleNames[victim]+" "+strings.Join(flags, " "), func(t *testing.T) {
				r, _, deadline := stoppedBefore(t, harness.Deadline(300*time.Millisecond), victim, flags...)
				o := r.wait()
				if o.code != 124 || o.report == nil || o.report.Cause != "timeout" || o.report.Teardown.Verdict != "proven" {
					t.Errorf("want a proven timeout: %v", o)
				}
				harness.Within(t, "the run", r.end.Sub(r.begin), deadline, deadline+400*time.Millisecond)
			})
		}
	}
}

// The keeper, the monitor, the room or init is stopped when it has just been made, so
// that the set-up never comes to its end: a signal to sbxrun ends that, and so would its
// bound of 30 s. A keeper that was stopped has half a second to do its work; or, if the
// command has begun before the test is there, as long as the proof may take.
func TestStoppedEarly(t *testing.T) {
	for _, victim := range []int{roleKeeper, roleMonitor, roleRoom, roleInit} {
		t.Run(roleNames[victim], func(t *testing.T) {
			for range scaled(t, 4) {
				r := start(t, options{}, append([]string{"--timeout", lifetime}, busy...)...)
				var pids [roles]int
				for !r.over() && pids[victim] == 0 {
					pids = r.processes()
				}
				r.hit(pids, victim, unix.SIGSTOP)
				r.signal(unix.SIGTERM)
				r.briefly(10 * time.Second)
				// Before sbxrun listens, a signal ends it by default, and the
				// keeper ends the rest: soon, and not before sbxrun returns.
				r.killed = r.killed || r.cmd.ProcessState.ExitCode() < 0
				o := r.wait()
				if o.code != 128+15 && o.signal != unix.SIGTERM {
					t.Errorf("want canceled: %v", o)
				}
				within := 300 * time.Millisecond
				if victim == roleKeeper {
					within += 500 * time.Millisecond
					if o.report != nil && o.report.Started {
						within += harness.Scaled(5 * time.Second) // --proof-timeout's
					}
				}
				harness.Within(t, "the run", r.end.Sub(r.begin), 0, within)
			}
		})
	}
}

// Sbxrun itself is stopped beyond the deadline. The keeper acts in its place, half a
// second after the deadline and the grace period, and then sbxrun calls it what it is.
func TestStoppedSelf(t *testing.T) {
	for _, flags := range [][]string{nil, {"--grace", "0.2"}} {
		r, pids, deadline := stoppedBefore(t, harness.Deadline(500*time.Millisecond), roleSbxrun, flags...)
		r.until("the end of the command", func() bool { return harness.Exited(pids[rolePayload]) })
		low := deadline + 500*time.Millisecond
		if len(flags) > 0 {
			low += 200 * time.Millisecond
		}
		harness.Within(t, "the command", time.Since(r.begin), low, low+300*time.Millisecond)
		r.signal(unix.SIGCONT)
		if o := r.wait(); o.code != 124 || o.report == nil || o.report.Cause != "timeout" || o.report.Teardown.Verdict != "proven" {
			t.Errorf("%v: want a proven timeout: %v", flags, o)
		}
	}

	// It goes on before that, and late all the same.
	r, pids, deadline := stoppedBefore(t, harness.Deadline(500*time.Millisecond), roleSbxrun)
	r.until("the deadline", func() bool { return time.Since(r.begin) > deadline+100*time.Millisecond })
	if harness.Exited(pids[rolePayload]) && time.Since(r.begin) < deadline+500*time.Millisecond {
		t.Errorf("the command was killed while sbxrun was stopped")
	}
	r.signal(unix.SIGCONT)
	if o := r.wait(); o.code != 124 {
		t.Errorf("want a timeout: %v", o)
	}

	// And killed while it is stopped.
	r, _ = begun(t, nil, busy)
	r.signal(unix.SIGSTOP)
	r.stopped(r.pid)
	r.signal(unix.SIGKILL)
	r.wait()
}

// A stopped keeper cannot give its half of the proof. When the time for that is over
// sbxrun kills it and does its work; and if sbxrun was killed, all goes away when the
// keeper goes on.
func TestStoppedKeeper(t *testing.T) {
	deadline := harness.Deadline(300 * time.Millisecond)
	for _, end := range []struct {
		name     string
		deadline time.Duration
		grace    string
		sig      unix.Signal // to sbxrun; 0 for none
		code     int
	}{
		{"deadline", deadline, "0", 0, 124},
		{"grace", deadline, "0.1", 0, 124},
		{"signal", bound / 2, "0", unix.SIGTERM, 143},
		{"kill", bound / 2, "0", unix.SIGKILL, 0},
	} {
		t.Run(end.name, func(t *testing.T) {
			r, pids, _ := stoppedBefore(t, end.deadline, roleKeeper, "--proof-timeout", proof.String(), "--grace", end.grace)
			keeper, err := harness.Open(pids[roleKeeper])
			harness.Must(t, err)
			defer keeper.Close()
			if end.sig != 0 {
				r.signal(end.sig)
			}
			select {
			case <-r.exited:
			case <-time.After(bound):
				t.Errorf("sbxrun waits for a stopped keeper")
			}
			if end.sig != unix.SIGKILL {
				o := r.result()
				if o.code != end.code || o.report == nil || o.report.Teardown.Verdict != "proven" {
					t.Errorf("want %d, proven: %v", end.code, o)
				}
			} else {
				r.killed = true
			}
			harness.Must(t, keeper.Signal(unix.SIGCONT))
			r.wait()
		})
	}
}

// What holds the command is killed from outside: lost, whatever the command was about to
// say.
func TestLost(t *testing.T) {
	for _, flags := range [][]string{nil, {"--json"}, {"--timeout", lifetime, "--grace", "10"}} {
		for _, victim := range []int{roleMonitor, roleRoom, roleInit} {
			lost(t, victim, flags)
		}
	}
}

func lost(t *testing.T, victim int, flags []string) {
	t.Run(strings.Join(append([]string{roleNames[victim]}, flags...), " "), func(t *testing.T) {
		r, pids := begun(t, flags, busy)
		if !r.hit(pids, victim, unix.SIGKILL) {
			t.Fatalf("there is no %s", roleNames[victim])
		}
		o := r.wait()
		if o.code != 137 || o.report == nil || o.report.Cause != "lost" || o.report.Teardown.Verdict != "proven" || !o.report.Started {
			t.Errorf("want lost and proven: %v", o)
		}
	})
}

// The command alone is killed from outside: that is its own end, not init's.
func TestKilledPayload(t *testing.T) {
	r, pids := begun(t, nil, busy)
	r.until("a process that it will leave behind", func() bool { return len(harness.Below(pids[rolePayload])) > 0 })
	if !r.hit(pids, rolePayload, unix.SIGKILL) {
		t.Fatal("there is no command")
	}
	o := r.wait()
	if o.code != 137 || o.report == nil || o.report.Cause != "signaled" || o.report.Payload == nil || o.report.Payload.Signal != "KILL" {
		t.Errorf("want signaled: %v", o)
	}
	if o.report != nil && o.report.Teardown.Strays == 0 {
		t.Errorf("it had left a process behind: %v", o)
	}
}

// The keeper is killed while it is stopped, and while there are 500 processes.
func TestKilledKeeper(t *testing.T) {
	timeout := harness.Scaled(10 * time.Second) // the crowd has to come first
	for _, payload := range [][]string{busy, deaf, crowd} {
		r, pids := begun(t, []string{"--timeout", timeout.String()}, payload)
		if !r.hit(pids, roleKeeper, unix.SIGSTOP) || !r.hit(pids, roleKeeper, unix.SIGKILL) {
			t.Fatal("there is no keeper")
		}
		o := r.wait()
		judge(t, o, roleKeeper, r.wrote("ran"))
		if o.code != 123 && o.code != 137 {
			t.Errorf("want lost or unproven: %v", o)
		}
		if o.report != nil && !o.report.Started {
			t.Errorf("it had been started: %v", o)
		}
		if took := r.end.Sub(r.begin); took > timeout-2*time.Second {
			t.Errorf("the keeper's death was noticed only at the deadline, after %v: %v", took, o)
		}
	}
}

// A proof that may not take as long as the end does: what is left goes all the same, though
// nobody above sbxrun reaps. The keeper does, without sbxrun.
func TestUnprovenGoes(t *testing.T) {
	tree := []string{"sh", "-c", "i=0; while [ $i -lt 200 ]; do sleep 600 & i=$((i+1)); done; : >/out/ran; wait"}
	for range scaled(t, 4) {
		r, _ := begun(t, []string{"--proof-timeout", "0.001"}, tree)
		r.signal(unix.SIGTERM)
		r.killed = true // so what is left has a moment to go
		if o := r.wait(); o.code != 123 && o.code != 128+15 {
			t.Errorf("want unproven, or in time: %v", o)
		}
	}
}

// A command that ends by itself after the deadline has a timeout, though sbxrun was stopped and has done
// nothing about it, and the grace period that the keeper leaves it is not over.
func TestEndedLate(t *testing.T) {
	for deadline := harness.Scaled(time.Second); deadline < bound/4; deadline *= 2 {
		script := fmt.Sprintf(": >/out/ran; sleep %v; exit 7", 2*deadline.Seconds())
		r, pids := begun(t, []string{"--timeout", deadline.String(), "--grace", bound.String()}, []string{"sh", "-c", script})
		r.hit(pids, roleSbxrun, unix.SIGSTOP)
		r.stopped(r.pid)
		early := time.Since(r.begin) < deadline
		r.until("the command's end", func() bool {
			p, ok := harness.ReadProc(pids[roleInit])
			return !ok || p.State == "Z" || p.State == "X"
		})
		r.signal(unix.SIGCONT)
		if o := r.wait(); early {
			if o.code != 124 || o.report == nil || o.report.Cause != "timeout" || o.report.Payload == nil || o.report.Payload.ExitCode == nil || *o.report.Payload.ExitCode != 7 {
				t.Errorf("want a timeout, and what the command has returned: %v", o)
			}
			return
		}
	}
	t.Error("sbxrun was never stopped in time")
}

// What is left at the end of the proof timeout is waited for once, and not once more for the keeper,
// which has it. A tracer from outside keeps a killed process from ending (ptrace(2), PTRACE_O_TRACEEXIT).
func TestUnprovenReturns(t *testing.T) {
	const patience = 4 * time.Second
	r, pids := begun(t, []string{"--proof-timeout", patience.String()}, busy)
	runtime.LockOSThread() // a tracer is a thread
	defer runtime.UnlockOSThread()
	if _, _, errno := unix.Syscall6(unix.SYS_PTRACE, unix.PTRACE_SEIZE, uintptr(pids[rolePayload]), 0, unix.PTRACE_O_TRACEEXIT, 0, 0); errno != 0 {
		r.abort()
		t.Skipf("trace the command: %v", errno)
	}
	r.signal(unix.SIGTERM)
	begin := time.Now()
	r.until("the end", r.over)
	took := time.Since(begin)
	if err := unix.PtraceDetach(pids[rolePayload]); err != nil {
		t.Errorf("let the command end: %v", err)
	}
	r.killed = true // so what is left has a moment to go
	if o := r.wait(); o.code != 123 || strings.Contains(o.stderr, "keeper") && strings.Contains(o.stderr, "warning") {
		t.Errorf("want unproven, said once: %v", o)
	}
	if took < patience || took > patience*3/2 {
		t.Errorf("sbxrun ended %v after it was told, with a proof timeout of %v", took, patience)
	}
}
