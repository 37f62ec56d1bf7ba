package proxy

import (
	"io"
	"net"
	"sync/atomic"
)

// relay moves bytes both ways until both are over, or one way has failed; begin is what was read of
// inner, which is in the sandbox, already. It closes neither. Where both are TCP the kernel moves
// the bytes (splice(2)).
func relay(inner, outer net.Conn, begin []byte, n *counter) {
	back := make(chan struct{})
	go func() {
		defer close(back)
		pass(inner, outer, &n.received)
	}()
	if len(begin) > 0 {
		written, err := outer.Write(begin)
		n.sent.Add(int64(written))
		if err != nil {
			inner.Close()
		}
	}
	pass(outer, inner, &n.sent)
	<-back
}

// pass copies until the end, which it passes on; after an error it ends both ways.
func pass(to, from net.Conn, moved *atomic.Int64) {
	n, err := io.Copy(to, from)
	moved.Add(n)
	if half, ok := to.(interface{ CloseWrite() error }); ok && err == nil {
		_ = half.CloseWrite() // it is closed already, then
		return
	}
	to.Close()
	from.Close()
}

// counted counts what goes over a connection to a host.
type counted struct {
	net.Conn
	counter *counter
}

func (c *counted) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.counter.received.Add(int64(n))
	return n, err
}

func (c *counted) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.counter.sent.Add(int64(n))
	return n, err
}
