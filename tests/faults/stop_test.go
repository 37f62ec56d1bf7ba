package faults

import (
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// begun starts a run, and returns when its command has created its file.
func begun(t *testing.T, flags, payload []string) (*run, [roles]int) {
	t.Helper()
	r := start(t, harness.Options{}, slices.Concat(flags, payload)...)
	var pids [roles]int
	r.until("the command", func() bool {
		pids = r.processes()
		return pids[rolePayload] > 0 && r.wrote("ran")
	})
	return r, pids
}

// proof is the proof timeout for tests that wait for it in vain. It is long enough for everything
// that can be proven, even if a process gets no CPU for seconds.
var proof = harness.Scaled(400 * time.Millisecond)

// stoppedBefore starts a run, and stops one of its processes after the command has started and
// before the deadline. If the deadline comes first, it tries twice the deadline.
func stoppedBefore(t *testing.T, deadline time.Duration, victim int, flags ...string) (*run, [roles]int, time.Duration) {
	t.Helper()
	for ; deadline < bound; deadline *= 2 {
		r, pids := begun(t, append([]string{"--timeout", deadline.String()}, flags...), busy)
		if r.hit(pids, victim, unix.SIGSTOP) {
			r.stopped(pids[victim])
			if time.Since(r.Begin) < deadline {
				return r, pids, deadline
			}
			r.hit(pids, victim, unix.SIGCONT)
		}
		r.Wait()
	}
	t.Fatalf("there is no %s", roleNames[victim])
	return nil, [roles]int{}, 0
}

// stopped waits until a process is stopped.
func (r *run) stopped(pid int) {
	r.t.Helper()
	r.until("a stop", func() bool { return harness.Stopped(pid) })
}

// A signal to sbxrun ends a run whose keeper, monitor, room or init was stopped during set-up, long before the limit of
// 30 s. A stopped keeper gets half a second; if the command has already started, as long as the proof timeout.
func TestStoppedEarly(t *testing.T) {
	for _, victim := range []int{roleKeeper, roleMonitor, roleRoom, roleInit} {
		t.Run(roleNames[victim], func(t *testing.T) {
			for range scaled(t, 4) {
				r := start(t, harness.Options{}, append([]string{"--timeout", lifetime}, busy...)...)
				var pids [roles]int
				for !r.Over() && pids[victim] == 0 {
					pids = r.processes()
				}
				r.hit(pids, victim, unix.SIGSTOP)
				r.signal(unix.SIGTERM)
				r.briefly(10 * time.Second)
				// Before sbxrun handles signals, a signal kills it, and the keeper ends the rest soon after.
				r.killed = r.killed || r.State().ExitCode() < 0
				o := r.Wait()
				check.That(t, o.ExitCode == 128+15 || o.Signal == unix.SIGTERM, "want canceled: %v", o)
				within := 300 * time.Millisecond
				if victim == roleKeeper {
					within += 500 * time.Millisecond
					if o.Report != nil && o.Report.Started {
						within += harness.Scaled(5 * time.Second) // default of --proof-timeout
					}
				}
				harness.Within(t, "the run", o.Elapsed, 0, within)
			}
		})
	}
}

// When sbxrun itself is stopped beyond the deadline, the keeper ends the command half a second
// after deadline and grace period, and sbxrun later reports a timeout.
func TestStoppedSelf(t *testing.T) {
	for _, flags := range [][]string{nil, {"--grace", "0.2"}} {
		r, pids, deadline := stoppedBefore(t, harness.Deadline(500*time.Millisecond), roleSbxrun, flags...)
		r.until("the end of the command", func() bool { return harness.Exited(pids[rolePayload]) })
		low := deadline + 500*time.Millisecond
		if len(flags) > 0 {
			low += 200 * time.Millisecond
		}
		harness.Within(t, "the command", time.Since(r.Begin), low, low+300*time.Millisecond)
		r.signal(unix.SIGCONT)
		o := r.Wait()
		check.That(t, o.ExitCode == 124 && o.Report != nil && o.Report.Cause == "timeout" && o.Report.Teardown.Verdict == "proven", "%v: want a proven timeout: %v", flags, o)
	}

	// It is killed while stopped.
	r, _ := begun(t, nil, busy)
	r.signal(unix.SIGSTOP)
	r.stopped(r.PID)
	r.signal(unix.SIGKILL)
	r.Wait()
}

// The deadline holds while a process below sbxrun is stopped. A stopped keeper cannot give its part of the proof: after
// the proof timeout sbxrun kills it and does its work. If sbxrun was killed, everything ends when the keeper continues.
func TestStopped(t *testing.T) {
	deadline := harness.Deadline(300 * time.Millisecond)
	for victim := roleKeeper; victim < roles; victim++ {
		for _, end := range []struct {
			name     string
			deadline time.Duration
			grace    string
			sig      unix.Signal // signal to sbxrun; 0 for none
			code     int
		}{
			{"deadline", deadline, "0", 0, 124},
			{"grace", deadline, "0.1", 0, 124},
			{"signal", bound / 2, "0", unix.SIGTERM, 143},
			{"kill", bound / 2, "0", unix.SIGKILL, 0},
		} {
			t.Run(roleNames[victim]+"/"+end.name, func(t *testing.T) {
				r, pids, deadline := stoppedBefore(t, end.deadline, victim, "--proof-timeout", proof.String(), "--grace", end.grace)
				stopped, err := harness.Open(pids[victim])
				check.Must(t, err)
				defer stopped.Close()
				if end.sig != 0 {
					r.signal(end.sig)
				}
				o := r.result() // sbxrun does not wait for a stopped process
				check.That(t, end.sig == unix.SIGKILL || o.ExitCode == end.code && o.Report != nil && o.Report.Teardown.Verdict == "proven", "want %d, proven: %v", end.code, o)
				if end.sig == 0 && victim != roleKeeper {
					harness.Within(t, "the run", o.Elapsed, deadline, deadline+400*time.Millisecond)
				}
				r.killed = r.killed || victim == roleKeeper && end.sig == unix.SIGKILL
				_ = stopped.Signal(unix.SIGCONT) // fails only if it has exited
				r.Wait()
			})
		}
	}
}

// When only the command is killed from outside, that is reported as the command's own end.
func TestKilledPayload(t *testing.T) {
	r, pids := begun(t, nil, busy)
	r.until("a process that it will leave behind", func() bool { return len(harness.Below(pids[rolePayload])) > 0 })
	check.Require(t, r.hit(pids, rolePayload, unix.SIGKILL), "there is no command")
	o := r.Wait()
	o.Expect(t, 137, "signaled")
	check.That(t, o.Report.Payload != nil && o.Report.Payload.Signal == "KILL" && o.Report.Teardown.Strays != 0, "want a signal, and the process that it had left behind: %v", o)
}

// When the proof timeout is shorter than the teardown, everything still exits and is reaped, by the keeper alone.
func TestUnprovenGoes(t *testing.T) {
	tree := []string{"sh", "-c", "i=0; while [ $i -lt 200 ]; do sleep 600 & i=$((i+1)); done; : >/out/ran; wait"}
	for range scaled(t, 4) {
		r, _ := begun(t, []string{"--proof-timeout", "0.001"}, tree)
		r.signal(unix.SIGTERM)
		r.killed = true // the rest may take a moment to exit
		o := r.Wait()
		check.That(t, o.ExitCode == 123 || o.ExitCode == 128+15, "want unproven, or in time: %v", o)
	}
}

// A command that exits by itself after the deadline has timed out, even if a stopped sbxrun did
// nothing and the keeper's grace period is not over.
func TestEndedLate(t *testing.T) {
	for deadline := harness.Deadline(500 * time.Millisecond); deadline < bound/4; deadline *= 2 {
		script := fmt.Sprintf(": >/out/ran; sleep %v; exit 7", 2*deadline.Seconds())
		r, pids := begun(t, []string{"--timeout", deadline.String(), "--grace", bound.String()}, []string{"sh", "-c", script})
		r.hit(pids, roleSbxrun, unix.SIGSTOP)
		r.stopped(r.PID)
		early := time.Since(r.Begin) < deadline
		r.until("the command's end", func() bool { return harness.Exited(pids[roleInit]) })
		r.signal(unix.SIGCONT)
		if o := r.Wait(); early {
			o.Expect(t, 124, "timeout")
			check.That(t, o.Report.Payload != nil && o.Report.Payload.ExitCode != nil && *o.Report.Payload.ExitCode == 7, "want what the command has returned: %v", o)
			return
		}
	}
	t.Error("sbxrun was never stopped in time")
}

// sbxrun waits once for the proof timeout, and not again for the keeper. A tracer keeps a killed
// process from exiting (ptrace(2), PTRACE_O_TRACEEXIT).
func TestUnprovenReturns(t *testing.T) {
	patience := harness.Deadline(2 * time.Second)
	r, pids := begun(t, []string{"--proof-timeout", patience.String()}, busy)
	runtime.LockOSThread() // only the thread that attached can trace
	defer runtime.UnlockOSThread()
	if _, _, errno := unix.Syscall6(unix.SYS_PTRACE, unix.PTRACE_SEIZE, uintptr(pids[rolePayload]), 0, unix.PTRACE_O_TRACEEXIT, 0, 0); errno != 0 {
		r.abort()
		t.Skipf("trace the command: %v", errno)
	}
	begin := time.Now()
	r.signal(unix.SIGTERM)
	r.until("the end", r.Over)
	took := time.Since(begin)
	check.OK(t, unix.PtraceDetach(pids[rolePayload]), "let the command end")
	r.killed = true // the rest may take a moment to exit
	o := r.Wait()
	check.That(t, o.ExitCode == 123 && (!strings.Contains(string(o.Stderr), "keeper") || !strings.Contains(string(o.Stderr), "warning")), "want unproven, said once: %v", o)
	check.That(t, took >= patience && took <= patience+max(patience, harness.Slack)/2, "sbxrun ended %v after it was told, with a proof timeout of %v", took, patience)
}

// sbxrun reports the command's exit at once, even while orphans arrive faster than init can reap them.
func TestOrphansWithoutEnd(t *testing.T) {
	lasting := harness.Scaled(4 * time.Second)
	r := start(t, harness.Options{}, "--env", actEnv+"=breed", "--ro-bind", actor(t)+":/actor", "--seccomp", "off", "--timeout", (2 * lasting).String(), "--", "/actor", strconv.FormatInt(lasting.Milliseconds(), 10))
	o := r.Wait()
	o.Exits(t, 7)
	check.That(t, o.Elapsed <= lasting*3/4, "its end was told after %v; for %v there were orphans", o.Elapsed, lasting)
}

// breed is a payload that exits soon and leaves processes. These create children of init without
// pause, for a number of milliseconds, on the one CPU that they share with init.
func breed(lasting string) int {
	runtime.LockOSThread()
	ms, err := strconv.ParseInt(lasting, 10, 64)
	if err != nil {
		return 1
	}
	// Each has its own session, because the scheduler may divide the CPU by session.
	const makers = 40
	var now unix.Timespec
	var cpus, cpu unix.CPUSet
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) != nil || unix.SchedGetaffinity(0, &cpus) != nil {
		return 2
	}
	for i := 0; cpu.Count() == 0; i++ {
		if cpus.IsSet(i) {
			cpu.Set(i)
		}
	}
	// Init has our UID, and there is no filter.
	if unix.SchedSetaffinity(0, &cpu) != nil || unix.SchedSetaffinity(1, &cpu) != nil {
		return 3
	}
	// Exiting processes leave their session's share (sched(7), autogroup) and would slow down other tests.
	if unix.Setpriority(unix.PRIO_PROCESS, 0, 19) != nil {
		return 3
	}
	begin := now.Nano() + 3e8 // when all makers exist
	m := &maker{begin: unix.NsecToTimespec(begin), end: begin + ms*1e6}
	for range makers {
		m.fork()
	}
	sleepUntil(unix.NsecToTimespec(begin + 1e8))
	syscall.RawSyscall(unix.SYS_EXIT_GROUP, 7, 0, 0)
	return 4
}

