package enter

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/tests/check"
)

// ended waits for a room that is about to end, but not after an error that says nothing about the room.
func TestEnded(t *testing.T) {
	other := errors.New("something else")
	for _, c := range []struct {
		err    error
		inside bool
		waits  bool
	}{
		{unix.EAGAIN, true, false},
		{fmt.Errorf("fork: %w", unix.EAGAIN), true, false},
		{os.NewSyscallError("pipe2", unix.EMFILE), true, false},
		{os.ErrDeadlineExceeded, true, false},
		{&proc.StartError{Step: "set the niceness", Err: unix.EACCES}, true, false},
		{unix.EAGAIN, false, false},
		{other, false, false},
		{other, true, true},
		{unix.ESRCH, true, true},
	} {
		t.Run(fmt.Sprintf("%v, %v", c.err, c.inside), func(t *testing.T) {
			t.Parallel()
			cmd := exec.Command("sleep", "1000")
			check.Must(t, cmd.Start())
			room, err := proc.Open(cmd.Process.Pid)
			check.Must(t, err)
			defer room.Close()
			end := func() { _ = cmd.Process.Kill() } // the process exists until Wait
			if c.waits {
				time.AfterFunc(Dying/40, end)
			}
			check.Equal(t, ended(room, c.err, c.inside), c.waits, "before its end")
			end()
			err = cmd.Wait()
			check.That(t, err != nil, "it was not killed")
			check.That(t, ended(room, c.err, c.inside), "its end was not seen")
		})
	}
}

// Release kills init when nothing can be written to the gate.
func TestNotReleased(t *testing.T) {
	held := exec.Command("sleep", "100")
	check.Must(t, held.Start())
	init, err := proc.Open(held.Process.Pid)
	check.Must(t, err)
	defer init.Close()
	x := &Exec{running: make(chan struct{}), exited: make(chan struct{})}
	check.Must(t, x.open())
	x.Init = init
	x.Entered()
	x.gate.Close()
	x.Release()
	if err := init.Wait(time.Now().Add(20 * time.Second)); err != nil {
		t.Error(err)
		_ = held.Process.Kill()
	}
	_ = held.Wait() // fails because of the signal
	<-x.Exited()
	x.way.Close()
}
