package faults

import (
	"runtime"
	"strconv"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// sbxrun reports the command's exit at once, even while orphans arrive faster than init can reap
// them.
func TestOrphansWithoutEnd(t *testing.T) {
	lasting := harness.Scaled(4 * time.Second)
	r := start(t, options{}, "--env", actEnv+"=breed", "--ro-bind", actor(t)+":/actor", "--seccomp", "off", "--timeout", (2 * lasting).String(), "--", "/actor", strconv.FormatInt(lasting.Milliseconds(), 10))
	o := r.wait()
	check.That(t, o.code == 7, "want 7: %v", o)
	took := r.end.Sub(r.begin)
	check.That(t, took <= lasting*3/4, "its end was told after %v; for %v there were orphans", took, lasting)
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
	// Exiting processes leave their session's share (sched(7), autogroup) and would slow down
	// other tests.
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

// maker is a process that was forked without an exec, like a [warrior].
type maker struct {
	children [atOnce]uintptr // PIDs in init's namespace
	begin    unix.Timespec
	end      int64
	now      unix.Timespec
}

func (m *maker) fork() {
	if pid, _, _ := syscall.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0); pid != 0 {
		return
	}
	syscall.RawSyscall(unix.SYS_SETSID, 0, 0, 0)
	if pid, _, _ := syscall.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0); pid != 0 {
		syscall.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
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
