package cluster

import (
	"bufio"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/internal/config"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// TestAway: the log and the error say why NATS cannot be reached, where, and without the password.
func TestAway(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	harness.Must(t, err)
	l.Close() // nobody answers there
	c := config.Default()
	c.NATS.URL = fmt.Sprintf("me:secret@%s", l.Addr())
	from, to := io.Pipe()
	bus, err := Connect(&c, GatewayKind, slog.New(slog.NewTextHandler(to, nil)))
	harness.Must(t, err)
	said := make(chan string, 1)
	go func() {
		b := make([]byte, 4096)
		n, _ := from.Read(b)
		said <- string(b[:n])
		from.Close()
	}()
	var line string
	select {
	case line = <-said:
	case <-time.After(time.Minute):
		t.Fatal("the log says nothing")
	}
	bus.Close()
	for _, text := range []string{line, bus.Why().Error()} {
		if !strings.Contains(text, "connection refused") || !strings.Contains(text, "me:xxxxx@"+l.Addr().String()) || strings.Contains(text, "secret") {
			t.Errorf("%q", text)
		}
	}
}

// hung is a server of NATS that takes connections, and answers for a moment. Each connection is told of.
func hung(t *testing.T, each func(net.Conn)) (url string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	harness.Must(t, err)
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			t.Cleanup(func() { c.Close() })
			_, _ = io.WriteString(c, "INFO {\"max_payload\":1048576}\r\n")
			in := bufio.NewScanner(c)
			for in.Scan() && in.Text() != "PING" {
			}
			_, _ = io.WriteString(c, "PONG\r\n")
			each(c)
		}
	}()
	return "nats://" + l.Addr().String()
}

// TestSilent: a server that says nothing any more is left so early that whoever was connected to it is
// heard by another way before it would be lost.
func TestSilent(t *testing.T) {
	t.Parallel()
	came := make(chan time.Time, 100)
	c := config.Default()
	c.NATS.URL = hung(t, func(c net.Conn) {
		came <- time.Now()
		go io.Copy(io.Discard, c)
	})
	bus, err := Connect(&c, GatewayKind, slog.New(slog.DiscardHandler))
	harness.Must(t, err)
	defer bus.Conn.Close()
	const most = lostAfter - heartbeatInterval // since the last beat
	first := <-came
	if after := (<-came).Sub(first); after >= most {
		t.Errorf("after %v", after)
	}
	for end := time.Now().Add(time.Minute); bus.Reconnects() == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it is not counted")
		}
	}
}

// TestUnread: a server that reads nothing any more is left, although whoever writes to it holds the connection.
func TestUnread(t *testing.T) {
	t.Parallel()
	came := make(chan time.Time, 100)
	c := config.Default()
	c.NATS.URL = hung(t, func(net.Conn) { came <- time.Now() })
	bus, err := Connect(&c, GatewayKind, slog.New(slog.DiscardHandler))
	harness.Must(t, err)
	defer bus.Conn.Close()
	<-came
	done := make(chan struct{})
	defer close(done)
	go func() {
		for data := make([]byte, piece); ; {
			select {
			case <-done:
				return
			default:
				_ = bus.Publish("x", "", data)
			}
		}
	}()
	select {
	case <-came:
	case <-time.After(2 * lostAfter):
		t.Error("nobody leaves it")
	}
}
