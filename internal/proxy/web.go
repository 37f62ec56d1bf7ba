package proxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/http/httputil"
	"net/textproto"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// web serves HTTP to the sandbox: CONNECT, requests for other hosts, and plain HTTP in tunnels. It
// checks each request.
type web struct {
	server  *server
	http    http.Server
	handed  chan net.Conn
	forward *httputil.ReverseProxy
	chained *httputil.ReverseProxy // through the proxy of this host
}

// tunneled is a tunnel with plain HTTP in it.
type tunneled struct {
	target
	up      net.Conn // for the first request; nil after that
	counter *counter
	forward *httputil.ReverseProxy
}

// handedConn is a connection in the hands of the HTTP server.
type handedConn struct {
	*net.TCPConn
	begin  []byte
	tunnel *tunneled
	closed chan struct{}
	once   sync.Once
	broken bool // the rest is not a request
}

func (c *handedConn) Read(b []byte) (int, error) {
	if len(c.begin) > 0 {
		n := copy(b, c.begin)
		c.begin = c.begin[n:]
		return n, nil
	}
	return c.TCPConn.Read(b)
}

func (c *handedConn) Close() error {
	err := c.TCPConn.Close()
	c.once.Do(func() { close(c.closed) })
	return err
}

type (
	connKey    struct{} // context key for the connection of a request
	requestKey struct{} // context key for the request's own context, in a context that outlives it
	writerKey  struct{} // context key for the writer of the response
)

func newWeb(s *server) *web {
	w := &web{server: s, handed: make(chan net.Conn)}
	w.forward = newReverseProxy(&http.Transport{DialContext: w.dial})
	w.chained = newReverseProxy(s.byUpstream())
	w.http = http.Server{
		Handler: w, ReadHeaderTimeout: beginBound, IdleTimeout: idleBound, MaxHeaderBytes: maxHeader,
		ErrorLog:    log.New(io.Discard, "", 0), // the sandbox's errors are not worth logging
		ConnContext: func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, connKey{}, c) },
		Protocols:   new(http.Protocols),
		// OPTIONS * is for the host, too.
		DisableGeneralOptionsHandler: true,
	}
	w.http.Protocols.SetHTTP1(true)
	go func() { _ = w.http.Serve(w) }() // until Close
	return w
}

// newReverseProxy forwards requests unchanged, except for upgrades to another protocol than WebSocket:
// after an upgrade the proxy sees no requests, and HTTP/2 (h2c) or TLS (RFC 2817) could address any
// host. A request with a body cannot be upgraded.
//
// A connection attempt ends with its request. Transport would continue it for the next request, so
// that a sandbox could start any number of attempts by canceling requests.
func newReverseProxy(t *http.Transport) *httputil.ReverseProxy {
	dial := t.DialContext
	t.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		return dial(ctx.Value(requestKey{}).(context.Context), network, address)
	}
	t.DisableCompression, t.MaxResponseHeaderBytes, t.MaxIdleConns, t.IdleConnTimeout = true, maxBegin, 32, time.Minute
	return &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out = r.Out.WithContext(context.WithValue(r.Out.Context(), requestKey{}, r.In.Context()))
			r.Out.Host = r.In.Host
			r.Out.URL.RawQuery = r.In.URL.RawQuery // ReverseProxy drops parameters that it cannot parse, such as b=1;c=2
			if r.In.ContentLength != 0 || !strings.EqualFold(r.Out.Header.Get("Upgrade"), "websocket") {
				r.Out.Header.Del("Upgrade")
				r.Out.Header.Del("Connection")
			}
		},
		ModifyResponse: func(r *http.Response) error {
			if fields(r.Header) > maxFields {
				return errFields
			}
			// Prevent net/http from guessing one. ReverseProxy clears the header after each informational response.
			r.Request.Context().Value(writerKey{}).(http.ResponseWriter).Header()["Content-Type"] = nil
			return nil
		},
		Transport:    limited{t},
		ErrorLog:     log.New(io.Discard, "", 0),
		ErrorHandler: func(rw http.ResponseWriter, _ *http.Request, err error) { refuseHTTP(rw, err) },
	}
}

// limited limits the fields of informational responses (1xx), of which a host can send any number.
type limited struct{ *http.Transport }

