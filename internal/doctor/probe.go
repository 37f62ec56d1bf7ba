package doctor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
)

// probeBound is how long one trial with bwrap may take; it takes milliseconds.
const probeBound = 5 * time.Second

// trySandbox lets bwrap make a sandbox with these options, in which `true`
// runs, under a run's own uid. That `true` is not there is none of the sandbox's fault.
func (e *exam) trySandbox(options ...string) error {
	args := []string{e.program.Path}
	for _, dir := range []string{"/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"} {
		args = append(args, "--ro-bind-try", dir, dir)
	}
	err := e.tryBwrap(append(append(args, options...), "--die-with-parent", "--chdir", "/", "--", "true")...)
	if f := (failure{}); errors.As(err, &f) && f.step == stepPayload {
		return nil
	}
	return err
}

// tryBwrap executes bwrap and waits for its end. An error is a [failure].
func (e *exam) tryBwrap(args ...string) error {
	ws, words, err := e.execute(args)
	var errno syscall.Errno
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return failure{step: stepOther, text: fmt.Sprintf("bubblewrap did not come to an end within %v", e.bound)}
	case errors.As(err, &errno) && e.caller.UID == 0 && (errno == unix.EPERM || errno == unix.EINVAL):
		return failed(stepIdentity, "", errno) // execve(2) itself has other errors
	case errors.As(err, &errno):
		return failed(stepStart, "", errno)
	case err != nil:
		return failed(stepStart, "", err)
	case ws.Signaled():
		f := failure{step: stepOther, text: "bubblewrap was killed by SIG" + result.SignalName(ws.Signal())}
		if ws.Signal() == unix.SIGSYS {
			f.step = stepCall // a seccomp filter that kills
		}
		return f
	case ws.ExitStatus() != 0 && words == "":
		return failure{step: stepOther, text: fmt.Sprintf("bubblewrap exited with %d and said nothing", ws.ExitStatus())}
	case ws.ExitStatus() != 0:
		return understand(words)
	}
	return nil
}

// execute runs bwrap, in a process group of its own, and returns when that
// group is dead and reaped: neither bwrap's init nor a mount that hangs is left
// to anybody else. words is what it wrote to stderr.
func (e *exam) execute(args []string) (ws unix.WaitStatus, words string, err error) {
	stderr, err := memoryFile()
	if err != nil {
		return 0, "", err
	}
	defer stderr.Close()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return 0, "", err
	}
	defer null.Close()
	// Should we be killed, so is bwrap. The signal comes when the thread ends
	// that made it (prctl(2), PR_SET_PDEATHSIG), so this one is kept.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	attr := &os.ProcAttr{
		Dir: "/", // the caller's may be out of reach for a run's uid
		Env: []string{"PATH=/usr/local/bin:/usr/bin:/bin"},
		// No sandbox option makes a session, so all of it stays in the group.
		Sys:   &syscall.SysProcAttr{Setpgid: true, Pdeathsig: unix.SIGKILL},
		Files: []*os.File{null, null, stderr},
	}
	if e.caller.UID == 0 {
		attr.Sys.Credential = &syscall.Credential{Uid: uint32(e.uid), Gid: uint32(e.gid)}
	}
	child, err := os.StartProcess(args[0], args, attr)
	if err != nil {
		return 0, "", err
	}
	pid := child.Pid
	_ = child.Release() // it is reaped below, by its group

	// Not reaped yet, so the pid is its own, and so is the group's number.
	p, err := proc.Open(pid)
	if err != nil {
		return endGroup(pid), readFrom(stderr), err
	}
	defer p.Close()
	ctx, cancel := context.WithTimeout(e.ctx, e.bound)
	defer cancel()
	err = p.WaitContext(ctx, time.Time{})
	ws = endGroup(pid)
	return ws, readFrom(stderr), err
}

// endGroup kills the group of an unreaped child and reaps all of it. What the
// child leaves behind is reparented to us, the subreaper, and stays in the
// group; ECHILD says that there is nothing left. It returns the child's status.
func endGroup(pid int) (status unix.WaitStatus) {
	if pid <= 1 {
		return 0
	}
	// Once, while the child is not reaped and the group's number so its own: a fork that is
	// under way fails or is hit too, under one lock of the kernel's.
	_ = unix.Kill(-pid, unix.SIGKILL)
	// Bounded, because SIGKILL does not end what waits for a dead file server.
	for end := time.Now().Add(probeBound); time.Now().Before(end); {
		var ws unix.WaitStatus
		switch got, err := unix.Wait4(-pid, &ws, unix.WNOHANG, nil); {
		case err == unix.EINTR:
		case err != nil:
			return status
		case got == pid:
			status = ws
		case got == 0:
			// Dying: there is no pidfd of every member to wait for.
			time.Sleep(time.Millisecond)
		}
	}
	return status
}

// memoryFile is a file without a name.
func memoryFile() (*os.File, error) {
	fd, err := unix.MemfdCreate("doctor", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("memfd_create: %w", err)
	}
	return os.NewFile(uintptr(fd), "doctor"), nil
}

// readFrom is the end of what was written to f.
func readFrom(f *os.File) string {
	const most = 4096
	st, err := f.Stat()
	if err != nil {
		return ""
	}
	b, _ := io.ReadAll(io.NewSectionReader(f, max(0, st.Size()-most), most)) // what could be read must do
	return string(b)
}
