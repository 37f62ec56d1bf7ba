package nsenter

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/proc"
)

// bound is how long the way in and a signal may take: a handful of system calls.
// Something in the sandbox may stop who comes in, but not the keeper above.
const bound = 2 * time.Second

// Signal sends sig to every process of the sandbox but init, in one step of the
// kernel's (kill(2), pid -1), so that nothing can fork its way out of it. It blocks
// for as long as some forks take, bounded by two seconds, and by [SetupBound] if what
// was forked does not go. [proc.ErrGone]: the sandbox has ended.
func Signal(t Target, sig syscall.Signal) error {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer null.Close()
	var w way
	defer w.Close()
	err = w.enter(&t, &entry{namespaces: t.namespaces(), signal: uintptr(sig)}, [3]*os.File{null, null, null}, nil, proc.Bounds{})
	if err == nil {
		_ = w.socket.SetReadDeadline(time.Now().Add(bound)) // it takes deadlines
		err = w.signaled()
	}
	if abandonErr := w.abandon(); abandonErr != nil {
		err = abandonErr
	}
	if err != nil {
		return fmt.Errorf("enter the sandbox of init %d: %w", t.Init.PID, err)
	}
	return nil
}

func (w *way) signaled() error {
	msg, _, err := w.read()
	switch {
	case errors.Is(err, errClosed):
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
