package calls

import (
	"context"
	"io"
	"sync"

	"github.com/sbxrun/sbxrun/internal/api"
)

// Input is a command's stdin that is sent to it bit by bit. It is an [io.Reader] for whoever feeds
// the command.
type Input struct {
	turn   chan struct{} // held by who sends
	pieces chan []byte
	rest   []byte // of the last piece
	end    sync.Once
	over   chan struct{}
}

// NewInput has nothing sent yet.
func NewInput() *Input {
	return &Input{turn: make(chan struct{}, 1), pieces: make(chan []byte), over: make(chan struct{})}
}

// End says that no more comes, or that nobody reads it any more.
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

// WriteTo is what io.Copy calls: it notices that the command has closed its stdin.
func (in *Input) WriteTo(w io.Writer) (int64, error) {
	defer in.End()
	return io.Copy(w, struct{ io.Reader }{in})
}

// Send sends what r has, and returns when all of it was taken, but for what fits into a pipe. One
// is sent after the other. After an error sent is how much may have been read.
func (in *Input) Send(ctx context.Context, r io.Reader) (sent int64, err error) {
	ended := api.NewError(api.Ended, "the process does not read its stdin any more", "")
	select {
	case in.turn <- struct{}{}:
		defer func() { <-in.turn }()
	case <-in.over:
		return 0, ended
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	select {
	case <-in.over: // meanwhile
		return 0, ended
	default:
	}
	for {
		piece := make([]byte, 32<<10) // the command's feeder keeps it
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
