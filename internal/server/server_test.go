package server

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/config"
	"github.com/sbxrun/sbxrun/internal/slot"
	"github.com/sbxrun/sbxrun/internal/tenants"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// nowhere is a source without slots.
type nowhere struct{}

func (nowhere) Take(context.Context, string, slot.Policy) (slot.Slot, error) {
	return nil, &result.Error{Code: "setup", Message: "there is no place"}
}

func (nowhere) Rooms() (idle, all, left int) { return 0, 0, 0 }

// newServer returns a server with its own state directory, which is drained with the test.
func newServer(t testing.TB, source slot.Source, change ...func(*config.Config)) *Server {
	t.Helper()
	c := config.Default()
	c.StateDir, c.MetricsTenants = filepath.Join(t.TempDir(), "state"), []string{"uid-1"}
	for _, each := range change {
		each(&c)
	}
	s, err := New(c, nil, source, slog.New(slog.DiscardHandler), "test")
	check.Must(t, err)
	t.Cleanup(func() { s.Drain(t.Context()) })
	return s
}

// as calls a handler as a user of the Unix socket.
func as(peer string, h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), peerKey, peer)))
	})
}

// handler returns the handler of a server without slots, called by uid-1.
func handler(t testing.TB, change ...func(*Server)) http.Handler {
	t.Helper()
	s := newServer(t, nowhere{}, func(c *config.Config) { c.MaxBody, c.Hosts = 1<<20, []string{"sbx.example.com"} })
	for _, each := range change {
		each(s)
	}
	return as("uid-1", s.Handler(http.NotFoundHandler()))
}

func ask(h http.Handler, method, path, body string, headers ...string) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	r := httptest.NewRequest(method, "http://sbxrun"+path, strings.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	h.ServeHTTP(w, r)
	return w
}

// FuzzRun: the response to any request is an error with a code or a queued call, and nothing has started.
func FuzzRun(f *testing.F) {
	for _, body := range []string{
		`{"argv":["true"]}`, `{"language":"sh","code":"x","env":{"A":"1"},"files":[{"path":"a","text":"b","mode":"755"}],"collect":["*"],"timeout_ms":1e9}`,
		`{"argv":["true"],"limits":{"memory":1048576,"pids":4,"cpus":1.5,"max_output":1,"output":"kill"}}`, `[]`, `{`, `null`, `{"argv":null}`, `{"timeout_ms":"1"}`,
		`{"argv":["a"],"files":[{"path":"../x","base64":"AA=="}]}`, `{"language":"python","code":"1","limits":{"max_output":1}}`, "{\"argv\":[\"\\u0000\"]}", `{"argv":["a"],"timeout_ms":-1e999}`,
		`{"argv":["a"],"overlay":{"name":"x","path":"/w"},"volumes":[{"name":"v","path":"/v","read_only":true}],"network":{"allow":["a.example:1"]},"snapshot":"s"}`,
		`{"argv":["a"],"image":"x"}`, `{"name":"s","ttl_ms":1}`, `{"name":"../s","ttl_ms":-1}`, `{"argv":["a"],"keep_stdin":true}`,
	} {
		f.Add(body)
	}
	h := handler(f)
	f.Fuzz(func(t *testing.T, body string) {
		for _, path := range []string{"/v1/run", "/v1/sessions", "/v1/sessions/x/code", "/v1/run?stream=1", "/v1/calls", "/v1/sessions/x/exec", "/v1/sessions/x/processes", "/v1/sessions/x/processes/y/signal", "/v1/sessions/x/snapshot"} {
			w := ask(h, http.MethodPost, path, body)
			var e api.Error
			err := json.Unmarshal(w.Body.Bytes(), &e)
			if path == "/v1/calls" && w.Code == http.StatusAccepted && err == nil && !e.Started {
				continue // the error is in the status of the call
			}
			check.That(t, err == nil && e.Failure.Code != "" && !e.Started && api.Codes()[e.Failure.Code] == w.Code, "%s: %d %s", path, w.Code, w.Body)
		}
	})
}

