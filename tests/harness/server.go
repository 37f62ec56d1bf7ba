package harness

import (
	"bytes"
	"os/exec"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Log is what a process writes, to be read while it does.
type Log struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// Serve starts a server. ended is closed when it has ended and was reaped.
func Serve(t testing.TB, cmd *exec.Cmd) (ended <-chan struct{}) {
	t.Helper()
	done, err := StartCommand(cmd)
	Must(t, err)
	reaped := make(chan struct{})
	go func() {
		_ = cmd.Wait() // its exit code is looked at
		done()
		close(reaped)
	}()
	return reaped
}

// Ended waits for the end of a server that was told to end, and returns its exit code.
func Ended(t testing.TB, cmd *exec.Cmd, ended <-chan struct{}, log *Log) int {
	t.Helper()
	select {
	case <-ended:
	case <-time.After(Bound):
		t.Errorf("the server does not end: %s", log)
		_ = cmd.Process.Kill()
		<-ended
	}
	return cmd.ProcessState.ExitCode()
}

// KillServer ends a server by a signal that it does not handle, and comes back when nothing of it is left. Its keepers are reaped here, in
// the place of who reaps for a server. It is stopped before, as a child that it has made since they were
// counted would not be among them.
func KillServer(t testing.TB, cmd *exec.Cmd, ended <-chan struct{}, by unix.Signal) {
	t.Helper()
	pid := cmd.Process.Pid
	_ = cmd.Process.Signal(unix.SIGSTOP) // fails only if it has ended
	Until(t, Bound, "the server to stop", func() bool { return Stopped(pid) })
	ran := Below(pid)
	_ = cmd.Process.Signal(by)
	_ = cmd.Process.Signal(unix.SIGCONT) // SIGKILL does not wait for it
	select {
	case <-ended:
	case <-time.After(Bound): // its stderr ends when nobody has it any more
		t.Fatalf("a killed server has not ended, or what it has started:\n%s", List(ran))
	}
	for _, p := range ran {
		Until(t, Bound, "the end of all that a killed server ran", func() bool {
			_, _ = unix.Wait4(p.PID, nil, unix.WNOHANG, nil) // ECHILD: it is another's
			now, there := ReadProc(p.PID)
			return !there || now.Start != p.Start
		})
	}
}
