package cluster

import (
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/internal/config"
)

// TestAway: the log and the error say why NATS cannot be reached, where, and without the password.
func TestAway(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close() // nobody answers there
	c := config.Default()
	c.NATS.URL = fmt.Sprintf("me:secret@%s", l.Addr())
	from, to := io.Pipe()
	bus, err := Connect(&c, GatewayKind, slog.New(slog.NewTextHandler(to, nil)))
	if err != nil {
		t.Fatal(err)
	}
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
