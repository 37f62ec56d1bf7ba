package proxy

import (
	"math"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Limits. Peers on both sides may be hostile, so every wait has one.
const (
	maxConns    = 512              // connections per listener
	beginBound  = 10 * time.Second // until the target of a connection is known
	dialBound   = 10 * time.Second // to resolve a name and connect
	answerBound = time.Minute      // for the response to a ClientHello
	idleBound   = 10 * time.Minute // without a byte in either direction
	idleCheck   = 30 * time.Second // interval between checks for idle connections
	maxBegin    = 64 << 10         // bytes of a request line, a ClientHello or a response header
	maxHeader   = 32 << 10         // bytes of a request header; net/http needs ten times as much if its fields are short
	maxFields   = 200              // fields of a forwarded header, of which there are three copies at a time
)

// conns are the open connections of one listener.
type conns struct {
	mu     sync.Mutex
	open   map[*net.TCPConn]net.Conn // each with its target; nil if there is none yet
	closed bool
	done   sync.WaitGroup
}

// add adds a connection. It returns false if there are too many.
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

// pair records the target of a connection, so that both are closed together: a goroutine that waits for
// the target would not notice the end of conn.
func (c *conns) pair(conn *net.TCPConn, to net.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		to.Close()
		return
	}
	c.open[conn] = to
}

// remove closes a connection. Call it once.
func (c *conns) remove(conn *net.TCPConn) {
	conn.Close()
	c.mu.Lock()
	delete(c.open, conn)
	c.mu.Unlock()
	c.done.Done()
}

// end closes all connections, and waits up to within for their goroutines, which count their bytes.
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

// closeIdle closes connections that have been idle for a time. The kernel keeps that time (tcp(7),
// TCP_INFO).
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

// quiet returns the time since the last byte in either direction. It is infinite if the peer has sent a
// reset, or if keep-alive probes have found its socket closed for a minute (tcp(7), tcp_fin_timeout). A
// peer that has only closed its own direction may be waiting for the other one.
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
