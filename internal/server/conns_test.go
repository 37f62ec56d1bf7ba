package server

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/json"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/config"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// A connection that cannot be had, since something is used up, does not end the server.
func TestConnectionsScarce(t *testing.T) {
	raw, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	harness.Must(t, err)
	ended := make(chan error, 1)
	web := &http.Server{Handler: http.NotFoundHandler(), ErrorLog: log.New(io.Discard, "", 0)}
	go func() { ended <- web.Serve(NewConnections(4).Of(&failing{raw, 3})) }()
	c, err := net.Dial("unix", raw.Addr().String())
	harness.Must(t, err)
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(20 * time.Second)) // it takes deadlines
	if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if r, err := http.ReadResponse(bufio.NewReader(c), nil); err != nil || r.StatusCode != http.StatusNotFound {
		t.Errorf("%+v, %v", r, err)
	}
	web.Close()
	if err := <-ended; err != http.ErrServerClosed {
		t.Error(err)
	}
}

// failing is a listener whose first calls fail.
type failing struct {
	net.Listener
	times int
}

func (l *failing) Accept() (net.Conn, error) {
	if l.times--; l.times >= 0 {
		return nil, &net.OpError{Op: "accept", Err: unix.ENOSPC}
	}
	return l.Listener.Accept()
}

// One peer has half of the connections at most; whoever has more is told before anything begins,
// and one that is closed makes room.
func TestConnections(t *testing.T) {
	for _, network := range []string{"unix", "tcp"} {
		t.Run(network, func(t *testing.T) {
			address := map[string]string{"unix": filepath.Join(t.TempDir(), "s"), "tcp": "127.0.0.1:0"}[network]
			raw, err := net.Listen(network, address)
			harness.Must(t, err)
			l := NewConnections(4).Of(raw)
			web := &http.Server{ConnContext: Peer, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				tenant, _ := r.Context().Value(peerKey).(string)
				_, _ = io.WriteString(w, tenant)
			})}
			go func() { _ = web.Serve(l) }()
			defer web.Close()
			ask := func() (*http.Response, net.Conn) {
				t.Helper()
				c, err := net.Dial(network, raw.Addr().String())
				harness.Must(t, err)
				t.Cleanup(func() { c.Close() })
				_ = c.SetDeadline(time.Now().Add(20 * time.Second)) // it takes deadlines
				if _, err := io.WriteString(c, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx"); err != nil {
					t.Fatal(err)
				}
				r, err := http.ReadResponse(bufio.NewReader(c), nil)
				harness.Must(t, err)
				return r, c
			}
			r, first := ask()
			b, err := io.ReadAll(r.Body)
			if r.StatusCode != 200 || err != nil || strings.HasPrefix(string(b), "uid-") != (network == "unix") {
				t.Errorf("%d %q %v", r.StatusCode, b, err)
			}
			if r, _ := ask(); r.StatusCode != 200 {
				t.Error(r.StatusCode)
			}
			r, _ = ask()
			var e api.Error
			if err := json.NewDecoder(r.Body).Decode(&e); err != nil || r.StatusCode != 429 || e.Failure.Code != api.Quota || e.Started || r.Header.Get("Retry-After") == "" {
				t.Errorf("a third one: %d %+v %v", r.StatusCode, e, err)
			}
			first.Close()
			for end := time.Now().Add(20 * time.Second); ; {
				if r, c := ask(); r.StatusCode == 200 {
					break
				} else if c.Close(); time.Now().After(end) {
					t.Fatal("a connection that was closed counts")
				}
			}
		})
	}
}

