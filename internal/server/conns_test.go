package server

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/config"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// dial connects to a server and sends a text.
func dial(t *testing.T, to net.Addr, text string) net.Conn {
	t.Helper()
	c, err := net.Dial(to.Network(), to.String())
	check.Must(t, err)
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(harness.Scaled(20 * time.Second))) // always supported
	_, err = io.WriteString(c, text)
	check.Must(t, err)
	return c
}

// A temporary error of accept does not end the server.
func TestConnectionsScarce(t *testing.T) {
	raw, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	check.Must(t, err)
	ended := make(chan error, 1)
	web := &http.Server{Handler: http.NotFoundHandler(), ErrorLog: log.New(io.Discard, "", 0)}
	go func() { ended <- web.Serve(NewConnections(4).Of(&failing{raw, 3})) }()
	r, err := http.ReadResponse(bufio.NewReader(dial(t, raw.Addr(), "GET / HTTP/1.1\r\nHost: x\r\n\r\n")), nil)
	check.That(t, err == nil && r.StatusCode == http.StatusNotFound, "%+v, %v", r, err)
	web.Close()
	err = <-ended
	check.That(t, err == http.ErrServerClosed, "%v", err)
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

// A new connection replaces the longest idle one of the same peer if the peer has half of all. It is refused,
// before anything begins, only if requests of authenticated clients are being answered on all of them.
func TestConnectionsOfPeer(t *testing.T) {
	for _, network := range []string{"unix", "tcp"} {
		t.Run(network, func(t *testing.T) {
			address := map[string]string{"unix": filepath.Join(t.TempDir(), "s"), "tcp": "127.0.0.1:0"}[network]
			raw, err := net.Listen(network, address)
			check.Must(t, err)
			l := NewConnections(4).Of(raw)
			answer := make(chan struct{})
			web := Web(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				known(r.Context(), true)
				if r.URL.Path == "/wait" {
					<-answer
				}
				tenant, _ := r.Context().Value(peerKey).(string)
				_, _ = io.WriteString(w, tenant)
			}), Peer, slog.New(slog.DiscardHandler))
			go func() { _ = web.Serve(l) }()
			defer web.Close()
			ask := func(path string) *bufio.Reader {
				t.Helper()
				return bufio.NewReader(dial(t, raw.Addr(), "POST "+path+" HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx"))
			}
			answered := func(in *bufio.Reader) *http.Response {
				t.Helper()
				r, err := http.ReadResponse(in, nil)
				check.Must(t, err)
				b, err := io.ReadAll(r.Body)
				check.That(t, r.StatusCode != 200 || err == nil && strings.HasPrefix(string(b), "uid-") == (network == "unix"), "%d %q %v", r.StatusCode, b, err)
				r.Body = io.NopCloser(bytes.NewReader(b))
				return r
			}
			// The server learns of a request, and counts its end, at other times than the client.
			active := func(n int) {
				t.Helper()
				harness.Until(t, harness.Scaled(20*time.Second), "requests", func() bool { return active(l.(*bounds).Connections) == n })
			}
			idle := ask("/")
			check.Equal(t, answered(idle).StatusCode, 200)
			active(0)
			first, second := ask("/wait"), ask("/wait")
			_, err = idle.ReadByte()
			check.That(t, err == io.EOF, "the idle connection: %v", err)
			active(2)
			var e api.Error
			r := answered(ask("/"))
			check.That(t, json.NewDecoder(r.Body).Decode(&e) == nil && r.StatusCode == 429 && e.Failure.Code == api.Quota && !e.Started && r.Header.Get("Retry-After") != "",
				"a third one: %d %+v", r.StatusCode, e)
			close(answer)
			for _, in := range []*bufio.Reader{first, second} {
				check.Equal(t, answered(in).StatusCode, 200)
			}
			active(0)
			check.Equal(t, answered(ask("/")).StatusCode, 200)
		})
	}
}

// active counts the connections on which requests of authenticated clients are being answered.
func active(s *Connections) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.all {
		if c.known && c.active {
			n++
		}
	}
	return n
}

