package mcp

import (
	"io"
	"strings"
	"testing"
	"testing/iotest"
)

// What is read is the messages alone, however the lines come; one that is too long is passed on.
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
		{"no message at the end", message + `"x"`, message},
		{"more than fits into the buffer", long + message, long + message},
	} {
		for _, most := range []int{1 << 20, 100 << 10} {
			got, err := io.ReadAll(newLines(t.Context(), iotest.HalfReader(strings.NewReader(tt.in)), io.Discard, most))
			if err != nil || string(got) != tt.want {
				t.Errorf("%s: %v, %.200q", tt.name, err, got)
			}
		}
	}
}
