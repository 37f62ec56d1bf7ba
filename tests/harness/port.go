package harness

import (
	"fmt"
	"net"

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
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	check.Must(t, err)
	t.Cleanup(func() { unix.Close(fd) })
	check.Must(t, unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	at, err := unix.Getsockname(fd)
	check.Must(t, err)
	return fmt.Sprintf("127.0.0.1:%d", at.(*unix.SockaddrInet4).Port)
}
