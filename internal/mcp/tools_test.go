package mcp

import (
	"encoding/base64"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/check"
)

// Output with a few invalid bytes is shown as text.
func TestStreams(t *testing.T) {
	binary := "\nstdout: binary data; write it to a file instead"
	for in, want := range map[string]string{
		"caf\xe9 au lait, \u00e9":          "\nstdout, with invalid bytes replaced:\ncaf\ufffd au lait, \u00e9",
		"\xe9 " + strings.Repeat("x", 9):   "\nstdout, with invalid bytes replaced:\n\ufffd " + strings.Repeat("x", 9),
		"\xe9 " + strings.Repeat("x", 8):   binary,
		"caf\xe9 au lait, \x00\x00\x1b[1m": binary,
		"\xff":                             binary,
		"":                                 "",
	} {
		var b strings.Builder
		encoded := base64.StdEncoding.EncodeToString([]byte(in))
		silent := writeStreams(&b, nil, &encoded, nil, nil)
		check.That(t, b.String() == want && silent == (in == ""), "%q: %q, want %q", in, b.String(), want)
	}
}

// A model learns that buffered output may be missing after a timeout, and that processes were killed.
func TestDescribe(t *testing.T) {
	for want, a := range map[string]*api.Answer{
		"exit code 0\nno output": {Report: result.Report{Cause: result.Exited}},
		"exit code 0\n1 leftover process was killed; start_process keeps one running\nno output":                                               {Report: result.Report{Cause: result.Exited, Teardown: result.ReportTeardown{Strays: 1}}},
		"exit code 0\n2 leftover processes were killed; start_process keeps one running\nno output":                                            {Report: result.Report{Cause: result.Exited, Teardown: result.ReportTeardown{Strays: 2}}},
		"timed out after 200 ms; everything it started was killed (exit code 124). Output that the program had buffered is missing\nno output": {Report: result.Report{Cause: result.Timeout, ExitCode: 124, Teardown: result.ReportTeardown{Strays: 2}}, TimeoutMS: 200},
	} {
		check.Equal(t, describe(a), want)
	}
}
