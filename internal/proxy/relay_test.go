package proxy

import (
	"bytes"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// More connections than large buffers transfer all bytes in order, in both directions, even while stalled
// readers use all large buffers. In the end all buffers are free again.
func TestRelayPieces(t *testing.T) {
	t.Parallel()
	var relays, ends sync.WaitGroup
	begin := func() (inside, host *net.TCPConn, n *counter) {
		inside, inner := tcpPair(t)
		outer, host := tcpPair(t)
		n = new(counter)
		relays.Go(func() { relay(inner, outer, nil, n) })
		return inside, host, n
	}
	var still []*net.TCPConn
	for range mostLarge {
		inside, host, _ := begin()
		still = append(still, inside, host)
		ends.Go(func() {
			for err := error(nil); err == nil; {
				_, err = host.Write(make([]byte, largePiece)) // until it is closed
			}
		})
	}
	harness.Until(t, time.Minute, "all are taken", func() bool { return len(large) == 0 })

	data := make([]byte, 3*largePiece+smallPiece+1)
	_, _ = rand.Read(data) // never fails
	for range 4 {
		inside, host, n := begin()
		var both sync.WaitGroup
		for _, way := range [][2]*net.TCPConn{{inside, host}, {host, inside}} {
			from, to := way[0], way[1]
			both.Go(func() {
				_, err := from.Write(data)
				check.OK(t, err)
				_ = from.CloseWrite() // the other end notices a failure
			})
			both.Go(func() {
				got, err := io.ReadAll(to)
				check.That(t, err == nil && bytes.Equal(got, data), "%d bytes, %v", len(got), err)
			})
		}
		both.Wait()
		sent, received := n.sent.Load(), n.received.Load()
		check.That(t, sent == int64(len(data)) && received == sent, "counted: %d and %d", sent, received)
	}
	for _, c := range still {
		c.Close()
	}
	ends.Wait()
	relays.Wait()
	harness.Until(t, time.Minute, "all are there", func() bool { return len(large) == mostLarge })
}

// A reset on one side, or the end of an idle connection, resets the other side, so that the data does not
// look complete.
func TestReset(t *testing.T) {
	t.Parallel()
	abort := func(c *net.TCPConn) {
		_ = c.SetLinger(0)
		c.Close()
	}
	for what, end := range map[string]func(inside, host *net.TCPConn, c *conns) (other *net.TCPConn){
		"of the host":    func(inside, host *net.TCPConn, _ *conns) *net.TCPConn { abort(host); return inside },
		"of the sandbox": func(inside, host *net.TCPConn, _ *conns) *net.TCPConn { abort(inside); return host },
		"idle, inside":   func(inside, host *net.TCPConn, c *conns) *net.TCPConn { c.closeIdle(-1); return inside },
		"idle, host":     func(inside, host *net.TCPConn, c *conns) *net.TCPConn { c.closeIdle(-1); return host },
	} {
		inside, inner := tcpPair(t)
		outer, host := tcpPair(t)
		var c conns
		c.add(inner)
		c.pair(inner, outer)
		go relay(inner, outer, nil, new(counter))
		for _, way := range [][2]*net.TCPConn{{inside, host}, {host, inside}} {
			_, writeErr := way[0].Write([]byte("part"))
			_, err := io.ReadFull(way[1], make([]byte, 4))
			check.Require(t, err == nil && writeErr == nil, "%v %v", err, writeErr)
		}
		_, err := end(inside, host, &c).Read(make([]byte, 1))
		check.That(t, errors.Is(err, unix.ECONNRESET), "%s: %v", what, err)
	}
}

// Writing to a host that does not read a request has a timeout.
func TestWriteBound(t *testing.T) {
	t.Parallel()
	outer, host := tcpPair(t)
	c := &counted{noting{outer, make(chan time.Time, 2)}, new(counter)}
	begin := time.Now()
	_, err := c.Write([]byte("x"))
	check.OK(t, err)
	select {
	case until := <-c.Conn.(noting).until:
		bound := until.Sub(begin)
		check.That(t, bound >= idleBound && bound <= idleBound+time.Minute, "it may take %v", bound)
	default:
		t.Error("it may take for ever")
	}
	host.Close()
}

// noting records the deadlines of writes.
type noting struct {
	net.Conn
	until chan time.Time
}

func (n noting) SetWriteDeadline(until time.Time) error {
	n.until <- until
	return n.Conn.SetWriteDeadline(until)
}
