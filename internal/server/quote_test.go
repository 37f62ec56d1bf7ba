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
