// Package cluster tests servers behind a gateway, with NATS between them. It is a module of its own: only
// these tests need NATS's server, which takes longer to compile than all of sbxrun.
package cluster

import (
	"fmt"
	"net"
	"testing"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/sbxrun/sbxrun/tests/harness"
)

func TestMain(m *testing.M) { harness.Main(m) }

// options are those of one server of NATS on the loopback interface.
func options(t *testing.T) *server.Options {
	return &server.Options{Host: "127.0.0.1", Port: freePort(t), NoLog: true, NoSigs: true, JetStream: true, StoreDir: t.TempDir()}
}

// freePort is one that nobody has: what was killed comes back at the same.
func freePort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// startNATS starts a server of NATS in this process.
func startNATS(t *testing.T, o *server.Options) *server.Server {
	t.Helper()
	s, err := server.NewServer(o)
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	if !s.ReadyForConnections(harness.Bound) {
		t.Fatal("NATS is not ready")
	}
	return s
}

func url(o *server.Options) string { return fmt.Sprintf("nats://127.0.0.1:%d", o.Port) }
