package proxy

import (
	"bytes"
	"crypto/ecdh"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// echConfigs returns an ECHConfigList (RFC 9849, 4) with a public name.
func echConfigs(t *testing.T, publicName string) []byte {
	t.Helper()
	key, err := ecdh.X25519().GenerateKey(rand.Reader)
	check.Must(t, err)
	u16 := binary.BigEndian.AppendUint16
	public := key.PublicKey().Bytes()
	c := append(u16(u16([]byte{1}, 0x20), uint16(len(public))), public...) // config_id, DHKEM(X25519, HKDF-SHA256)
	c = u16(u16(u16(c, 4), 1), 1)                                          // HKDF-SHA256, AES-128-GCM
	c = u16(append(append(c, 0, byte(len(publicName))), publicName...), 0)
	c = append(u16(u16(nil, extensionECH), uint16(len(c))), c...)
	return append(u16(nil, uint16(len(c))), c...)
}

// A tunnel to a name permits TLS only with that name, unencrypted. crypto/tls creates the ClientHello.
func TestHello(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		to, name string
		ech      bool
		want     string // the refusal
	}{
		{to: "www.example.org:443", name: "www.example.org"},
		{to: "www.example.org:443", name: "other.example.org", want: "differs: other.example.org"},
		{to: "www.example.org:443", want: "without a server name"},
		{to: "www.example.org:443", name: "other.example.org", ech: true, want: "is encrypted"},
		{to: "192.0.2.1:443", name: "other.example.org", ech: true},
		{to: "host.example.org:443", name: "Host.Example.ORG"},
		{to: "host.example.org:443", name: "ho\u017ft.example.org", want: "differs"}, // which folds to s
		{to: "192.0.2.1:443"},
	} {
		config := &tls.Config{ServerName: tt.name, InsecureSkipVerify: tt.name == ""}
		if tt.ech {
			config.EncryptedClientHelloConfigList = echConfigs(t, "www.example.org")
		}
		client, server := tcpPair(t)
		over := make(chan error)
		go func() { over <- tls.Client(client, config).Handshake() }()
		to, _ := parseTarget(tt.to, 0)
		read, err := checkHello(server, to)
		_, refused := errors.AsType[refusal](err)
		check.That(t, (err != nil || tt.want == "") && (err == nil || tt.want != "" && refused && strings.Contains(err.Error(), tt.want)), "%+v: %v", tt, err)
		kind, sure := classify(read)
		check.That(t, err != nil || kind == kindTLS && sure, "%+v: classified as %d, %v", tt, kind, sure)
		server.Close()
		check.That(t, <-over != nil, "%+v: there was a server", tt)
	}
}

// helloFor returns the ClientHello for a server name, in one record.
func helloFor(name string) []byte {
	var c pretended
	_ = tls.Client(&c, &tls.Config{ServerName: name}).Handshake() // there is no response
	return c.Bytes()
}

// pretended is a connection without a peer.
type pretended struct {
	net.Conn
	bytes.Buffer
}

func (p *pretended) Read([]byte) (int, error)         { return 0, io.EOF }
func (p *pretended) Write(b []byte) (int, error)      { return p.Buffer.Write(b) }
func (p *pretended) Close() error                     { return nil }
func (p *pretended) SetWriteDeadline(time.Time) error { return nil }

// record returns a TLS record.
func record(kind byte, body []byte) []byte {
	return append(binary.BigEndian.AppendUint16([]byte{kind, 3, 3}, uint16(len(body))), body...)
}