// Among unauthenticated connections, the longest idle one of the peer with the most is replaced. Half of all
// connections stay free for others.
func TestConnectionsReplaced(t *testing.T) {
	s := NewConnections(8)
	now := time.Now()
	at := func(peer string, n int) *conn {
		return &conn{peer: peer, of: s, since: now.Add(time.Duration(n) * time.Second)}
	}
	add := func(c, want *conn) {
		t.Helper()
		replaced, err := s.add(c)
		check.Require(t, err == nil && replaced == want, "%+v, %v; want %+v", replaced, err, want)
	}
	a1, a2, a3, b1 := at("a", 1), at("a", 2), at("a", 3), at("b", 0)
	for _, c := range []*conn{a1, a2, a3, b1} {
		add(c, nil)
	}
	b2 := at("b", 4)
	add(b2, a1)
	b2.setKnown(true)
	a4 := at("a", 5)
	add(a4, nil) // four are unauthenticated, because b2 is not counted
	b3 := at("b", 6)
	add(b3, a2)
	for _, c := range []*conn{a3, a4, b1, b3} {
		c.setKnown(true)
		c.active = true
	}
	b2.active = true
	c1, c2, c3 := at("c", 7), at("c", 8), at("c", 9)
	for _, c := range []*conn{c1, c2, c3} {
		add(c, nil)
		c.setKnown(true)
		c.active = true
	}
	replaced, err := s.add(at("d", 10))
	check.That(t, replaced == nil && err != nil && err.Failure.Code == api.Busy, "with all in use: %+v, %v", replaced, err)
	c2.active = false
	add(at("d", 11), c2)
	s.remove(c2) // the server closes it later, too
	check.That(t, len(s.all) == 8 && s.peers["c"].all == 2 && s.unknown == 1, "%d in all, %d of c, %d not authenticated", len(s.all), s.peers["c"].all, s.unknown)
}

// A client with many addresses, one connection each, does not replace the new connections of a proxy whose
// other connections are authenticated.
func TestConnectionsOfManyAddresses(t *testing.T) {
	const most = 64
	s := NewConnections(most)
	now, n := time.Now(), 0
	add := func(peer string) *conn {
		t.Helper()
		n++
		c := &conn{peer: peer, of: s, since: now.Add(time.Duration(n) * time.Second)}
		_, refused := s.add(c)
		check.Require(t, refused == nil, "%v", refused)
		return c
	}
	for range 8 {
		add("proxy").setKnown(true)
	}
	for range most {
		add(fmt.Sprint("address ", n))
	}
	next := add("proxy")
	for range most/2 - 1 {
		add(fmt.Sprint("address ", n))
		_, open := s.all[next]
		check.Require(t, open, "the proxy's new connection was replaced")
	}
	next.setKnown(true)
	check.That(t, s.unknown == most/2-1 && s.peers["proxy"] == (count{all: 9}), "%d not authenticated; of the proxy %+v", s.unknown, s.peers["proxy"])
}

// Addresses of one IPv6 /64 are one peer.
func TestPeerOf(t *testing.T) {
	for address, want := range map[string]string{
		"192.0.2.7:1": "192.0.2.7", "[::ffff:192.0.2.7]:2": "192.0.2.7", "[2001:db8:1:2:3::4]:5": "2001:db8:1:2::/64", "[2001:db8:1:2:ffff::9]:1": "2001:db8:1:2::/64", "[fe80::1%lo]:1": "fe80::/64",
	} {
		a, err := netip.ParseAddrPort(address)
		check.Must(t, err)
		check.Equal(t, peerOf(net.TCPAddrFromAddrPort(a)), want, "%s", address)
	}
}

