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

// tunnel relays between the sandbox and a host. begin was already read from inner. tunnel inspects what
// the sandbox sends first, unless the host speaks first, as no server of TLS or HTTP/1 does. A server of
// HTTP/2 may do so; tunnel refuses it, because a request could address any host.
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
		_ = inner.SetReadDeadline(time.Time{})
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
	_ = inner.SetReadDeadline(time.Time{})
	if kind == kindHTTP {
		s.web.serve(inner, begin, &tunneled{target: t, up: up, counter: n})
		return
	}
	relay(inner, up, begin, n)
}

// listening waits until a host sends something, and then interrupts the read of inner.
type listening struct {
	inner *net.TCPConn
	up    net.Conn
	spoke atomic.Bool // set before the read is interrupted
	http2 bool        // whether it sent HTTP/2; valid once over is closed
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
			_ = inner.SetReadDeadline(past)
		}
	}()
	return l
}

// http2Header is the length of an HTTP/2 frame header (RFC 9113, 4.1).
const http2Header = 9

// isSettings reports whether b is the header of a SETTINGS frame, with which a server of HTTP/2 starts (RFC 9113,
// 3.4), and which it sends in one piece. A shorter text does not count: other servers may send less and wait.
func isSettings(b []byte) bool {
	return len(b) == http2Header && b[3] == 4 && b[5]&0x7f == 0 && b[6] == 0 && b[7] == 0 && b[8] == 0
}

// read reads from inner until a deadline; zero means none.
func (l *listening) read(b []byte, until time.Time) (int, error) {
	_ = l.inner.SetReadDeadline(until)
	if l.spoke.Load() { // after setting the deadline, which would replace the interruption
		return 0, os.ErrDeadlineExceeded
	}
	return l.inner.Read(b)
}

// stop stops waiting, and reports whether the host has sent something.
func (l *listening) stop() bool {
	_ = l.up.SetReadDeadline(past)
	<-l.over
	_ = l.up.SetReadDeadline(time.Time{})
	return l.spoke.Load()
}

// past is a deadline that interrupts a read.
var past = time.Unix(1, 0)

// Kinds of traffic.
const (
	kindOther = iota
	kindTLS
	kindHTTP
)

