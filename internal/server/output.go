package server

import (
	"encoding/base64"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/stream"
)

// buffered keeps the beginning and the end of both streams for the report.
type buffered struct{ out, err *stream.Buffer }

// copies is how many there are of an output while an answer is made of it.
const copies = 2

// buffer settles that there is an answer with the output, and so much more.
func (ex *execution) buffer(more int64) {
	if ex.maxOutput > ex.maxAnswer && !slices.Contains(ex.clamped, "limits.max_output") {
		ex.clamped = append(ex.clamped, "limits.max_output")
	}
	ex.memory = 2*copies*ex.maxAnswer + more + ex.collects()
}

func newBuffered(ex *execution) *buffered {
	ex.buffer(0)
	return &buffered{stream.NewBuffer(ex.maxAnswer), stream.NewBuffer(ex.maxAnswer)}
}

func (b *buffered) Writers() (stdout, stderr io.Writer) { return b.out, b.err }
func (b *buffered) Started(func(syscall.Signal) error)  {}
func (b *buffered) Output(r *result.Report) {
	setOutput(r, b.out.Stream(), b.err.Stream())
	b.out, b.err = nil, nil // the answer has it
}

func setOutput(r *result.Report, stdout, stderr result.Stream) {
	stdout.UTF8, stderr.UTF8 = stdout.UTF8 && readable(stdout.Text), stderr.UTF8 && readable(stderr.Text)
	r.SetOutput(stdout, stderr)
}

// readable reports whether UTF-8 goes as text, and not as base64: what is mostly control
// characters, each an escape of six bytes, would be several times as long, and nobody reads it.
func readable(text string) bool {
	long := 0
	for i := range len(text) {
		if escapes[text[i]] == 'u' {
			long++
		}
	}
	return worth(len(text), long)
}

// worth is readable of so many bytes, so many of which are escapes.
func worth(size, long int) bool {
	const (
		short  = 4 << 10 // is text in any case
		escape = 5       // bytes more than the character
	)
	return size <= short || escape*long <= size
}

// events sends a call's output while it runs, and the report at the end: JSON lines, or
// server-sent events of the same.
type events struct {
	w   http.ResponseWriter
	sse bool
	id  string
	max int64 // of each stream

	spawn func(func())

	mu     sync.Mutex // of w, and of
	begun  bool       // the status is sent
	first  bool       // and the start
	over   bool       // and the handler is about to return
	closed chan struct{}
	pieces [2]pieces

	line []byte // used again for each event
}

// pieces is one stream on its way.
type pieces struct {
	events *events
	name   string
	mu     sync.Mutex // held for a whole piece: a client may take its time for it
	total  int64
	carry  []byte // the beginning of a character whose end is still to come
}

func newEvents(w http.ResponseWriter, sse bool, ex *execution, spawn func(func())) *events {
	e := &events{w: w, sse: sse, id: ex.id, max: ex.maxOutput, spawn: spawn, closed: make(chan struct{})}
	e.pieces = [2]pieces{{events: e, name: "stdout"}, {events: e, name: "stderr"}}
	return e
}

// keepalive is how long a client hears nothing at most; tests shorten it.
var keepalive = 5 * time.Second

func (e *events) Writers() (stdout, stderr io.Writer) { return &e.pieces[0], &e.pieces[1] }

func (e *events) Started(func(syscall.Signal) error) { _ = e.send("start", nil) } // the next one fails as well

// alive has a client hear something that waits for the call's turn, or for output. What is refused
// at once, as most is, has its own status still.
func (e *events) alive() {
	e.spawn(func() {
		tick := time.NewTicker(keepalive)
		defer tick.Stop()
		for {
			select {
			case <-e.closed:
				return
			case <-tick.C:
				if e.send("keepalive", appendJSON(&api.Event{Event: "keepalive"})) != nil {
					return // the request's context ends the call
				}
			}
		}
	})
}

// send sends one event, which is appended to a line as JSON.
func (e *events) send(name string, document func([]byte) []byte) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.sendLocked(name, document)
}

// sendLocked is send with the mutex held. Before the first event goes the status, with which it is settled
// that this is a stream; and before the first one of a command that runs goes its start, since output may be
// quicker than the word of that.
func (e *events) sendLocked(name string, document func([]byte) []byte) error {
	if e.over {
		return os.ErrClosed
	}
	if !e.begun {
		e.begun = true
		kind := "application/x-ndjson"
		if e.sse {
			kind = "text/event-stream"
		}
		e.w.Header().Set("Content-Type", kind)
		e.w.WriteHeader(http.StatusOK)
	}
	if !e.first && name != "keepalive" && name != "error" {
		e.first = true
		if err := e.write("start", appendJSON(&api.Event{Event: "start", ID: e.id})); err != nil {
			return err
		}
	}
	if name == "start" {
		return nil
	}
	return e.write(name, document)
}

