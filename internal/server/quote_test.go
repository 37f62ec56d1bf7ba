package server

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
)

func FuzzQuoted(f *testing.F) {
	for _, text := range []string{"", "plain text of more than eight bytes", "a \"b\" \\ \b\f\n\r\t\x00\x1f\x7f é \u2028 😀", strings.Repeat("y\n", 20)} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		text = strings.ToValidUTF8(text, "?")
		quoted, long := appendQuoted([]byte("x"), []byte(text))
		var got string
		err := json.Unmarshal(quoted[1:], &got)
		check.That(t, err == nil && got == text, "%q: %q, %v", text, quoted, err)
		want := strings.Count(string(quoted), `\u00`) - strings.Count(text, `\u00`)
		check.That(t, long == want || strings.Contains(text, `\`), "%q: %d, want %d", quoted, long, want)
	})
}

func BenchmarkQuoted(b *testing.B) {
	for name, line := range map[string]string{"lines": strings.Repeat("x", 79) + "\n", "yes": "y\n"} {
		text := strings.Repeat(line, (32<<10)/len(line))
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(text)))
			var to []byte
			for b.Loop() {
				to, _ = appendQuoted(to[:0], []byte(text))
			}
		})
		b.Run(name+"/json", func(b *testing.B) {
			b.SetBytes(int64(len(text)))
			enc := json.NewEncoder(discard{})
			enc.SetEscapeHTML(false)
			for b.Loop() {
				_ = enc.Encode(text)
			}
		})
	}
}

type discard struct{}

func (discard) Write(b []byte) (int, error) { return len(b), nil }
