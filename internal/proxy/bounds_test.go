package proxy

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/network"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// tcpPair returns the two ends of a connection.
func tcpPair(t *testing.T) (client, server *net.TCPConn) {
	t.Helper()
	l := harness.Listen(t)
	c, err := net.Dial("tcp", l.Addr().String())
	check.Must(t, err)
	s, err := l.Accept()
	check.Must(t, err)
	for _, end := range []net.Conn{c, s} {
		_ = end.SetDeadline(time.Now().Add(time.Minute))
		t.Cleanup(func() { end.Close() })
	}
	return c.(*net.TCPConn), s.(*net.TCPConn)
}

// accepted returns the next connection to a listener.
func accepted(t *testing.T, l net.Listener) net.Conn {
	t.Helper()
	c, err := l.Accept()
	check.Must(t, err)
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	return c
}

func init() { endBound = harness.Scaled(endBound) }

// Idle connections of the proxy and of published ports are closed on both sides, whatever they wait for.
// Connections with traffic in only one direction are not idle.
func TestIdle(t *testing.T) {
	t.Parallel()
	idle := harness.Deadline(3 * time.Second) // a busy machine may not run the active connections for a while
	hosts, proxy, port := harness.Listen(t), harness.Listen(t), harness.Listen(t)
	address := hosts.Addr().String()
	p := &process{server: newServer(listing(t, address, nil))}
	defer p.server.end()
	go p.handler(network.Listener{Kind: network.KindProxy}, proxy)()
	led := new(conns)
	p.conns = append(p.conns, led)
	go p.forward(port, led, "published", true, func() (net.Conn, error) { return net.Dial("tcp", address) })
	// relayed returns both ends of a connection through a listener.
	relayed := func(by net.Listener) (inside, host *net.TCPConn) {
		request, status := "", []int(nil)
		if by == proxy {
			request, status = "CONNECT "+address+" HTTP/1.1\r\n\r\n", []int{http.StatusOK}
		}
		conn, _ := get(t, by.Addr().String(), request+"\x01", status...)
		up := accepted(t, hosts)
		_, err := io.ReadFull(up, make([]byte, 1))
		check.Must(t, err)
		return conn.(*net.TCPConn), up.(*net.TCPConn)
	}
	fill := func(c net.Conn) {
		for err := error(nil); err == nil; {
			_, err = c.Write(make([]byte, smallPiece)) // until it is closed
		}
	}
	begin := time.Now()
	var busy [][2]net.Conn
	for _, by := range []net.Listener{proxy, port} {
		inside, host := relayed(by)
		busy = append(busy, [2]net.Conn{host, inside})
		relayed(by) // an idle one
		inside, _ = relayed(by)
		_ = inside.CloseWrite() // the host ignores it
		inside, _ = relayed(by)
		go fill(inside)
		_, host = relayed(by)
		go fill(host)
	}
	go p.closeIdle(idle/100, idle)
	left := func() (n int) {
		for _, c := range p.conns {
			c.mu.Lock()
			n += len(c.open)
			c.mu.Unlock()
		}
		return n
	}
	harness.Until(t, time.Minute, "the idle connections to be closed", func() bool {
		for _, way := range busy {
			_, err := way[0].Write([]byte("x"))
			check.Require(t, err == nil, "an active connection was closed: %v", err)
			_, err = io.ReadFull(way[1], make([]byte, 1))
			check.Require(t, err == nil, "an active connection was closed: %v", err)
		}
		check.Require(t, left() >= 10 || time.Since(begin) >= idle/2, "a connection was closed after %v", time.Since(begin))
		return left() == len(busy)
	})
}

// When the client of a request is gone, name resolution and connection attempts end.
func TestGivenUp(t *testing.T) {
	t.Parallel()
	r := listing(t, "slow.example.org", nil)
	asked, over := make(chan bool), make(chan bool)
	r.resolve = func(ctx context.Context, _ string) ([]netip.Addr, error) {
		asked <- true
		<-ctx.Done()
		over <- errors.Is(ctx.Err(), context.Canceled)
		return nil, ctx.Err()
	}
	c, _ := get(t, serving(t, r), "GET http://slow.example.org/ HTTP/1.1\r\nHost: slow.example.org\r\n\r\n")
	<-asked
	c.Close()
	check.That(t, <-over, "it continued until the timeout")
}

// Lookups that were given up leave no sockets, also if a lookup of the same name was under way.
func TestLookupGivenUp(t *testing.T) {
	t.Parallel()
	silent, err := net.ListenPacket("udp", "127.0.0.1:0")
	check.Must(t, err)
	defer silent.Close()
	var open, asked atomic.Int64
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		conn, err := new(net.Dialer).DialContext(ctx, "udp", silent.LocalAddr().String())
		if err != nil {
			return nil, err
		}
		open.Add(1)
		asked.Add(1)
		return &patient{UDPConn: conn.(*net.UDPConn), open: &open}, nil
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var over sync.WaitGroup
	for range 2 {
		over.Go(func() {
			_, err := lookupBy(ctx, "slow.example.org", dial)
			check.That(t, err != nil, "a silent name server answered")
		})
	}
	harness.Until(t, time.Minute, "the queries", func() bool { return asked.Load() >= 2 })
	cancel()
	over.Wait()
	harness.Until(t, time.Minute, "the sockets to be closed", func() bool { return open.Load() == 0 })
}

