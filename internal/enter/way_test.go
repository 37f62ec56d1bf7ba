package enter

import (
	"errors"
	"os"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/helper"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/tests/check"
)

// Enter returns ErrClosed when the process that waits for the room has already ended.
func TestHandClosed(t *testing.T) {
	var w way
	defer w.Close()
	check.Must(t, w.open())
	self, err := proc.Open(os.Getpid())
	check.Must(t, err)
	defer self.Close()
	w.Entered()
	err = w.Enter(self)
	check.That(t, errors.Is(err, ErrClosed), "got %v", err)
}

// read returns an init's message even if the init has ended with an unread order: the kernel then reports ECONNRESET
// before the message (unix(7)).
func TestReadAfterReset(t *testing.T) {
	var w way
	defer w.Close()
	check.Must(t, w.open())
	x := &Exec{way: w}
	err := x.order(order{signal: int32(unix.SIGTERM)})
	check.Must(t, err)
	said := helper.Report{Kind: helper.Exited, Value: 7 << 8}
	_, err = w.inner[0].Write((*[unsafe.Sizeof(said)]byte)(unsafe.Pointer(&said))[:])
	check.Must(t, err)
	w.Entered()
	got, _, err := w.read()
	check.That(t, err == nil && got == said, "read %+v, %v", got, err)
	_, _, err = w.read()
	check.That(t, err == ErrClosed, "then %v", err)
}
