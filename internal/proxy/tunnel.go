package proxy

import (
	"bytes"
	"crypto/sha256"
	"crypto/tls"
	"encoding/binary"
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
// HTTP/1. A server of HTTP/2 may, and a request of that can be for any host: so it is refused.
func (s *server) tunnel(inner *net.TCPConn, begin []byte, up net.Conn, t target, n *counter) {
	s.conns.pair(inner, up)
	host := listen(inner, up)
	begin, kind, err := sniff(host, begin)
	spoke := host.stop()
	if spoke && host.http2 && !t.addr.IsValid() {
		s.counts.refuse(t, "HTTP/2 without TLS")
		return
	}
	if spoke && (err != nil || len(begin) == 0) {
		_ = inner.SetReadDeadline(time.Time{}) // it takes deadlines
		relay(inner, up, begin, n)
		return
	}
	if err == nil && kind == kindTLS {
		begin, err = beginTLS(inner, begin, &counted{up, n}, t)
	}
	if why, ok := errors.AsType[refusal](err); ok {
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
	http2 bool        // and that was HTTP/2; once over is closed
	over  chan struct{}
}

func listen(inner *net.TCPConn, up net.Conn) *listening {
	l := &listening{inner: inner, up: up, over: make(chan struct{})}
	go func() {
		defer close(l.over)
		raw, err := up.(*net.TCPConn).SyscallConn()
		if err == nil {
			err = raw.Read(func(fd uintptr) bool {
				var b [http2Header]byte
				n, _, err := unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
				l.http2 = isSettings(b[:max(n, 0)])
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

// http2Header is how many bytes a frame of HTTP/2 begins with (RFC 9113, 4.1).
const http2Header = 9

// isSettings reports whether b is the header of a SETTINGS frame, with which a server of HTTP/2 begins (RFC 9113,
// 3.4), and which it sends in one piece. Less than a header is none: other servers may say less, and wait.
func isSettings(b []byte) bool {
	return len(b) == http2Header && b[3] == 4 && b[5]&0x7f == 0 && b[6] == 0 && b[7] == 0 && b[8] == 0
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
// lines before a request (RFC 9112, 2.2), and some all white space.
func classify(begin []byte) (kind int, sure bool) {
	text := bytes.TrimLeft(begin, "\r\n \t\v\f")
	if len(text) == 0 {
		return kindHTTP, false
	}
	if isRecord(begin) {
		return kindTLS, true
	}
	if bytes.HasPrefix(begin, proxyHeader) {
		return kindHTTP, true
	}
	if mayBeOldHello(begin) {
		return kindTLS, len(begin) >= oldHeader
	}
	if odd := oddSpace(begin); odd > 0 {
		return classifyOdd(begin[odd:])
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

// oddSpace returns the length of a prefix with a byte that a lenient HTTP server may skip, though it is no
// white space of HTTP: NUL and control characters, which Java's trim and Python's split remove, or a byte
// order mark. Without one, the length is 0.
func oddSpace(begin []byte) int {
	i, odd := 0, false
	for ; i < len(begin); i++ {
		switch begin[i] {
		case '\r', '\n', ' ', '\t', '\v', '\f':
		case 0, 0x1c, 0x1d, 0x1e, 0x1f, 0x85, 0xa0, 0xef, 0xbb, 0xbf, 0xfe, 0xff: // the last five: parts of a mark
			odd = true
		default:
			if !odd {
				return 0
			}
			return i
		}
	}
	if !odd {
		return 0
	}
	return i
}

// classifyOdd is classify for the text after an odd prefix. Binary protocols begin with such bytes, too, and
// then need not have a line: so only text that begins with a method has to come to the end of its line.
func classifyOdd(text []byte) (kind int, sure bool) {
	const shortest = 3 // GET, PUT
	rest := bytes.TrimLeft(text, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
	switch letters := len(text) - len(rest); {
	case len(rest) == 0:
		return kindHTTP, false
	case letters < shortest || !strings.Contains(" \t\v\f\x1c\x1d\x1e\x1f\x85\xa0", string(rest[:1])): // all that split takes
		return kindOther, true
	}
	line, _, whole := bytes.Cut(text, []byte("\n"))
	if whole && !mayRequest(line) {
		return kindOther, true
	}
	return kindHTTP, whole
}

// proxyHeader is what version 2 of the PROXY protocol begins with, and nothing else that is known. A server that
// takes it reads on behind it, as behind the line of version 1: there TLS or a request could be for any host. Both
// are for web, which refuses them as no request.
var proxyHeader = []byte("\r\n\r\n\x00")

// oldHeader is what a ClientHello in the form of SSL 2.0 is known by.
const oldHeader = 4

// mayBeOldHello reports whether the bytes are such a ClientHello, or can still become one: two bytes of length
// with the first bit set, the message's type, and the first byte of the version (RFC 5246, E.2). Servers of
// today take one for TLS 1.2, and it has no server name. beginTLS refuses it, as it is no record.
func mayBeOldHello(begin []byte) bool {
	return begin[0] >= 0x80 && (len(begin) < 3 || begin[2] == 1) && (len(begin) < oldHeader || begin[3] == 3)
}

// mayRequest reports whether a server may take a line for a request. Without a version that is HTTP/0.9,
// and what is no version many take for one: the target, or a Host below it, can name another host there.
// web refuses what is not HTTP/1.x.
func mayRequest(line []byte) bool {
	if bytes.Contains(bytes.ToUpper(line), []byte("HTTP/")) || bytes.HasPrefix(line, []byte("PROXY ")) {
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

// beginTLS passes on what TLS begins with, once it is checked, and the answer; it returns what else was
// read of inner. A server can ask for a second ClientHello (RFC 8446, 4.1.4), and may go by the name in
// that. So nothing more is passed on to it before it has answered.
func beginTLS(inner net.Conn, begin []byte, up net.Conn, t target) (rest []byte, err error) {
	left := bytes.NewReader(begin)
	client := io.MultiReader(left, inner)
	passHello := func() error {
		_ = inner.SetReadDeadline(time.Now().Add(beginBound)) // it takes deadlines
		hello, err := checkHello(client, t)
		if err == nil {
			_, err = up.Write(hello)
		}
		return err
	}
	if err := passHello(); err != nil {
		return nil, err
	}
	_ = up.SetReadDeadline(time.Now().Add(answerBound)) // it takes deadlines
	again, err := passAnswer(inner, up)
	if err == nil && again { // no server asks for a third
		err = passHello()
	}
	if err != nil {
		return nil, err
	}
	_ = up.SetDeadline(time.Time{}) // it takes deadlines
	rest, _ = io.ReadAll(left)      // of memory
	return rest, nil
}

// checkHello reads a ClientHello and refuses one for another name than that of the tunnel. To an
// address every name may be sent: it was listed as an address.
func checkHello(client io.Reader, t target) (read []byte, err error) {
	hello, read, err := readHello(client)
	if err == io.EOF { // it has given up
		return nil, err
	}
	if err != nil {
		return nil, refusal("what it begins with is no ClientHello")
	}
	named, ok := newTarget(hello.ServerName, t.port)
	switch {
	case t.addr.IsValid():
		return read, nil
	case slices.Contains(hello.Extensions, extensionECH):
		return nil, refusal("the server name of TLS is encrypted")
	case hello.ServerName == "":
		return nil, refusal("TLS without a server name")
	case !ok || named.host != t.host:
		return nil, refusal("the server name of TLS is another: " + hello.ServerName)
	}
	return read, nil
}

// extensionECH is encrypted_client_hello (RFC 9849). In it is another name than the one in the
// clear, for a server that has the key.
const extensionECH = 0xfe0d

// TLS's types of records (RFC 8446, 5.1), and the bytes before what is in one.
const (
	recordFirst     = 20
	recordAlert     = 21
	recordHandshake = 22
	recordLast      = 24
	recordHeader    = 5
)

func isRecord(begin []byte) bool { return begin[0] >= recordFirst && begin[0] <= recordLast }

// readRecord reads a record of TLS; of what is none as much as the header of one.
func readRecord(from io.Reader) (record []byte, err error) {
	record = make([]byte, recordHeader)
	n, err := io.ReadFull(from, record)
	if err != nil || !isRecord(record) {
		return record[:n], err
	}
	record = append(record, make([]byte, binary.BigEndian.Uint16(record[3:]))...)
	n, err = io.ReadFull(from, record[recordHeader:])
	return record[:recordHeader+n], err
}

// readHello reads records until a message of the handshake is whole, and no further, and has crypto/tls
// look at it. Others may come before: in TLS 1.3 one that says nothing, and data that came too early,
// which the server skips. With more in the last one it is an error: the server would take that for the
// next message.
func readHello(from io.Reader) (hello *tls.ClientHelloInfo, read []byte, err error) {
	from = io.LimitReader(from, maxBegin)
	const header = 4            // the message's type, and three bytes of its length
	var records, message []byte // of the handshake
	for size := header; len(message) < size; {
		record, err := readRecord(from)
		if err == nil && !isRecord(record) {
			err = errors.New("there is no record")
		}
		if err != nil {
			return nil, nil, err
		}
		if read = append(read, record...); record[0] != recordHandshake {
			continue
		}
		records, message = append(records, record...), append(message, record[recordHeader:]...)
		if len(message) >= header {
			size = header + int(binary.BigEndian.Uint32(message)&0xffffff)
		}
		if len(message) > size {
			return nil, nil, errors.New("there is more in its record")
		}
	}
	err = tls.Server(&recorded{from: bytes.NewReader(records)}, &tls.Config{GetConfigForClient: func(h *tls.ClientHelloInfo) (*tls.Config, error) {
		hello = h
		return nil, errors.New("it is there")
	}}).Handshake()
	if hello != nil {
		err = nil
	}
	return hello, read, err
}

// recorded is a connection to what was read. crypto/tls writes an alert to it, for nobody.
type recorded struct {
	net.Conn
	from io.Reader
}

func (r *recorded) Read(b []byte) (int, error)  { return r.from.Read(b) }
func (r *recorded) Write(b []byte) (int, error) { return len(b), nil }

// passAnswer passes on what a server answers to a ClientHello, as far as it tells whether it asks for
// another one.
func passAnswer(inner io.Writer, up io.Reader) (again bool, err error) {
	for {
		record, err := readRecord(up)
		if _, writeErr := inner.Write(record); err == nil {
			err = writeErr
		}
		if err != nil || record[0] != recordAlert { // or it is a warning
			return err == nil && asksAgain(record), err
		}
	}
}

// asksAgain reports whether a record may be a HelloRetryRequest, which is a ServerHello with a random of
// its own (RFC 8446, 4.1.3). In too short a record it cannot be seen.
func asksAgain(record []byte) bool {
	const random = recordHeader + 4 + 2
	if record[0] != recordHandshake {
		return false
	}
	return len(record) < random+len(retryRandom) || bytes.HasPrefix(record[random:], retryRandom[:])
}

var retryRandom = sha256.Sum256([]byte("HelloRetryRequest"))