func sleepUntil(at unix.Timespec) {
	for errno := unix.EINTR; errno == unix.EINTR; { // for example by SIGCHLD
		_, _, errno = syscall.RawSyscall6(unix.SYS_CLOCK_NANOSLEEP, unix.CLOCK_MONOTONIC, unix.TIMER_ABSTIME, uintptr(unsafe.Pointer(&at)), 0, 0, 0)
	}
}

const atOnce = 128 // children of one maker at a time

// maker is an [orphaned] process.
type maker struct {
	children [atOnce]uintptr // PIDs in init's namespace
	begin    unix.Timespec
	end      int64
	now      unix.Timespec
}

func (m *maker) fork() {
	if !orphaned() {
		return
	}
	sleepUntil(m.begin)
	for i := 0; m.now.Nano() < m.end; {
		syscall.RawSyscall(unix.SYS_CLOCK_GETTIME, unix.CLOCK_MONOTONIC, uintptr(unsafe.Pointer(&m.now)), 0)
		// A child that was not reaped still exists.
		if child := m.children[i]; child != 0 {
			if _, _, errno := syscall.RawSyscall(unix.SYS_KILL, child, 0, 0); errno == 0 {
				continue
			}
		}
		// CLONE_PARENT makes it a child of init.
		child, _, errno := syscall.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD)|unix.CLONE_PARENT, 0, 0, 0, 0, 0)
		if child == 0 {
			syscall.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
		}
		if errno == 0 {
			m.children[i], i = child, (i+1)%atOnce
		}
	}
	syscall.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
}
