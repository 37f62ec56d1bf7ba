package sbxrun

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// The margin is for the server: a caller that is busy between two reads, or before the first, loses nothing.
func TestBusyCaller(t *testing.T) {
	text := strings.Repeat("x", 64<<10) // more than is read ahead
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			_, _ = io.WriteString(w, text)
			return
		}
		all := json.NewEncoder(w)
		for _, event := range []any{map[string]any{"event": "stdout", "text": "first"}, map[string]any{"event": "stdout", "text": text}, map[string]any{"event": "report", "report": &Report{Outcome: Outcome{ID: "1", Cause: "exited"}, ExitCode: 7}}} {
			_ = all.Encode(event)
		}
	}))
	defer s.Close()
	c, err := New(s.URL)
	check.Must(t, err)
	margin := harness.Deadline(time.Second)
	c.Margin = margin
	busy := func() { time.Sleep(margin * 3 / 2) }

	code := 0
	for e, err := range c.Stream(t.Context(), Call{Argv: []string{"x"}, Timeout: time.Nanosecond}) {
		check.Must(t, err)
		if e.Report != nil {
			code = e.Report.ExitCode
		} else if string(e.Data) == "first" {
			busy()
		}
	}
	check.That(t, code == 7, "exit code %d", code)

	body, err := c.FetchStream(t.Context(), "x")
	check.Must(t, err)
	defer body.Close()
	busy()
	all, err := io.ReadAll(body)
	check.That(t, err == nil && string(all) == text, "%d bytes, %v", len(all), err)
}

// The longest timeout there is, which some take for none, is not over at once.
func TestLongest(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, `{"id":"1","cause":"exited","exit_code":7}`)
	}))
	defer s.Close()
	c, err := New(s.URL)
	check.Must(t, err)
	for _, grace := range []time.Duration{0, time.Hour} {
		r, err := c.Run(t.Context(), Call{Argv: []string{"x"}, Timeout: math.MaxInt64, Grace: grace})
		check.That(t, err == nil && r.ExitCode == 7, "%v %v", r, err)
	}
}

// Only what may have been sent is Lost; and the client's own bound is not the caller's cancellation.
func TestBound(t *testing.T) {
	silent := harness.Listen(t) // it accepts no one, and the kernel connects
	half := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // only then is it noticed that the client leaves
		_, _ = io.WriteString(w, "{")
		_ = http.NewResponseController(w).Flush() // so that the head is there
		<-r.Context().Done()
	}))
	defer half.Close()
	for _, tt := range []struct {
		name, address, token string
		refused, late        bool
	}{
		{"no answer", "http://" + silent.Addr().String(), "", false, true},
		{"half an answer", half.URL, "", false, true},
		{"no TLS in time", "https://" + silent.Addr().String(), "", true, true},
		{"no TLS", "https://" + half.Listener.Addr().String(), "", true, false},
		{"a header that cannot be sent", half.URL, "a\nb", true, false},
	} {
		c, err := New(tt.address)
		check.Must(t, err)
		c.Token = tt.token
		if tt.late {
			c.Margin = harness.Deadline(500 * time.Millisecond) // to connect and send
		}
		_, err = c.Run(t.Context(), Call{Argv: []string{"x"}, Timeout: time.Nanosecond})
		var refused *Refused
		var lost *Lost
		check.That(t, errors.As(err, &refused) == tt.refused && errors.As(err, &lost) != tt.refused, "%s: %v", tt.name, err)
		check.That(t, !errors.Is(err, context.Canceled) && strings.Contains(err.Error(), errLate.Error()) == tt.late, "%s: %v", tt.name, err)
	}
}

// Text that JSON cannot carry is rejected instead of changed. The path of a file is encoded.
func TestNotUTF8(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got, _ := io.ReadAll(r.Body)
		t.Errorf("sent: %s", got)
	}))
	defer server.Close()
	c, err := New(server.URL)
	check.Must(t, err)
	const bytes = "\xff"
	for i, call := range []Call{
		{Argv: []string{"cat"}, Stdin: bytes}, {Argv: []string{"cat", bytes}}, {Code: bytes}, {Argv: []string{"env"}, Env: map[string]string{"A": bytes}},
		{Argv: []string{"env"}, Env: map[string]string{bytes: "a"}}, {Argv: []string{"pwd"}, Workdir: bytes},
	} {
		_, err := c.Run(t.Context(), call)
		check.That(t, err != nil && strings.Contains(err.Error(), "UTF-8"), "%d: %v", i, err)
	}
	_, err = c.Session("x").Cell(t.Context(), Cell{Code: bytes})
	check.That(t, err != nil && strings.Contains(err.Error(), "UTF-8"), "a cell: %v", err)
	text, err := json.Marshal(Call{Files: []File{{Path: bytes, ID: "x"}}})
	check.That(t, err == nil && strings.Contains(string(text), `{"path_base64":"/w==","id":"x"}`), "a path: %s, %v", text, err)
}
