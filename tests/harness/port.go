package harness

import (
	"fmt"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
)

// Listen returns a listener on an unused port of 127.0.0.1, which is closed with the test.
func Listen(t T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	check.Must(t, err)
	t.Cleanup(func() { l.Close() })
	return l
}

// RefusingAddress returns a TCP address that refuses connections and that no other process can get until the end of
// the test: a socket is bound to it and does not listen.
func RefusingAddress(t T) string {
	t.Helper()
	_, port := bound(t)
	return fmt.Sprintf("127.0.0.1:%d", port)
}

// SilentPort returns a port of 127.0.0.1 whose backlog of connections is full, and which never accepts one.
func SilentPort(t T) int {
	t.Helper()
	fd, port := bound(t)
	check.Must(t, unix.Listen(fd, 0))
	for failed := 0; failed < 3; { // the backlog has room for some; on a busy machine one may fail before that
		c, err := net.DialTimeout("tcp", fmt.Sprintf("127.0.0.1:%d", port), 200*time.Millisecond)
		if err != nil {
			failed++
			continue
		}
		t.Cleanup(func() { c.Close() })
	}
	return port
}

// bound returns a socket that is bound to an unused port.
func bound(t T) (fd, port int) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	check.Must(t, err)
	t.Cleanup(func() { unix.Close(fd) })
	check.Must(t, unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	at, err := unix.Getsockname(fd)
	check.Must(t, err)
	return fd, at.(*unix.SockaddrInet4).Port
}
