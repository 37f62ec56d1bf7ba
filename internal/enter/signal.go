package enter

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/proc"
)

// bound is how long the way in and a signal may take: a handful of system calls.
// Another signal to all of the room may stop who comes in, but not the keeper above.
const bound = 2 * time.Second

// Signal sends sig to every process of every command in a room, in one step of the
// kernel's (kill(2), pid -1), so that nothing can fork its way out of it. room is the
// room's PID 1, verified. It blocks for as long as some forks take, bounded by two seconds,
// and by [SetupBound] if what was forked does not go. [proc.ErrGone]: the room has ended.
func Signal(room *proc.Process, cred *proc.Cred, hostNet bool, sig syscall.Signal) error {
	var w way
	defer w.Close()
	err := w.send(room, cred, func(b *proc.Block) *entry {
		n := newEntry(b, hostNet)
		n.signal = uintptr(sig)
		return n
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

// send forks a process that goes into a room to do one thing, of which it tells by the socket. outer
// is what it needs beside the room.
func (w *way) send(room *proc.Process, cred *proc.Cred, lay func(*proc.Block) *entry, outer ...*os.File) error {
	if err := w.open(); err != nil {
		return err
	}
	if err := w.Enter(room, outer...); err != nil {
		return err
	}
	end, gate := w.inner[0], w.inner[1]
	way := &proc.Way{Lay: func(b *proc.Block) unsafe.Pointer { return unsafe.Pointer(lay(b)) }, Enter: enter,
		Files: []*os.File{gate, gate, gate, end, gate, gate, gate}} // it has no use for 0, 1 and 2, and something has to be there
	var err error
	w.Keeper, err = proc.Keep(proc.Command{Cred: cred, Way: way})
	w.Entered()
	_ = w.socket.SetReadDeadline(time.Now().Add(bound)) // it takes deadlines
	return err
}

// over ends what was sent, and returns why it failed.
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

// ended reports whether a room that could not be entered has ended. One that is about to refuses in
// many ways, so it is waited for, if the error came from inside. What was never sent, for want of a
// task or a descriptor, says nothing of the room, and a kill that comes after this is not to wait.
func ended(room *proc.Process, err error, inside bool) bool {
	if !inside || errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EMFILE) || errors.Is(err, os.ErrDeadlineExceeded) {
		return room.Exited()
	}
	return room.Wait(time.Now().Add(Dying)) == nil
}

func (w *way) signaled() error {
	msg, _, err := w.read()
	switch {
	case errors.Is(err, ErrClosed):
		return nil // killed, which only the sandbox's own end does: as good as done
	case err != nil:
		return err
	case msg.kind == messageFailed && msg.step == stepSetns && syscall.Errno(msg.value) == unix.ESRCH:
		return proc.ErrGone
	case msg.kind == messageFailed:
		return msg.err()
	}
	return nil
}
