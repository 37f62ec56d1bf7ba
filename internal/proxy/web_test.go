package proxy

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// serving starts a proxy with rules and returns its address.
func serving(t *testing.T, r *rules) string {
	t.Helper()
	return serve(t, newServer(r))
}

// serve starts a proxy and returns its address.
func serve(t *testing.T, s *server) string {
	t.Helper()
	t.Cleanup(s.end)
	l := harness.Listen(t) // closed before
	go s.serve(l)
	return l.Addr().String()
}

// get sends requests to a proxy, and compares the status of the responses.
func get(t *testing.T, proxy, requests string, status ...int) (net.Conn, *bufio.Reader) {
	t.Helper()
	c, err := net.Dial("tcp", proxy)
	check.Must(t, err)
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	_, err = io.WriteString(c, requests)
	check.Must(t, err)
	b := bufio.NewReader(c)
	for _, want := range status {
		method, rest, _ := strings.Cut(requests, " ")
		_, requests, _ = strings.Cut(rest, "\r\n\r\n")
		answer, err := http.ReadResponse(b, &http.Request{Method: method})
		check.Must(t, err)
		check.That(t, answer.StatusCode == want, "%s, want %d", answer.Status, want)
		if want != http.StatusSwitchingProtocols && method != http.MethodConnect { // which have no body
			_, _ = io.Copy(io.Discard, answer.Body)
		}
	}
	return c, b
}

// A query that ReverseProxy cannot parse reaches the host, and a response without a type gets none.
func TestUnchanged(t *testing.T) {
	t.Parallel()
	host := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/hints" {
			rw.WriteHeader(http.StatusEarlyHints)
		}
		if r.URL.Path != "/typed" {
			rw.Header()["Content-Type"] = nil
		}
		fmt.Fprint(rw, "<html>", r.URL.RawQuery)
	}))
	defer host.Close()
	address := host.Listener.Addr().String()
	proxy := serving(t, listing(t, address, nil))
	for path, want := range map[string][]string{"/": nil, "/hints": nil, "/typed": {"text/html; charset=utf-8"}} {
		const query = "b=1;c=2&a=%zz"
		rest := path + "?" + query + " HTTP/1.1\r\nHost: " + address + "\r\n\r\n"
		_, plain := get(t, proxy, "GET http://"+address+rest)
		_, within := get(t, proxy, "CONNECT "+address+" HTTP/1.1\r\n\r\nGET "+rest, http.StatusOK)
		for what, b := range map[string]*bufio.Reader{"plain": plain, "within a tunnel": within} {
			answer, err := http.ReadResponse(b, nil)
			check.Must(t, err)
			if path == "/hints" {
				check.Equal(t, answer.StatusCode, http.StatusEarlyHints, what)
				answer, err = http.ReadResponse(b, nil)
				check.Must(t, err)
			}
			body, err := io.ReadAll(answer.Body)
			check.That(t, err == nil && string(body) == "<html>"+query, "%s: %s, %v", what, body, err)
			got := answer.Header["Content-Type"]
			check.That(t, slices.Equal(got, want), "%s: the type of %s is %q", what, path, got)
		}
	}
}

// OPTIONS * is checked like any other request, and the server responds to it.
func TestOptions(t *testing.T) {
	t.Parallel()
	host := httptest.NewUnstartedServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		check.That(t, r.Method == http.MethodOptions && r.RequestURI == "*", "%s %s", r.Method, r.RequestURI)
		rw.WriteHeader(http.StatusNoContent)
	}))
	host.Config.DisableGeneralOptionsHandler = true
	host.Start()
	defer host.Close()
	name := fmt.Sprintf("www.example.org:%d", host.Listener.Addr().(*net.TCPAddr).Port)
	proxy := serving(t, listing(t, name+","+host.Listener.Addr().String(), map[string]string{"www.example.org": "127.0.0.1"}))
	tunnel := "CONNECT " + name + " HTTP/1.1\r\n\r\n"
	get(t, proxy, tunnel+"OPTIONS * HTTP/1.1\r\nHost: "+name+"\r\n\r\n", http.StatusOK, http.StatusNoContent)
	get(t, proxy, tunnel+"OPTIONS * HTTP/1.1\r\nHost: other.example.org\r\n\r\n", http.StatusOK, http.StatusForbidden)
}

