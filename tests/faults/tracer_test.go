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

// tracerEnv turns the test binary into a tracer. "VICTIM N" is the role and the number of the stop at which it is
// killed; every system call stops twice, before and after it. With "VICTIM N QUIT" the victim gets SIGQUIT instead, and
// stops before it has its own handler (internal/quit) do not count.
const tracerEnv = "SBXRUN_FAULTS_TRACER"

// tracerStops is the file to which the tracer writes the number of the victim's stops.
const tracerStops = "SBXRUN_FAULTS_STOPS"

// Two more processes exist for some system calls during set-up: the one that enters the room, and
// its child inside, which creates init. The keeper is the parent of all three (CLONE_PARENT), but
// ptrace reports a child to the tracer of the caller.
const (
	tracedEnters = roles + iota
	tracedInside
	tracedOther // traced, but never a victim
)

// made maps a process to those that it creates, in order.
var made = map[int][]int{
	roleSbxrun:   {roleKeeper},
	roleKeeper:   {roleMonitor, tracedEnters},
	roleMonitor:  {roleRoom},
	tracedEnters: {tracedInside},
	tracedInside: {roleInit},
	roleInit:     {rolePayload},
}

// leadsTo reports whether a process creates the victim, directly or not.
func leadsTo(role, victim int) bool {
	for _, child := range made[role] {
		if child == victim || leadsTo(child, victim) {
			return true
		}
	}
	return false
}

// tracerMain starts sbxrun, its arguments, under ptrace(2), follows the forks to the victim, and
// kills that one alone. It then dies as sbxrun did, with the same code or signal.
//
// The keeper's helpers that share its memory are cloned with CLONE_VM and SIGCHLD. A tracer sees
// that as a fork (PTRACE_EVENT_FORK), and a clone into a cgroup too; only a thread, which sends no
// signal at its end, is PTRACE_EVENT_CLONE.
//
// It is a separate process because it waits for any child: in the test process that would reap the
// orphans to be counted.
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
		_ = unix.Kill(os.Getpid(), tr.status.Signal()) // SIGKILL in all tests
		return 204
	}
	return tr.status.ExitStatus()
}

// task is a traced thread.
type task struct {
	role    int
	process int
	ready   bool // it has made its first stop
	births  *int // number of processes that its process has created
}

type tracer struct {
	root       int
	victim, at int
	by         unix.Signal // signal for the victim
	setter     int         // task that sets a handler for SIGQUIT
	ready      bool        // the handler is set
	stops      int
	tasks      map[int]*task
	status     syscall.WaitStatus // of sbxrun
}

// loop runs until sbxrun exits. The end of the tracer releases the remaining tasks.
func (tr *tracer) loop() error {
	early := map[int]bool{} // tasks that stopped before their birth was reported
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
			tr.first(pid, t) // after the exec of the first task, or the SIGSTOP of another
			continue
		}
		tr.stopped(pid, t, ws, early)
	}
}

// first resumes a new task. The tracer follows threads, and forks that lead to the victim. It detaches from everything
// else, also from the SIGSTOP with which a traced process is born and which would outlive the tracer.
func (tr *tracer) first(pid int, t *task) {
	options := unix.PTRACE_O_TRACECLONE | unix.PTRACE_O_TRACESYSGOOD
	switch {
	case leadsTo(t.role, tr.victim):
		options |= unix.PTRACE_O_TRACEFORK | unix.PTRACE_O_TRACEVFORK
	case t.role != tr.victim:
		delete(tr.tasks, pid)
		_ = syscall.PtraceDetach(pid) // fails only if it was killed
		return
	}
	t.ready = true
	_ = syscall.PtraceSetOptions(pid, options) // if it was killed, the next wait reports that
	tr.resume(pid, t, 0)
}

// stopped handles a stop of a known task.
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

// handlesQuit reports whether a stopped task sets an action for SIGQUIT and asks for the old one.
// Package quit does both at once, and Go's runtime never does.
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

// born records a new task: a thread of the same process, or the next process that this one creates.
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

// resume lets a task run, to its next system call if it belongs to the victim. If it was killed,
// the next wait reports that.
func (tr *tracer) resume(pid int, t *task, sig int) {
	if t.role == tr.victim && (tr.at == 0 || tr.stops < tr.at) {
		_ = syscall.PtraceSyscall(pid, sig)
	} else {
		_ = syscall.PtraceCont(pid, sig)
	}
}
