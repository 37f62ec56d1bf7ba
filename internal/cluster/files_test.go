package cluster

import (
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"
)

// What is stored is read in pieces that are full, and a body that is broken off is not one that ends.
func TestWhole(t *testing.T) {
	t.Parallel()
	for _, end := range []error{io.EOF, io.ErrUnexpectedEOF} {
		body := io.MultiReader(iotest.OneByteReader(strings.NewReader("abcde")), iotest.ErrReader(end))
		b := make([]byte, 3)
		for _, want := range []struct {
			text string
			err  error
		}{{"abc", nil}, {"de", end}} {
			if n, err := (fullReader{body}).Read(b); string(b[:n]) != want.text || !errors.Is(err, want.err) {
				t.Errorf("%q, %v; want %q, %v", b[:n], err, want.text, want.err)
			}
		}
	}
}
