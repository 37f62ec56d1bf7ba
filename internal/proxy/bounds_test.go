package proxy

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// tcpPair is a connection's two ends.
func tcpPair(t *testing.T) (client, server *net.TCPConn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	s, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	for _, end := range []net.Conn{c, s} {
		_ = end.SetDeadline(time.Now().Add(time.Minute))
		t.Cleanup(func() { end.Close() })
	}
	return c.(*net.TCPConn), s.(*net.TCPConn)
}

// TestIdle: a connection that has moved nothing for a time is ended, both ways, and one that has is
// not, although all that was moved went one way.
func TestIdle(t *testing.T) {
	t.Parallel()
	const idle = time.Second
	var all conns
	// relayed is what a sandbox and a host have of a connection.
	relayed := func() (inside, host *net.TCPConn) {
		inside, inner := tcpPair(t)
		outer, host := tcpPair(t)
		if !all.add(inner) {
			t.Fatal("it is not taken")
		}
		go func() {
			defer all.remove(inner)
			defer outer.Close()
			relay(inner, outer, nil, new(counter))
		}()
		return inside, host
	}
	begin := time.Now()
	quietInside, quietHost := relayed()
	busyInside, busyHost := relayed()
	ended := make(chan error, 2)
	for _, c := range []net.Conn{quietInside, quietHost} {
		go func() {
			_, err := c.Read(make([]byte, 1))
			ended <- err
		}()
	}
	for left := 2; left > 0; {
		if _, err := busyHost.Write([]byte("x")); err != nil {
			t.Fatalf("the busy one has ended: %v", err)
		}
		if _, err := io.ReadFull(busyInside, make([]byte, 1)); err != nil {
			t.Fatalf("the busy one has ended: %v", err)
		}
		all.endIdle(idle)
		select {
		case err := <-ended:
			if left--; !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET) || time.Since(begin) < idle/2 {
				t.Errorf("after %v: %v", time.Since(begin), err)
			}
		case <-time.After(time.Millisecond):
		}
	}
	busyInside.Close()
	busyHost.Close()
	all.done.Wait()
}

// TestDialBound: neither a name server nor a host that does not answer is waited for.
func TestDialBound(t *testing.T) {
	t.Parallel()
	r := listing(t, "slow.example.org", nil)
	r.resolve = func(ctx context.Context, _ string) ([]netip.Addr, error) {
		if until, ok := ctx.Deadline(); !ok || time.Until(until) > dialBound {
			t.Errorf("it may take until %v", until)
		}
		return nil, context.DeadlineExceeded
	}
	get(t, serving(t, r), "GET http://slow.example.org/ HTTP/1.1\r\nHost: slow.example.org\r\n\r\n", http.StatusGatewayTimeout)

	// One that takes no connections, with as many as it has not taken.
	l, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(l)
	if err = unix.Bind(l, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err == nil {
		err = unix.Listen(l, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	at, err := unix.Getsockname(l)
	if err != nil {
		t.Fatal(err)
	}
	port := at.(*unix.SockaddrInet4).Port
	for i := range 5 {
		fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			t.Fatal(err)
		}
		socket := os.NewFile(uintptr(fd), "socket")
		defer socket.Close()
		err = connect(socket, loopbacks[0], uint16(port), time.Now().Add(100*time.Millisecond))
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return
		}
		if err != nil {
			t.Fatalf("%d: %v", i, err)
		}
	}
	t.Error("it has connected more often than there is room")
}
