package mcp

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"sync"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
)

// Codes of JSON-RPC 2.0, section 5.1.
const (
	parseError     = -32700
	invalidRequest = -32600
)

// lines passes on messages, one per line. A line that is not a message is answered with an error, as
// JSON-RPC demands. The SDK would end the connection, and all calls with it.
type lines struct {
	in     *bufio.Reader
	most   int // bytes in a line; a longer one is passed on as it comes, for the SDK to refuse
	rest   []byte
	long   bool        // the line goes on
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
		line, whole, err := l.next()
		if len(line) == 0 && err != nil {
			return 0, err
		}
		if whole {
			if code, what := refusal(line); code != 0 {
				l.refuse(code, what)
				continue
			}
		}
		l.rest = line
	}
	n := copy(b, l.rest)
	l.rest = l.rest[n:]
	return n, nil
}

// next reads a line; or what there is of one that is too long, and then the rest of it.
func (l *lines) next() (line []byte, whole bool, err error) {
	for going := l.long; ; {
		part, err := l.in.ReadSlice('\n')
		line = append(line, part...)
		more := errors.Is(err, bufio.ErrBufferFull)
		if l.long = more && (going || len(line) > l.most); l.long || !more {
			return line, !going && !more, err
		}
	}
}

// refusal says why a line is not a message; code 0 means that it is one.
func refusal(line []byte) (code int, what string) {
	line = bytes.TrimSpace(line)
	switch {
	case len(line) == 0:
	case !json.Valid(line):
		return parseError, "the line is not JSON; a message has one line"
	case line[0] == '[':
		return invalidRequest, "several messages in a line are not supported"
	default:
		if _, err := jsonrpc.DecodeMessage(line); err != nil {
			return invalidRequest, "the line is not a JSON-RPC 2.0 message: " + err.Error()
		}
	}
	return 0, ""
}

func (l *lines) refuse(code int, what string) {
	text, err := json.Marshal(map[string]any{"jsonrpc": "2.0", "id": nil, "error": map[string]any{"code": code, "message": what}})
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
