package mcp

import (
	"io"
	"strings"
	"testing"
	"testing/iotest"
)

// What is read is the messages alone, however the lines come, and without those that are too long.
func TestLines(t *testing.T) {
	const message = `{"jsonrpc":"2.0","id":1,"method":"ping"}` + "\n"
	long := `{"jsonrpc":"2.0","id":1,"method":"` + strings.Repeat("x", 200<<10) + `"}` + "\n"
	for _, tt := range []struct{ name, in, want string }{
		{"messages", message + message, message + message},
		{"no line break at the end", strings.TrimSpace(message), strings.TrimSpace(message)},
		{"several at once", "[" + strings.TrimSpace(message) + "]\n[1]\n[]\n" + message, message},
		{"an empty line", "\n" + message, "\n" + message},
		{"no JSON", "garbage\n" + message, message},
		{"no message", `{"foo":1}` + "\n" + message, message},
		{"what is no Unicode", `{"jsonrpc":"2.0","id":1,"method":"` + "\xff" + `"}` + "\n" + message, message},
		{"no message at the end", message + `"x"`, message},
		{"more than fits into the buffer", message + long + message, message + long + message},
		{"the same at the end", message + strings.TrimSpace(long), message + strings.TrimSpace(long)},
	} {
		for _, most := range []int{1 << 20, 100 << 10} {
			want := tt.want
			if most < len(long) {
				want = strings.ReplaceAll(strings.ReplaceAll(want, long, ""), strings.TrimSpace(long), "")
			}
			got, err := io.ReadAll(newLines(t.Context(), iotest.HalfReader(strings.NewReader(tt.in)), io.Discard, most))
			if err != nil || string(got) != want {
				t.Errorf("%s: %v, %.200q", tt.name, err, got)
			}
		}
	}
}

// A line that is too long is answered by its id, where that is surely the message's own.
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
		if err != nil || string(got[:n]) != want {
			t.Errorf("%v %s, want %s", err, got[:n], want)
		}
	}
}

// A message that can be read in two ways is answered by its id, or its client would wait.
func TestLinesStrict(t *testing.T) {
	r, w := io.Pipe()
	go func() {
		line := `{"jsonrpc":"2.0","id":7,"method":"m","params":{"code":"` + "\xff" + `"}}` + "\n"
		_, _ = io.Copy(io.Discard, newLines(t.Context(), strings.NewReader(line), w, 1<<10)) // neither fails
	}()
	got := make([]byte, 1<<10)
	n, err := r.Read(got)
	if text := string(got[:n]); err != nil || !strings.Contains(text, `"id":7,`) || !strings.Contains(text, "Unicode") {
		t.Errorf("%v %s", err, text)
	}
}
