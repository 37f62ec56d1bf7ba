package cluster

import (
	"bufio"
	"context"
	"io"
	"net/http"
	"sync"
)

// closeHook is the body of an answer, with something that is done after its end.
type closeHook struct {
	io.ReadCloser
	after func()
}

func (c closeHook) Close() error {
	defer c.after()
	return c.ReadCloser.Close()
}

// do sends a request to an instance, over a connection of its own. If the error is [ErrUnreachable] nothing of it was delivered.
// The body is read until the answer's body is closed, or the whole request is sent.
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
			err = own // and not what was made of it
		}
		conn.Close()
		return nil, err
	}
	if r.Body == nil || r.GetBody != nil && r.ContentLength <= window/2 {
		// All of it is in memory, and may be on its way at once: nothing is waited for.
		if err := write(); err != nil {
			return fail(err)
		}
	} else {
		go func() {
			// The server may answer before it has read all, and then nobody minds.
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

// Buffers of a message's size are used again: one of each per request was most of what a gateway
// allocated.
var (
	writers = sync.Pool{New: func() any { return bufio.NewWriterSize(nil, piece) }}
	pieces  = sync.Pool{New: func() any { return new([piece]byte) }}
)

// failure is what a connection has failed with.
func (c *Conn) failure() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}