func (l limited) RoundTrip(r *http.Request) (*http.Response, error) {
	trace := httptrace.ContextClientTrace(r.Context()) // ReverseProxy's, for this request
	pass := trace.Got1xxResponse
	trace.Got1xxResponse = func(code int, header textproto.MIMEHeader) error {
		if fields(http.Header(header)) > maxFields {
			return errFields
		}
		return pass(code, header)
	}
	return l.Transport.RoundTrip(r)
}

// Accept, Close and Addr make web a listener for connections that serve hands over.
func (w *web) Accept() (net.Conn, error) {
	select {
	case c := <-w.handed:
		return c, nil
	case <-w.server.ctx.Done():
		return nil, net.ErrClosed
	}
}
func (w *web) Close() error   { return nil }
func (w *web) Addr() net.Addr { return &net.TCPAddr{} }

// serve serves HTTP on a connection until it closes. begin was already read from it.
func (w *web) serve(conn *net.TCPConn, begin []byte, tunnel *tunneled) {
	c := &handedConn{TCPConn: conn, begin: begin, tunnel: tunnel, closed: make(chan struct{})}
	if tunnel != nil {
		t := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return tunnel.dial(ctx, w.server) }}
		t.MaxConnsPerHost = 1
		tunnel.forward = newReverseProxy(t)
		defer t.CloseIdleConnections()
	}
	select {
	case w.handed <- c:
		<-c.closed
	case <-w.server.ctx.Done():
	}
}

// dial returns the tunnel's connection to the host. If the host has closed that, it checks the host again and
// reconnects.
func (t *tunneled) dial(ctx context.Context, s *server) (net.Conn, error) {
	if up := t.up; up != nil {
		t.up = nil
		return &counted{up, t.counter}, nil
	}
	up, n, err := s.connect(ctx, t.target)
	if err != nil {
		return nil, err
	}
	return &counted{up, n}, nil
}

// dial connects to the host of a request.
func (w *web) dial(ctx context.Context, _, address string) (net.Conn, error) {
	t, ok := parseTarget(address, 0)
	if !ok {
		return nil, refusal("no host and port")
	}
	conn, n, err := w.server.connect(ctx, t)
	if err != nil {
		return nil, err
	}
	return &counted{conn, n}, nil
}

// ServeHTTP handles one request.
func (w *web) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	conn := r.Context().Value(connKey{}).(*handedConn)
	if conn.broken {
		panic(http.ErrAbortHandler) // closes it
	}
	if fields(r.Header) > maxFields {
		rw.Header().Set("Connection", "close")
		http.Error(rw, "sbxrun: "+errFields.Error(), http.StatusRequestHeaderFieldsTooLarge)
		return
	}
	switch {
	case conn.tunnel != nil:
		w.within(rw, r, conn.tunnel)
	case r.Method == http.MethodConnect:
		w.connect(rw, r, conn)
	case r.URL.Scheme == "http" && r.URL.Host != "":
		w.pass(rw, r)
	default:
		http.Error(rw, "sbxrun: this is a proxy for HTTP, CONNECT and SOCKS5", http.StatusBadRequest)
	}
}

var errFields = fmt.Errorf("the header has more than %d fields", maxFields)

// fields counts the fields of a header, including repeated ones.
func fields(h http.Header) (n int) {
	for _, values := range h {
		n += len(values)
	}
	return n
}

// connect handles CONNECT.
func (w *web) connect(rw http.ResponseWriter, r *http.Request, conn *handedConn) {
	t, ok := parseTarget(r.Host, 0)
	if !ok {
		http.Error(rw, "sbxrun: want CONNECT HOST:PORT", http.StatusBadRequest)
		return
	}
	up, n, err := w.server.connect(r.Context(), t)
	if err != nil {
		refuseHTTP(rw, err)
		return
	}
	defer up.Close()
	_, buffered, err := http.NewResponseController(rw).Hijack()
	if err != nil {
		return
	}
	defer conn.Close() // which ends serve
	_ = conn.SetDeadline(time.Time{})
	begin := make([]byte, buffered.Reader.Buffered())
	if _, err := io.ReadFull(buffered, begin); err != nil {
		return
	}
	begin = append(begin, conn.begin...)
	if _, err := io.WriteString(conn.TCPConn, "HTTP/1.1 200 Connection established\r\n\r\n"); err != nil {
		return
	}
	w.server.tunnel(conn.TCPConn, begin, up, t, n)
}

