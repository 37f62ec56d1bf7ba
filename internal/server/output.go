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

// copies is the number of copies of the output in memory while the answer is built.
const copies = 2

// buffer computes the memory for an answer with the output and more bytes.
func (ex *execution) buffer(more int64) {
	if ex.maxOutput > ex.maxAnswer && !slices.Contains(ex.clamped, "limits.max_output") {
		ex.clamped = append(ex.clamped, "limits.max_output")
	}
	ex.memory = 2*copies*ex.maxAnswer + more + ex.lists() + ex.echo()
}

// echo returns the memory by which the command line in the report exceeds that in the request, which may contain the
// characters themselves instead of escapes.
func (ex *execution) echo() int64 {
	n := 0
	for _, word := range ex.argv {
		n += longEscapes(word)
	}
	return copies * escaped * int64(n)
}

func newBuffered(ex *execution) *buffered {
	ex.buffer(0)
	return &buffered{stream.NewBuffer(ex.maxAnswer), stream.NewBuffer(ex.maxAnswer)}
}

func (b *buffered) Writers() (stdout, stderr io.Writer) { return b.out, b.err }
func (b *buffered) Started(func(syscall.Signal) error)  {}
func (b *buffered) Output(r *result.Report) {
	setOutput(r, b.out.Stream(), b.err.Stream())
	b.out, b.err = nil, nil // the answer owns it now
}

func setOutput(r *result.Report, stdout, stderr result.Stream) {
	stdout.UTF8, stderr.UTF8 = stdout.UTF8 && readable(stdout.Text), stderr.UTF8 && readable(stderr.Text)
	r.SetOutput(stdout, stderr)
}

// readable reports whether UTF-8 is sent as text instead of Base64. Text that is mostly control characters
// would be several times as long, because each takes a six-byte escape.
func readable(text string) bool { return worth(len(text), longEscapes(text)) }

// longEscapes counts the six-byte escapes that [result.JSON] needs for a text.
func longEscapes(text string) (n int) {
	for i := range len(text) {
		switch c := text[i]; {
		case escapes[c] == 'u', c == 0x7f, c == 0xc2 && i+1 < len(text) && text[i+1] < 0xa0:
			n++
		}
	}
	return n
}

// worth is like readable, given the size of a text in bytes and how many long escapes it needs.
func worth(size, long int) bool {
	const (
		short  = 4 << 10 // always sent as text
		escape = 5       // additional bytes of an escape
	)
	return size <= short || escape*long <= size
}

// events streams a call's output, and the report at the end, as JSON lines or server-sent events.
type events struct {
	w   http.ResponseWriter
	sse bool
	id  string
	max int64 // of each stream

	spawn func(func())

	mu     sync.Mutex
	begun  bool // status sent
	first  bool // start sent
	over   bool // the handler is about to return
	closed chan struct{}
	pieces [2]pieces

	line []byte // reused for each event
}

// pieces sends one stream.
type pieces struct {
	events *events
	name   string
	mu     sync.Mutex // held for a whole piece, as long as the client takes
	total  int64
	carry  []byte // an incomplete character
}

func newEvents(w http.ResponseWriter, sse bool, ex *execution, spawn func(func())) *events {
	ex.memory = ex.echo()
	e := &events{w: w, sse: sse, id: ex.id, max: ex.maxOutput, spawn: spawn, closed: make(chan struct{})}
	e.pieces = [2]pieces{{events: e, name: "stdout"}, {events: e, name: "stderr"}}
	return e
}

// keepalive is the longest time without an event; tests shorten it.
var keepalive = 5 * time.Second

func (e *events) Writers() (stdout, stderr io.Writer) { return &e.pieces[0], &e.pieces[1] }

func (e *events) Started(func(syscall.Signal) error) { _ = e.send("start", nil) } // the next send fails as well

// alive sends keepalive events while a call is queued or writes nothing. A call that is rejected at once
// still gets its own status.
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

// send sends one event, whose JSON document appends to a line.
func (e *events) send(name string, document func([]byte) []byte) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.sendLocked(name, document)
}