// patient is a connection without timeouts.
type patient struct {
	*net.UDPConn
	open *atomic.Int64
	once sync.Once
}

func (c *patient) SetDeadline(time.Time) error { return nil }

func (c *patient) Close() error {
	c.once.Do(func() { c.open.Add(-1) })
	return c.UDPConn.Close()
}

// A connection whose peer is gone counts as idle.
func TestGone(t *testing.T) {
	t.Parallel()
	var c conns
	gone, conn := tcpPair(t)
	_, there := tcpPair(t)
	half, waiting := tcpPair(t)
	for _, conn := range []*net.TCPConn{conn, there, waiting} {
		c.add(conn)
	}
	_ = half.CloseWrite()
	_ = gone.SetLinger(0)
	gone.Close()
	harness.Until(t, time.Minute, "the connection to be closed", func() bool {
		c.closeIdle(idleBound)
		return conn.SetDeadline(time.Time{}) != nil
	})
	for _, conn := range []*net.TCPConn{there, waiting} {
		check.OK(t, conn.SetDeadline(time.Time{}))
	}
}

// Name servers and hosts that do not respond have a timeout.
func TestDialBound(t *testing.T) {
	t.Parallel()
	r := listing(t, "slow.example.org", nil)
	r.resolve = func(ctx context.Context, _ string) ([]netip.Addr, error) {
		until, ok := ctx.Deadline()
		check.That(t, ok && time.Until(until) <= dialBound, "the deadline is %v", until)
		return nil, context.DeadlineExceeded
	}
	get(t, serving(t, r), "GET http://slow.example.org/ HTTP/1.1\r\nHost: slow.example.org\r\n\r\n", http.StatusGatewayTimeout)
	socket := os.NewFile(uintptr(freeSocket(t)), "socket")
	defer socket.Close()
	err := connect(t.Context(), socket, loopbacks[0], uint16(harness.SilentPort(t)), 100*time.Millisecond)
	check.That(t, errors.Is(err, os.ErrDeadlineExceeded), "%v", err)
}

// freeSocket returns a socket like those of sbxrun.
func freeSocket(t *testing.T) int {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	check.Must(t, err)
	return fd
}

// The end of the proxy aborts connection attempts, which do not count as refusals.
func TestEnd(t *testing.T) {
	t.Parallel()
	r := listing(t, "slow.example.org", nil)
	resolving := make(chan bool)
	r.resolve = func(ctx context.Context, _ string) ([]netip.Addr, error) {
		resolving <- true
		<-ctx.Done()
		return nil, ctx.Err()
	}
	theirs, ours := controls(t)
	p := &process{control: theirs, server: newServer(r)}
	p.ask.control, p.ask.replies, p.ask.pool = theirs, make(chan reply), []int{freeSocket(t)}
	listen := func(want network.Listener) (address string) {
		l := harness.Listen(t)
		p.listeners = append(p.listeners, l)
		go p.handler(want, l)()
		return l.Addr().String()
	}
	port := uint16(harness.SilentPort(t))
	proxy, published := listen(network.Listener{Kind: network.KindProxy}), listen(network.Listener{Kind: network.KindPublish, Port: port})
	get(t, proxy, "\x05\x01\x00\x05\x01\x00\x03\x10slow.example.org\x01\xbb")
	<-resolving
	get(t, published, "") // takes the socket, and is connecting
	harness.Until(t, time.Minute, "the socket to be taken", func() bool {
		p.ask.mu.Lock()
		defer p.ask.mu.Unlock()
		return len(p.ask.pool) == 0
	})
	get(t, published, "") // waits for a socket
	m, _, err := network.Receive(ours)
	check.Require(t, err == nil && m.Sockets != 0, "%+v, %v", m, err)
	over := make(chan int, 1)
	go func() { over <- p.work() }()
	_ = unix.Shutdown(proc.Descriptor(ours), unix.SHUT_WR) // otherwise the proxy keeps running
	begin := time.Now()
	m, _, err = network.Receive(ours)
	took := time.Since(begin)
	check.Require(t, err == nil && m.Report != nil && took <= endBound*3/4, "after %v: %+v, %v", took, m, err)
	for _, h := range m.Report.Hosts {
		check.That(t, h.Refused == 0, "%+v", h)
	}
	code := <-over
	check.That(t, code == 0, "exit code %d", code)
}