// Events split text only between characters.
func FuzzPieces(f *testing.F) {
	f.Add([]byte("aä€😀\xff\xc3"), 3)
	f.Add([]byte("\xf0\x9f\x98"), 1)
	f.Fuzz(func(t *testing.T, text []byte, size int) {
		if size <= 0 {
			return
		}
		w := httptest.NewRecorder()
		e := newEvents(w, false, &execution{id: "x", maxOutput: 1 << 20}, nil)
		stdout, _ := e.Writers()
		for rest := text; len(rest) > 0; {
			n := min(size, len(rest))
			k, err := stdout.Write(rest[:n])
			check.Require(t, k == n && err == nil, "%v %v", k, err)
			rest = rest[n:]
		}
		var a api.Answer
		e.Output(&a.Report)
		e.finish(&a, nil)
		var got []byte
		for line := range bytes.Lines(w.Body.Bytes()) {
			var event api.Event
			check.Must(t, json.Unmarshal(line, &event))
			got = append(append(got, event.Text...), event.Base64...)
		}
		check.That(t, bytes.Equal(got, text) && *a.StdoutBytes == int64(len(text)), "%q, want %q", got, text)
	})
}

// A response written in pieces equals the document written at once.
func FuzzAnswer(f *testing.F) {
	f.Add("a\x00<é>\u2028\"", "", 40_000)
	f.Add("\xff", "x", 1)
	f.Add("\u2028\u2029ä", "😀", 40_000)
	f.Fuzz(func(t *testing.T, stdout, stderr string, times int) {
		if times < 0 || times*len(stdout) > 1<<20 {
			return
		}
		stdout = strings.Repeat(stdout, times)
		a := &api.Answer{RequestID: "r"}
		setOutput(&a.Report, result.Stream{Text: stdout, UTF8: utf8.ValidString(stdout)}, result.Stream{Text: stderr, UTF8: utf8.ValidString(stderr)})
		w := httptest.NewRecorder()
		writeAnswer(w, a)
		check.That(t, w.Body.Len() <= 3*(len(stdout)+len(stderr))+50<<10, "%d bytes for %d", w.Body.Len(), len(stdout)+len(stderr))
		var got api.Answer
		check.Must(t, json.Unmarshal(w.Body.Bytes(), &got))
		check.NoDiff(t, cmp.Diff(a, &got))
	})
}

// Even the shortest requested time sets a deadline.
func TestShortTimes(t *testing.T) {
	for ms, want := range map[float64]time.Duration{0: 0, 1e-9: 1, 5e-324: 1, 1.5: 1500 * time.Microsecond} {
		check.Equal(t, milliseconds(ms), want, "%g ms", ms)
	}
}

// No request is redirected, because repeating it with the same method could have another effect.
func TestIdleParts(t *testing.T) {
	h := handler(t)
	for _, path := range []string{"/v1/sessions/x/files/..", "/v1/sessions/x/files/../y", "/v1/sessions/x/files/a//b", "/v1/sessions/x/files/./b", "//v1/run"} {
		r := httptest.NewRequest(http.MethodDelete, "http://sbxrun/", nil)
		r.URL.Path = path
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		check.That(t, w.Code == http.StatusBadRequest && strings.Contains(w.Body.String(), `"usage"`), "%s: %d %s", path, w.Code, w.Body)
	}
	w := ask(h, http.MethodGet, "/v1/sessions/x/files/a%2F..%2Fb", "")
	check.That(t, w.Code == http.StatusNotFound, "%d %s", w.Code, w.Body)
}

// Queued calls leave the queue when their clients disconnect.
func TestLeavesQueue(t *testing.T) {
	s := newServer(t, nowhere{}, func(c *config.Config) { c.Places = 1 })
	turn, err := s.scheduler.Join("uid-1", tenants.Ceilings{})
	check.Must(t, err)
	check.Must(t, turn.Wait(t.Context()))
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	ex, err := s.check(Identity{Tenant: "uid-1"}, &api.Call{Argv: []string{"true"}})
	check.Must(t, err)
	_, err = s.execute(ctx, ex, newBuffered(ex))
	check.That(t, api.AsError(err).Failure.Code == api.Ended, "%v", err)
	turn.Leave()
	u := s.scheduler.Uses()["uid-1"]
	check.That(t, u.Running == 0 && u.Waiting == 0, "%+v", u)
}

