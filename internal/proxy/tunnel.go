package proxy

import (
	"bytes"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// tunnel relays between the sandbox and a host; begin is what was read of inner already. What the
// sandbox begins with is looked at, unless the host speaks first, which none does that takes TLS or
// HTTP.
func (s *server) tunnel(inner *net.TCPConn, begin []byte, up net.Conn, t target, n *counter) {
	s.conns.leads(inner, up)
	host := listen(inner, up)
	begin, kind, err := sniff(host, begin)
	if host.stop() && (err != nil || len(begin) == 0) {
		_ = inner.SetReadDeadline(time.Time{}) // it takes deadlines
		relay(inner, up, begin, n)
		return
	}
	if err == nil && kind == kindTLS {
		begin, err = checkHello(inner, begin, t)
	}
	if why := refusal(""); errors.As(err, &why) {
		s.counts.refuse(t, string(why))
	}
	if err != nil && (!errors.Is(err, io.EOF) || kind != kindOther) {
		return
	}
	_ = inner.SetReadDeadline(time.Time{}) // it takes deadlines
	if kind == kindHTTP {
		s.web.serve(inner, begin, &tunneled{target: t, up: up, counter: n})
		return
	}
	relay(inner, up, begin, n)
}

// listening looks whether a host says something, which ends a read of inner.
type listening struct {
	inner *net.TCPConn
	up    net.Conn
	spoke atomic.Bool // before inner's read is ended
	over  chan struct{}
}

func listen(inner *net.TCPConn, up net.Conn) *listening {
	l := &listening{inner: inner, up: up, over: make(chan struct{})}
	go func() {
		defer close(l.over)
		raw, err := up.(*net.TCPConn).SyscallConn()
		if err == nil {
			err = raw.Read(func(fd uintptr) bool {
				var b [1]byte
				_, _, err := unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
				return err != unix.EAGAIN && err != unix.EINTR
			})
		}
		if err == nil {
			l.spoke.Store(true)
			_ = inner.SetReadDeadline(past) // it takes deadlines
		}
	}()
	return l
}

// read is a read of inner, until a time; zero for no bound.
func (l *listening) read(b []byte, until time.Time) (int, error) {
	_ = l.inner.SetReadDeadline(until) // it takes deadlines
	if l.spoke.Load() {                // or it comes after that deadline was set, and replaces it
		return 0, os.ErrDeadlineExceeded
	}
	return l.inner.Read(b)
}

// stop ends the look, and reports whether the host has said something.
func (l *listening) stop() bool {
	_ = l.up.SetReadDeadline(past)
	<-l.over
	_ = l.up.SetReadDeadline(time.Time{})
	return l.spoke.Load()
}

// past is a deadline that ends a read.
var past = time.Unix(1, 0)

// What a tunnel begins with.
const (
	kindOther = iota
	kindTLS
	kindHTTP
)

// sniff reads until it is clear what the sandbox begins with. The first byte may take any time;
// what looks like text has to come to the end of its line soon, as no program is to be
// misunderstood that sends one slowly.
func sniff(host *listening, begin []byte) (read []byte, kind int, err error) {
	buf := make([]byte, 4096)
	var since time.Time // there was a byte
	for {
		kind, sure := classify(begin)
		if sure {
			return begin, kind, nil
		}
		if len(begin) > maxBegin {
			return begin, kindHTTP, refusal("a line of it is too long")
		}
		until := time.Time{}
		if len(begin) > 0 {
			if since.IsZero() {
				since = time.Now()
			}
			until = since.Add(beginBound)
		}
		n, err := host.read(buf, until)
		begin = append(begin, buf[:n]...)
		if err != nil && n == 0 {
			if len(begin) == 0 {
				kind = kindOther
			}
			return begin, kind, err
		}
	}
}

// classify tells what the bytes are the beginning of, if they suffice. An HTTP server skips empty
// lines before a request (RFC 9112, 2.2).
func classify(begin []byte) (kind int, sure bool) {
	const firstRecord, lastRecord = 20, 24 // of TLS's types of records (RFC 8446, 5.1)
	text := bytes.TrimLeft(begin, "\r\n \t")
	if len(text) == 0 {
		return kindHTTP, false
	}
	if begin[0] >= firstRecord && begin[0] <= lastRecord {
		return kindTLS, true
	}
	line, _, whole := bytes.Cut(text, []byte("\n"))
	rest := bytes.TrimLeft(line, "ABCDEFGHIJKLMNOPQRSTUVWXYZ")
	method := len(rest) < len(line) && bytes.IndexAny(rest, " \t") == 0
	// No method begins so, and no line of HTTP has a NUL; but some servers take one behind a method.
	if text[0] < '!' || text[0] > '~' || bytes.IndexByte(line, 0) >= 0 && !method {
		return kindOther, true
	}
	if !whole {
		return kindHTTP, false
	}
	if mayRequest(line) {
		return kindHTTP, true
	}
	return kindOther, true
}

// mayRequest reports whether a server may take a line for a request. Without a version that is HTTP/0.9,
// and what is no version many take for one: the target, or a Host below it, can name another host there.
// web refuses what is not HTTP/1.x.
func mayRequest(line []byte) bool {
	if bytes.Contains(bytes.ToUpper(line), []byte("HTTP/")) {
		return true
	}
	words := strings.FieldsFunc(string(line), func(r rune) bool { return r < '!' || r > '~' })
	if len(words) < 2 {
		return false
	}
	target := strings.ToUpper(words[1])
	// Not "get KEY", which is memcached's.
	return words[0] == "GET" || target[0] == '/' || strings.HasPrefix(target, "HTTP:") || strings.HasPrefix(target, "HTTPS:")
}

// checkHello reads the ClientHello and refuses one for another name than that of the tunnel. To an
// address every name may be sent: it was listed as an address.
func checkHello(conn *net.TCPConn, begin []byte, t target) (read []byte, err error) {
	_ = conn.SetReadDeadline(time.Now().Add(beginBound)) // it takes deadlines
	tee := &recorder{Conn: conn, from: io.LimitReader(io.MultiReader(bytes.NewReader(begin), conn), maxBegin)}
	hello, err := readHello(tee)
	// What was not read of begin comes after what was.
	read = append(tee.read, begin[min(len(begin), len(tee.read)):]...)
	switch {
	case err != nil:
		return read, refusal("what it begins with is no ClientHello")
	case t.addr.IsValid():
		return read, nil
	case slices.Contains(hello.Extensions, extensionECH):
		return read, refusal("the server name of TLS is encrypted")
	case hello.ServerName == "":
		return read, refusal("TLS without a server name")
	case !strings.EqualFold(strings.TrimSuffix(hello.ServerName, "."), t.host):
		return read, refusal("the server name of TLS is another: " + hello.ServerName)
	}
	return read, nil
}

// extensionECH is encrypted_client_hello (RFC 9849). In it is another name than the one in the
// clear, for a server that has the key.
const extensionECH = 0xfe0d

// readHello has crypto/tls read a ClientHello, and nothing more.
func readHello(conn net.Conn) (hello *tls.ClientHelloInfo, err error) {
	seen := errors.New("it is there")
	err = tls.Server(conn, &tls.Config{GetConfigForClient: func(h *tls.ClientHelloInfo) (*tls.Config, error) {
		hello = h
		return nil, seen
	}}).Handshake()
	if hello != nil {
		return hello, nil
	}
	return nil, err
}

// recorder notes what is read, and writes nothing: crypto/tls would send an alert.
type recorder struct {
	net.Conn
	from io.Reader
	read []byte
}

func (r *recorder) Read(b []byte) (int, error) {
	n, err := r.from.Read(b)
	r.read = append(r.read, b[:n]...)
	return n, err
}

func (r *recorder) Write(b []byte) (int, error) { return len(b), nil }

func is[T error](err error) bool {
	var want T
	return errors.As(err, &want)
}

func isErrno(err error, errno unix.Errno) bool { return errors.Is(err, errno) }
