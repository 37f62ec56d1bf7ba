package mcp

import (
	"context"
	"errors"
	"io"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sbxrun/sbxrun/internal/server"
)

// Serve talks to one client on a pipe, whose calls are the tenant's, until its end of file, an
// error, or the end of ctx. Then it ends the server: when it returns, nothing of any call is left.
func (f *Front) Serve(ctx context.Context, tenant string, in io.ReadCloser, out io.WriteCloser) error {
	run, stop := context.WithCancel(server.As(context.WithoutCancel(ctx), tenant, ""))
	defer stop()
	most, answers := int(f.server.Settings().MaxBody), &together{WriteCloser: out}
	reading, over := context.WithCancel(ctx)
	defer over()
	lines := watched{Reader: newLines(run, in, answers, most), Closer: in, over: over}
	ended := make(chan struct{})
	var err error
	go func() {
		defer close(ended)
		err = f.protocol.Run(run, &sdk.IOTransport{Reader: lines, Writer: answers, MaxLineLength: most})
	}()
	select {
	case <-reading.Done():
	case <-ended:
	}
	// The SDK waits until each answer is written, and an agent may read none and keep its end open.
	over()
	f.server.Drain(reading)
	stop()
	const moment = 5 * time.Second // for answers on their way, which nobody may read
	select {
	case <-ended:
	case <-time.After(moment):
		return nil
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
	over context.CancelFunc
}

func (w watched) Read(b []byte) (int, error) {
	n, err := w.Reader.Read(b)
	if err != nil {
		w.over()
	}
	return n, err
}
