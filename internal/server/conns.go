package server

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/config"
)

// Connections limits how many connections are open: in total, for each peer, and for clients that
// have not been authenticated yet. A peer is the user at the other end of a unix socket, an IPv4
// address, or a /64 network of IPv6 addresses. At a limit a new connection replaces an older one, and is
// refused only if authenticated requests are being answered on all of them.
type Connections struct {
	most, each, strangers int
	refusing              chan struct{}

	mu      sync.Mutex
	all     map[*conn]struct{}
	peers   map[string]count
	unknown int // connections without an authenticated request
}

// count is the number of connections of a peer.
type count struct{ all, unknown int }

func (n count) allOf() int     { return n.all }
func (n count) unknownOf() int { return n.unknown }

// change adds to the connections of a peer. The mutex is held.
func (s *Connections) change(peer string, all, unknown int) {
	n := s.peers[peer]
	n.all += all
	n.unknown += unknown
	s.unknown += unknown
	if s.peers[peer] = n; n.all == 0 {
		delete(s.peers, peer)
	}
}

// NewConnections allows most connections in total. Half of them are for clients that have been
// authenticated, and one peer gets at most half.
func NewConnections(most int) *Connections {
	const refusedAtOnce = 64
	half := max(1, most/2)
	return &Connections{
		most: most, each: half, strangers: half, refusing: make(chan struct{}, refusedAtOnce),
		all: map[*conn]struct{}{}, peers: map[string]count{},
	}
}

// Of returns a listener whose connections are counted.
func (s *Connections) Of(l net.Listener) net.Listener { return &bounds{l, s} }

type bounds struct {
	net.Listener
	*Connections
}

// conn is a connection that is counted until it is closed.
type conn struct {
	net.Conn
	user string // user at the other end of a Unix socket
	peer string
	of   *Connections

	// guarded by the mutex of Connections
	known  bool      // its last request was authenticated
	active bool      // a request is being answered
	since  time.Time // when it was accepted, or became idle
}

func (c *conn) Close() error {
	c.of.remove(c)
	return c.Conn.Close()
}

func (b *bounds) Accept() (net.Conn, error) {
	for {
		raw, err := b.Listener.Accept()
		if err != nil && !errors.Is(err, net.ErrClosed) {
			return nil, scarce{err}
		}
		if err != nil {
			return nil, err
		}
		c := &conn{Conn: raw, user: user(raw), of: b.Connections, since: time.Now()}
		c.peer = cmp.Or(c.user, peerOf(raw.RemoteAddr()))
		replaced, refused := b.add(c)
		if replaced != nil {
			replaced.Close()
		}
		if refused == nil {
			return c, nil
		}
		select {
		case b.refusing <- struct{}{}:
			go func() {
				defer func() { <-b.refusing }()
				refuse(raw, refused)
			}()
		default:
			raw.Close() // probably a flood
		}
	}
}

// peerOf returns the IPv4 address, or the IPv6 /64 network, of a client: one client usually has all
// addresses of a /64. It returns "" for addresses of other kinds.
func peerOf(a net.Addr) string {
	tcp, ok := a.(*net.TCPAddr)
	if !ok {
		return ""
	}
	ip := tcp.AddrPort().Addr().Unmap().WithZone("")
	if ip.Is4() {
		return ip.String()
	}
	const bits = 64
	prefix, err := ip.Prefix(bits)
	if err != nil {
		return ""
	}
	return prefix.String()
}

// add registers a connection. At a limit it also returns the connection that the caller must close to make
// room, or refuses the new one with an error.
func (s *Connections) add(c *conn) (replaced *conn, refused *api.Error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	full := true
	switch {
	case s.peers[c.peer].all >= s.each:
		replaced = s.dispensable(count.allOf, func(o *conn) bool { return o.peer == c.peer })
		refused = api.NewError(api.Quota, fmt.Sprintf("this address or user has %d connections, all of them in use", s.each), "close some, or wait until requests have ended")
	case s.unknown >= s.strangers:
		replaced = s.dispensable(count.unknownOf, func(o *conn) bool { return !o.known })
	case len(s.all) >= s.most:
		replaced = s.dispensable(count.allOf, func(*conn) bool { return true })
		refused = api.NewError(api.Busy, "all connections are in use", "try again later")
	default:
		full = false
	}
	if full && replaced == nil {
		return nil, refused
	}
	if replaced != nil {
		s.drop(replaced)
	}
	s.all[c] = struct{}{}
	s.change(c.peer, 1, 1)
	return replaced, nil
}

// dispensable returns the connection to close for a new one, or nil. It picks the peer with the most
// connections, as counted by of, and that peer's longest idle one. A connection on which an authenticated
// request is being answered is never picked. The mutex is held.
//
// For the limit on unauthenticated clients only unauthenticated connections are compared: a proxy with many
// authenticated clients must not lose its new connections to a client that uses many addresses with one
// connection each.
func (s *Connections) dispensable(of func(count) int, among func(*conn) bool) (found *conn) {
	for c := range s.all {
		if c.known && c.active || !among(c) {
			continue
		}
		if found == nil || cmp.Or(cmp.Compare(of(s.peers[found.peer]), of(s.peers[c.peer])), c.since.Compare(found.since)) < 0 {
			found = c
		}
	}
	return found
}

func (s *Connections) remove(c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.drop(c)
}

// drop stops counting a connection. The mutex is held.
func (s *Connections) drop(c *conn) {
	if _, counts := s.all[c]; !counts {
		return
	}
	delete(s.all, c)
	unknown := 1
	if c.known {
		unknown = 0
	}
	s.change(c.peer, -1, -unknown)
}

