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

// lines passes on messages, one per line. A line that is not a message, or too long, is answered with an
// error, as JSON-RPC demands. The SDK would end the connection, and all calls with it.
type lines struct {
	in     *bufio.Reader
	most   int // bytes in a line; a longer one is dropped
	rest   []byte
	errors chan []byte // dropped if the client reads none
}

// newLines also writes the errors to out, from a goroutine that ends with ctx.
func newLines(ctx context.Context, in io.Reader, out io.Writer, most int) *lines {
	l := &lines{in: bufio.NewReaderSize(in, 64<<10), most: most, errors: make(chan []byte, 16)}
	go func() {
		for {
			select {
			case <-ctx.Done():
				return
			case line := <-l.errors:
				_, _ = out.Write(line) // the SDK meets the same error
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
			l.refuse(idOf(line), invalidRequest, fmt.Sprintf("the line is longer than %d bytes", l.most))
		} else if id, code, what := refusal(line); code != 0 {
			l.refuse(id, code, what)
		} else {
			l.rest = line
		}
	}
	n := copy(b, l.rest)
	l.rest = l.rest[n:]
	return n, nil
}

// end is how many of the first and of the last bytes are kept of a line that is too long.
const end = 1 << 10

// next reads a line, or the first and the last bytes of one that is too long.
func (l *lines) next() (line []byte, long bool, err error) {
	for {
		part, err := l.in.ReadSlice('\n')
		line = append(line, part...)
		if long = long || len(line) > l.most; long && len(line) > 2*end {
			line = slices.Delete(line, end, len(line)-end)
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			return line, long, err
		}
	}
}

// Where an id is the message's own and not, for example, an argument's: behind no value but the
// strings that a message has, or directly before the brace at the line's end.
var (
	atHead = regexp.MustCompile(`^\s*\{\s*(?:"(?:jsonrpc|method)"\s*:\s*"[^"\\]*"\s*,\s*)*"id"\s*:\s*(-?\d+|"[^"\\]*")\s*[,}]`)
	atEnd  = regexp.MustCompile(`,\s*"id"\s*:\s*(-?\d+|"[^"\\]*")\s*\}\s*$`)
)

var unknown = json.RawMessage("null")

// idOf returns the id of a message that is too long, or null where it is elsewhere.
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

// refusal says why a line is not a message, and which one it is meant to be; code 0 means that it is one.
func refusal(line []byte) (id json.RawMessage, code int, what string) {
	line = bytes.TrimSpace(line)
	switch {
	case len(line) == 0:
	case !json.Valid(line):
		return unknown, parseError, "the line is not JSON; a message has one line"
	case line[0] == '[':
		return unknown, invalidRequest, "several messages in a line are not supported"
	default:
		if _, err := jsonrpc.DecodeMessage(line); err != nil {
			return unknown, invalidRequest, "the line is not a JSON-RPC 2.0 message: " + err.Error()
		}
		if err := server.Strict(line); err != nil {
			var message struct {
				ID json.RawMessage `json:"id"`
			}
			_ = json.Unmarshal(line, &message) // it is a message
			return message.ID, invalidRequest, err.Error()
		}
	}
	return nil, 0, ""
}

func (l *lines) refuse(id json.RawMessage, code int, what string) {
	text, err := json.Marshal(map[string]any{"jsonrpc": "2.0", "id": id, "error": map[string]any{"code": code, "message": what}})
	if err != nil {
		return // it cannot fail
	}
	select {
	case l.errors <- append(text, '\n'):
	default:
	}
}

// together is a writer for several goroutines.
type together struct {
	io.WriteCloser
	mutex sync.Mutex
}

func (t *together) Write(b []byte) (int, error) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	return t.WriteCloser.Write(b)
}
