package enter

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/helper"
	"github.com/sbxrun/sbxrun/internal/proc"
)

// bound limits the time to enter and to send a signal, which takes a few system calls. A concurrent signal to the
// whole room may stop the entering process, but not its keeper.
const bound = 2 * time.Second

// Signal sends sig to every process of every command in a room with a single kill(2) of PID -1, which no process can
// escape by forking. room is the room's verified PID 1. Signal blocks for a few forks, at most two seconds, or
// [SetupBound] if the forked processes do not exit. It returns [proc.ErrGone] if the room has ended.
func Signal(room *proc.Process, cred *proc.Cred, hostNet bool, sig syscall.Signal) error {
	var w way
	defer w.Close()
	err := w.send(room, cred, func(s *helper.Script) {
		layStart(s, 1)
		s.Do(stepSetns, unix.SYS_SETNS, slotRoom, namespaces(hostNet))
		layInside(s)
		s.Do("signal all processes of the room", unix.SYS_KILL, -1, int(sig))
		s.Allow(0, unix.ESRCH) // there is no process
		s.Do("report", helper.Say, reportSignaled, 0, 0)
		s.Do("exit", helper.Exit, 0)
	})
	if err == nil {
		err = w.signaled()
	}
	err = w.over(room, err)
	if err != nil {
		return fmt.Errorf("enter the room of process %d: %w", room.PID, err)
	}
	return nil
}

// send forks a process that enters a room, does one thing and reports it through the socket. outer are further
// descriptors for it.
func (w *way) send(room *proc.Process, cred *proc.Cred, lay func(*helper.Script), outer ...*os.File) error {
	if err := w.open(); err != nil {
		return err
	}
	if err := w.Enter(room, outer...); err != nil {
		return err
	}
	end, gate := w.inner[0], w.inner[1]
	way := &proc.Way{Lay: lay, Files: []*os.File{gate, gate, gate, end}} // gate fills the unused numbers
	var err error
	w.Keeper, err = proc.Keep(proc.Command{Cred: cred, Way: way})
	w.Entered()
	_ = w.socket.SetReadDeadline(time.Now().Add(bound)) // a socket supports deadlines
	return err
}

// over ends the processes of send and returns the cause of their failure, if any.
func (w *way) over(room *proc.Process, err error) error {
	abandonErr := w.abandon()
	inside := w.Keeper != nil && abandonErr == nil
	if abandonErr != nil {
		err = abandonErr
	}
	if err != nil && ended(room, err, inside) {
		err = proc.ErrGone
	}
	return err
}

// ended reports whether a room that could not be entered has ended. A room that is about to end refuses in many ways, so
// ended waits for its end if the error came from inside. It does not wait if the fork failed for lack of tasks or
// descriptors, because that says nothing about the room, and waiting would delay a kill.
func ended(room *proc.Process, err error, inside bool) bool {
	step, failed := errors.AsType[*proc.StartError](err)
	if !inside || failed && step.Outside() || errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EMFILE) || errors.Is(err, os.ErrDeadlineExceeded) {
		return room.Exited()
	}
	return room.Wait(time.Now().Add(Dying)) == nil
}

func (w *way) signaled() error {
	msg, _, err := w.read()
	switch {
	case errors.Is(err, ErrClosed):
		return nil // killed by the end of the sandbox, which makes the signal unnecessary
	case err != nil:
		return err
	case msg.Kind == helper.Failed && msg.Step() == stepSetns && syscall.Errno(msg.Value) == unix.ESRCH:
		return proc.ErrGone
	case msg.Kind == helper.Failed:
		return proc.Failure(&msg)
	}
	return nil
}