// sniff reads until the kind of traffic is clear. The first byte may take any time. After that, a line
// of text must be complete within a time, so that a program cannot avoid the check by sending slowly.
func sniff(host *listening, begin []byte) (read []byte, kind int, err error) {
	buf := make([]byte, 4096)
	var since time.Time // the first byte
	for {
		kind, sure := classify(begin)
		if sure {
			return begin, kind, nil
		}
		if len(begin) > maxBegin {
			return begin, kindHTTP, refusal("the first line is too long")
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

// classify returns the kind of traffic, and whether the bytes suffice to tell. HTTP servers skip empty
// lines before a request (RFC 9112, 2.2), and some skip all white space.
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
	// No method starts with these bytes. A line of HTTP has no NUL, but some servers accept one after the method.
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

// oddSpace returns the length of a prefix that a lenient HTTP server may skip although it is not white
// space in HTTP: NUL and control characters, which Java's trim and Python's split remove, or a byte
// order mark. It returns 0 if there is none.
func oddSpace(begin []byte) int {
	i, odd := 0, false
	for ; i < len(begin); i++ {
		switch begin[i] {
		case '\r', '\n', ' ', '\t', '\v', '\f':
		case 0, 0x1c, 0x1d, 0x1e, 0x1f, 0x85, 0xa0, 0xef, 0xbb, 0xbf, 0xfe, 0xff: // the last five are parts of a mark
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

// classifyOdd is classify for the text after an odd prefix. Binary protocols may start with such bytes,
// too, and need not contain a line, so only text that starts with a method must complete its line.
func classifyOdd(text []byte) (kind int, sure bool) {
	const shortest = 3 // GET, PUT
	rest := bytes.TrimLeft(text, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
	switch letters := len(text) - len(rest); {
	case len(rest) == 0:
		return kindHTTP, false
	case letters < shortest || !strings.Contains(" \t\v\f\x1c\x1d\x1e\x1f\x85\xa0", string(rest[:1])): // the separators of split
		return kindOther, true
	}
	line, _, whole := bytes.Cut(text, []byte("\n"))
	if whole && !mayRequest(line) {
		return kindOther, true
	}
	return kindHTTP, whole
}

// proxyHeader is the start of version 2 of the PROXY protocol, and of no other known protocol. A server that accepts
// it, or the line of version 1, continues to read after it, and TLS or a request there could address any host. Both
// go to web, which refuses them as invalid requests.
var proxyHeader = []byte("\r\n\r\n\x00")

// oldHeader is the length of the prefix that identifies a ClientHello in the format of SSL 2.0.
const oldHeader = 4

// mayBeOldHello reports whether the bytes are such a ClientHello, or can still become one: two bytes of
// length with the first bit set, the type of the message, and the first byte of the version (RFC 5246,
// E.2). Current servers accept it for TLS 1.2, and it has no server name. beginTLS refuses it because it
// is not a record.
func mayBeOldHello(begin []byte) bool {
	return begin[0] >= 0x80 && (len(begin) < 3 || begin[2] == 1) && (len(begin) < oldHeader || begin[3] == 3)
}

// mayRequest reports whether a server may accept a line as a request. Without a version it is HTTP/0.9,
// and many servers accept invalid versions. The target, or a Host below it, could name another host. web
// refuses everything but HTTP/1.x.
func mayRequest(line []byte) bool {
	if bytes.Contains(bytes.ToUpper(line), []byte("HTTP/")) || bytes.HasPrefix(line, []byte("PROXY ")) {
		return true
	}
	words := strings.FieldsFunc(string(line), func(r rune) bool { return r < '!' || r > '~' })
	if len(words) < 2 {
		return false
	}
	target := strings.ToUpper(words[1])
	// Not "get KEY" of memcached.
	return words[0] == "GET" || target[0] == '/' || strings.HasPrefix(target, "HTTP:") || strings.HasPrefix(target, "HTTPS:")
}

// beginTLS checks and forwards a ClientHello, and forwards the response. It returns the rest of begin. A
// server can request a second ClientHello (RFC 8446, 4.1.4) and may use the name in that. So beginTLS
// forwards nothing else before the server has responded.
func beginTLS(inner net.Conn, begin []byte, up net.Conn, t target) (rest []byte, err error) {
	left := bytes.NewReader(begin)
	client := io.MultiReader(left, inner)
	passHello := func() error {
		_ = inner.SetReadDeadline(time.Now().Add(beginBound))
		hello, err := checkHello(client, t)
		if err == nil {
			_, err = up.Write(hello)
		}
		return err
	}
	if err := passHello(); err != nil {
		return nil, err
	}
	_ = up.SetReadDeadline(time.Now().Add(answerBound))
	again, err := passAnswer(inner, up)
	if err == nil && again { // no server requests a third
		err = passHello()
	}
	if err != nil {
		return nil, err
	}
	_ = up.SetDeadline(time.Time{})
	rest, _ = io.ReadAll(left) // from memory
	return rest, nil
}

// checkHello reads a ClientHello and refuses it if its name differs from the tunnel's. In a tunnel to an
// address, any name is allowed, because the list contains the address itself.
func checkHello(client io.Reader, t target) (read []byte, err error) {
	hello, read, err := readHello(client)
	if err == io.EOF { // the client has given up
		return nil, err
	}
	if err != nil {
		return nil, refusal("it does not start with a valid ClientHello")
	}
	named, ok := newTarget(hello.ServerName, t.port)
	switch {
	case t.addr.IsValid():
		return read, nil
	case slices.Contains(hello.Extensions, extensionECH):
		return nil, refusal("the TLS server name is encrypted")
	case hello.ServerName == "":
		return nil, refusal("TLS without a server name")
	case !ok || named.host != t.host:
		return nil, refusal("the TLS server name differs: " + hello.ServerName)
	}
	return read, nil
}

// extensionECH is encrypted_client_hello (RFC 9849). It has the actual name, encrypted for the server.
const extensionECH = 0xfe0d

// Types of TLS records (RFC 8446, 5.1), and the length of their header.
const (
	recordFirst     = 20
	recordAlert     = 21
	recordHandshake = 22
	recordLast      = 24
	recordHeader    = 5
)

func isRecord(begin []byte) bool { return begin[0] >= recordFirst && begin[0] <= recordLast }

// readRecord reads a TLS record. If the header is invalid, it returns only that.
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

// readHello reads records up to the end of the first handshake message, and lets crypto/tls parse it.
// Other records may come before it: in TLS 1.3 an empty change_cipher_spec, and early data, which the
// server skips. More data in the last record is an error: the server would read it as the next message.
func readHello(from io.Reader) (hello *tls.ClientHelloInfo, read []byte, err error) {
	from = io.LimitReader(from, maxBegin)
	const header = 4            // the type of the message, and three bytes of length
	var records, message []byte // handshake only
	for size := header; len(message) < size; {
		record, err := readRecord(from)
		if err == nil && !isRecord(record) {
			err = errors.New("invalid record")
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
			return nil, nil, errors.New("data after the message in its record")
		}
	}
	err = tls.Server(&recorded{from: bytes.NewReader(records)}, &tls.Config{GetConfigForClient: func(h *tls.ClientHelloInfo) (*tls.Config, error) {
		hello = h
		return nil, errors.New("parsed")
	}}).Handshake()
	if hello != nil {
		err = nil
	}
	return hello, read, err
}

// recorded is a connection that replays data. It discards the alert that crypto/tls writes.
type recorded struct {
	net.Conn
	from io.Reader
}

func (r *recorded) Read(b []byte) (int, error)  { return r.from.Read(b) }
func (r *recorded) Write(b []byte) (int, error) { return len(b), nil }

// passAnswer forwards the server's response until it is clear whether it requests a second ClientHello.
func passAnswer(inner io.Writer, up io.Reader) (again bool, err error) {
	for {
		record, err := readRecord(up)
		if _, writeErr := inner.Write(record); err == nil {
			err = writeErr
		}
		if err != nil || record[0] != recordAlert { // an alert may be a warning
			return err == nil && asksAgain(record), err
		}
	}
}

// asksAgain reports whether a record may be a HelloRetryRequest, a ServerHello with a special random value
// (RFC 8446, 4.1.3). A record that is too short to tell counts as one.
func asksAgain(record []byte) bool {
	const random = recordHeader + 4 + 2
	if record[0] != recordHandshake {
		return false
	}
	return len(record) < random+len(retryRandom) || bytes.HasPrefix(record[random:], retryRandom[:])
}

var retryRandom = sha256.Sum256([]byte("HelloRetryRequest"))
