package cluster

import (
	"bufio"
	"io"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/internal/config"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// The log and the error say why and where NATS is unreachable, without the password.
func TestUnreachable(t *testing.T) {
	address := harness.RefusingAddress(t)
	c := config.Default()
	c.NATS.URL = "me:secret@" + address
	from, to := io.Pipe()
	bus, err := Connect(&c, GatewayKind, slog.New(slog.NewTextHandler(to, nil)))
	check.Must(t, err)
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
		t.Fatal("the log is empty")
	}
	bus.Close()
	for _, text := range []string{line, bus.Why().Error()} {
		check.That(t, strings.Contains(text, "connection refused") && strings.Contains(text, "me:xxxxx@"+address) && !strings.Contains(text, "secret"), "%q", text)
	}
}

// hung is a NATS server that accepts connections, and responds only for a moment. It reports each connection.
func hung(t *testing.T, each func(net.Conn)) (url string) {
	t.Helper()
	l := harness.Listen(t)
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

// A client leaves a server that stops reading, although a blocked write holds the connection.
func TestUnread(t *testing.T) {
	t.Parallel()
	came := make(chan time.Time, 100)
	c := config.Default()
	c.NATS.URL = hung(t, func(net.Conn) { came <- time.Now() })
	bus, err := Connect(&c, GatewayKind, slog.New(slog.DiscardHandler))
	check.Must(t, err)
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
	case <-time.After(harness.Bound):
		t.Error("nobody leaves it")
	}
}
