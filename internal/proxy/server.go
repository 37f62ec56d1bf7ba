// Package proxy accepts connections from a sandbox and connects to the hosts that its rules permit. It
// runs as a role of sbxrund, one process per sandbox with a list of hosts (package network). The
// process is outside the sandbox, which reaches it only through its sockets.
//
// The sandbox names a host by HTTP or SOCKS5. The proxy checks the name, resolves it once, and connects
// to an address that it has checked; or it asks the proxy of this host's environment. It does not
// decrypt traffic. But if a connection begins with TLS or HTTP, the name in it must be the requested
// one: otherwise a permitted host would give access to others at the same address.
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
	rules    *rules
	counts   counters
	conns    conns // from the sandbox
	dialer   net.Dialer
	dial1    func(ctx context.Context, address string) (net.Conn, error) // one attempt
	upstream upstream
	web      *web
	ctx      context.Context // ends connection attempts at the end of the proxy
	cancel   context.CancelFunc
}

func newServer(r *rules) *server {
	s := &server{rules: r, dialer: net.Dialer{Timeout: dialBound}}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.dial1 = func(ctx context.Context, address string) (net.Conn, error) {
		return s.dialer.DialContext(ctx, "tcp", address)
	}
	s.web = newWeb(s)
	return s
}

// serve accepts connections until the listener closes.
func (s *server) serve(l net.Listener) {
	accept(l, &s.conns, s.take)
}

// end ends connection attempts, and HTTP connections.
func (s *server) end() {
	s.cancel()
	_ = s.web.http.Close() // errors of closing connections do not matter
}

// accept calls take in a goroutine for each connection, and closes the connection afterwards.
func accept(l net.Listener, to *conns, take func(*net.TCPConn)) {
	for {
		c, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // too many descriptors, or the peer has left
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

// take distinguishes SOCKS5 from HTTP by the first byte, the version of SOCKS.
func (s *server) take(conn *net.TCPConn) {
	_ = conn.SetReadDeadline(time.Now().Add(beginBound))
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

// connect connects to a permitted host, and counts the connection. The sandbox sees its error.
func (s *server) connect(ctx context.Context, t target) (net.Conn, *counter, error) {
	ctx, cancel := context.WithTimeout(ctx, dialBound)
	defer cancel()
	proxy, err := s.upstream.of("https", t)
	if err != nil {
		return nil, nil, &hostError{t, err}
	}
	var addrs []netip.Addr
	if proxy != nil {
		err = s.rules.check(t)
	} else {
		addrs, err = s.rules.permits(ctx, t)
	}
	if err != nil {
		return nil, nil, s.refused(t, err)
	}
	n := s.counts.of(ofHost, t.String())
	var conn net.Conn
	if proxy != nil {
		conn, err = s.connectBy(ctx, proxy, t)
	} else {
		conn, err = s.dial(ctx, addrs, t.port)
	}
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

// attemptDelay is the time after which the next address is tried (RFC 8305, section 5).
const attemptDelay = 250 * time.Millisecond

// dial connects to one of several addresses of a host (RFC 8305). It alternates between IPv6 and IPv4,
// and starts the next attempt after attemptDelay, or when one has failed.
func (s *server) dial(ctx context.Context, addrs []netip.Addr, port uint16) (net.Conn, error) {
	const maxAddrs = 8
	addrs = alternate(addrs)
	addrs = addrs[:min(len(addrs), maxAddrs)]
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type result struct {
		conn net.Conn
		err  error
	}
	results := make(chan result)
	attempt := func(a netip.Addr) {
		conn, err := s.dial1(ctx, netip.AddrPortFrom(a, port).String())
		select {
		case results <- result{conn, err}:
		case <-ctx.Done():
			if err == nil {
				conn.Close()
			}
		}
	}
	var first error
	next := time.NewTimer(0)
	defer next.Stop()
	for started, failed := 0, 0; ; {
		select {
		case <-next.C:
			if started < len(addrs) {
				go attempt(addrs[started])
				started++
				next.Reset(attemptDelay)
			}
		case r := <-results:
			if r.err == nil {
				return r.conn, nil
			}
			if first == nil {
				first = r.err
			}
			if failed++; failed == len(addrs) {
				return nil, first
			}
			next.Reset(0)
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// alternate sorts addresses so that IPv6 and IPv4 alternate, starting with the family of the first one.
func alternate(addrs []netip.Addr) (out []netip.Addr) {
	var families [2][]netip.Addr // the family of the first address, and the other
	for _, a := range addrs {
		other := 0
		if a.Is4() != addrs[0].Is4() {
			other = 1
		}
		families[other] = append(families[other], a)
	}
	for i := range addrs {
		for _, f := range families {
			if i < len(f) {
				out = append(out, f[i])
			}
		}
	}
	return out
}

// listener returns the listener of a descriptor, and owns the descriptor.
func listener(fd int) (net.Listener, error) {
	f := os.NewFile(uintptr(fd), "listener "+strconv.Itoa(fd))
	defer f.Close() // net duplicates it
	_ = unix.SetNonblock(fd, true)
	return net.FileListener(f)
}
