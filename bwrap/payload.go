package bwrap

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/result"
)

// Release lets init start the payload. From here on the sandbox is followed in
// the background until Exited is closed.
//
// When the payload ends, bwrap's monitor writes its exit code to the status
// pipe and exits, and init is killed with it (--die-with-parent): what the
// payload has left behind would be gone before anybody could count it or give
// it a grace period. So the pipe was filled before (fillStatus): the monitor
// waits in write(2) until we read. The filling is white space to JSON.
func (sb *Sandbox) Release() { go sb.follow() }

// follow sees the payload begin and end.
func (sb *Sandbox) follow() {
	defer close(sb.exited)
	err := sb.begin()
	if errors.Is(err, result.ErrSetup) {
		sb.fallback.err = err
		close(sb.running)
		return
	}
	close(sb.running)
	if sb.payload != nil {
		// No deadline: ended by whoever kills init.
		_ = sb.payload.Wait(time.Time{})
		return
	}
	sb.hear()
}

// hear waits for bwrap's word on the payload's end, for as long as that runs.
func (sb *Sandbox) hear() {
	_ = sb.status.SetReadDeadline(time.Time{}) // there was one for the setup; ended by whoever kills init
	sb.fallback.code, sb.fallback.err = sb.stream.exitCode()
}

// begin releases init and takes hold of the payload. A payload may be over in
// half a millisecond, so init is traced for the moment of the fork. Where that
// is forbidden (Yama, a container without CAP_SYS_PTRACE) it is looked for, as
// quickly as can be, and may be missed: then bwrap's word on its end must do.
// The error is result.ErrSetup if it is certain that there was no payload.
func (sb *Sandbox) begin() error {
	ctx, traced := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		defer traced()
		done <- sb.traceFork()
	}()
	if err := sb.monitor.WaitContext(ctx, time.Time{}); err == nil {
		// The monitor died first. An init that still waits for it to write the uid
		// map waits for ever (bubblewrap #633); another may yet get to its payload.
		// Either way it is over, and the trace tells which it was.
		_ = sb.Init.Signal(unix.SIGKILL) // an error means that it is gone
	}
	err := <-done
	if !errors.Is(err, errNoTrace) {
		return err
	}
	if err := sb.release(); err != nil {
		return err
	}
	// When init has read the release it closes the block pipe, and as nobody
	// else has that end open, ours reports an error: now comes the fork.
	if err := proc.WaitHangup(sb.block, time.Now().Add(SetupBound)); err != nil {
		return fmt.Errorf("%w: %w", result.ErrSetup, err)
	}
	sb.payload = sb.findPayload()
	return nil
}

func (sb *Sandbox) release() error {
	if _, err := sb.block.Write([]byte{0}); err != nil {
		return fmt.Errorf("%w: release init: %w", result.ErrSetup, err)
	}
	return nil
}

var errNoTrace = errors.New("init cannot be traced")

