package mcp

import (
	"encoding/base64"
	"strings"
	"testing"
)

// An agent reads output of which a few bytes are no text.
func TestStreams(t *testing.T) {
	nothing := "\nstdout: no text; stdout_base64 and stderr_base64 have it"
	for in, want := range map[string]string{
		"caf\xe9 au lait, \u00e9":          "\nstdout, not all of which is text:\ncaf\ufffd au lait, \u00e9",
		"\xe9 " + strings.Repeat("x", 9):   "\nstdout, not all of which is text:\n\ufffd " + strings.Repeat("x", 9),
		"\xe9 " + strings.Repeat("x", 8):   nothing,
		"caf\xe9 au lait, \x00\x00\x1b[1m": nothing,
		"\xff":                             nothing,
		"":                                 "",
	} {
		var b strings.Builder
		encoded := base64.StdEncoding.EncodeToString([]byte(in))
		if silent := writeStreams(&b, nil, &encoded, nil, nil); b.String() != want || silent != (in == "") {
			t.Errorf("%q: %q, want %q", in, b.String(), want)
		}
	}
}
