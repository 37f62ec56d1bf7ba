package mcp

import (
	"context"
	"errors"
	"io"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sbxrun/sbxrun/internal/server"
)

// Serve talks to one client, whose calls belong to tenant, until end of file, an error, or the end of
// ctx. Then it drains the server: when it returns, everything that calls started has exited.
func (f *Server) Serve(ctx context.Context, tenant string, in io.ReadCloser, out io.WriteCloser) error {
	run, stop := context.WithCancel(server.As(context.WithoutCancel(ctx), tenant, ""))
	defer stop()
	maxLine := int(f.server.Settings().MaxBody)
	writer := &syncWriter{WriteCloser: out}
	reading, over := context.WithCancel(ctx)
	defer over()
	lines := notifyReader{Reader: newLines(run, in, writer, maxLine), Closer: in, ended: over}
	ended := make(chan struct{})
	var err error
	go func() {
		defer close(ended)
		err = f.tenant(tenant).stateless.Run(run, stdioTransport{&sdk.IOTransport{Reader: lines, Writer: writer, MaxLineLength: maxLine}})
	}()
	select {
	case <-reading.Done():
	case <-ended:
	}
	// The SDK waits until each response is written, but the agent may have stopped reading.
	over()
	f.server.Drain(reading)
	stop()
	const flushTimeout = 5 * time.Second
	select {
	case <-ended:
	case <-time.After(flushTimeout):
		return nil
	}
	if errors.Is(err, io.EOF) || errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// notifyReader calls ended when a read fails.
type notifyReader struct {
	io.Reader
	io.Closer
	ended context.CancelFunc
}

func (r notifyReader) Read(b []byte) (int, error) {
	n, err := r.Reader.Read(b)
	if err != nil {
		r.ended()
	}
	return n, err
}
