package mcp

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sbxrun/sbxrun/internal/server"
)

// Serve talks to one client on a pipe, whose calls are the tenant's, until its end of file, an
// error, or the end of ctx. Then it ends the server: when it returns, nothing of any call is left.
func (f *Front) Serve(ctx context.Context, tenant string, in io.ReadCloser, out io.WriteCloser) error {
	run, stop := context.WithCancel(server.As(context.WithoutCancel(ctx), tenant, ""))
	defer stop()
	most, answers := int(f.settings.MaxBody), &together{WriteCloser: out}
	watched := &watched{Reader: newLines(run, in, answers, most), Closer: in, over: make(chan struct{})}
	ended := make(chan error, 1)
	go func() {
		ended <- f.protocol.Run(run, &sdk.IOTransport{Reader: watched, Writer: answers, MaxLineLength: most})
	}()
	var err error
	done := false
	select {
	case <-ctx.Done():
	case <-watched.over:
	case err = <-ended:
		done = true
	}
	// The SDK waits until each answer is written, and an agent may read none and keep its end open.
	now, cancel := context.WithCancel(ctx)
	cancel()
	f.server.Drain(now)
	stop()
	if !done {
		const moment = 5 * time.Second // for answers on their way, which nobody may read
		select {
		case err = <-ended:
		case <-time.After(moment):
		}
	}
	if errors.Is(err, io.EOF) || errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// watched tells when nothing more is to be read.
type watched struct {
	io.Reader
	io.Closer
	once sync.Once
	over chan struct{}
}

func (w *watched) Read(b []byte) (int, error) {
	n, err := w.Reader.Read(b)
	if err != nil {
		w.once.Do(func() { close(w.over) })
	}
	return n, err
}
