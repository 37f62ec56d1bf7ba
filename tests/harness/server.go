package harness

import (
	"bytes"
	"os/exec"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
)

// Log collects the output of a process while it runs.
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

// Serve starts a server. ended is closed when it was reaped.
func Serve(t testing.TB, cmd *exec.Cmd) (ended <-chan struct{}) {
	t.Helper()
	done, err := StartCommand(cmd)
	check.Must(t, err)
	reaped := make(chan struct{})
	go func() {
		_ = cmd.Wait() // tests check ProcessState
		done()
		close(reaped)
	}()
	return reaped
}

// Ended waits until a server that was told to end exits, and returns its exit code.
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

// KillServer kills a server with a signal that it does not handle, and returns when all its
// processes have exited. It reaps the keepers, as init would. It stops the server before listing
// its children, so that it cannot create another one.
func KillServer(t testing.TB, cmd *exec.Cmd, ended <-chan struct{}, by unix.Signal) {
	t.Helper()
	pid := cmd.Process.Pid
	_ = cmd.Process.Signal(unix.SIGSTOP) // fails only if it has exited
	Until(t, Bound, "the server to stop", func() bool { return Stopped(pid) })
	ran := Below(pid)
	_ = cmd.Process.Signal(by)
	_ = cmd.Process.Signal(unix.SIGCONT) // not needed for SIGKILL
	select {
	case <-ended:
	case <-time.After(Bound): // Wait returns when all processes have closed stderr
		t.Fatalf("a killed server has not ended, or what it has started:\n%s", List(ran))
	}
	for _, p := range ran {
		Until(t, Bound, "the end of all that a killed server ran", func() bool {
			_, _ = unix.Wait4(p.PID, nil, unix.WNOHANG, nil) // ECHILD: not our child
			now, there := ReadProc(p.PID)
			return !there || now.Start != p.Start
		})
	}
}