// sendLocked is send with the mutex held. The first event is preceded by the status, and the first event of a running
// command by its start event, because output may arrive before Started is called.
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

// Write sends a piece of a stream within its limit. Text is split only between characters.
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
	if len(whole) == 0 { // an incomplete character only
		p.carry = append([]byte(nil), b...)
		return n, nil
	}
	if !utf8.Valid(whole) {
		whole = b // not UTF-8
	}
	p.carry = append([]byte(nil), b[len(whole):]...)
	return n, p.send(whole)
}

// send sends a piece as an [api.Event].
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

// Output sends the rest of both streams and adds their sizes to the report.
func (e *events) Output(r *result.Report) {
	count := func(p *pieces) (*int64, *bool) {
		p.mu.Lock()
		defer p.mu.Unlock()
		if len(p.carry) > 0 {
			_ = p.send(p.carry) // the next send fails as well
		}
		total, truncated := p.total, p.total > e.max
		return &total, &truncated
	}
	r.StdoutBytes, r.StdoutTruncated = count(&e.pieces[0])
	r.StderrBytes, r.StderrTruncated = count(&e.pieces[1])
}

// finish sends the last event, or the error of a call that failed to start. Nothing is sent after it.
func (e *events) finish(a *api.Answer, err error) {
	defer close(e.closed)
	e.mu.Lock() // blocks later events
	defer e.mu.Unlock()
	defer func() { e.over = true }()
	switch {
	case err == nil:
		_ = e.sendLocked("report", appendJSON(&api.Event{Event: "report", Report: a})) // the client may have disconnected
	case e.begun:
		_ = e.sendLocked("error", appendJSON(&api.Event{Event: "error", Error: api.AsError(err)})) // see above
	default:
		api.AsError(err).Write(e.w)
	}
}

// writeAnswer sends the report of a call.
func writeAnswer(w http.ResponseWriter, a *api.Answer) {
	rest := *a
	rest.Stdout, rest.StdoutBase64, rest.Stderr, rest.StderrBase64 = nil, nil, nil, nil
	writeJSON(w, rest, output(a.Stdout, a.StdoutBase64, a.Stderr, a.StderrBase64)...)
}

// writeCell sends the answer of a cell.
func writeCell(w http.ResponseWriter, a *api.CellAnswer) {
	rest := *a
	rest.Stdout, rest.StdoutBase64, rest.Stderr, rest.StderrBase64 = nil, nil, nil, nil
	writeJSON(w, rest, output(a.Stdout, a.StdoutBase64, a.Stderr, a.StderrBase64)...)
}

// member is a member of a document with a long string value; nil if absent.
type member struct {
	name string
	text *string
}

// output returns the output members of a report or a cell's answer.
func output(stdout, stdoutBase64, stderr, stderrBase64 *string) []member {
	return []member{{"stdout", stdout}, {"stdout_base64", stdoutBase64}, {"stderr", stderr}, {"stderr_base64", stderrBase64}}
}

// writeJSON sends a document, which is an object if there are long members. They come last and are encoded
// piece by piece, because the whole JSON text can be many times as long as the output.
func writeJSON(w http.ResponseWriter, v any, long ...member) {
	doc, err := result.JSON(v)
	if err != nil {
		panic(err) // impossible for types of package api
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
			n := min(len(text), size) // may split a character, whose bytes need no escape
			piece, _ = appendQuoted(piece[:0], []byte(text[:n]))
			_, _ = out.Write(piece[len(`"`) : len(piece)-len(`"`)]) // out keeps the error
			text = text[n:]
		}
		doc = []byte("\"}\n")
	}
	_, _ = out.Write(doc) // the client may have disconnected
}

// errWriter ignores writes after the first error.
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

// appendJSON returns a function that appends a value of package api.
func appendJSON(v any) func([]byte) []byte {
	return func(to []byte) []byte {
		doc, err := result.JSON(v)
		if err != nil {
			panic(err)
		}
		return append(to, doc[:len(doc)-len("\n")]...)
	}
}
