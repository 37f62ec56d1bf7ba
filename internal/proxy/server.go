// Package proxy takes connections of a sandbox and makes those that its list of hosts permits. It
// is sbxrund in a role of its own, one process for each sandbox that has a list (package network):
// nothing of it is inside, and nothing inside can reach it but by its sockets.
//
// A host is permitted as it was asked for, by HTTP or SOCKS5. Its name is resolved here, once, and
// the connection made to an address that was checked. What goes over the connection is not
// decrypted, but where it begins as TLS or as HTTP, the name in it must be the one that was asked
// for: or a host that is permitted would be a way to others at the same address.
package proxy

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// server is a proxy for one sandbox.
type server struct {
	rules  *rules
	counts counters
	conns  conns // of the sandbox
	dialer net.Dialer
	web    *web
	ctx    context.Context // over when the proxy ends, and with it connections that are being made
	cancel context.CancelFunc
}

func newServer(r *rules) *server {
	s := &server{rules: r, dialer: net.Dialer{Timeout: dialBound}}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.web = newWeb(s)
	return s
}

// serve takes connections until the listener closes.
func (s *server) serve(l net.Listener) {
	accept(l, &s.conns, s.take)
}

// end ends connections that are being made, and those that speak HTTP.
func (s *server) end() {
	s.cancel()
	_ = s.web.http.Close() // it closes connections, and their errors are nobody's
}

// accept hands each connection to take in a goroutine of its own; take does not close it.
func accept(l net.Listener, to *conns, take func(*net.TCPConn)) {
	for {
		c, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // descriptors are few, or the peer has gone
			time.Sleep(10 * time.Millisecond)
			continue
		}
		conn := c.(*net.TCPConn)
		if !to.add(conn) {
			conn.Close()
			continue
		}
		go func() {
			defer to.remove(conn)
			take(conn)
		}()
	}
}

// take reads the first byte: SOCKS5 begins with its version, and nothing of HTTP with that.
func (s *server) take(conn *net.TCPConn) {
	_ = conn.SetReadDeadline(time.Now().Add(beginBound)) // it takes deadlines
	var first [1]byte
	if n, err := conn.Read(first[:]); n != 1 || err != nil {
		return
	}
	if first[0] == socksVersion {
		s.socks(conn)
		return
	}
	s.web.serve(conn, first[:], nil)
}

// connect makes a connection that is permitted, and counts. The error is for the sandbox.
func (s *server) connect(ctx context.Context, t target) (net.Conn, *counter, error) {
	ctx, cancel := context.WithTimeout(ctx, dialBound)
	defer cancel()
	addrs, err := s.rules.permits(ctx, t)
	if err != nil {
		return nil, nil, s.refused(t, err)
	}
	n := s.counts.of(ofHost, t.String())
	conn, err := s.dial(ctx, addrs, t.port)
	if err != nil {
		return nil, nil, &hostError{t, err}
	}
	n.connections.Add(1)
	return conn, n, nil
}

// refused counts a refusal, and adds the host to the error.
func (s *server) refused(t target, err error) error {
	if why, ok := errors.AsType[refusal](err); ok {
		s.counts.refuse(t, string(why))
	}
	return &hostError{t, err}
}

// dial tries the addresses one after the other.
func (s *server) dial(ctx context.Context, addrs []netip.Addr, port uint16) (conn net.Conn, err error) {
	const most = 8 // of one name
	for _, a := range addrs[:min(len(addrs), most)] {
		if conn, err = s.dialer.DialContext(ctx, "tcp", netip.AddrPortFrom(a, port).String()); err == nil {
			return conn, nil
		}
		if ctx.Err() != nil {
			break
		}
	}
	return nil, err
}

// listener is one by its descriptor, which is taken over.
func listener(fd int) (net.Listener, error) {
	f := os.NewFile(uintptr(fd), "listener "+strconv.Itoa(fd))
	defer f.Close() // net has a copy
	_ = unix.SetNonblock(fd, true)
	return net.FileListener(f)
}