// setKnown records whether the request on a connection is authenticated.
func (c *conn) setKnown(known bool) {
	c.of.mu.Lock()
	defer c.of.mu.Unlock()
	if _, counts := c.of.all[c]; !counts || c.known == known {
		return
	}
	if c.known = known; known {
		c.of.change(c.peer, 0, -1)
	} else {
		c.of.change(c.peer, 0, 1)
	}
}

// known records whether the request's connection is authenticated.
func known(ctx context.Context, is bool) {
	if c, ok := ctx.Value(connKey).(*conn); ok {
		c.setKnown(is)
	}
}

// connState is for http.Server.ConnState. A connection becomes active when the head of a request is
// complete.
func connState(c net.Conn, state http.ConnState) {
	if c, ok := underTLS(c).(*conn); ok {
		c.of.mu.Lock()
		defer c.of.mu.Unlock()
		if c.active = state == http.StateActive; state == http.StateIdle {
			c.since = time.Now()
		}
	}
}

func underTLS(c net.Conn) net.Conn {
	if secure, ok := c.(*tls.Conn); ok {
		return secure.NetConn()
	}
	return c
}

// scarce is an error of accept(2) that is caused by a shortage, such as of descriptors or epoll(7) watches.
// An ordinary user's command can use up that user's share for as long as it runs. The error is temporary so
// that [http.Server.Serve] retries instead of ending the server.
type scarce struct{ error }

func (e scarce) Unwrap() error   { return e.error }
func (e scarce) Timeout() bool   { return false }
func (e scarce) Temporary() bool { return true }

// refuse answers a request for which there is no connection left. It reads the request first, because some
// clients ignore an early response, and closing with unread data can lose it.
func refuse(c net.Conn, e *api.Error) {
	const within = 2 * time.Second
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(within)) // never fails for sockets
	r, err := http.ReadRequest(bufio.NewReader(io.LimitReader(c, maxHeader)))
	if err != nil {
		return
	}
	text, _ := result.JSON(e) // always encodable
	answer := &http.Response{
		StatusCode: e.GetStatus(), ProtoMajor: 1, ProtoMinor: 1, Header: e.GetHeaders(), ContentLength: int64(len(text)), Body: io.NopCloser(bytes.NewReader(text)), Close: true,
	}
	answer.Header.Set("Content-Type", "application/json")
	out := bufio.NewWriter(c)
	_ = answer.Write(out) // the client may have disconnected
	_ = out.Flush()
	if half, ok := c.(interface{ CloseWrite() error }); ok && half.CloseWrite() == nil {
		_, _ = io.Copy(io.Discard, r.Body) // until the client closes, or the deadline
	}
}

// user returns the tenant of the process at the other end of a Unix socket (SO_PEERCRED, unix(7)), or "" for
// other connections.
func user(c net.Conn) string {
	u, ok := c.(*net.UnixConn)
	if !ok {
		return ""
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return ""
	}
	var cred *unix.Ucred
	if raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }) != nil || err != nil {
		return ""
	}
	return uidTenant(int(cred.Uid))
}

// uidTenant returns the tenant of a local user.
func uidTenant(uid int) string { return config.Local + strconv.Itoa(uid) }

// Peer is for http.Server.ConnContext. It stores the user at the other end of a Unix socket, and the
// connection for [WhileConnected].
func Peer(ctx context.Context, c net.Conn) context.Context {
	ctx = context.WithValue(ctx, connKey, underTLS(c))
	if c, ok := c.(*conn); ok && c.user != "" {
		return context.WithValue(ctx, peerKey, c.user)
	}
	return ctx
}

// Gone reports whether the other end has closed the connection. With TCP, the FIN follows the data sent
// before it and is invisible until that data fits into the receive buffer.
func (c *conn) Gone() (gone bool) {
	socket, ok := c.Conn.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		return false
	}
	err = raw.Control(func(fd uintptr) {
		n, _ := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}, 0) // polled again soon
		gone = n > 0
	})
	return gone || err != nil
}

// WhileConnected returns a context that ends when the client disconnects, even if the request body has not
// been read completely. Until then net/http does not check.
func WhileConnected(ctx context.Context) (context.Context, context.CancelFunc) {
	const every = time.Second
	c, ok := ctx.Value(connKey).(interface{ Gone() bool })
	ctx, cancel := context.WithCancel(ctx)
	if ok {
		go func() {
			tick := time.NewTicker(every)
			defer tick.Stop()
			for {
				select {
				case <-ctx.Done():
					return
				case <-tick.C:
					if c.Gone() {
						cancel()
					}
				}
			}
		}()
	}
	return ctx, cancel
}

// maxHeader is the maximum size of a request's header.
const maxHeader = 64 << 10

// Web returns an HTTP server for handler. conn is [Peer] or [Passed].
func Web(handler http.Handler, conn func(context.Context, net.Conn) context.Context, log *slog.Logger) *http.Server {
	web := &http.Server{
		Handler: handler, ConnContext: conn, ConnState: connState, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelWarn),
		ReadHeaderTimeout: 10 * time.Second, MaxHeaderBytes: maxHeader,
		Protocols: new(http.Protocols), // HTTP/2 stream resets are easily missed
		// OPTIONS * needs authentication, too.
		DisableGeneralOptionsHandler: true,
	}
	web.Protocols.SetHTTP1(true)
	return web
}
