package mcp

import (
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/sbxrun/sbxrun/tests/check"
)

// Read returns the messages, without lines that are invalid or too long, however the input is split.
func TestLines(t *testing.T) {
	const message = `{"jsonrpc":"2.0","id":1,"method":"ping"}` + "\n"
	long := `{"jsonrpc":"2.0","id":1,"method":"` + strings.Repeat("x", 200<<10) + `"}` + "\n"
	for _, tt := range []struct{ name, in, want string }{
		{"messages", message + message, message + message},
		{"no newline at the end", strings.TrimSpace(message), strings.TrimSpace(message)},
		{"batches", "[" + strings.TrimSpace(message) + "]\n[1]\n[]\n" + message, message},
		{"an empty line", "\n" + message, "\n" + message},
		{"invalid JSON", "garbage\n" + message, message},
		{"not a message", `{"foo":1}` + "\n" + message, message},
		{"invalid UTF-8", `{"jsonrpc":"2.0","id":1,"method":"` + "\xff" + `"}` + "\n" + message, message},
		{"not a message, at the end", message + `"x"`, message},
		{"a line longer than the buffer", message + long + message, message + long + message},
		{"a long line at the end", message + strings.TrimSpace(long), message + strings.TrimSpace(long)},
	} {
		for _, maximum := range []int{1 << 20, 100 << 10} {
			want := tt.want
			if maximum < len(long) {
				want = strings.ReplaceAll(strings.ReplaceAll(want, long, ""), strings.TrimSpace(long), "")
			}
			got, err := io.ReadAll(newLines(t.Context(), iotest.HalfReader(strings.NewReader(tt.in)), io.Discard, maximum))
			check.That(t, err == nil && string(got) == want, "%s: %v, %.200q", tt.name, err, got)
		}
	}
}

// The error for a line that is too long has the ID of the message if that is unambiguous.
func TestLinesTooLong(t *testing.T) {
	much := strings.Repeat("x", 200<<10)
	for _, tt := range []struct{ line, id string }{
		{`{"jsonrpc":"2.0","id":7,"method":"m","params":"` + much + `"}`, "7"},
		{` { "method" : "m" , "id" : "a b" , "params":"` + much + `"} `, `"a b"`},
		{`{"method":"m","params":{"a":"` + much + `"},"jsonrpc":"2.0","id":-8}` + "\r", "-8"},
		{`{"method":"m","params":["` + much + `"], "id": "é" }`, `"é"`},
		{`{"method":"m","params":"` + much + `","id":9,"jsonrpc":"2.0"}`, "null"},
		{`{"method":"m","params":{"id":9,"a":"` + much + `"}}`, "null"},
		{`{"method":"m","params":{"a":"` + much + `","id":9}}`, "null"},
		{`{"method":"m","params":"` + much + `,\"id\":9}"}`, "null"},
		{`{"id":"` + much + `"}`, "null"},
		{`{"id":1.5,"params":"` + much + `"}`, "null"},
		{`{"id":01,"params":"` + much + `"}`, "null"},
		{`{"id":null,"params":"` + much + `","id":"` + "\x01" + `"}`, "null"},
		{much, "null"},
	} {
		r, w := io.Pipe()
		go func() {
			_, _ = io.Copy(io.Discard, newLines(t.Context(), strings.NewReader(tt.line+"\n"), w, 100<<10)) // neither fails
		}()
		got := make([]byte, 1<<10)
		n, err := r.Read(got)
		want := `{"error":{"code":-32600,"message":"the line is longer than 102400 bytes"},"id":` + tt.id + `,"jsonrpc":"2.0"}` + "\n"
		check.That(t, err == nil && string(got[:n]) == want, "%v %s, want %s", err, got[:n], want)
	}
}

// The error for an ambiguous message has its ID; otherwise the client would wait for a response.
func TestLinesStrict(t *testing.T) {
	r, w := io.Pipe()
	go func() {
		line := `{"jsonrpc":"2.0","id":7,"method":"m","params":{"code":"` + "\xff" + `"}}` + "\n"
		_, _ = io.Copy(io.Discard, newLines(t.Context(), strings.NewReader(line), w, 1<<10)) // neither fails
	}()
	got := make([]byte, 1<<10)
	n, err := r.Read(got)
	text := string(got[:n])
	check.That(t, err == nil && strings.Contains(text, `"id":7,`) && strings.Contains(text, "Unicode"), "%v %s", err, text)
}
