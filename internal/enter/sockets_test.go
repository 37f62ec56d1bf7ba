package enter_test

import (
	"io"
	"net"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/enter"
	"github.com/sbxrun/sbxrun/internal/supervise"
)

// A process outside listens and connects in a room's network namespace with sockets that were made there
// (network_namespaces(7)).
func TestSockets(t *testing.T) {
	sb := idle(t)
	fds, err := enter.Sockets(sb.Room, sb.Cred, []uint16{80, 3128}, 20)
	if err != nil {
		t.Fatal(err)
	}
	if len(fds) != 22 {
		t.Fatalf("%d sockets", len(fds))
	}
	first := os.NewFile(uintptr(fds[0]), "socket")
	l, err := net.FileListener(first)
	first.Close()
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		c, err := l.Accept()
		if err == nil {
			_, _ = io.WriteString(c, "from outside\n")
			c.Close()
		}
	}()
	text, _ := run(t, sb, entry(sb, "bash", "-c", `exec 3<>/dev/tcp/127.0.0.1/80; cat <&3`), supervise.Options{})
	if text != "from outside\n" {
		t.Errorf("%q", text)
	}
	c, err := net.Dial("tcp", "127.0.0.1:3128")
	if err == nil {
		c.Close()
		t.Error("the room's port is the host's")
	}
	// Connect to the second listener.
	addr := &unix.SockaddrInet6{Port: 3128}
	addr.Addr = [16]byte{10: 0xff, 11: 0xff, 12: 127, 15: 1}
	if err := unix.Connect(fds[2], addr); err != nil && err != unix.EINPROGRESS {
		t.Errorf("connect in the room: %v", err)
	}
	if _, err := enter.Sockets(sb.Room, sb.Cred, []uint16{3128}, 0); err == nil {
		t.Error("a port is there twice")
	}
	for _, fd := range fds[1:] {
		unix.Close(fd)
	}
	unharmed(t, sb)
}
