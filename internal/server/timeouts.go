package server

import (
	"context"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// A client may be slow, and holds itself alone with that: of each request and of each answer a
// piece has to come, or to be taken, within its time. One that is slower is taken for gone. This
// is the only place with deadlines of connections.

const pieceSize = 64 << 10

// pieceBound is how long a client may take for one piece; a test has less.
var pieceBound = 30 * time.Second

// patient is the connection of one request, as the writer of its answer.
type timeoutWriter struct {
	http.ResponseWriter
	in, out side
	coming  atomic.Bool // something of the request
	begun   atomic.Bool // the answer
}

// side is one direction of a connection.
type side struct {
	set func(time.Time) error
	mu  sync.Mutex
	cut bool // nothing more comes or goes
}

// newPatient begins with a request, and has its body come by pieces. The caller calls expect
// when its handler has returned: net/http sends the last of the answer then.
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

// expect gives the client its time for the next piece of the answer. What no handler has read of
// a request net/http reads itself before that.
func (p *timeoutWriter) expect() {
	within := pieceBound
	if p.coming.Load() {
		within *= 2
	}
	p.out.deadline(time.Now().Add(within))
}

// linger sends the answer, and then reads for a moment what still comes of a request after which the
// connection is closed: a client that writes when it is closed may never see the answer. net/http reads
// the rest as well, but not where it has to break off a read at the handler's end, such as a gateway's.
func (p *timeoutWriter) linger(r *http.Request) {
	const most, moment = 256 << 10, 2 * time.Second
	a, ok := r.Body.(*timedBody)
	if !ok || !r.Close && p.Header().Get("Connection") != "close" || !p.coming.Load() || p.FlushError() != nil {
		return
	}
	// Who reads beside sets no deadline any more: net/http breaks off its own next read by one, and would wait.
	p.in.last(time.Now().Add(moment))
	_, _ = io.CopyN(io.Discard, a.ReadCloser, most)
}

func (s *side) deadline(at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.cut {
		_ = s.set(at) // a writer of a test may have none
	}
}

// last sets a deadline after which none is set any more.
func (s *side) last(at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.cut {
		_ = s.set(at) // as above
	}
	s.cut = true
}

// until breaks off with a context, also when the client does not move.
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

// Flush is [http.Flusher], which packages of others look for.
func (p *timeoutWriter) Flush() { _ = p.FlushError() } // the next Write fails as well

func (p *timeoutWriter) FlushError() error {
	p.expect()
	return http.NewResponseController(p.ResponseWriter).Flush()
}

// Unwrap is for [http.ResponseController].
func (p *timeoutWriter) Unwrap() http.ResponseWriter { return p.ResponseWriter }

// arriving is the body of a request. Its deadline is over with it: a connection that is past one
// counts as closed, and its request as canceled.
type timedBody struct {
	io.ReadCloser
	p     *timeoutWriter
	got   int       // bytes of this piece so far
	until time.Time // when the client's time for this piece is over
	read  time.Time // when something was read last
}

func (a *timedBody) Read(b []byte) (int, error) {
	if a.p.coming.Load() {
		// While nobody reads, as a process that pauses does not read its stdin, the client cannot send.
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
