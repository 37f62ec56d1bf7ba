package mcp

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/config"
	"github.com/sbxrun/sbxrun/internal/server"
	"github.com/sbxrun/sbxrun/internal/slot"
	"github.com/sbxrun/sbxrun/tests/check"
)

// noSlots is a source without slots.
type noSlots struct{}

func (noSlots) Take(context.Context, string, slot.Policy) (slot.Slot, error) {
	return nil, &result.Error{Code: "setup", Message: "no slot"}
}

func (noSlots) Rooms() (idle, all, left int) { return 0, 0, 0 }

// newFront returns a front without slots.
func newFront(t testing.TB) *Server {
	c := config.Default()
	c.StateDir = filepath.Join(t.TempDir(), "state")
	c.MaxBody = 1 << 20
	log := slog.New(slog.NewJSONHandler(io.Discard, nil))
	s, err := server.New(c, nil, noSlots{}, log, "test")
	check.Must(t, err)
	t.Cleanup(func() { s.Drain(context.Background()) })
	return New(s, "test", log)
}

// post sends a message in a version of the protocol; "" sends none.
func post(t *testing.T, front *Server, body, version string) *httptest.ResponseRecorder {
	const timeout = time.Minute
	ctx, cancel := context.WithTimeout(server.As(t.Context(), "uid-1", "request"), timeout)
	defer cancel()
	r := httptest.NewRequestWithContext(ctx, http.MethodPost, "http://sbxrun/mcp", strings.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Accept", "application/json, text/event-stream")
	if version != "" {
		r.Header.Set("Mcp-Protocol-Version", version)
	}
	w := httptest.NewRecorder()
	front.ServeHTTP(w, r)
	check.That(t, ctx.Err() == nil, "no response to %.90s", body)
	return w
}

// Every request to /mcp gets a response that is not an internal error, and no tool claims to have run anything.
func FuzzBody(f *testing.F) {
	const call = `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"run_code","arguments":{"code":"1","files":[{"path":"a","text":"b"}],"session":"x"}}}`
	for _, body := range []string{
		call, strings.ReplaceAll(call, "run_code", "run_command"), `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"read_file","arguments":{"session":"x","path":"../a","offset":-1}}}`,
		`{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"a","version":"1"}}}`,
		`{"jsonrpc":"2.0","id":"a","method":"resources/read","params":{"uri":"sbxrun://sessions/x/files/%2e%2e/a"}}`, `{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1}}`,
		`[` + call + `]`, `[]`, `{`, `null`, `{"jsonrpc":"2.0","id":{},"method":"ping"}`, `{"jsonrpc":"1.0","id":1,"method":"tools/list","params":{"cursor":"x"}}`,
	} {
		f.Add(body, true)
		f.Add(body, false)
	}
	front := newFront(f)
	f.Fuzz(func(t *testing.T, body string, newest bool) {
		version := ""
		if newest {
			version = sessionless
		}
		w := post(t, front, body, version)
		check.That(t, w.Code < 500, "%d %s", w.Code, w.Body)
		text := w.Body.String()
		check.That(t, !strings.Contains(text, `"started":true`) && !strings.Contains(text, `"internal"`), "%v", text)
	})
}

// Only a tool call may be long: the SDK keeps other messages as long as their connection.
func TestLongMessages(t *testing.T) {
	front := newFront(t)
	long := strings.Repeat("x", maxMessage)
	const legacy = "2025-06-18"
	for _, test := range []struct {
		body  string
		large bool
	}{
		{`{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"` + legacy + `","capabilities":{},"clientInfo":{"name":"a","version":"1"}}}`, false},
		{`{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"` + legacy + `","capabilities":{},"clientInfo":{"name":"` + long + `","version":"1"}}}`, true},
		{`{"jsonrpc":"2.0","id":1,"method":"initialize","Method":"tools/call","params":{"protocolVersion":"` + legacy + `","capabilities":{},"clientInfo":{"name":"` + long + `","version":"1"}}}`, true},
		{`{"jsonrpc":"2.0","id":1,"method":"logging/setLevel","params":{"level":"` + long + `"}}`, true},
		{`{"jsonrpc":"2.0","method":"notifications/initialized","params":{"_meta":{"a":"` + long + `"}}}`, true},
		{`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"run_code","arguments":{"code":"` + long + `"}}}`, false},
	} {
		w := post(t, front, test.body, "")
		check.That(t, (w.Code == http.StatusRequestEntityTooLarge) == test.large, "%.90s: %d %.200s", test.body, w.Code, w.Body)
	}
}
