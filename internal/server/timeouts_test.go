package server

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sbxrun/sbxrun/internal/config"
	"github.com/sbxrun/sbxrun/tests/check"
)

// one is a listener for one connection.
type one struct {
	net.Listener
	conns chan net.Conn
}

func (o one) Accept() (net.Conn, error) {
	c, ok := <-o.conns
	if !ok {
		return nil, net.ErrClosed
	}
	return c, nil
}
func (o one) Close() error   { return nil }
func (o one) Addr() net.Addr { return &net.UnixAddr{} }

// A client that keeps reading or sending pieces is served completely, however long that takes, as is one
// whose request is read late. An idle client is disconnected.
func TestPatience(t *testing.T) {
	const size = 4 << 20
	body := bytes.Repeat([]byte("x"), size)
	for _, test := range []struct {
		name                string
		sends, reads, still time.Duration // between pieces; still: after the first one of the response
		pauses              time.Duration // of the handler, after the beginning of the request
		takes               time.Duration // minimum duration
		whole               bool
	}{
		{name: "quick", whole: true},
		{name: "reads slowly", reads: 20 * time.Second, takes: 20 * time.Minute, whole: true},
		{name: "sends slowly", sends: 20 * time.Second, takes: 20 * time.Minute, whole: true},
		{name: "is not read from", pauses: time.Hour, takes: time.Hour, whole: true},
		{name: "does not read", still: time.Hour, takes: 30 * time.Second},
		{name: "does not send", sends: time.Hour, takes: 30 * time.Second},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "state")
			synctest.Test(t, func(t *testing.T) {
				c := config.Default()
				c.StateDir = dir
				s, err := New(c, nil, nowhere{}, slog.New(slog.NewJSONHandler(io.Discard, nil)), "test")
				check.Must(t, err)
				defer s.Drain(t.Context())
				ended := make(chan error, 1)
				h := s.authenticated(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					_, err := io.ReadFull(r.Body, make([]byte, 1000))
					time.Sleep(test.pauses)
					if err == nil {
						_, err = io.Copy(io.Discard, r.Body)
					}
					if err != nil {
						ended <- err
						return
					}
					_, err = w.Write(body)
					ended <- err
				}))
				l := one{conns: make(chan net.Conn, 1)}
				web := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					h.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), peerKey, "uid-1")))
				})}
				done := make(chan struct{})
				go func() {
					defer close(done)
					_ = web.Serve(l)
				}()
				client, server := net.Pipe() // unbuffered
				l.conns <- server
				began := time.Now()
				sent := make(chan struct{})
				go func() {
					defer close(sent)
					_, err := io.WriteString(client, "POST / HTTP/1.1\r\nHost: sbxrun\r\nContent-Length: 4194304\r\nConnection: close\r\n\r\n")
					for rest := body; err == nil && len(rest) > 0; rest = rest[pieceSize:] {
						time.Sleep(test.sends)
						_, err = client.Write(rest[:pieceSize])
					}
				}()
				got, piece := 0, make([]byte, pieceSize)
				for {
					n, err := client.Read(piece)
					got += bytes.Count(piece[:n], []byte("x"))
					if err != nil {
						break
					}
					time.Sleep(test.reads * time.Duration(n) / pieceSize)
					if strings.HasPrefix(string(piece), "HTTP") {
						time.Sleep(test.still)
					}
				}
				err = <-ended
				took := time.Since(began)
				check.That(t, (got >= size) == test.whole && (err == nil) == test.whole && took >= test.takes && (test.still != 0 || test.whole || took <= 2*test.takes),
					"%d bytes after %v, %v", got, took, err)
				client.Close()
				<-sent
				close(l.conns)
				web.Close()
				<-done
			})
		})
	}
}

// linger reads the rest of a request before the connection is closed, so that the client sees the response.
func TestLinger(t *testing.T) {
	door, err := NewMiddleware(config.Default(), nil, slog.New(slog.DiscardHandler))
	check.Must(t, err)
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "socket"))
	check.Must(t, err)
	web := &http.Server{Handler: door.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.ReadFull(r.Body, make([]byte, 5))
		reads := make(chan struct{})
		go func() { // as a gateway does
			close(reads)
			_, _ = io.Copy(io.Discard, r.Body)
		}()
		<-reads
		time.Sleep(20 * time.Millisecond) // until the read blocks, which cannot be observed; otherwise net/http itself reads on
		_, _ = io.WriteString(w, "early")
	}))}
	defer web.Close()
	go func() { _ = web.Serve(l) }()
	c := dial(t, l.Addr(), "PUT /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
	in := bufio.NewReader(c)
	res, err := http.ReadResponse(in, nil)
	check.Must(t, err)
	for _, piece := range append(slices.Repeat([]string{"1\r\nx\r\n"}, 5), "0\r\n\r\n") {
		_, err := io.WriteString(c, piece)
		check.Must(t, err)
		time.Sleep(10 * time.Millisecond) // the pace of this client
	}
	text, err := io.ReadAll(res.Body)
	check.That(t, string(text) == "early" && err == nil, "%q, %v", text, err)
	text, err = io.ReadAll(in)
	check.That(t, len(text) == 0 && err == nil, "%q, %v", text, err)
}
