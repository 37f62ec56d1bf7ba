package cluster

import (
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/sbxrun/sbxrun/tests/check"
)

// fullReader fills each buffer, and reports an incomplete body as an error.
func TestFullReader(t *testing.T) {
	t.Parallel()
	for _, end := range []error{io.EOF, io.ErrUnexpectedEOF} {
		body := io.MultiReader(iotest.OneByteReader(strings.NewReader("abcde")), iotest.ErrReader(end))
		b := make([]byte, 3)
		for _, want := range []struct {
			text string
			err  error
		}{{"abc", nil}, {"de", end}} {
			n, err := (fullReader{body}).Read(b)
			check.That(t, string(b[:n]) == want.text && errors.Is(err, want.err), "%q, %v; want %q, %v", b[:n], err, want.text, want.err)
		}
	}
}