// The number of header fields is limited, including repeated ones, in requests and responses.
func TestFields(t *testing.T) {
	t.Parallel()
	host := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/many":
			rw.Header()["X"] = make([]string, maxFields+1)
		case "/hints":
			rw.Header()["X"] = make([]string, maxFields+1)
			rw.WriteHeader(http.StatusEarlyHints)
			rw.Header().Del("X")
		}
	}))
	defer host.Close()
	address := host.Listener.Addr().String()
	proxy := serving(t, listing(t, address, nil))
	request := func(method, target string, n int) string {
		return method + " " + target + " HTTP/1.1\r\nHost: " + address + "\r\n" + strings.Repeat("X: \r\n", n) + "\r\n"
	}
	for n, want := range map[int]int{maxFields: http.StatusOK, maxFields + 1: http.StatusRequestHeaderFieldsTooLarge} {
		get(t, proxy, request("GET", "http://"+address+"/", n), want)
		get(t, proxy, request("CONNECT", address, n), want)
		get(t, proxy, request("CONNECT", address, 0)+request("GET", "/", n), http.StatusOK, want)
	}
	_, b := get(t, proxy, request("GET", "http://"+address+"/", maxFields+1), http.StatusRequestHeaderFieldsTooLarge)
	n, err := b.Read(make([]byte, 1))
	check.That(t, n == 0 && err == io.EOF, "the connection is still open: %d, %v", n, err)
	for _, path := range []string{"/many", "/hints"} {
		get(t, proxy, request("GET", "http://"+address+path, 0), http.StatusBadGateway)
	}
}

// Only upgrades to WebSocket are forwarded. In other protocols a request could address another host.
func TestUpgrade(t *testing.T) {
	t.Parallel()
	host := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		protocol := r.Header.Get("Upgrade")
		if protocol == "" {
			return
		}
		c, b, err := http.NewResponseController(rw).Hijack()
		if err != nil {
			return
		}
		defer c.Close()
		fmt.Fprintf(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n", protocol)
		_, _ = io.Copy(c, b)
	}))
	defer host.Close()
	address := host.Listener.Addr().String()
	proxy := serving(t, listing(t, address, nil))
	for protocol, want := range map[string]int{"websocket": 101, "WebSocket": 101, "h2c": 200, "TLS/1.0": 200, "websocket, h2c": 200} {
		t.Run(protocol, func(t *testing.T) {
			headers := "Host: " + address + "\r\nConnection: Upgrade\r\nUpgrade: " + protocol + "\r\n\r\n"
			plain, b := get(t, proxy, "GET http://"+address+"/ HTTP/1.1\r\n"+headers, want)
			if want == 101 {
				_, err := io.WriteString(plain, "ping\n")
				line, readErr := b.ReadString('\n')
				check.That(t, line == "ping\n", "%q, %v, %v", line, err, readErr)
			}
			get(t, proxy, "CONNECT "+address+" HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n"+headers, 200, want)
		})
	}
}

// A request without a version has no Host header, but its target can name a host. Behind a header of the
// PROXY protocol, and bytes that some servers skip, there can be a request for any host. None reaches the host of a tunnel.
func TestNoVersion(t *testing.T) {
	t.Parallel()
	const other = "GET / HTTP/1.1\r\nHost: other.example.org\r\n\r\n"
	for _, line := range []string{"\x00" + other, strings.Repeat("\x00", 100) + other, "\xef\xbb\xbf" + other, "\x1c" + other, "GET http://other.example.org/\r\n", "GET http://other.example.org/ \r\n", "GET /\r\nHost: other.example.org\r\n\r\n", "get / x\n",
		"PROXY TCP4 192.0.2.1 192.0.2.2 1 80\r\n" + other, "\r\n\r\n\x00\r\nQUIT\n!\x11\x00\x00" + other} {
		host := harness.Listen(t)
		address := host.Addr().String()
		c, b := get(t, serving(t, listing(t, address, nil)), "CONNECT "+address+" HTTP/1.1\r\n\r\n"+line[:1], http.StatusOK)
		for i := 1; i < len(line); i++ { // byte by byte
			_, _ = io.WriteString(c, line[i:i+1]) // fails if it is refused already
		}
		up := accepted(t, host)
		reached := make(chan []byte)
		go func() {
			var first [1]byte
			n, _ := up.Read(first[:]) // fails if it is closed
			up.Close()
			reached <- first[:n]
		}()
		answer, err := http.ReadResponse(b, nil)
		check.That(t, err == nil && answer.StatusCode == http.StatusBadRequest, "%q: %v, %v", line, answer, err)
		got := <-reached
		check.That(t, len(got) == 0, "%q: the host received %q", line, got)
	}
}