// A server can request a second ClientHello and use the name in that. It is checked like the first one,
// however it arrives.
func TestSecondHello(t *testing.T) {
	t.Parallel()
	host := harness.Listen(t)
	port := host.Addr().(*net.TCPAddr).Port
	name := fmt.Sprintf("www.example.org:%d", port)
	s := newServer(listing(t, fmt.Sprintf("%s,127.0.0.1:%d", name, port), map[string]string{"www.example.org": "127.0.0.1"}))
	proxy := serve(t, s)

	const ccs, alert, handshake, data = 20, 21, 22, 23
	good, bad := helloFor("www.example.org"), helloFor("other.example.org")
	random := sha256.Sum256([]byte("HelloRetryRequest"))
	serverHello := func(random []byte) []byte {
		return record(handshake, slices.Concat([]byte{2, 0, 0, 40, 3, 3}, random, make([]byte, 6)))
	}
	again, plain := serverHello(random[:]), serverHello(make([]byte, 32))
	between := slices.Concat(record(ccs, []byte{1}), record(data, make([]byte, 3000)))
	parts := func(b []byte) []byte { return slices.Concat(record(handshake, b[5:20]), record(handshake, b[20:])) }
	both := record(handshake, slices.Concat(good[5:], bad[5:])) // in one record
	for _, tt := range []struct {
		what                 string
		first, answer, other []byte // other follows the response
		want                 []byte // at the host, after the first hello
		refused              bool
	}{
		{"the same", good, again, good, good, false},
		{"the same, in parts and after others", good, again, slices.Concat(between, parts(good)), slices.Concat(between, parts(good)), false},
		{"another", good, again, bad, nil, true},
		{"another, in parts and after others", good, again, slices.Concat(between, parts(bad)), nil, true},
		{"another at once", slices.Concat(good, bad), again, nil, nil, true},
		{"another, after an alert", good, slices.Concat(record(alert, []byte{1, 112}), again), bad, nil, true},
		{"another, in a record with the same", good, again, both, nil, true},
		{"another, after an answer that does not tell", good, parts(again)[:20], bad, nil, true},
		{"the same, after what is no record", good, again, slices.Concat([]byte("hello"), good), nil, true},
		{"no second one is requested", good, plain, bad, bad, false}, // which the host refuses
		{"no TLS", good, []byte("220 ready"), []byte("x"), []byte("x"), false},
	} {
		before := s.counts.of(ofHost, name).refused.Load()
		c, b := get(t, proxy, "CONNECT "+name+" HTTP/1.1\r\n\r\n"+string(tt.first), http.StatusOK)
		up := accepted(t, host)
		first := make([]byte, len(good))
		_, err := io.ReadFull(up, first)
		check.That(t, err == nil && bytes.Equal(first, good), "%s: the first is %x, %v", tt.what, first, err)
		_, err = up.Write(tt.answer)
		check.OK(t, err)
		got := make([]byte, len(tt.answer))
		_, err = io.ReadFull(b, got)
		check.That(t, err == nil && bytes.Equal(got, tt.answer), "%s: the answer is %x, %v", tt.what, got, err)
		_, err = c.Write(tt.other)
		check.OK(t, err)
		_ = c.(*net.TCPConn).CloseWrite() // fails if it is closed
		got, _ = io.ReadAll(up)
		check.That(t, bytes.Equal(got, tt.want), "%s: the host got %x", tt.what, got)
		up.Close()
		refused := s.counts.of(ofHost, name).refused.Load() > before
		check.That(t, refused == tt.refused, "%s: refused: %v", tt.what, refused)
	}
	get(t, proxy, "CONNECT "+name+" HTTP/1.1\r\n\r\n"+string(both), http.StatusOK)
	got, _ := io.ReadAll(accepted(t, host))
	check.That(t, len(got) == 0, "two in the first record: the host got %x", got)
}

