package server

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/config"
	"github.com/sbxrun/sbxrun/internal/tenants"
)

// Connections bounds how many there are, in all and of each peer: the user at the other end of a
// unix socket, or an address.
type Connections struct {
	budget   *tenants.Budget
	each     int64
	refusing chan struct{}
}

// NewConnections allows so many, and each peer half of them: so none keeps all others out.
func NewConnections(most int) *Connections {
	const refusedAtOnce = 64
	return &Connections{tenants.NewBudget("connections", int64(most)), max(1, int64(most)/2), make(chan struct{}, refusedAtOnce)}
}

// Of is a listener that has no more.
func (c *Connections) Of(l net.Listener) net.Listener { return &bounds{l, c} }

type bounds struct {
	net.Listener
	*Connections
}

// conn is one that counts until it is closed.
type conn struct {
	net.Conn
	user  string // at the other end of a unix socket
	lease *tenants.Lease
}

func (c *conn) Close() error {
	c.lease.Free()
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
		c := &conn{Conn: raw, user: user(raw)}
		peer := c.user
		if peer == "" {
			peer, _, _ = net.SplitHostPort(raw.RemoteAddr().String()) // "" for all that have none
		}
		if c.lease, err = b.budget.Take(peer, 1, b.each); err == nil {
			return c, nil
		}
		select {
		case b.refusing <- struct{}{}:
			go func() {
				defer func() { <-b.refusing }()
				refuse(raw, api.AsError(err))
			}()
		default:
			raw.Close() // so many at once mean no good
		}
	}
}

// scarce is what the kernel had too few of for one more connection. The command of an ordinary
// user can use up what that user may have of some, such as watches of epoll(7), for as long as it
// lives: that is no reason for the server to end, as it would by [http.Server.Serve].
type scarce struct{ error }

func (e scarce) Unwrap() error   { return e.error }
func (e scarce) Timeout() bool   { return false }
func (e scarce) Temporary() bool { return true }

// refuse answers a request for which there is no connection. The request is read: some clients
// take an answer that comes first for none, and one that is sent before all is read may be lost.
func refuse(c net.Conn, e *api.Error) {
	const within = 2 * time.Second
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(within)) // of sockets
	r, err := http.ReadRequest(bufio.NewReader(io.LimitReader(c, maxHeader)))
	if err != nil {
		return
	}
	text, _ := result.JSON(e) // there is nothing in it that JSON has not
	answer := &http.Response{
		StatusCode: e.GetStatus(), ProtoMajor: 1, ProtoMinor: 1, Header: e.GetHeaders(), ContentLength: int64(len(text)), Body: io.NopCloser(bytes.NewReader(text)), Close: true,
	}
	answer.Header.Set("Content-Type", "application/json")
	out := bufio.NewWriter(c)
	_ = answer.Write(out) // who has gone away reads nothing
	_ = out.Flush()
	if half, ok := c.(interface{ CloseWrite() error }); ok && half.CloseWrite() == nil {
		_, _ = io.Copy(io.Discard, r.Body) // until the client closes, or the deadline
	}
}

// user is who is at the other end of a unix socket, as the kernel says (SO_PEERCRED, unix(7)); ""
// of any other connection.
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

// uidTenant is the tenant that a user of this machine is.
func uidTenant(uid int) string { return config.Local + strconv.Itoa(uid) }

// Peer is for http.Server.ConnContext: it keeps who is at the other end of a unix socket, and the connection
// for [WhileThere].
func Peer(ctx context.Context, c net.Conn) context.Context {
	under := c
	if secure, ok := c.(*tls.Conn); ok {
		under = secure.NetConn()
	}
	ctx = context.WithValue(ctx, connKey, under)
	if c, ok := c.(*conn); ok && c.user != "" {
		return context.WithValue(ctx, peerKey, c.user)
	}
	return ctx
}

// Gone reports whether the other end has closed. Of TCP that comes behind what was sent before, and is not seen
// while that has no room here.
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
		n, _ := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}, 0) // the next look comes soon
		gone = n > 0
	})
	return gone || err != nil
}

// WhileThere returns a context that ends with a request's client, also before all that it sends is read: until
// then net/http does not look whether it is there.
func WhileThere(ctx context.Context) (context.Context, context.CancelFunc) {
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

// maxHeader is how long the head of a request may be.
const maxHeader = 64 << 10

// Web answers requests by a handler. conn is [Peer] or [Passed].
func Web(handler http.Handler, conn func(context.Context, net.Conn) context.Context, log *slog.Logger) *http.Server {
	web := &http.Server{
		Handler: handler, ConnContext: conn, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelWarn),
		ReadHeaderTimeout: 10 * time.Second, MaxHeaderBytes: maxHeader,
		Protocols: new(http.Protocols), // an HTTP/2 stream that is reset is easily lost
	}
	web.Protocols.SetHTTP1(true)
	return web
}
