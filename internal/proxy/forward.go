package proxy

import (
	"context"
	"errors"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/network"
)

// This file forwards connections from ports of the host into the sandbox, and from ports of the sandbox
// to Unix sockets of the host. sbxrun creates the sockets for both, because this process may neither
// enter the sandbox nor open files.

// asking sends requests to sbxrun, one at a time.
type asking struct {
	mu      sync.Mutex
	control *os.File
	replies chan reply
	pool    []int // unconnected sockets of the sandbox
}

type reply struct {
	network.Message
	fds []int
}

var errGone = errors.New("sbxrun has exited")

// ask sends a request and returns the descriptors of the reply, which the caller owns.
func (a *asking) ask(m network.Message) (fds []int, err error) {
	if err := network.Send(a.control, m); err != nil {
		return nil, err
	}
	r, ok := <-a.replies
	switch {
	case !ok:
		return nil, errGone
	case r.Errno != 0:
		network.CloseAll(r.fds)
		return nil, unix.Errno(r.Errno)
	case len(r.fds) == 0: // the descriptor table was full
		return nil, unix.EMFILE
	}
	return r.fds, nil
}

// batch is the number of sockets per request: each request costs two forks.
const batch = 32

// socket returns an unconnected socket of the sandbox.
func (a *asking) socket() (fd int, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.pool) == 0 {
		if a.pool, err = a.ask(network.Message{Sockets: batch}); err != nil {
			return -1, err
		}
	}
	fd = a.pool[len(a.pool)-1]
	a.pool = a.pool[:len(a.pool)-1]
	return fd, nil
}

// dialUnix connects to a Unix socket of the host.
func (a *asking) dialUnix(index int) (net.Conn, error) {
	a.mu.Lock()
	fds, err := a.ask(network.Message{Dial: &index})
	a.mu.Unlock()
	if err != nil {
		return nil, err
	}
	network.CloseAll(fds[1:])
	f := os.NewFile(uintptr(fds[0]), "connection")
	defer f.Close() // net duplicates it
	return net.FileConn(f)
}

// loopbacks are the addresses to try inside the sandbox, in this order.
var loopbacks = []([16]byte){{10: 0xff, 11: 0xff, 12: 127, 15: 1}, {15: 1}}

// dialInside connects to a port of the sandbox.
func (a *asking) dialInside(ctx context.Context, port uint16) (conn net.Conn, err error) {
	for _, addr := range loopbacks {
		fd, sockErr := a.socket()
		if sockErr != nil {
			return nil, sockErr
		}
		socket := os.NewFile(uintptr(fd), "socket") // nonblocking, so the poller handles it
		if err = connect(ctx, socket, addr, port, dialBound); err == nil {
			conn, err = net.FileConn(socket) // duplicates it
		}
		socket.Close()
		if err == nil || ctx.Err() != nil {
			break
		}
	}
	return conn, err
}

// connect connects a socket to a loopback address. That is immediate unless the server's backlog is full;
// then connect gives up after within.
func connect(ctx context.Context, socket *os.File, addr [16]byte, port uint16, within time.Duration) error {
	raw, err := socket.SyscallConn()
	if err != nil {
		return err
	}
	if err := socket.SetWriteDeadline(time.Now().Add(within)); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = socket.SetWriteDeadline(past) })
	defer stop()
	begun := false
	var failed error
	err = raw.Write(func(s uintptr) bool {
		fd := int(s)
		if !begun {
			begun = true
			failed = unix.Connect(fd, &unix.SockaddrInet6{Addr: addr, Port: int(port)})
			if failed == unix.EAFNOSUPPORT || failed == unix.EINVAL { // a kernel without IPv6
				failed = unix.Connect(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}, Port: int(port)})
			}
			return failed != unix.EINPROGRESS
		}
		errno, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
		failed = err
		if err == nil && errno != 0 {
			failed = unix.Errno(errno)
		}
		if failed != nil {
			return true
		}
		// The poller also wakes up for a socket that is not connecting yet.
		_, err = unix.Getpeername(fd)
		return err == nil
	})
	if err != nil {
		return err // for example the deadline
	}
	return failed
}

// forward accepts connections until the listener closes, and relays each to a connection from dial:
// inward, into the sandbox, or out of it.
func (p *process) forward(l net.Listener, to *conns, name string, inward bool, dial func() (net.Conn, error)) {
	accept(l, to, func(conn *net.TCPConn) {
		n := p.server.counts.of(ofPort, name)
		other, err := dial()
		if err != nil {
			if p.server.ctx.Err() == nil { // not because the proxy is ending
				n.refused.Add(1)
				why := err.Error()
				n.reason.Store(&why)
			}
			_ = conn.SetLinger(0) // the peer sees a reset, as from a closed port
			return
		}
		defer other.Close()
		to.pair(conn, other)
		n.connections.Add(1)
		if inward {
			relay(other, conn, nil, n)
		} else {
			relay(conn, other, nil, n)
		}
	})
}
