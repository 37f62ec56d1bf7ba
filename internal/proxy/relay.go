package proxy

import (
	"io"
	"net"
	"sync/atomic"
	"time"
)

// relay moves bytes both ways until both are over, or one way has failed; begin is what was read of
// inner, which is in the sandbox, already. It closes neither.
func relay(inner, outer net.Conn, begin []byte, n *counter) {
	if c, ok := inner.(*net.TCPConn); ok {
		_ = c.SetWriteBuffer(innerBuffer) // else it is the kernel's
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

// pass copies until the end, which it passes on; an error it passes on both ways as a reset.
func pass(to, from net.Conn, moved *atomic.Int64) {
	err := move(to, from, moved)
	if half, ok := to.(interface{ CloseWrite() error }); ok && err == nil {
		_ = half.CloseWrite() // it is closed already, then
		return
	}
	reset(to, from)
}

// reset closes connections so that whoever is at the other end does not take that for the end of what is
// sent (tcp(7), SO_LINGER). Unix sockets have no such thing.
func reset(conns ...net.Conn) {
	for _, c := range conns {
		if c, ok := c.(*net.TCPConn); ok {
			_ = c.SetLinger(0) // it is closed already, then
		}
		c.Close()
	}
}

// innerBuffer is how many bytes may wait for a reader in the sandbox. The way there is short, so more of them
// make nothing quicker: they only leave the processor's cache before they are read. Fewer than some
// segments of 64 KiB would wait for acknowledgements.
const innerBuffer = 256 << 10

// A way has a small piece of memory, and one of the large ones while what comes fills its own. There are
// few of these, so that no number of connections takes more than some megabytes.
const (
	smallPiece = 16 << 10
	largePiece = 512 << 10
	mostLarge  = 16
)

var large = make(chan []byte, mostLarge)

func init() {
	for range mostLarge {
		large <- nil // made when it is first wanted
	}
}

// move copies until the end. Large pieces are twice as quick as to have the kernel move the bytes
// (splice(2)), which does so in segments of 64 KiB, each of which wakes both sides.
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
			default: // others have them
			}
		case n < smallPiece && len(piece) == largePiece:
			large <- piece
			piece = small
		}
	}
}

// counted counts what goes over a connection to a host, for requests. No one connection of the sandbox
// has such a one, so it is not ended with that; but each piece is small, and has its time to go.
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
	_ = c.SetWriteDeadline(time.Now().Add(idleBound)) // it takes deadlines
	n, err := c.Conn.Write(b)
	c.counter.sent.Add(int64(n))
	return n, err
}
