package proxy

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/internal/network"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// company is a proxy of a company: it requires a password, resolves names itself, and refuses CONNECT to port 80.
type company struct {
	address string // of its only host
	mu      sync.Mutex
	asked   []string
}

func (c *company) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c.mu.Lock()
	c.asked = append(c.asked, r.Method+" "+r.RequestURI)
	c.mu.Unlock()
	switch {
	case r.Header.Get("Proxy-Authorization") != "Basic dXNlcjpzZWNyZXQ=":
		w.WriteHeader(http.StatusProxyAuthRequired)
	case r.Method != http.MethodConnect:
		fmt.Fprint(w, "from the proxy")
	case strings.HasSuffix(r.RequestURI, ":80"):
		w.WriteHeader(http.StatusForbidden)
	default:
		up, err := net.Dial("tcp", c.address)
		if err != nil {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		defer up.Close()
		conn, b, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer conn.Close()
		_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\nX: y\r\n\r\n")
		go func() { _, _ = io.Copy(up, b) }()
		_, _ = io.Copy(conn, up)
	}
}

// Behind a company's proxy, tunnels and plain requests go through that, except for hosts in no_proxy.
func TestUpstream(t *testing.T) {
	t.Parallel()
	host := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "from ", r.Host) }))
	defer host.Close()
	address := host.Listener.Addr().String()
	upstream := &company{address: address}
	proxy := httptest.NewServer(upstream)
	defer proxy.Close()
	url := strings.Replace(proxy.URL, "http://", "http://user:secret@", 1)
	behind := func(env network.Upstream) string {
		s := newServer(listing(t, "a.example.org:443,a.example.org:80,direct.example.org:"+address[strings.LastIndex(address, ":")+1:]+","+address, map[string]string{"direct.example.org": "127.0.0.1"}))
		var err error
		s.upstream, err = newUpstream(&env)
		check.Must(t, err)
		return serve(t, s)
	}
	body := func(b *bufio.Reader) string {
		t.Helper()
		r, err := http.ReadResponse(b, nil)
		check.Must(t, err)
		text := harness.ReadAll(t, r.Body)
		return string(text)
	}
	at := behind(network.Upstream{HTTP: url, HTTPS: url})
	_, b := get(t, at, "CONNECT a.example.org:443 HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\nHost: a.example.org\r\n\r\n", http.StatusOK)
	check.Equal(t, body(b), "from a.example.org", "in a tunnel")
	_, b = get(t, at, "GET http://a.example.org/x HTTP/1.1\r\nHost: a.example.org\r\n\r\n")
	check.Equal(t, body(b), "from the proxy", "plain")
	get(t, at, "CONNECT a.example.org:80 HTTP/1.1\r\n\r\n", http.StatusBadGateway)
	get(t, at, "CONNECT b.example.org:443 HTTP/1.1\r\n\r\n", http.StatusForbidden)
	get(t, at, "GET http://b.example.org/ HTTP/1.1\r\nHost: b.example.org\r\n\r\n", http.StatusForbidden)
	get(t, at, "Trace http://a.example.org/ HTTP/1.1\r\nHost: a.example.org\r\nMax-Forwards: 0\r\n\r\n", http.StatusForbidden)
	want := "CONNECT a.example.org:443,GET http://a.example.org/x,CONNECT a.example.org:80"
	check.Equal(t, strings.Join(upstream.asked, ","), want, "the proxy was asked for")
	direct := strings.Replace(address, "127.0.0.1", "direct.example.org", 1)
	at = behind(network.Upstream{HTTP: url, HTTPS: url, No: "direct.example.org"})
	_, b = get(t, at, "GET http://"+direct+"/ HTTP/1.1\r\nHost: "+direct+"\r\n\r\n")
	check.Equal(t, body(b), "from "+direct, "in no_proxy")
	check.That(t, len(upstream.asked) == 3, "the proxy was asked for a host in no_proxy")
	for _, bad := range []network.Upstream{{HTTPS: "socks5://p:1"}, {HTTP: "http://"}, {HTTP: "https://p"}} {
		_, err := newUpstream(&bad)
		check.That(t, err != nil && !strings.Contains(err.Error(), "p:1"), "%+v: %v", bad, err)
	}
}

// An address that does not respond delays a connection only for a moment (RFC 8305).
func TestHappyEyeballs(t *testing.T) {
	t.Parallel()
	l := harness.Listen(t)
	port := l.Addr().(*net.TCPAddr).AddrPort().Port()
	s := newServer(listing(t, "example.org", nil))
	defer s.end()
	silent := netip.MustParseAddr("2001:db8::1")
	s.dial1 = func(ctx context.Context, address string) (net.Conn, error) {
		if strings.HasPrefix(address, "[") {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		return s.dialer.DialContext(ctx, "tcp", address)
	}
	ctx, cancel := context.WithTimeout(t.Context(), dialBound)
	defer cancel()
	begin := time.Now()
	c, err := s.dial(ctx, []netip.Addr{silent, silent, silent, netip.MustParseAddr("127.0.0.1")}, port)
	check.Must(t, err)
	c.Close()
	took := time.Since(begin)
	check.That(t, took <= dialBound/2, "connected after %v", took)
	// A failed attempt starts the next one at once, and the first error is the result.
	failed := errors.New("failed")
	s = newServer(listing(t, "example.org", nil)) // attempts of the other one may still be ending
	defer s.end()
	s.dial1 = func(_ context.Context, address string) (net.Conn, error) {
		return nil, fmt.Errorf("%w: %s", failed, address)
	}
	_, err = s.dial(ctx, []netip.Addr{silent, netip.MustParseAddr("127.0.0.1")}, 80)
	check.That(t, errors.Is(err, failed) && strings.Contains(err.Error(), "[2001:db8::1]:80"), "%v", err)
	got := alternate([]netip.Addr{silent, silent.Next(), netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("127.0.0.2"), netip.MustParseAddr("127.0.0.3")})
	check.That(t, fmt.Sprint(got) == "[2001:db8::1 127.0.0.1 2001:db8::2 127.0.0.2 127.0.0.3]", "%v", got)
}
