package proxy

import (
	"io"
	"net"
	"sync/atomic"
	"time"
)

// relay copies bytes in both directions until both have ended or one has failed. begin was already read
// from inner, the connection of the sandbox. relay closes neither connection.
func relay(inner, outer net.Conn, begin []byte, n *counter) {
	if c, ok := inner.(*net.TCPConn); ok {
		_ = c.SetWriteBuffer(innerBuffer) // failure leaves the kernel's default
	}
	back := make(chan struct{})
	go func() {
		defer close(back)
		pass(inner, outer, &n.received)
	}()
	if len(begin) > 0 {
		written, err := outer.Write(begin)
		n.sent.Add(int64(written))
		if err != nil {
			reset(inner)
		}
	}
	pass(outer, inner, &n.sent)
	<-back
}

// pass copies until end of file and then closes that direction of to. After an error it resets both
// connections.
func pass(to, from net.Conn, moved *atomic.Int64) {
	err := move(to, from, moved)
	if half, ok := to.(interface{ CloseWrite() error }); ok && err == nil {
		_ = half.CloseWrite() // fails only if it is closed
		return
	}
	reset(to, from)
}

// reset closes connections with a reset, so that the peers do not mistake that for a regular end (tcp(7),
// SO_LINGER). Unix sockets have no reset.
func reset(conns ...net.Conn) {
	for _, c := range conns {
		if c, ok := c.(*net.TCPConn); ok {
			_ = c.SetLinger(0) // fails only if it is closed
		}
		c.Close()
	}
}

// innerBuffer is the size of the send buffer towards the sandbox. The loopback interface needs no more: a
// larger buffer only exceeds the processor's cache. With less than a few segments of 64 KiB the sender
// would wait for acknowledgements.
const innerBuffer = 256 << 10

// Each direction has a small buffer, and borrows a large one while reads fill its own. The number of
// large buffers is limited, so that any number of connections needs only a few megabytes.
const (
	smallPiece = 16 << 10
	largePiece = 512 << 10
	mostLarge  = 16
)

var large = make(chan []byte, mostLarge)

func init() {
	for range mostLarge {
		large <- nil // allocated on first use
	}
}

// move copies until end of file. Large buffers are twice as fast as splice(2), which moves segments of
// 64 KiB and wakes both sides for each.
func move(to io.Writer, from io.Reader, moved *atomic.Int64) error {
	small := make([]byte, smallPiece)
	piece := small
	defer func() {
		if len(piece) == largePiece {
			large <- piece
		}
	}()
	for {
		n, err := from.Read(piece)
		if n > 0 {
			written, err := to.Write(piece[:n])
			moved.Add(int64(written))
			if err != nil {
				return err
			}
		}
		switch {
		case err == io.EOF:
			return nil
		case err != nil:
			return err
		case n == smallPiece && len(piece) == smallPiece:
			select {
			case piece = <-large:
				if piece == nil {
					piece = make([]byte, largePiece)
				}
			default: // all in use
			}
		case n < smallPiece && len(piece) == largePiece:
			large <- piece
			piece = small
		}
	}
}

// counted counts the bytes of a connection to a host that serves HTTP requests. It does not belong to a
// single connection of the sandbox and does not end with one, so each write has a deadline instead.
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
	_ = c.SetWriteDeadline(time.Now().Add(idleBound))
	n, err := c.Conn.Write(b)
	c.counter.sent.Add(int64(n))
	return n, err
}
