package enter_test

import (
	"io"
	"net"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/enter"
	"github.com/sbxrun/sbxrun/internal/supervise"
	"github.com/sbxrun/sbxrun/tests/check"
)

// A process outside listens and connects in a room's network namespace with sockets that were made there
// (network_namespaces(7)).
func TestSockets(t *testing.T) {
	sb := idle(t)
	fds, err := enter.Sockets(sb.Room, sb.Cred, []uint16{80, 3128}, 20)
	check.Must(t, err)
	check.Require(t, len(fds) == 22, "%d sockets", len(fds))
	first := os.NewFile(uintptr(fds[0]), "socket")
	l, err := net.FileListener(first)
	first.Close()
	check.Must(t, err)
	defer l.Close()
	go func() {
		c, err := l.Accept()
		if err == nil {
			_, _ = io.WriteString(c, "from outside\n")
			c.Close()
		}
	}()
	text, _ := run(t, sb, entry(sb, "bash", "-c", `exec 3<>/dev/tcp/127.0.0.1/80; cat <&3`), supervise.Options{})
	check.That(t, text == "from outside\n", "%q", text)
	c, err := net.Dial("tcp", "127.0.0.1:3128")
	if err == nil {
		c.Close()
		t.Error("the room's port is the host's")
	}
	// Connect to the second listener.
	addr := &unix.SockaddrInet6{Port: 3128}
	addr.Addr = [16]byte{10: 0xff, 11: 0xff, 12: 127, 15: 1}
	err = unix.Connect(fds[2], addr)
	check.That(t, err == nil || err == unix.EINPROGRESS, "connect in the room: %v", err)
	_, err = enter.Sockets(sb.Room, sb.Cred, []uint16{3128}, 0)
	check.That(t, err != nil, "a port is there twice")
	for _, fd := range fds[1:] {
		unix.Close(fd)
	}
	unharmed(t, sb)
}
