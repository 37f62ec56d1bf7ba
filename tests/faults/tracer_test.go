package faults

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// tracerEnv makes the test binary a tracer instead: "VICTIM N" is the role and
// the number of the stop at which it is killed. Every system call stops twice:
// before it and after it. With "VICTIM N QUIT" it gets SIGQUIT instead, and the stops before it has
// a handler of its own do not count (internal/quit).
const tracerEnv = "SBXRUN_FAULTS_TRACER"

// tracerStops is where the tracer writes how often the victim stopped.
const tracerStops = "SBXRUN_FAULTS_STOPS"

// Two more are there on the way in, for some system calls: what enters the room, and what
// it makes inside, which makes init. The keeper is the parent of all three (CLONE_PARENT),
// but a tracer is told of a birth by who has made the call.
const (
	tracedEnters = roles + iota
	tracedInside
	tracedOther // nobody's business
)

// made is which processes each one makes, in this order.
var made = map[int][]int{
	roleSbxrun:   {roleKeeper},
	roleKeeper:   {roleMonitor, tracedEnters},
	roleMonitor:  {roleRoom},
	tracedEnters: {tracedInside},
	tracedInside: {roleInit},
	roleInit:     {rolePayload},
}

// leadsTo says whether a victim is made by a process, or by what that makes.
func leadsTo(role, victim int) bool {
	for _, child := range made[role] {
		if child == victim || leadsTo(child, victim) {
			return true
		}
	}
	return false
}

// tracerMain starts its arguments, which are sbxrun's, under ptrace(2), follows
// the forks down to the victim, and kills that one alone. It then dies as
// sbxrun did, with the same code, or of the same signal.
//
// All that shares its memory with the keeper is cloned with CLONE_VM and SIGCHLD, which is
// a fork to the tracer (PTRACE_EVENT_FORK), and so is a clone into a cgroup; only a
// thread, which sends no signal when it ends, is PTRACE_EVENT_CLONE.
//
// It is a process of its own, because it waits for any child there is: in the
// test process that would be the orphans that are to be counted.
func tracerMain() int {
	var victim, at int
	words, quit := strings.CutSuffix(os.Getenv(tracerEnv), " QUIT")
	if _, err := fmt.Sscan(words, &victim, &at); err != nil {
		fmt.Fprintln(os.Stderr, "tracer:", err)
		return 200
	}
	runtime.LockOSThread() // a tracer is a thread
	cmd := exec.Cmd{Path: os.Args[1], Args: os.Args[1:], Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr,
		SysProcAttr: &syscall.SysProcAttr{Ptrace: true}}
	if err := cmd.Start(); err != nil {
		fmt.Fprintln(os.Stderr, "tracer:", err)
		return 201
	}
	tr := tracer{root: cmd.Process.Pid, victim: victim, at: at, by: unix.SIGKILL, tasks: map[int]*task{}}
	if quit {
		tr.by = unix.SIGQUIT
	}
	tr.tasks[tr.root] = &task{process: tr.root, births: new(int)}
	if err := tr.loop(); err != nil {
		fmt.Fprintln(os.Stderr, "tracer:", err)
		return 202
	}
	if name := os.Getenv(tracerStops); name != "" {
		if err := os.WriteFile(name, []byte(strconv.Itoa(tr.stops)), 0o644); err != nil {
			fmt.Fprintln(os.Stderr, "tracer:", err)
			return 203
		}
	}
	if tr.status.Signaled() {
		_ = unix.Kill(os.Getpid(), tr.status.Signal()) // SIGKILL in all the tests
		return 204
	}
	return tr.status.ExitStatus()
}

// task is a thread that is traced.
type task struct {
	role    int
	process int
	ready   bool // has made its first stop
	births  *int // how many processes its process has made
}

type tracer struct {
	root       int
	victim, at int
	by         unix.Signal // what it gets
	setter     int         // the task that sets a handler for SIGQUIT
	ready      bool        // it has one
	stops      int
	tasks      map[int]*task
	status     syscall.WaitStatus // of sbxrun
}