// traceFork releases init, with ptrace(2) telling of its next fork: the payload
// is stopped then, and so is init, until we have a pidfd of it and let both go.
// It blocks until then, or until init is dead. If sbxrun dies, init dies with it
// (PTRACE_O_EXITKILL, Linux 3.8): should the keeper have been killed in the same
// instant, an init that has not yet asked to die with its parent would go on, and
// nobody would be left to end it. It asks some ten system calls after its fork: that
// moment remains, and cleanup.
//
// A tracer is a thread. The caller's goroutine must end after the call, and with
// it the thread, which stays locked to it: then the kernel detaches whatever is
// still traced because it was killed meanwhile. Nobody else could reap it.
func (sb *Sandbox) traceFork() error {
	runtime.LockOSThread()
	if unix.Gettid() == unix.Getpid() {
		// The main thread never ends. While we sit on it, another gets the work.
		defer runtime.UnlockOSThread()
		done := make(chan error, 1)
		go func() { done <- sb.traceFork() }()
		return <-done
	}
	pid := sb.Init.PID
	_, _, errno := unix.Syscall6(unix.SYS_PTRACE, unix.PTRACE_SEIZE, uintptr(pid), 0, unix.PTRACE_O_TRACEFORK|unix.PTRACE_O_EXITKILL, 0, 0)
	if errno != 0 {
		return errNoTrace
	}
	if sb.Init.Exited() {
		return fmt.Errorf("%w: init ended", result.ErrSetup) // so the pid may be a stranger's
	}
	if err := sb.release(); err != nil {
		return err
	}
	initStopped, payloadStopped := false, false
	for !initStopped || !payloadStopped {
		pid, err := waitThread()
		if err != nil {
			return fmt.Errorf("trace init: %w", err)
		}
		if pid != sb.Init.PID && sb.payload == nil {
			if sb.payload, err = sb.traced(pid); err != nil {
				return err
			}
		}
		var ws unix.WaitStatus
		if _, err := unix.Wait4(pid, &ws, unix.WALL|unix.WNOHANG, nil); err != nil {
			return fmt.Errorf("trace init: %w", err)
		}
		switch {
		case pid != sb.Init.PID && !ws.Stopped():
			return nil // killed with init, before it did anything
		case pid != sb.Init.PID:
			payloadStopped = true
		case !ws.Stopped():
			// Dead, before it had a payload. Its parent collects it all the same.
			return fmt.Errorf("%w: init ended", result.ErrSetup)
		case ws.TrapCause() == unix.PTRACE_EVENT_FORK:
			initStopped = true
		default:
			// Some other stop: of a signal, which goes on to where it was sent.
			sig := int(ws.StopSignal())
			if ws.TrapCause() > 0 {
				sig = 0
			}
			if err := unix.PtraceCont(pid, sig); err != nil {
				return fmt.Errorf("trace init: %w", err)
			}
		}
	}
	if sb.monitor.Exited() {
		// Before init has asked to die with it: that will be in vain.
		_ = sb.Init.Signal(unix.SIGKILL)
	}
	// An error means that it was killed meanwhile.
	_ = unix.PtraceDetach(sb.payload.PID)
	_ = unix.PtraceDetach(sb.Init.PID)
	return nil
}

// waitThread waits for a change in any of this thread's tracees and children,
// and leaves it to be collected. For any: init may be killed with a payload that
// nobody knows of yet, and then it waits for that one's end, and that for us.
func waitThread() (pid int, err error) {
	const wNoThread = 0x20000000 // __WNOTHREAD, wait(2)
	for {
		var info unix.Siginfo
		err := unix.Waitid(unix.P_ALL, 0, &info, unix.WEXITED|unix.WSTOPPED|unix.WNOWAIT|unix.WALL|wNoThread, nil)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return 0, err
		}
		// si_pid is the first member of the union behind the three numbers, which
		// starts at 16 bytes where addresses have 8 (sigaction(2)).
		return int(*(*int32)(unsafe.Add(unsafe.Pointer(&info), 16))), nil
	}
}

// traced opens a tracee that is not init, which must be init's child: the
// payload. It is stopped or a zombie, and nobody but us can collect it, so the
// pid is its own. What else this thread has is not ours to collect here.
func (sb *Sandbox) traced(pid int) (*proc.Process, error) {
	st, err := proc.ReadStat(pid)
	if err != nil || st.Parent != sb.Init.PID {
		return nil, fmt.Errorf("trace init: child %d has ended", pid)
	}
	return proc.Open(pid)
}

// findPayload looks for the payload, which init is forking right now; nil if
// there was none to be seen.
func (sb *Sandbox) findPayload() *proc.Process {
	// It takes microseconds, but for a busy machine.
	const soon, bound = 2 * time.Millisecond, time.Second
	for start := time.Now(); time.Since(start) < bound && !sb.Init.Exited(); {
		children := proc.Children(sb.Init.PID, sb.Init.PID)
		if len(children) == 0 {
			if time.Since(start) > soon {
				time.Sleep(100 * time.Microsecond)
			}
			runtime.Gosched()
			continue
		}
		p, err := proc.Open(children[0])
		if err != nil {
			return nil
		}
		// An orphan of the payload's could be the first child if the payload
		// has ended already; the payload is process 2 of its namespace.
		st, err := proc.ReadStat(p.PID)
		n, nerr := proc.NSPID(p.PID)
		if err != nil || nerr != nil || st.Parent != sb.Init.PID || n != 2 {
			p.Close()
			return nil
		}
		return p
	}
	return nil
}

