package enter

import (
	"errors"
	"os"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/helper"
	"github.com/sbxrun/sbxrun/internal/proc"
)

// Enter returns ErrClosed when the process that waits for the room has already ended.
func TestHandClosed(t *testing.T) {
	var w way
	defer w.Close()
	if err := w.open(); err != nil {
		t.Fatal(err)
	}
	self, err := proc.Open(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	defer self.Close()
	w.Entered()
	if err := w.Enter(self); !errors.Is(err, ErrClosed) {
		t.Errorf("got %v", err)
	}
}

// read returns an init's message even if the init has ended with an unread order: the kernel then reports ECONNRESET
// before the message (unix(7)).
func TestReadAfterReset(t *testing.T) {
	var w way
	defer w.Close()
	if err := w.open(); err != nil {
		t.Fatal(err)
	}
	x := &Exec{way: w}
	if err := x.order(order{signal: int32(unix.SIGTERM)}); err != nil {
		t.Fatal(err)
	}
	said := helper.Report{Kind: helper.Exited, Value: 7 << 8}
	if _, err := w.inner[0].Write((*[unsafe.Sizeof(said)]byte)(unsafe.Pointer(&said))[:]); err != nil {
		t.Fatal(err)
	}
	w.Entered()
	if got, _, err := w.read(); err != nil || got != said {
		t.Errorf("read %+v, %v", got, err)
	}
	if _, _, err := w.read(); err != ErrClosed {
		t.Errorf("then %v", err)
	}
}
