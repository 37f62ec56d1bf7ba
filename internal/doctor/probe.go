package doctor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/helper"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/room"
)

// probeBound limits one trial with bwrap, which takes milliseconds.
const probeBound = 5 * time.Second

// trySandbox runs `true` with bwrap and these options, with the uid of a run. A missing `true` is not a sandbox
// failure.
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
		return failure{step: stepOther, text: fmt.Sprintf("bubblewrap did not exit within %v", e.bound)}
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
		return failure{step: stepOther, text: fmt.Sprintf("bubblewrap exited with code %d and no message", ws.ExitStatus())}
	case ws.ExitStatus() != 0:
		return understand(words)
	}
	return nil
}

// execute runs bwrap below a keeper, as a run does. It returns the end of stderr after all processes have exited and
// are reaped.
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
	hold, err := helper.HoldFile()
	if err != nil {
		return 0, "", err
	}
	c := proc.Command{Program: &proc.Program{Path: args[0], Args: args, Files: room.TrialFiles(null, null, stderr, hold)}}
	if e.caller.UID == 0 {
		c.Cred = &proc.Cred{UID: uint32(e.uid), GID: uint32(e.gid)}
	}
	keeper, err := proc.Keep(c)
	if err != nil {
		return 0, "", err
	}
	ctx, cancel := context.WithTimeout(e.ctx, e.bound)
	defer cancel()
	// The keeper exits when it has reaped everything. If it is stopped or the time is over, Abandon kills it and its
	// children.
	_ = keeper.WaitContext(ctx, time.Time{})
	kept := proc.Kept{Keeper: keeper}
	end, err := kept.Abandon(time.Now().Add(probeBound))
	words = readFrom(stderr)
	switch {
	case ctx.Err() != nil:
		err = os.ErrDeadlineExceeded // check detects an interruption itself
	case err != nil:
	case keeper.StartError() != nil:
		err = keeper.StartError()
	case end.Program == nil:
		err = errors.New("the keeper was killed")
	default:
		ws = *end.Program
	}
	return ws, words, err
}

// memoryFile returns an anonymous file.
func memoryFile() (*os.File, error) {
	fd, err := unix.MemfdCreate("doctor", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("memfd_create: %w", err)
	}
	return os.NewFile(uintptr(fd), "doctor"), nil
}

// readFrom returns the end of f.
func readFrom(f *os.File) string {
	const most = 4096
	st, err := f.Stat()
	if err != nil {
		return ""
	}
	b, _ := io.ReadAll(io.NewSectionReader(f, max(0, st.Size()-most), most)) // best effort
	return string(b)
}