// pass forwards a request to the host in its URL. The Host header does not matter (RFC 9112, 3.2.2):
// the host gets the name in the URL.
func (w *web) pass(rw http.ResponseWriter, r *http.Request) {
	t, ok := parseTarget(r.URL.Host, 80)
	if !ok {
		http.Error(rw, "sbxrun: no host in the URL", http.StatusBadRequest)
		return
	}
	// A reused connection leads to the same host and port, without resolving the name again. The rules
	// are checked for each request.
	if err := w.server.rules.check(t); err != nil {
		refuseHTTP(rw, w.server.refused(t, err))
		return
	}
	r.URL.Host, r.Host = t.String(), r.URL.Host
	if proxy, err := w.server.upstream.of("http", t); err != nil {
		refuseHTTP(rw, &hostError{t, err})
	} else if proxy != nil && strings.EqualFold(r.Method, http.MethodTrace) {
		// The other proxy may respond itself, with the request that it got (RFC 9110, 9.3.8).
		refuseHTTP(rw, w.server.refused(t, refusal("TRACE could show the password for the proxy of this host")))
	} else if proxy != nil {
		n := w.server.counts.of(ofHost, t.String())
		forward(w.chained, rw, r.WithContext(context.WithValue(r.Context(), counterKey{}, n)))
	} else {
		forward(w.forward, rw, r)
	}
}

// within forwards a request in a tunnel, if it is for the host of the tunnel. In a tunnel to an address,
// it may have any Host, as in TLS.
func (w *web) within(rw http.ResponseWriter, r *http.Request, tunnel *tunneled) {
	t, ok := parseTarget(r.Host, tunnel.port)
	if r.Method == http.MethodConnect || !ok || t.host != tunnel.host && !tunnel.addr.IsValid() {
		why := refusal("the Host header of a request names another host")
		w.server.counts.refuse(tunnel.target, string(why))
		rw.Header().Set("Connection", "close")
		refuseHTTP(rw, &hostError{tunnel.target, why})
		return
	}
	r.URL = &url.URL{Scheme: "http", Host: tunnel.String(), Path: r.URL.Path, RawPath: r.URL.RawPath, RawQuery: r.URL.RawQuery, ForceQuery: r.URL.ForceQuery}
	forward(tunnel.forward, rw, r)
}

// forward forwards a request, also if the host responds before the end of the request. By default, net/http would
// read and close the request's body before it writes the response, which would delay or truncate that
// (golang.org/issue/40747). Then, however, the body must end before the handler does: net/http panics if it has to
// read the rest itself and the connection has another request.
func forward(by *httputil.ReverseProxy, rw http.ResponseWriter, r *http.Request) {
	r = r.WithContext(context.WithValue(r.Context(), writerKey{}, rw)) // net/http needs its own request unchanged
	if r.ContentLength == 0 {
		by.ServeHTTP(rw, r)
		return
	}
	answer := http.NewResponseController(rw)
	_ = answer.EnableFullDuplex() // HTTP/1 supports it
	body := &requestBody{ReadCloser: r.Body}
	r.Body = body
	by.ServeHTTP(rw, r)
	if !body.ended.Load() {
		_ = answer.Flush()       // the client may wait for the response
		if body.Close() != nil { // it reads the rest, or leaves the connection to be closed
			r.Context().Value(connKey{}).(*handedConn).broken = true
		}
	}
}

// requestBody records that a body has ended.
type requestBody struct {
	io.ReadCloser
	ended atomic.Bool
}

func (b *requestBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err == io.EOF {
		b.ended.Store(true)
	}
	return n, err
}

// hostError is an error about a host.
type hostError struct {
	target target
	err    error
}

func (e *hostError) Error() string { return e.target.String() + ": " + e.err.Error() }
func (e *hostError) Unwrap() error { return e.err }

// refuseHTTP responds with an error.
func refuseHTTP(rw http.ResponseWriter, err error) {
	status := http.StatusBadGateway
	if _, refused := errors.AsType[refusal](err); refused {
		status = http.StatusForbidden
	}
	if errors.Is(err, context.DeadlineExceeded) {
		status = http.StatusGatewayTimeout
	}
	http.Error(rw, "sbxrun: "+err.Error(), status)
}