// WhileConnected notices that a client disconnects while no one reads its body, and does not end while it is connected.
func TestWhileThere(t *testing.T) {
	t.Parallel()
	for _, network := range []string{"unix", "tcp", "tls"} {
		t.Run(network, func(t *testing.T) {
			t.Parallel()
			l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
			if network != "unix" {
				l, err = net.Listen("tcp", "127.0.0.1:0")
			}
			check.Must(t, err)
			ended := make(chan struct{})
			web := httptest.NewUnstartedServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
				there, leave := WhileConnected(r.Context())
				defer leave()
				select {
				case <-there.Done():
				case <-time.After(harness.Scaled(20 * time.Second)):
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
			check.Must(t, err)
			defer c.Close()
			if network == "tls" {
				c = tls.Client(c, &tls.Config{InsecureSkipVerify: true})
			}
			_, err = io.WriteString(c, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"+strings.Repeat("x", 30_000))
			check.Must(t, err)
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

// A body of many small values is rejected, because it would take many times its length in memory.
func TestManyValues(t *testing.T) {
	h := handler(t)
	for _, body := range []string{
		`{"argv":[` + strings.Repeat(`"",`, 1<<17) + `""]}`, `[` + strings.Repeat(`{},`, 1<<17) + `{}]`, `{"env":` + strings.Repeat(`{"a":`, 1<<17) + `1` + strings.Repeat(`}`, 1<<17) + `}`,
	} {
		w := ask(h, http.MethodPost, "/v1/run", body)
		check.That(t, w.Code == http.StatusBadRequest && strings.Contains(w.Body.String(), "values"), "%d %.300s", w.Code, w.Body)
	}
	w := ask(h, http.MethodPost, "/v1/run", `{"language":"sh","code":"`+strings.Repeat(`,[{\"`, 1<<16)+`"}`)
	check.That(t, !strings.Contains(w.Body.String(), "values"), "in a text: %d %.300s", w.Code, w.Body)
	err := checkValueCount([]byte(`"\\"` + strings.Repeat(",", 1<<17)))
	check.That(t, err != nil, "behind a text that ends with a backslash")
}

// Validation errors stay short, however long the invalid text is.
func TestLongErrors(t *testing.T) {
	h := handler(t)
	long := strings.Repeat("x", 500_000)
	for path, bodies := range map[string][]string{
		"/v1/run": {
			`{"argv":["true"],"` + long + `":1}`, `{"argv":["true"],"env":{"` + long + `":1}}`, `{"argv":["true"],"timeout_ms":1` + strings.Repeat("0", 500_000) + `}`,
			`{"argv":["true"],"files":[` + strings.Repeat(`{"x":1},`, 10_000) + `{}]}`,
		},
		"/v1/sessions": {`{"limits":{"` + long + `":1}}`},
	} {
		for _, body := range bodies {
			w := ask(h, http.MethodPost, path, body)
			check.That(t, w.Code == http.StatusBadRequest && w.Body.Len() <= 16<<10, "%.40s: %d, %d bytes: %.300s", body, w.Code, w.Body.Len(), w.Body)
		}
	}
}

// The memory for bodies limits how many are read at once.
func TestBodiesAtOnce(t *testing.T) {
	h := as("uid-1", newServer(t, nowhere{}, func(c *config.Config) { c.Tenant.Buffers = 1 << 20 }).Handler(http.NotFoundHandler()))
	web := httptest.NewServer(h)
	t.Cleanup(web.Close)
	begin := func() net.Conn {
		t.Helper()
		return dial(t, web.Listener.Addr(), "POST /v1/run HTTP/1.1\r\nHost: sbxrun\r\nContent-Type: application/json\r\nContent-Length: 200000\r\n\r\n"+strings.Repeat(" ", 190_000))
	}
	first := begin()
	for end := time.Now().Add(harness.Scaled(20 * time.Second)); ; { // the server may not have received the first one yet
		c := begin()
		_ = c.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
		r, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err == nil {
			var e api.Error
			err := json.NewDecoder(r.Body).Decode(&e)
			check.That(t, err == nil && r.StatusCode == 429 && e.Failure.Code == api.Quota && !e.Started, "%d %+v %v", r.StatusCode, e, err)
			break
		}
		check.Require(t, !time.Now().After(end), "no second body is refused")
		first.Close()
		first = c
	}
	w := ask(h, http.MethodGet, "/v1/calls", "")
	check.That(t, w.Code == 200, "a request without a body: %d %s", w.Code, w.Body)
	first.Close()
	harness.Until(t, harness.Bound, "the memory of a body that was given up", func() bool {
		return ask(h, http.MethodPost, "/v1/run", `{"argv":["true"],"limits":{"max_output":1000},"stdin":"`+strings.Repeat("x", 200_000)+`"}`).Code != 429
	})
}

// Memory for a body is reserved as it is read, with or without Content-Length.
func TestBodyHolds(t *testing.T) {
	var s *Server
	h := handler(t, func(its *Server) { s = its })
	web := httptest.NewServer(h)
	t.Cleanup(web.Close)
	for _, length := range []string{"Transfer-Encoding: chunked\r\n\r\n64\r\n", "Content-Length: 10000000\r\n\r\n"} {
		c := dial(t, web.Listener.Addr(), "POST /v1/run HTTP/1.1\r\nHost: sbxrun\r\nContent-Type: application/json\r\n"+length+strings.Repeat(" ", 100))
		var used int64
		harness.Until(t, harness.Bound, "the memory of a body", func() bool {
			used = s.memory.Used("uid-1")
			return used > 0
		})
		check.That(t, used <= 10_000, "%d bytes for a body of 100: %q", used, length)
		c.Close()
		harness.Until(t, harness.Bound, "the end of the request", func() bool { return s.memory.Used("uid-1") == 0 })
	}
}

// The memory that a request has reserved is freed at its end.
func TestHold(t *testing.T) {
	s := newServer(t, nowhere{}, func(c *config.Config) { c.Tenant.Buffers = 1000 })
	h := s.authenticated(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for _, want := range []api.Code{"", api.Policy} {
			err := s.Hold(r.Context(), 600)
			check.That(t, (want != "" || err == nil) && (want == "" || api.AsError(err).Failure.Code == want), "%v, want %q", err, want)
		}
	}))
	for range 2 {
		ask(as("uid-1", h), http.MethodGet, "/", "")
	}
	check.Equal(t, s.memory.Used("uid-1"), 0)
	check.OK(t, s.Hold(As(t.Context(), "uid-1", ""), 1<<30), "without HTTP")
}

// The number of concurrent requests per tenant is limited, so one tenant cannot use up a proxy's connections.
func TestRequestsAtOnce(t *testing.T) {
	s := newServer(t, nowhere{}, func(c *config.Config) { c.Tenant.Requests = 1 })
	var h http.Handler
	status := func(path, peer string) int {
		w := ask(as(peer, h), http.MethodGet, path, "")
		check.That(t, w.Code != 429 || strings.Contains(w.Body.String(), `"started":false`), "%s", w.Body)
		return w.Code
	}
	h = s.authenticated(s.limited(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/first" {
			return
		}
		for path, want := range map[string]int{"/second uid-1": 429, "/second uid-2": 200, "/readyz uid-1": 200} {
			path, peer, _ := strings.Cut(path, " ")
			check.Equal(t, status(path, peer), want, "%s of %s", path, peer)
		}
	})))
	for range 2 {
		check.Equal(t, status("/first", "uid-1"), 200)
	}
}

// OPTIONS * is answered like every other request of a stranger.
func TestOptions(t *testing.T) {
	s := newServer(t, nowhere{})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	check.Must(t, err)
	web := Web(s.Handler(http.NotFoundHandler()), Peer, slog.New(slog.DiscardHandler))
	go func() { _ = web.Serve(NewConnections(4).Of(l)) }() // until Close
	defer web.Close()
	r, err := http.ReadResponse(bufio.NewReader(dial(t, l.Addr(), "OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n")), nil)
	check.Must(t, err)
	defer r.Body.Close()
	check.That(t, r.StatusCode == http.StatusUnauthorized && r.Close, "%+v", r)
}

// A report repeats the command line, which may be six times as long there.
func TestEcho(t *testing.T) {
	const size, answer = 100_000, 4 << 20
	h := handler(t, func(s *Server) {
		set := *s.settings.Load()
		set.Tenant.Buffers = answer + 8*size // enough for both requests
		s.settings.Store(&set)
	})
	for path, n := range map[string]int{"/v1/run": size, "/v1/run?stream=1": 4 * size} { // the stream needs no memory for output
		for _, text := range []string{"a", "\x7f"} {
			w := ask(h, http.MethodPost, path, `{"argv":["`+strings.Repeat(text, n/len(text))+`"]}`)
			refused := w.Code == http.StatusForbidden || w.Code == http.StatusTooManyRequests
			check.That(t, refused == (text != "a"), "%s of %q: %d %.200s", path, text, w.Code, w.Body) // there is no slot
		}
	}
}
