package server

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/place"
	"github.com/sbxrun/sbxrun/internal/stream"
)

// buffered keeps the beginning and the end of both streams for the report.
type buffered struct{ out, err *stream.Buffer }

func newBuffered(o *order) *buffered {
	return &buffered{stream.NewBuffer(o.maxOutput), stream.NewBuffer(o.maxOutput)}
}

func (b *buffered) writers() (stdout, stderr io.Writer) { return b.out, b.err }
func (b *buffered) started(place.Running)               {}
func (b *buffered) output(r *result.Report)             { r.SetOutput(b.out.Stream(), b.err.Stream()) }

// events sends a call's output while it runs, and the report at the end: JSON lines, or
// server-sent events of the same.
type events struct {
	w   http.ResponseWriter
	sse bool
	id  string
	max int64 // of each stream

	mu     sync.Mutex // of w, and of
	begun  bool       // the status is sent
	over   bool       // and the handler is about to return
	closed chan struct{}
	pieces [2]pieces

	line    bytes.Buffer // used again for each event
	encoder *json.Encoder
}

// pieces is one stream on its way.
type pieces struct {
	events *events
	name   string
	mu     sync.Mutex // held for a whole piece: a client may take its time for it
	total  int64
	carry  []byte // the beginning of a character whose end is still to come
}

func newEvents(w http.ResponseWriter, sse bool, o *order) *events {
	e := &events{w: w, sse: sse, id: o.id, max: o.maxOutput, closed: make(chan struct{})}
	e.encoder = json.NewEncoder(&e.line)
	e.encoder.SetEscapeHTML(false)
	e.pieces = [2]pieces{{events: e, name: "stdout"}, {events: e, name: "stderr"}}
	return e
}

// keepalive is how long a client hears nothing at most.
const keepalive = 5 * time.Second

func (e *events) writers() (stdout, stderr io.Writer) { return &e.pieces[0], &e.pieces[1] }

// begin sends the status, with which it is settled that this is a stream, and the first event.
// The command's first output may be quicker than the word that it was started.
func (e *events) begin() error {
	if e.begun {
		return nil
	}
	e.begun = true
	kind := "application/x-ndjson"
	if e.sse {
		kind = "text/event-stream"
	}
	e.w.Header().Set("Content-Type", kind)
	e.w.WriteHeader(http.StatusOK)
	return e.write(&api.Event{Event: "start", ID: e.id})
}

func (e *events) started(place.Running) {
	e.mu.Lock()
	_ = e.begin() // the next one fails as well
	e.mu.Unlock()
	go func() {
		tick := time.NewTicker(keepalive)
		defer tick.Stop()
		for {
			select {
			case <-e.closed:
				return
			case <-tick.C:
				if e.send(&api.Event{Event: "keepalive"}) != nil {
					return // the request's context ends the call
				}
			}
		}
	}()
}

// send sends one event.
func (e *events) send(event *api.Event) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.over {
		return os.ErrClosed
	}
	if err := e.begin(); err != nil {
		return err
	}
	return e.write(event)
}

func (e *events) write(event *api.Event) error {
	e.line.Reset()
	if e.sse {
		e.line.WriteString("event: " + event.Event + "\ndata: ")
	}
	if err := e.encoder.Encode(event); err != nil {
		return err
	}
	if e.sse {
		e.line.WriteByte('\n')
	}
	patience(e.w)
	if _, err := e.w.Write(e.line.Bytes()); err != nil {
		return err
	}
	return http.NewResponseController(e.w).Flush()
}

// Write sends a piece of a stream, as far as that is within its bound. What is sent as text is
// whole characters.
func (p *pieces) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := len(b)
	left := max(0, p.events.max-p.total)
	p.total += int64(n)
	if int64(len(b)) > left {
		b = b[:left]
	}
	if len(b) == 0 {
		return n, nil
	}
	if len(p.carry) > 0 {
		b = append(p.carry, b...)
		p.carry = nil
	}
	whole := b[:len(b)-incomplete(b)]
	if len(whole) == 0 { // the beginning of one character, and nothing else
		p.carry = append([]byte(nil), b...)
		return n, nil
	}
	event := p.piece(whole)
	if event.Text == "" {
		event, whole = p.piece(b), b // binary: there are no characters to be kept whole
	}
	p.carry = append([]byte(nil), b[len(whole):]...)
	return n, p.events.send(event)
}

func (p *pieces) piece(b []byte) *api.Event {
	event := &api.Event{Event: p.name}
	if utf8.Valid(b) {
		event.Text = string(b)
	} else {
		event.Base64 = b
	}
	return event
}

// incomplete is how many bytes at the end begin a character and do not end it.
func incomplete(b []byte) int {
	for i := 1; i < utf8.UTFMax && i <= len(b); i++ {
		if c := b[len(b)-i]; utf8.RuneStart(c) {
			if c >= utf8.RuneSelf && !utf8.FullRune(b[len(b)-i:]) {
				return i
			}
			return 0
		}
	}
	return 0
}

// output sends what is left of both streams, and counts them in the report.
func (e *events) output(r *result.Report) {
	count := func(p *pieces) (*int64, *bool) {
		p.mu.Lock()
		defer p.mu.Unlock()
		if len(p.carry) > 0 {
			_ = e.send(p.piece(p.carry)) // the next one fails as well
		}
		total, truncated := p.total, p.total > e.max
		return &total, &truncated
	}
	r.StdoutBytes, r.StdoutTruncated = count(&e.pieces[0])
	r.StderrBytes, r.StderrTruncated = count(&e.pieces[1])
}

// finish sends the last event, or the answer of a call that came to nothing. What comes later
// is not sent.
func (e *events) finish(a *api.Answer, err error) {
	defer func() {
		close(e.closed)
		e.mu.Lock()
		e.over = true
		e.mu.Unlock()
	}()
	var failed *api.Error
	if err != nil {
		failed = api.AsError(err)
	}
	switch {
	case failed == nil:
		_ = e.send(&api.Event{Event: "report", Report: a}) // who has gone away reads nothing
	case e.begun:
		_ = e.send(&api.Event{Event: "error", Error: failed}) // likewise
	default:
		patience(e.w)
		failed.Write(e.w)
	}
}

// writeJSON answers with a document.
func writeJSON(w http.ResponseWriter, status int, v any) {
	patience(w)
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(v) // who has gone away reads nothing
}
