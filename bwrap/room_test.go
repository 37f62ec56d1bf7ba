package bwrap_test

import (
	"errors"
	"io"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/bwrap"
	"github.com/sbxrun/sbxrun/tests/check"
)

// A signal to only the command's own process does not reach its descendants.
func TestSignalAlone(t *testing.T) {
	room := &bwrap.Room{ProofTimeout: bound}
	check.Must(t, room.Start(t.Context()))
	defer room.Close()
	r, w := io.Pipe()
	c := room.Command("sh", "-c", `trap 'exit 3' USR1; sh -c 'trap "echo child" USR1; echo ready; while :; do sleep 0.01; done' & while :; do sleep 0.01; done`)
	c.Stdout, c.Timeout, c.ProofTimeout = w, bound, bound
	check.Must(t, c.Start(t.Context()))
	ready := make([]byte, len("ready\n"))
	_, err := io.ReadFull(r, ready)
	check.Must(t, err)
	rest := make(chan []byte)
	go func() {
		text, _ := io.ReadAll(r)
		rest <- text
	}()
	check.OK(t, c.SignalAlone(unix.SIGUSR1))
	res, err := c.Wait()
	w.Close()
	text := <-rest
	check.That(t, err == nil && res.ExitCode() == 3 && len(text) == 0, "%+v, %v, %q", res, err, text)
	check.That(t, c.SignalAlone(0) != nil, "it has ended, and can be signalled")
	err = room.Signal(65)
	check.That(t, errors.Is(err, unix.EINVAL), "a signal that there is not: %v", err)
	check.OK(t, room.Signal(unix.SIGTERM), "a room in which nothing runs")
}