// loop goes on until sbxrun is dead; who still is traced then is let go by the
// tracer's own end.
func (tr *tracer) loop() error {
	early := map[int]bool{} // stopped before their birth was reported
	for {
		var ws syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &ws, unix.WALL, nil)
		if err == syscall.EINTR {
			continue
		}
		if err != nil {
			return fmt.Errorf("wait: %w", err)
		}
		if !ws.Stopped() {
			delete(tr.tasks, pid)
			if pid == tr.root {
				tr.status = ws
				return nil
			}
			continue
		}
		t, known := tr.tasks[pid]
		if !known {
			early[pid] = true
			continue
		}
		if !t.ready {
			tr.first(pid, t) // the exec of the first one, the SIGSTOP of the others
			continue
		}
		tr.stopped(pid, t, ws, early)
	}
}

// first lets a new task go. Threads are followed, and forks as far as to the
// victim: what it forks itself is not touched, not even by the SIGSTOP with
// which a traced process is born, and which would outlive the tracer. What does not lead
// there is let go for good.
func (tr *tracer) first(pid int, t *task) {
	options := unix.PTRACE_O_TRACECLONE | unix.PTRACE_O_TRACESYSGOOD
	switch {
	case leadsTo(t.role, tr.victim):
		options |= unix.PTRACE_O_TRACEFORK | unix.PTRACE_O_TRACEVFORK
	case t.role != tr.victim:
		delete(tr.tasks, pid)
		_ = syscall.PtraceDetach(pid) // killed meanwhile: then it needs no letting go
		return
	}
	t.ready = true
	_ = syscall.PtraceSetOptions(pid, options) // killed meanwhile: the next wait tells
	tr.resume(pid, t, 0)
}

// stopped handles one stop of a known task.
func (tr *tracer) stopped(pid int, t *task, ws syscall.WaitStatus, early map[int]bool) {
	sig := ws.StopSignal()
	switch {
	case sig == syscall.SIGTRAP && ws.TrapCause() > 0:
		if child, err := syscall.PtraceGetEventMsg(pid); err == nil {
			tr.born(int(child), t, ws.TrapCause(), early)
		}
		sig = 0
	case sig == syscall.SIGTRAP|0x80:
		if tr.by == unix.SIGQUIT && tr.setter == 0 && handlesQuit(pid) {
			tr.setter = pid
		} else if pid == tr.setter {
			tr.ready = true // after the call
		}
		if t.role == tr.victim && (tr.ready || tr.by != unix.SIGQUIT) {
			tr.stops++
			if tr.stops == tr.at {
				_ = unix.Kill(t.process, tr.by) // it is stopped, so it exists
			}
		}
		sig = 0
	case sig == syscall.SIGTRAP:
		sig = 0 // after an exec
	}
	tr.resume(pid, t, int(sig))
}

// handlesQuit reports whether a stopped task sets an action for SIGQUIT and asks for the old one:
// package quit does, and Go's runtime never does both at once.
func handlesQuit(pid int) bool {
	// struct ptrace_syscall_info at the entry of a call (PTRACE_GET_SYSCALL_INFO, Linux 5.3)
	const getInfo, entry = 0x420e, 1
	var info struct {
		op             uint8
		arch           uint32
		ip, sp, number uint64
		args           [6]uint64
	}
	_, _, errno := syscall.RawSyscall6(unix.SYS_PTRACE, getInfo, uintptr(pid), unsafe.Sizeof(info), uintptr(unsafe.Pointer(&info)), 0, 0)
	return errno == 0 && info.op == entry && info.number == unix.SYS_RT_SIGACTION && info.args[0] == uint64(unix.SIGQUIT) && info.args[1] != 0 && info.args[2] != 0
}

// born takes note of a new task: a thread of the same process, or the next process that
// this one makes.
func (tr *tracer) born(child int, parent *task, event int, early map[int]bool) {
	t := &task{role: parent.role, process: parent.process, births: parent.births}
	if event != unix.PTRACE_EVENT_CLONE {
		t.role, t.process, t.births = tracedOther, child, new(int)
		if list := made[parent.role]; *parent.births < len(list) {
			t.role = list[*parent.births]
		}
		*parent.births++
	}
	tr.tasks[child] = t
	if early[child] {
		delete(early, child)
		tr.first(child, t)
	}
}

// resume lets a task run, and to its next system call only if it is the
// victim's. It may have been killed meanwhile, which the next wait tells.
func (tr *tracer) resume(pid int, t *task, sig int) {
	if t.role == tr.victim && (tr.at == 0 || tr.stops < tr.at) {
		_ = syscall.PtraceSyscall(pid, sig)
	} else {
		_ = syscall.PtraceCont(pid, sig)
	}
}