// fillStatus makes the monitor wait with the exit code: the pipe is made to hold
// one message and no more, and gets one.
func (sb *Sandbox) fillStatus() error {
	w, err := reopen(sb.status, unix.O_WRONLY)
	if err != nil {
		return err
	}
	defer w.Close()
	fd := uintptr(proc.Descriptor(w))
	if _, err := unix.FcntlInt(fd, unix.F_SETPIPE_SZ, os.Getpagesize()); err != nil {
		return fmt.Errorf("shrink the status pipe: %w", err)
	}
	// In packet mode nothing is added to a message, however short it is (open(2)
	// does not take O_DIRECT for a pipe; fcntl(2) does, since Linux 4.5). And not
	// blocking: were there something in the pipe already, it would be full as it is.
	if _, err := unix.FcntlInt(fd, unix.F_SETFL, unix.O_DIRECT|unix.O_NONBLOCK); err != nil {
		return fmt.Errorf("packet mode of the status pipe: %w", err)
	}
	if _, err := unix.Write(int(fd), []byte(" ")); err != nil && err != unix.EAGAIN {
		return fmt.Errorf("fill the status pipe: %w", err)
	}
	return nil
}

// Strays looks at what the payload has left behind: how many processes are
// alive, at most 1,000, and what they have used. After Exited, and while init
// still lives.
func (sb *Sandbox) Strays() (n int, used proc.Usage) {
	payload := 0
	if sb.payload != nil {
		payload = sb.payload.PID
	}
	return sb.Kept.Strays(payload)
}

// Signal sends a signal to the payload alone. [proc.ErrGone] if it has ended or
// is not known.
func (sb *Sandbox) Signal(sig unix.Signal) error {
	select {
	case <-sb.running:
	default:
		return proc.ErrGone
	}
	if sb.payload == nil {
		return proc.ErrGone
	}
	return sb.payload.Signal(sig)
}

// InitEnding says whether init was on its way to its end when the payload had come to
// its own. Where nobody held the payload, bwrap's word was all there was, and nobody can
// tell.
func (sb *Sandbox) InitEnding() bool { return sb.payload != nil && sb.Kept.InitEnding() }

// ExitStatus is the payload's end. After Exited; it blocks until deadline at
// the most. Otherwise [result.ErrSetup], [result.ErrUnknown], or a
// *[result.Error] if the command could not be executed.
func (sb *Sandbox) ExitStatus(deadline time.Time) (*result.Payload, error) {
	if sb.payload == nil {
		if sb.fallback.err == nil {
			p := result.FromShellCode(sb.fallback.code)
			return &p, nil
		}
		if errors.Is(sb.fallback.err, result.ErrSetup) {
			return nil, sb.fallback.err
		}
		return nil, result.ErrUnknown
	}
	// Init reaps it in a matter of microseconds, on a busy machine of milliseconds.
	soon := time.Now().Add(time.Second)
	if deadline.Before(soon) {
		soon = deadline
	}
	if ws, ok := sb.payload.ExitStatus(soon); ok {
		// bwrap's child exits with 1 if it could not exec: only then ask, and only
		// the end of the stream without a word on the exit says so.
		p := result.FromWaitStatus(ws)
		if p.Signal == 0 && p.ExitCode == 1 {
			if _, err := sb.readExitCode(deadline); errors.Is(err, io.EOF) {
				return nil, &result.Error{Code: "not-executable", ExitCode: result.ExitNotExecutable,
					Message: "the command could not be executed; bubblewrap says why"}
			}
		}
		return &p, nil
	}
	code, err := sb.readExitCode(deadline)
	if err != nil {
		return nil, result.ErrUnknown
	}
	p := result.FromShellCode(code)
	return &p, nil
}

func (sb *Sandbox) readExitCode(deadline time.Time) (int, error) {
	// The monitor is only waiting for us.
	if soon := time.Now().Add(2 * time.Second); soon.Before(deadline) {
		deadline = soon
	}
	_ = sb.status.SetReadDeadline(deadline) // an error shows in the read
	return sb.stream.exitCode()
}
