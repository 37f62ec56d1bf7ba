package calls

import (
	"context"
	"io"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/check"
)

// Pieces arrive whole and in order, and none after the end.
func TestInput(t *testing.T) {
	in := NewInput()
	big := strings.Repeat("0123456789", 10_000)
	failed := make(chan error, 1)
	go func() {
		defer in.End()
		for _, text := range []string{"a", "", big, "z"} {
			if _, err := in.Send(t.Context(), strings.NewReader(text)); err != nil {
				failed <- err
				return
			}
		}
		failed <- nil
	}()
	b, err := io.ReadAll(in)
	check.That(t, err == nil && string(b) == "a"+big+"z", "%d bytes, %v", len(b), err)
	check.OK(t, <-failed)
	_, err = in.Send(t.Context(), strings.NewReader("x"))
	check.That(t, api.AsError(err).Failure.Code == api.Ended, "after the end: %v", err)
}

// closed is a command that has closed its stdin.
type closed struct{}

func (closed) Write([]byte) (int, error) { return 0, unix.EPIPE }

// Send does not wait for a command that has closed its stdin, and stops waiting for one that does not read
// when its context ends.
func TestInputNotRead(t *testing.T) {
	in := NewInput()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := in.Send(ctx, strings.NewReader("x"))
	check.That(t, err == context.Canceled, "%v", err)
	go func() { _, _ = io.Copy(closed{}, in) }() // fails intentionally
	_, err = in.Send(t.Context(), strings.NewReader("taken, and lost as in a pipe"))
	check.OK(t, err)
	<-in.over
	_, err = in.Send(t.Context(), strings.NewReader("x"))
	check.That(t, api.AsError(err).Failure.Code == api.Ended, "%v", err)
}