// A response does not wait for the rest of its request and is not cut by it: net/http would read and close the request's
// body before it writes the response (golang.org/issue/40747).
func TestEarlyResponse(t *testing.T) {
	t.Parallel()
	host := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(rw).EnableFullDuplex()
		for range 2 {
			half := make([]byte, 4)
			_, _ = io.ReadFull(r.Body, half)
			_, _ = rw.Write(half)
			_ = http.NewResponseController(rw).Flush()
		}
	}))
	defer host.Close()
	address := host.Listener.Addr().String()
	proxy := serving(t, listing(t, address, nil))
	const rest = "/ HTTP/1.1\r\nHost: x\r\nContent-Length: 8\r\n\r\nhalf"
	for what, begin := range map[string]string{"plain": "POST http://" + address + rest, "within a tunnel": "POST " + strings.Replace(rest, "Host: x", "Host: "+address, 1)} {
		tunnel := ""
		if what != "plain" {
			tunnel = "CONNECT " + address + " HTTP/1.1\r\n\r\n"
		}
		c, b := get(t, proxy, tunnel, slices.Repeat([]int{http.StatusOK}, min(1, len(tunnel)))...)
		for range 2 { // on one connection
			_, err := io.WriteString(c, begin)
			check.Must(t, err)
			answer, err := http.ReadResponse(b, nil)
			check.Require(t, err == nil, "%s: %v", what, err)
			_, err = io.WriteString(c, "more")
			check.Must(t, err)
			body, err := io.ReadAll(answer.Body)
			check.That(t, err == nil && string(body) == "halfmore", "%s: %q, %v", what, body, err)
		}
	}
}

// After a response that came before the end of its request, the connection takes the next request.
func TestRequestAfterEarlyResponse(t *testing.T) {
	t.Parallel()
	host := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		c, _, err := http.NewResponseController(rw).Hijack()
		check.Must(t, err)
		defer c.Close()
		_, _ = io.WriteString(c, "HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
		_, _ = io.Copy(io.Discard, c)
	}))
	defer host.Close()
	address := host.Listener.Addr().String()
	proxy := serving(t, listing(t, address, nil))
	const field = "Content-Length: 8\r\n\r\n"
	const next = "GET http://other.example.org/ HTTP/1.1\r\nHost: x\r\n\r\n"
	for what, test := range map[string]struct {
		begin  string
		status []int
		next   int
	}{
		"plain":           {"POST http://" + address + "/ HTTP/1.1\r\nHost: x\r\n" + field + "half", []int{http.StatusRequestEntityTooLarge}, http.StatusForbidden},
		"within a tunnel": {"CONNECT " + address + " HTTP/1.1\r\n\r\nPOST / HTTP/1.1\r\nHost: " + address + "\r\n" + field + "half", []int{http.StatusOK, http.StatusRequestEntityTooLarge}, http.StatusRequestEntityTooLarge},
		"refused":         {"POST http://other.example.org/ HTTP/1.1\r\nHost: x\r\n" + field + "halfmore", []int{http.StatusForbidden}, http.StatusForbidden},
	} {
		for _, pieces := range [][]string{{"more" + next}, {"more", next}} {
			if what == "refused" {
				pieces = []string{next}
			}
			c, b := get(t, proxy, test.begin, test.status...)
			for _, piece := range pieces {
				_, err := io.WriteString(c, piece)
				check.Must(t, err)
			}
			answer, err := http.ReadResponse(b, nil)
			check.That(t, err == nil && answer.StatusCode == test.next, "%s: %+v, %v", what, answer, err)
		}
	}
}

// The text after an invalid body is not taken for another request.
func TestInvalidBody(t *testing.T) {
	t.Parallel()
	host := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { _, _ = io.Copy(io.Discard, r.Body) }))
	defer host.Close()
	address := host.Listener.Addr().String()
	proxy := serving(t, listing(t, address, nil))
	_, b := get(t, proxy, "POST http://"+address+"/ HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nGET http://"+address+"/ HTTP/1.1\r\nHost: x\r\n\r\n")
	answer, err := http.ReadResponse(b, nil)
	if err == nil {
		check.That(t, answer.StatusCode == http.StatusBadGateway, "%s", answer.Status)
		_, _ = io.Copy(io.Discard, answer.Body)
		answer, err = http.ReadResponse(b, nil)
	}
	check.That(t, err != nil, "another response: %+v", answer)
}
