package calls

import (
	"context"
	"io"
	"sync"

	"github.com/sbxrun/sbxrun/internal/api"
)

// Input is the stdin of a command, sent in several requests. Its Read side feeds the command.
type Input struct {
	turn   chan struct{} // held by the current sender
	pieces chan []byte
	rest   []byte // rest of the last piece
	end    sync.Once
	over   chan struct{}
}

// NewInput returns an empty Input.
func NewInput() *Input {
	return &Input{turn: make(chan struct{}, 1), pieces: make(chan []byte), over: make(chan struct{})}
}

// End marks the end of the input. It is also called when the command stops reading.
func (in *Input) End() { in.end.Do(func() { close(in.over) }) }

func (in *Input) Read(p []byte) (int, error) {
	for len(in.rest) == 0 {
		select {
		case in.rest = <-in.pieces:
		case <-in.over:
			return 0, io.EOF
		}
	}
	n := copy(p, in.rest)
	in.rest = in.rest[n:]
	return n, nil
}

// WriteTo is used by io.Copy. It ends the input when the command closes its stdin.
func (in *Input) WriteTo(w io.Writer) (int64, error) {
	defer in.End()
	return io.Copy(w, struct{ io.Reader }{in})
}

// Send sends the content of r and returns when the command has read it, except for what fits into a pipe.
// Concurrent calls are serialized. After an error, the command may have read up to sent bytes.
func (in *Input) Send(ctx context.Context, r io.Reader) (sent int64, err error) {
	ended := api.NewError(api.Ended, "the process no longer reads its stdin", "")
	select {
	case in.turn <- struct{}{}:
		defer func() { <-in.turn }()
	case <-in.over:
		return 0, ended
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	select {
	case <-in.over: // ended while waiting
		return 0, ended
	default:
	}
	for {
		piece := make([]byte, 32<<10) // new each time, because the feeder keeps it
		n, err := r.Read(piece)
		if n > 0 {
			select {
			case in.pieces <- piece[:n]:
				sent += int64(n)
			case <-in.over:
				return sent, ended
			case <-ctx.Done():
				return sent, ctx.Err()
			}
		}
		switch {
		case err == io.EOF:
			return sent, nil
		case err != nil:
			return sent, err
		}
	}
}
