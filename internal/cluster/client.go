package cluster

import (
	"bufio"
	"context"
	"io"
	"net/http"
	"sync"
)

// closeHook is a response body with a function to call after Close.
type closeHook struct {
	io.ReadCloser
	after func()
}

func (c closeHook) Close() error {
	defer c.after()
	return c.ReadCloser.Close()
}

// do sends a request to an instance over a new connection. If the error is [ErrUnreachable], nothing was
// delivered. The request body is read until it ends or the response body is closed.
func (l *Transport) do(r *http.Request, at string) (*http.Response, error) {
	conn := l.Dial(at)
	stop := context.AfterFunc(r.Context(), func() { conn.Abort(context.Cause(r.Context())) })
	r.Close = true
	write := func() error {
		w := writers.Get().(*bufio.Writer)
		w.Reset(conn)
		defer func() {
			w.Reset(nil) // or the pool would keep the connection
			writers.Put(w)
		}()
		if err := r.Write(w); err != nil {
			return err
		}
		return w.Flush()
	}
	fail := func(err error) (*http.Response, error) {
		stop()
		if own := conn.failure(); own != nil {
			err = own // instead of the HTTP client's error
		}
		conn.Close()
		return nil, err
	}
	if r.Body == nil || r.GetBody != nil && r.ContentLength <= window/2 {
		// The whole request fits into the window, so this does not block.
		if err := write(); err != nil {
			return fail(err)
		}
	} else {
		go func() {
			// The server may respond before it has read everything; then the error does not matter.
			_ = write()
		}()
	}
	in := bufio.NewReaderSize(conn, 4<<10)
	for {
		a, err := http.ReadResponse(in, r)
		if err != nil {
			return fail(err)
		}
		if a.StatusCode >= http.StatusContinue && a.StatusCode < http.StatusOK {
			continue
		}
		a.Body = closeHook{a.Body, func() {
			stop()
			conn.Close()
		}}
		return a, nil
	}
}

// Pools of buffers of a message's size, because allocating one of each for every request made up most of a gateway's
// allocations.
var (
	writers = sync.Pool{New: func() any { return bufio.NewWriterSize(nil, piece) }}
	pieces  = sync.Pool{New: func() any { return new([piece]byte) }}
)

// failure returns the error of a connection, if it has failed.
func (c *Conn) failure() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}
