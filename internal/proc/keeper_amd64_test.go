package proc

import (
	"runtime"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// failOnce makes the process's next system call with this number return an error without being executed, and then
// detaches from the process. It calls ready when it traces the process. It stays on one thread, because a tracer is a
// thread (ptrace(2)).
func failOnce(t *testing.T, pid int, number uint64, with syscall.Errno, ready func()) {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	step := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	}
	stop := func() {
		t.Helper()
		_, err := unix.Wait4(pid, nil, unix.WALL, nil)
		step("wait for the traced process", err)
	}
	step("seize", unix.PtraceSeize(pid))
	step("interrupt", unix.PtraceInterrupt(pid))
	stop()
	ready()
	for {
		step("go on to the next system call", unix.PtraceSyscall(pid, 0))
		stop()
		var regs unix.PtraceRegs
		step("registers", unix.PtraceGetRegs(pid, &regs))
		entered := int64(regs.Rax) == -int64(unix.ENOSYS) // the value until the call returns
		if !entered || regs.Orig_rax != number {
			continue
		}
		regs.Orig_rax = ^uint64(0) // no call
		step("set registers", unix.PtraceSetRegs(pid, &regs))
		step("go on to the end of the system call", unix.PtraceSyscall(pid, 0))
		stop()
		step("registers", unix.PtraceGetRegs(pid, &regs))
		regs.Rax = uint64(-int64(with))
		step("set registers", unix.PtraceSetRegs(pid, &regs))
		step("detach", unix.PtraceDetach(pid))
		return
	}
}

// The keeper kills its children even if it first fails to read their PIDs and none of them ends by itself.
func TestKeeperListUnread(t *testing.T) {
	k, out := start(t, "sh", "-c", "trap '' TERM; echo up; exec sleep 100")
	if _, err := out.Read(make([]byte, 3)); err != nil {
		t.Fatal(err)
	}
	failOnce(t, k.PID, unix.SYS_PREAD64, unix.ENOMEM, k.Kill)
	finish(t, k)
}
