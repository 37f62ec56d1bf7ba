package bwrap_test

import (
	"errors"
	"io"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/bwrap"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// A signal to only the command's own process does not reach its descendants.
func TestSignalAlone(t *testing.T) {
	room := &bwrap.Room{}
	harness.Must(t, room.Start(t.Context()))
	defer room.Close()
	r, w := io.Pipe()
	c := room.Command("sh", "-c", `trap 'exit 3' USR1; sh -c 'trap "echo child" USR1; echo ready; while :; do sleep 0.01; done' & while :; do sleep 0.01; done`)
	c.Stdout, c.Timeout = w, bound
	harness.Must(t, c.Start(t.Context()))
	ready := make([]byte, len("ready\n"))
	if _, err := io.ReadFull(r, ready); err != nil {
		t.Fatal(err)
	}
	rest := make(chan []byte)
	go func() {
		text, _ := io.ReadAll(r)
		rest <- text
	}()
	if err := c.SignalAlone(unix.SIGUSR1); err != nil {
		t.Error(err)
	}
	res, err := c.Wait()
	w.Close()
	if text := <-rest; err != nil || res.ExitCode() != 3 || len(text) != 0 {
		t.Errorf("%+v, %v, %q", res, err, text)
	}
	if c.SignalAlone(0) == nil {
		t.Error("it has ended, and can be signalled")
	}
	if err := room.Signal(65); !errors.Is(err, unix.EINVAL) {
		t.Errorf("a signal that there is not: %v", err)
	}
	if err := room.Signal(unix.SIGTERM); err != nil {
		t.Errorf("a room in which nothing runs: %v", err)
	}
}
