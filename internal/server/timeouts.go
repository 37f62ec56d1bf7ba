package server

import (
	"context"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// A slow client must not hold anything but itself. The client has to send, or read, each piece of a body
// within pieceBound; otherwise the connection is dropped. No other code sets deadlines on connections.

const pieceSize = 64 << 10

// pieceBound is the time for one piece; tests shorten it.
var pieceBound = 30 * time.Second

// timeoutWriter is the response writer of a request. It sets the deadlines of its connection.
type timeoutWriter struct {
	http.ResponseWriter
	in, out side
	coming  atomic.Bool // the request body is incomplete
	begun   atomic.Bool // the response has begun
}

// side is one direction of a connection.
type side struct {
	set func(time.Time) error
	mu  sync.Mutex
	cut bool // no more deadlines
}

// newTimeoutWriter wraps the response and the request body. The caller calls expect after the handler has
// returned, because net/http sends the rest of the response then.
func newTimeoutWriter(w http.ResponseWriter, r *http.Request) *timeoutWriter {
	c := http.NewResponseController(w)
	p := &timeoutWriter{ResponseWriter: w, in: side{set: c.SetReadDeadline}, out: side{set: c.SetWriteDeadline}}
	p.expect()
	if r.ContentLength != 0 {
		p.coming.Store(true)
		a := &timedBody{ReadCloser: r.Body, p: p, read: time.Now()}
		a.until = a.read.Add(pieceBound)
		p.in.deadline(a.until)
		r.Body = a
	}
	return p
}

// expect sets the deadline for the next piece of the response. net/http first reads the rest of the request
// body, which gets its own time.
func (p *timeoutWriter) expect() {
	within := pieceBound
	if p.coming.Load() {
		within *= 2
	}
	p.out.deadline(time.Now().Add(within))
}

// linger sends the response and then reads the rest of a request for a moment before the connection is
// closed: a client that is still writing might otherwise never see the response. net/http does the same,
// except if a read was interrupted at the handler's end, as in a gateway.
func (p *timeoutWriter) linger(r *http.Request) {
	const most, moment = 256 << 10, 2 * time.Second
	a, ok := r.Body.(*timedBody)
	if !ok || !r.Close && p.Header().Get("Connection") != "close" || !p.coming.Load() || p.FlushError() != nil {
		return
	}
	// Another goroutine may be reading. It must no longer set a deadline, because net/http uses one to interrupt its
	// own next read and would wait.
	p.in.last(time.Now().Add(moment))
	_, _ = io.CopyN(io.Discard, a.ReadCloser, most)
}

func (s *side) deadline(at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.cut {
		_ = s.set(at) // writers in tests may not support deadlines
	}
}

// last sets a final deadline; later ones are ignored.
func (s *side) last(at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.cut {
		_ = s.set(at) // see above
	}
	s.cut = true
}

// until interrupts reads or writes when ctx is done, even if the client is idle.
func (s *side) until(ctx context.Context) (stop func() bool) {
	return context.AfterFunc(ctx, func() { s.last(time.Unix(1, 0)) })
}

func (p *timeoutWriter) WriteHeader(status int) {
	p.begun.Store(true)
	p.ResponseWriter.WriteHeader(status)
}

func (p *timeoutWriter) Write(b []byte) (n int, err error) {
	p.begun.Store(true)
	for {
		p.expect()
		k, err := p.ResponseWriter.Write(b[n:min(len(b), n+pieceSize)])
		n += k
		if err != nil || n == len(b) {
			return n, err
		}
	}
}

// Flush implements [http.Flusher], which other packages look for.
func (p *timeoutWriter) Flush() { _ = p.FlushError() } // the next Write returns the error

func (p *timeoutWriter) FlushError() error {
	p.expect()
	return http.NewResponseController(p.ResponseWriter).Flush()
}

// Unwrap implements the convention of [http.ResponseController].
func (p *timeoutWriter) Unwrap() http.ResponseWriter { return p.ResponseWriter }

// timedBody is a request body. It clears its deadline at the end, because net/http treats an expired one as a
// closed connection and cancels the request.
type timedBody struct {
	io.ReadCloser
	p     *timeoutWriter
	got   int       // bytes of the current piece
	until time.Time // deadline of the current piece
	read  time.Time // time of the last read
}

func (a *timedBody) Read(b []byte) (int, error) {
	if a.p.coming.Load() {
		// While the handler does not read, for example because a process pauses before it reads stdin, the
		// client cannot send.
		a.until = a.until.Add(time.Since(a.read))
		a.p.in.deadline(a.until)
	}
	n, err := a.ReadCloser.Read(b)
	a.read = time.Now()
	switch a.got += n; {
	case err == io.EOF:
		a.p.coming.Store(false)
		a.p.in.deadline(time.Time{})
	case a.got >= pieceSize:
		a.got, a.until = 0, a.read.Add(pieceBound)
	}
	return n, err
}