// A stream sends keepalive events while its call is queued, and reports a later rejection in its last event.
func TestQueuedStream(t *testing.T) {
	defer func(before time.Duration) { keepalive = before }(keepalive)
	keepalive = time.Millisecond
	s := newServer(t, nowhere{}, func(c *config.Config) { c.Places = 1 })
	turn, err := s.scheduler.Join("uid-2", tenants.Ceilings{})
	check.Must(t, err)
	check.Must(t, turn.Wait(t.Context()))
	web := httptest.NewServer(as("uid-1", s.Handler(http.NotFoundHandler())))
	defer web.Close()
	r, err := http.Post(web.URL+"/v1/run?stream=1", "application/json", strings.NewReader(`{"argv":["true"]}`))
	check.Must(t, err)
	defer r.Body.Close()
	var events []string
	var last api.Event
	for d := json.NewDecoder(r.Body); d.Decode(&last) == nil; {
		if events = append(events, last.Event); len(events) == 3 {
			turn.Leave()
		}
	}
	check.That(t, r.StatusCode == http.StatusOK && len(events) >= 4 && !slices.Contains(events, "start") && last.Event == "error" && last.Error.Failure.Code == api.Setup && !last.Error.Started,
		"%d %v, %+v", r.StatusCode, events, last.Error)
}

// patientSource delays Take and records whether the request was canceled.
type patientSource struct {
	nowhere
	canceled chan bool
}

func (p patientSource) Take(ctx context.Context, _ string, _ slot.Policy) (slot.Slot, error) {
	select {
	case <-ctx.Done():
	case <-time.After(3 * pieceBound):
	}
	p.canceled <- ctx.Err() != nil
	return nil, &result.Error{Code: "setup", Message: "there is no place"}
}

// A client that announces a body and does not send it is disconnected, authenticated or not. A client that
// has sent its body may wait as long as it likes.
func TestBodyThatDoesNotCome(t *testing.T) {
	defer func(before time.Duration) { pieceBound = before }(pieceBound)
	pieceBound = harness.Deadline(time.Second) // also enough for responses on a busy machine
	source := patientSource{canceled: make(chan bool, 1)}
	h := newServer(t, source).Handler(http.NotFoundHandler())
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("X-Known") != "" {
			as("uid-1", h).ServeHTTP(w, r)
		} else {
			h.ServeHTTP(w, r)
		}
	}))
	defer web.Close()
	var all sync.WaitGroup
	for _, request := range []string{
		"GET /healthz HTTP/1.1\r\n", "POST /v1/run HTTP/1.1\r\n", "POST /v1/run HTTP/1.1\r\nX-Known: 1\r\n", "GET /v1/calls HTTP/1.1\r\nX-Known: 1\r\n",
		"GET /v1/calls/none/output HTTP/1.1\r\nX-Known: 1\r\n", "PUT /v1/sessions/none/files/x HTTP/1.1\r\nX-Known: 1\r\n", "GET /none HTTP/1.1\r\nX-Known: 1\r\n",
	} {
		conn := dial(t, web.Listener.Addr(), request+"Host: sbxrun\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n")
		all.Go(func() {
			answer, err := io.ReadAll(conn)
			check.That(t, err == nil && strings.HasPrefix(string(answer), "HTTP/1.1 "), "%q: %q %v", request, answer, err)
		})
	}
	defer all.Wait()
	q, err := http.NewRequestWithContext(t.Context(), http.MethodPost, web.URL+"/v1/run", strings.NewReader(`{"argv":["true"]}`))
	check.Must(t, err)
	q.Header.Set("Content-Type", "application/json")
	q.Header.Set("X-Known", "1")
	answer, err := http.DefaultClient.Do(q)
	check.Must(t, err)
	answer.Body.Close()
	check.That(t, !<-source.canceled, "a request that has come was canceled for the time that its body may take")
}
