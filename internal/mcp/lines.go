package mcp

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"sync"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"

	"github.com/sbxrun/sbxrun/internal/server"
)

// Codes of JSON-RPC 2.0, section 5.1.
const (
	parseError     = -32700
	invalidRequest = -32600
)

// lines forwards messages, one per line. It answers a line that is not a message, or is too long, with
// an error, as JSON-RPC demands. The SDK would close the connection, which ends all calls.
type lines struct {
	in     *bufio.Reader
	max    int // bytes in a line
	rest   []byte
	errors chan []byte // dropped if the client reads none
}

// newLines returns a reader of messages. It writes errors to out, from a goroutine that ends with ctx.
func newLines(ctx context.Context, in io.Reader, out io.Writer, max int) *lines {
	l := &lines{in: bufio.NewReaderSize(in, 64<<10), max: max, errors: make(chan []byte, 16)}
	go func() {
		for {
			select {
			case <-ctx.Done():
				return
			case line := <-l.errors:
				_, _ = out.Write(line) // the SDK gets the same error
			}
		}
	}()
	return l
}

func (l *lines) Read(b []byte) (int, error) {
	for len(l.rest) == 0 {
		line, long, err := l.next()
		if len(line) == 0 && err != nil {
			return 0, err
		}
		if long {
			l.reject(idOf(line), invalidRequest, fmt.Sprintf("the line is longer than %d bytes", l.max))
		} else if id, code, what := invalid(line); code != 0 {
			l.reject(id, code, what)
		} else {
			l.rest = line
		}
	}
	n := copy(b, l.rest)
	l.rest = l.rest[n:]
	return n, nil
}

// end is the number of bytes kept of the beginning and the end of a line that is too long.
const end = 1 << 10

// next reads a line, or the beginning and the end of one that is too long.
func (l *lines) next() (line []byte, long bool, err error) {
	for {
		part, err := l.in.ReadSlice('\n')
		line = append(line, part...)
		if long = long || len(line) > l.max; long && len(line) > 2*end {
			line = slices.Delete(line, end, len(line)-end)
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			return line, long, err
		}
	}
}

// The positions where an ID must be that of the message, and not part of its params: after nothing but
// the other string members, or directly before the last brace.
var (
	atHead = regexp.MustCompile(`^\s*\{\s*(?:"(?:jsonrpc|method)"\s*:\s*"[^"\\]*"\s*,\s*)*"id"\s*:\s*(-?\d+|"[^"\\]*")\s*[,}]`)
	atEnd  = regexp.MustCompile(`,\s*"id"\s*:\s*(-?\d+|"[^"\\]*")\s*\}\s*$`)
)

var unknown = json.RawMessage("null")

// idOf returns the ID of a message that is too long, or null if its position is ambiguous.
func idOf(line []byte) json.RawMessage {
	m := atHead.FindSubmatch(line[:min(end, len(line))])
	if m == nil {
		m = atEnd.FindSubmatch(line[max(0, len(line)-end):])
	}
	if m != nil && json.Valid(m[1]) {
		return m[1]
	}
	return unknown
}

// invalid returns an error for a line that is not a message, with the ID of the message if it is known.
// For a valid message, code is 0.
func invalid(line []byte) (id json.RawMessage, code int, what string) {
	line = bytes.TrimSpace(line)
	switch {
	case len(line) == 0:
	case !json.Valid(line):
		return unknown, parseError, "the line is not valid JSON; send each message in one line"
	case line[0] == '[':
		return unknown, invalidRequest, "batches of messages are not supported"
	default:
		if _, err := jsonrpc.DecodeMessage(line); err != nil {
			return unknown, invalidRequest, "the line is not a JSON-RPC 2.0 message: " + err.Error()
		}
		if err := server.Strict(line); err != nil {
			var message struct {
				ID json.RawMessage `json:"id"`
			}
			_ = json.Unmarshal(line, &message) // it is valid
			return message.ID, invalidRequest, err.Error()
		}
	}
	return nil, 0, ""
}

func (l *lines) reject(id json.RawMessage, code int, what string) {
	text, err := json.Marshal(map[string]any{"jsonrpc": "2.0", "id": id, "error": map[string]any{"code": code, "message": what}})
	if err != nil {
		return // impossible
	}
	select {
	case l.errors <- append(text, '\n'):
	default:
	}
}

// syncWriter is a writer for several goroutines.
type syncWriter struct {
	io.WriteCloser
	mu sync.Mutex
}

func (w *syncWriter) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.WriteCloser.Write(b)
}