// Data that a host sends first reaches the client, however short it is, except for HTTP/2, where a request
// could address another host.
func TestSpeaksFirst(t *testing.T) {
	t.Parallel()
	host := harness.Listen(t)
	address := host.Addr().String()
	port := host.Addr().(*net.TCPAddr).Port
	name := fmt.Sprintf("www.example.org:%d", port)
	s := newServer(listing(t, name+","+address, map[string]string{"www.example.org": "127.0.0.1"}))
	proxy := serve(t, s)
	for _, tt := range []struct {
		says, to, begin string
		refused         bool
	}{
		{"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00\x64", name, "", true},
		{"\x00\x00\x00\x04\x00\x00\x00\x00\x00", name, "PRI *", true},
		{"\x00\x00\x00\x04\x00\x00\x00\x00\x00", address, "", false},
		{"\x00\x00\x00\x04\x00\x00\x00\x00\x01", name, "", false},
		{"\x00\x00\x00\x04", name, "", false},
		{"220 it speaks first\r\n", name, "", false},
	} {
		before := s.counts.of(ofHost, tt.to).refused.Load()
		c, b := get(t, proxy, "CONNECT "+tt.to+" HTTP/1.1\r\n\r\n"+tt.begin, http.StatusOK)
		up := accepted(t, host)
		_, err := io.WriteString(up, tt.says)
		check.Must(t, err)
		got := make([]byte, len(tt.says))
		n, _ := io.ReadFull(b, got) // fails if it is closed
		refused := n == 0
		check.That(t, refused == tt.refused && (refused || string(got) == tt.says), "%q to %s: the client got %q", tt.says, tt.to, got[:n])
		refused = s.counts.of(ofHost, tt.to).refused.Load() > before
		check.That(t, refused == tt.refused, "%q to %s: refused: %v", tt.says, tt.to, refused)
		c.Close()
		up.Close()
	}
}

// The response to a ClientHello has a timeout.
func TestAnswerBound(t *testing.T) {
	t.Parallel()
	_, inner := tcpPair(t)
	up, _ := tcpPair(t)
	to, _ := parseTarget("www.example.org:443", 0)
	begin := time.Now()
	_, err := beginTLS(inner, helloFor("www.example.org"), hurried{up, begin.Add(2 * answerBound)}, to)
	check.That(t, errors.Is(err, os.ErrDeadlineExceeded) && time.Since(begin) <= answerBound/2, "after %v: %v", time.Since(begin), err)
}

// hurried is a connection whose reads time out at once if they have a deadline within most.
type hurried struct {
	*net.TCPConn
	most time.Time
}

func (h hurried) SetReadDeadline(until time.Time) error {
	if until.Before(h.most) {
		until = past
	}
	return h.TCPConn.SetReadDeadline(until)
}

// TLS clients reach hosts with and without a second ClientHello.
func TestTLS(t *testing.T) {
	t.Parallel()
	host := httptest.NewUnstartedServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(rw, r.Body)
	}))
	host.TLS = &tls.Config{CurvePreferences: []tls.CurveID{tls.CurveP384}}
	host.StartTLS()
	defer host.Close()
	port := host.Listener.Addr().(*net.TCPAddr).Port
	name := fmt.Sprintf("example.com:%d", port) // the name in its certificate
	proxy := serving(t, listing(t, fmt.Sprintf("%s,127.0.0.1:%d", name, port), map[string]string{"example.com": "127.0.0.1"}))
	for again, config := range map[bool]*tls.Config{
		true:  {},
		false: {CurvePreferences: []tls.CurveID{tls.CurveP384}},
	} {
		for _, version := range []uint16{tls.VersionTLS12, tls.VersionTLS13} {
			config.MaxVersion, config.RootCAs = version, host.Client().Transport.(*http.Transport).TLSClientConfig.RootCAs
			client := http.Client{Transport: &http.Transport{TLSClientConfig: config, DisableKeepAlives: true, Proxy: http.ProxyURL(&url.URL{Scheme: "http", Host: proxy})}}
			answer, err := client.Post("https://"+name, "", strings.NewReader(strings.Repeat("x", 1<<20)))
			if err != nil {
				t.Errorf("%x, %v: %v", version, again, err)
				continue
			}
			got, err := io.ReadAll(answer.Body)
			check.That(t, err == nil && len(got) == 1<<20 && answer.TLS.HelloRetryRequest == (again && version == tls.VersionTLS13),
				"%x, %v: %d bytes, %v, asked again: %v", version, again, len(got), err, answer.TLS.HelloRetryRequest)
			answer.Body.Close()
		}
	}
}
