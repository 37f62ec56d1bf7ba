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
	err := w.open()
	if err == nil {
		err = w.hand(room)
	}
	if err == nil {
		lay := func(b *proc.Block) unsafe.Pointer {
			n := newEntry(b, hostNet)
			n.signal = uintptr(sig)
			return unsafe.Pointer(n)
		}
		end, gate := w.inner[0], w.inner[1]
		// It has no use for 0, 1 and 2, and something has to be there.
		w.Keeper, err = proc.Keep(proc.Command{Cred: cred, Way: &proc.Way{Lay: lay, Enter: enter, Files: []*os.File{gate, gate, gate, end, gate, gate}}})
		w.Entered()
	}
	if err == nil {
		_ = w.socket.SetReadDeadline(time.Now().Add(bound)) // it takes deadlines
		err = w.signaled()
	}
	if abandonErr := w.abandon(); abandonErr != nil {
		err = abandonErr
	}
	if err != nil && room.Wait(time.Now().Add(dying)) == nil {
		err = proc.ErrGone // a room that is about to end refuses in many ways
	}
	if err != nil {
		return fmt.Errorf("enter the room of process %d: %w", room.PID, err)
	}
	return nil
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