// A client is seen to leave also while nobody reads what it sends, and one that stays is not taken for gone.
func TestWhileThere(t *testing.T) {
	t.Parallel()
	for _, network := range []string{"unix", "tcp", "tls"} {
		t.Run(network, func(t *testing.T) {
			t.Parallel()
			l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
			if network != "unix" {
				l, err = net.Listen("tcp", "127.0.0.1:0")
			}
			harness.Must(t, err)
			ended := make(chan struct{})
			web := httptest.NewUnstartedServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
				there, leave := WhileThere(r.Context())
				defer leave()
				select {
				case <-there.Done():
				case <-time.After(20 * time.Second):
					t.Error("nobody has seen that the client has left")
				}
				close(ended)
			}))
			web.Config.ConnContext = Peer
			web.Listener.Close()
			web.Listener = NewConnections(4).Of(l)
			if network == "tls" {
				web.StartTLS()
			} else {
				web.Start()
			}
			defer web.Close()
			c, err := net.Dial(l.Addr().Network(), l.Addr().String())
			harness.Must(t, err)
			defer c.Close()
			if network == "tls" {
				c = tls.Client(c, &tls.Config{InsecureSkipVerify: true})
			}
			if _, err := io.WriteString(c, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"+strings.Repeat("x", 30_000)); err != nil {
				t.Fatal(err)
			}
			select {
			case <-ended:
				t.Error("it has ended while the client is there")
			case <-time.After(1500 * time.Millisecond):
			}
			c.Close()
			<-ended
		})
	}
}

// A body of many small values would take many times its length of memory.
func TestManyValues(t *testing.T) {
	h := handler(t)
	for _, body := range []string{
		`{"argv":[` + strings.Repeat(`"",`, 1<<17) + `""]}`, `[` + strings.Repeat(`{},`, 1<<17) + `{}]`, `{"env":` + strings.Repeat(`{"a":`, 1<<17) + `1` + strings.Repeat(`}`, 1<<17) + `}`,
	} {
		if w := ask(h, http.MethodPost, "/v1/run", body); w.Code != http.StatusBadRequest || !strings.Contains(w.Body.String(), "values") {
			t.Errorf("%d %.300s", w.Code, w.Body)
		}
	}
	if w := ask(h, http.MethodPost, "/v1/run", `{"language":"sh","code":"`+strings.Repeat(`,[{\"`, 1<<16)+`"}`); strings.Contains(w.Body.String(), "values") {
		t.Errorf("in a text: %d %.300s", w.Code, w.Body)
	}
	if err := modest([]byte(`"\\"` + strings.Repeat(",", 1<<17))); err == nil {
		t.Error("behind a text that ends with a backslash")
	}
}

// How many bodies are read at once is bounded by the memory that they may take.
func TestBodiesAtOnce(t *testing.T) {
	h := handler(t, func(s *Server) {
		set := *s.settings.Load()
		set.Tenant.Buffers = 1 << 20
		s.settings.Store(&set)
	})
	web := httptest.NewServer(h)
	t.Cleanup(web.Close)
	begin := func() net.Conn {
		t.Helper()
		c, err := net.Dial("tcp", web.Listener.Addr().String())
		harness.Must(t, err)
		t.Cleanup(func() { c.Close() })
		_ = c.SetDeadline(time.Now().Add(20 * time.Second)) // it takes deadlines
		if _, err := io.WriteString(c, "POST /v1/run HTTP/1.1\r\nHost: sbxrun\r\nContent-Type: application/json\r\nContent-Length: 200000\r\n\r\n"+strings.Repeat(" ", 190_000)); err != nil {
			t.Fatal(err)
		}
		return c
	}
	first := begin()
	for end := time.Now().Add(20 * time.Second); ; { // the server may not have seen the first one
		c := begin()
		_ = c.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
		r, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err == nil {
			var e api.Error
			if err := json.NewDecoder(r.Body).Decode(&e); err != nil || r.StatusCode != 429 || e.Failure.Code != api.Quota || e.Started {
				t.Errorf("%d %+v %v", r.StatusCode, e, err)
			}
			break
		}
		if time.Now().After(end) {
			t.Fatal("no second body is refused")
		}
		first.Close()
		first = c
	}
	if w := ask(h, http.MethodGet, "/v1/calls", ""); w.Code != 200 {
		t.Errorf("a request without a body: %d %s", w.Code, w.Body)
	}
	first.Close()
	for end := time.Now().Add(20 * time.Second); ; {
		if w := ask(h, http.MethodPost, "/v1/run", `{"argv":["true"],"limits":{"max_output":1000},"stdin":"`+strings.Repeat("x", 200_000)+`"}`); w.Code != 429 {
			break
		} else if time.Now().After(end) {
			t.Fatalf("memory of a body that was given up: %s", w.Body)
		}
	}
}

