package sbxrun

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

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
		for _, event := range []any{map[string]any{"event": "stdout", "text": "first"}, map[string]any{"event": "stdout", "text": text}, map[string]any{"event": "report", "report": &Report{ExitCode: 7}}} {
			_ = all.Encode(event)
		}
	}))
	defer s.Close()
	c, err := New(s.URL)
	if err != nil {
		t.Fatal(err)
	}
	margin := harness.Deadline(500 * time.Millisecond)
	c.Margin = margin
	busy := func() { time.Sleep(3 * margin) }

	code := 0
	for e, err := range c.Stream(t.Context(), Call{Argv: []string{"x"}, Timeout: time.Nanosecond}) {
		if err != nil {
			t.Fatal(err)
		}
		if e.Report != nil {
			code = e.Report.ExitCode
		} else if string(e.Data) == "first" {
			busy()
		}
	}
	if code != 7 {
		t.Errorf("exit code %d", code)
	}

	body, err := c.FetchStream(t.Context(), "x")
	if err != nil {
		t.Fatal(err)
	}
	defer body.Close()
	busy()
	if all, err := io.ReadAll(body); err != nil || string(all) != text {
		t.Errorf("%d bytes, %v", len(all), err)
	}
}