func (e *events) write(name string, document func([]byte) []byte) error {
	e.line = e.line[:0]
	if e.sse {
		e.line = append(e.line, "event: "+name+"\ndata: "...)
	}
	e.line = append(document(e.line), '\n')
	if e.sse {
		e.line = append(e.line, '\n')
	}
	if _, err := e.w.Write(e.line); err != nil {
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
	whole := b[:len(b)-stream.Partial(b)]
	if len(whole) == 0 { // the beginning of one character, and nothing else
		p.carry = append([]byte(nil), b...)
		return n, nil
	}
	if !utf8.Valid(whole) {
		whole = b // there are no characters to be kept whole
	}
	p.carry = append([]byte(nil), b[len(whole):]...)
	return n, p.send(whole)
}

// send sends a piece, as [api.Event] has it.
func (p *pieces) send(b []byte) error {
	return p.events.send(p.name, func(line []byte) []byte {
		head := len(line)
		line = append(line, `{"event":"`+p.name+`","`...)
		if utf8.Valid(b) {
			to, long := appendQuoted(append(line, `text":`...), b)
			if worth(len(b), long) {
				return append(to, '}')
			}
			line = append(to[:head], `{"event":"`+p.name+`","`...)
		}
		return append(base64.StdEncoding.AppendEncode(append(line, `base64":"`...), b), `"}`...)
	})
}

// Output sends what is left of both streams, and counts them in the report.
func (e *events) Output(r *result.Report) {
	count := func(p *pieces) (*int64, *bool) {
		p.mu.Lock()
		defer p.mu.Unlock()
		if len(p.carry) > 0 {
			_ = p.send(p.carry) // the next one fails as well
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
	defer close(e.closed)
	e.mu.Lock() // until nothing can come after it
	defer e.mu.Unlock()
	defer func() { e.over = true }()
	switch {
	case err == nil:
		_ = e.sendLocked("report", appendJSON(&api.Event{Event: "report", Report: a})) // who has gone away reads nothing
	case e.begun:
		_ = e.sendLocked("error", appendJSON(&api.Event{Event: "error", Error: api.AsError(err)})) // likewise
	default:
		api.AsError(err).Write(e.w)
	}
}

// writeAnswer answers with the report of a call.
func writeAnswer(w http.ResponseWriter, a *api.Answer) {
	rest := *a // shared with who asks once more
	rest.Stdout, rest.StdoutBase64, rest.Stderr, rest.StderrBase64 = nil, nil, nil, nil
	writeJSON(w, rest, output(a.Stdout, a.StdoutBase64, a.Stderr, a.StderrBase64)...)
}

// writeCell answers with what has become of a cell.
func writeCell(w http.ResponseWriter, a *api.CellAnswer) {
	rest := *a
	rest.Stdout, rest.StdoutBase64, rest.Stderr, rest.StderrBase64 = nil, nil, nil, nil
	writeJSON(w, rest, output(a.Stdout, a.StdoutBase64, a.Stderr, a.StderrBase64)...)
}

// member is one of a document whose value is a long text; nil for none.
type member struct {
	name string
	text *string
}

// output names the members that a report, and the answer of a cell, have for the two streams.
func output(stdout, stdoutBase64, stderr, stderrBase64 *string) []member {
	return []member{{"stdout", stdout}, {"stdout_base64", stdoutBase64}, {"stderr", stderr}, {"stderr_base64", stderrBase64}}
}

// writeJSON answers with a document, which is an object if there are long members. These come
// last, piece by piece: all of them as JSON at once would be many times what was kept of the output.
func writeJSON(w http.ResponseWriter, v any, long ...member) {
	doc, err := result.JSON(v)
	if err != nil {
		panic(err) // of a type of package api
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	out := errWriter{w: w}
	const size = 32 << 10 // of a piece
	var piece []byte
	for _, m := range long {
		if m.text == nil {
			continue
		}
		_, _ = out.Write(doc[:len(doc)-len("}\n")])
		fmt.Fprintf(&out, ",%q:\"", m.name)
		for text := *m.text; text != ""; {
			n := min(len(text), size) // also within a character: its bytes stand for themselves
			piece, _ = appendQuoted(piece[:0], []byte(text[:n]))
			_, _ = out.Write(piece[len(`"`) : len(piece)-len(`"`)]) // out keeps the error
			text = text[n:]
		}
		doc = []byte("\"}\n")
	}
	_, _ = out.Write(doc) // who has gone away reads nothing
}

// errWriter writes until that fails once.
type errWriter struct {
	w   io.Writer
	err error
}

func (e *errWriter) Write(b []byte) (int, error) {
	if e.err == nil {
		_, e.err = e.w.Write(b)
	}
	return len(b), e.err
}

// appendJSON appends what is a type of package api.
func appendJSON(v any) func([]byte) []byte {
	return func(to []byte) []byte {
		doc, err := result.JSON(v)
		if err != nil {
			panic(err)
		}
		return append(to, doc[:len(doc)-len("\n")]...)
	}
}