// Memory for a body is reserved as it is read, with or without Content-Length.
func TestBodyHolds(t *testing.T) {
	var s *Server
	h := handler(t, func(its *Server) { s = its })
	web := httptest.NewServer(h)
	t.Cleanup(web.Close)
	for _, length := range []string{"Transfer-Encoding: chunked\r\n\r\n64\r\n", "Content-Length: 10000000\r\n\r\n"} {
		c, err := net.Dial("tcp", web.Listener.Addr().String())
		harness.Must(t, err)
		_, err = io.WriteString(c, "POST /v1/run HTTP/1.1\r\nHost: sbxrun\r\nContent-Type: application/json\r\n"+length+strings.Repeat(" ", 100))
		harness.Must(t, err)
		var used int64
		harness.Until(t, harness.Bound, "the memory of a body", func() bool {
			used = s.memory.Used("uid-1")
			return used > 0
		})
		if used > 10_000 {
			t.Errorf("%d bytes for a body of 100: %q", used, length)
		}
		c.Close()
		harness.Until(t, harness.Bound, "the end of the request", func() bool { return s.memory.Used("uid-1") == 0 })
	}
}

// What a request has taken of the memory it gives back with its end.
func TestHold(t *testing.T) {
	c := config.Default()
	c.StateDir, c.Tenant.Buffers = filepath.Join(t.TempDir(), "state"), 1000
	s, err := New(c, nil, nowhere{}, slog.New(slog.NewJSONHandler(io.Discard, nil)), "test")
	harness.Must(t, err)
	defer s.Drain(t.Context())
	h := s.identified(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for _, want := range []api.Code{"", api.Policy} {
			if err := s.Hold(r.Context(), 600); want == "" && err != nil || want != "" && api.AsError(err).Failure.Code != want {
				t.Errorf("%v, want %q", err, want)
			}
		}
	}))
	for range 2 {
		r := httptest.NewRequest(http.MethodGet, "http://sbxrun/", nil)
		h.ServeHTTP(httptest.NewRecorder(), r.WithContext(context.WithValue(r.Context(), peerKey, "uid-1")))
	}
	if n := s.memory.Used("uid-1"); n != 0 {
		t.Errorf("%d bytes", n)
	}
	if err := s.Hold(As(t.Context(), "uid-1", ""), 1<<30); err != nil {
		t.Errorf("without HTTP: %v", err)
	}
}

// One tenant does not take all the connections of a proxy: how many requests it has at once is
// bounded.
func TestRequestsAtOnce(t *testing.T) {
	c := config.Default()
	c.StateDir, c.Tenant.Requests = filepath.Join(t.TempDir(), "state"), 1
	s, err := New(c, nil, nowhere{}, slog.New(slog.NewJSONHandler(io.Discard, nil)), "test")
	harness.Must(t, err)
	defer s.Drain(t.Context())
	var h http.Handler
	ask := func(path, peer string) int {
		w := httptest.NewRecorder()
		r := httptest.NewRequest(http.MethodGet, "http://sbxrun"+path, nil)
		h.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), peerKey, peer)))
		if w.Code == 429 && !strings.Contains(w.Body.String(), `"started":false`) {
			t.Errorf("%s", w.Body)
		}
		return w.Code
	}
	h = s.identified(s.counted(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/first" {
			return
		}
		for path, want := range map[string]int{"/second uid-1": 429, "/second uid-2": 200, "/readyz uid-1": 200} {
			path, peer, _ := strings.Cut(path, " ")
			if got := ask(path, peer); got != want {
				t.Errorf("%s of %s: %d, want %d", path, peer, got, want)
			}
		}
	})))
	for range 2 {
		if got := ask("/first", "uid-1"); got != 200 {
			t.Errorf("%d", got)
		}
	}
}

// What is shown of a call's code does not keep all of it.
func TestShown(t *testing.T) {
	set := &settings{}
	set.ShowCode = true
	code := strings.Repeat("x", 2*mostShown)
	shown := set.shown(nil, code)
	if len(shown) != mostShown || unsafe.StringData(shown) == unsafe.StringData(code) {
		t.Errorf("%d bytes", len(shown))
	}
}
