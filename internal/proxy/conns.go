package proxy

import (
	"math"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Bounds. Peers on both sides can be hostile, so nothing is waited for without one.
const (
	maxConns    = 512              // at once, of each listener
	beginBound  = 10 * time.Second // for what says where a connection is to go
	dialBound   = 10 * time.Second // for a name and a connection
	answerBound = time.Minute      // for what a server answers to a ClientHello
	idleBound   = 10 * time.Minute // without a byte either way
	idleLook    = 30 * time.Second // between two looks
	maxBegin    = 64 << 10         // bytes of a request line, a ClientHello or an answer's header
	maxHeader   = 32 << 10         // bytes of a request's header, of which net/http makes ten times as many if its fields are short
	maxFields   = 200              // of a header that is passed on, which is kept three times meanwhile
)

// conns are the connections that were accepted at one listener.
type conns struct {
	mu     sync.Mutex
	open   map[*net.TCPConn]net.Conn // with the one that each is led to; nil if that is not known
	closed bool
	done   sync.WaitGroup
}

// add takes a connection in; not if there are too many.
func (c *conns) add(conn *net.TCPConn) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || len(c.open) >= maxConns {
		return false
	}
	if c.open == nil {
		c.open = map[*net.TCPConn]net.Conn{}
	}
	c.open[conn] = nil
	c.done.Add(1)
	return true
}

// pair notes the connection that one is led to, so that they end together: what waits for the other side
// alone does not see the end of this one.
func (c *conns) pair(conn *net.TCPConn, to net.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		to.Close()
		return
	}
	c.open[conn] = to
}

// remove closes a connection. Once.
func (c *conns) remove(conn *net.TCPConn) {
	conn.Close()
	c.mu.Lock()
	delete(c.open, conn)
	c.mu.Unlock()
	c.done.Done()
}

// end closes all, and waits until they are counted; for at most so long.
func (c *conns) end(within time.Duration) {
	c.mu.Lock()
	c.closed = true
	for conn, to := range c.open {
		conn.Close()
		if to != nil {
			to.Close()
		}
	}
	c.mu.Unlock()
	over := make(chan struct{})
	go func() {
		c.done.Wait()
		close(over)
	}()
	select {
	case <-over:
	case <-time.After(within):
	}
}

// closeIdle closes those that have moved nothing for a time. The kernel knows that, so that
// nothing has to be noted with each piece (tcp(7), TCP_INFO).
func (c *conns) closeIdle(idle time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for conn, to := range c.open {
		if quiet(conn) > idle {
			reset(conn)
			if to != nil {
				reset(to)
			}
		}
	}
}

// quiet is for how long nothing has come or gone: for ever if the peer is gone. That is a reset, or the
// keep-alive probes have found a socket that was closed a minute ago (tcp(7), tcp_fin_timeout). A peer that
// has only ended its own way may wait for the other one.
func quiet(conn *net.TCPConn) time.Duration {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0
	}
	var info *unix.TCPInfo
	if raw.Control(func(fd uintptr) { info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO) }) != nil || err != nil {
		return 0
	}
	if info.State == unix.BPF_TCP_CLOSE {
		return math.MaxInt64
	}
	return time.Duration(min(info.Last_data_recv, info.Last_data_sent)) * time.Millisecond
}
