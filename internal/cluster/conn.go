package cluster

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// window bounds the bytes in flight or unread in each direction of a connection, and thus the memory for a
// slow reader.
const window = 128 << 10

// piece is the maximum payload of a message.
const piece = 32 << 10

// Errors of connections.
var (
	// ErrUnreachable means that nothing was delivered.
	ErrUnreachable = errors.New("the node is not connected to NATS")
	// ErrLost means that the peer is gone, and that its progress is unknown.
	ErrLost = errors.New("the connection over NATS was lost")
)

// Conn is a [net.Conn] over messages. Its methods may be called concurrently.
type Conn struct {
	link   *Transport
	id     string
	peer   string // subject of the other transport
	from   string // name of the peer
	dialed bool

	mu      sync.Mutex
	changed sync.Cond
	err     error // ends both directions
	closed  bool  // Close was called

	// The incoming direction.
	in       []byte // unread
	got      uint64 // bytes received
	inEnded  bool
	granted  uint64 // limit last sent to the peer
	owed     bool   // the peer waits for an acknowledgement
	heard    bool   // received anything
	lastIn   time.Time
	alone    time.Time // since when the peer has not been alive; zero if it is
	readBy   time.Time
	readWake *time.Timer

	// The outgoing direction.
	out       []byte // not acknowledged
	acked     uint64 // stream offset of out
	limit     uint64 // granted by the peer
	outEnded  bool
	endAcked  bool
	blocked   int       // waiting writers
	times     int       // transmissions of the first byte
	lastOut   time.Time // of progress or the last attempt
	writeBy   time.Time
	writeWake *time.Timer
}

func newConn(l *Transport, id, peer string, dialed bool) *Conn {
	c := &Conn{link: l, id: id, peer: peer, from: nameIn(peer), dialed: dialed, granted: window, limit: window, lastIn: time.Now(), lastOut: time.Now()}
	c.changed.L = &c.mu
	return c
}

func (c *Conn) Read(b []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		switch {
		case c.closed:
			return 0, net.ErrClosed
		case len(b) == 0:
			return 0, nil
		case late(c.readBy):
			return 0, os.ErrDeadlineExceeded
		case len(c.in) > 0:
			n := copy(b, c.in)
			if c.in = c.in[n:]; len(c.in) == 0 {
				c.in = nil
			}
			// Not after every read: each update is a message.
			if c.mayArrive()-c.granted >= window/4 && c.err == nil && !c.inEnded {
				c.send(frame{})
			}
			return n, nil
		case c.inEnded:
			return 0, io.EOF
		case c.err != nil:
			return 0, c.err
		}
		c.changed.Wait()
	}
}

// mayArrive returns the stream offset up to which the peer may send.
func (c *Conn) mayArrive() uint64 { return c.got - uint64(len(c.in)) + window }

// end returns the stream offset after everything sent.
func (c *Conn) end() uint64 { return c.acked + uint64(len(c.out)) }

func late(by time.Time) bool { return !by.IsZero() && !time.Now().Before(by) }

// Write blocks while the peer's reader is slow.
func (c *Conn) Write(b []byte) (n int, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for n < len(b) {
		next := c.end()
		switch {
		case c.closed, c.outEnded:
			return n, net.ErrClosed
		case c.err != nil:
			return n, c.err
		case late(c.writeBy):
			return n, os.ErrDeadlineExceeded
		case next < c.limit:
			k := min(len(b)-n, piece, int(c.limit-next))
			if len(c.out) == 0 {
				c.lastOut = time.Now()
			}
			c.out = append(c.out, b[n:n+k]...)
			c.send(frame{at: next, data: b[n : n+k]})
			if n += k; c.err != nil {
				return n, c.err
			}
			continue
		}
		c.blocked++
		c.changed.Wait()
		c.blocked--
	}
	return n, nil
}

// CloseWrite ends the outgoing direction.
func (c *Conn) CloseWrite() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.outEnded && c.err == nil {
		c.outEnded = true
		c.lastOut = time.Now()
		c.send(frame{at: c.end()})
	}
	return nil
}

// Close closes both directions. Written data is still delivered.
func (c *Conn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil
	}
	c.closed = true
	switch {
	case c.err != nil:
	case c.dialed || len(c.in) > 0 && !c.inEnded:
		// The client has its response, or no longer wants it.
		c.fail(net.ErrClosed, true)
	case !c.outEnded:
		// The next tick sends this, which is early enough: a response marks its own end, after which the client
		// closes the connection.
		c.outEnded, c.owed, c.lastOut = true, true, time.Now()
	}
	c.in = nil
	c.changed.Broadcast()
	if c.settled() {
		c.link.forget(c)
	}
	return nil
}

// Gone reports whether the peer has left, for [server.WhileConnected].
func (c *Conn) Gone() bool { return c.failure() != nil }

// Abort ends the connection at once. Read and Write return err.
func (c *Conn) Abort(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fail(err, true)
}

func (c *Conn) fail(err error, tell bool) {
	if c.err != nil {
		return
	}
	if tell {
		c.send(frame{bits: resets})
	}
	c.err = err
	c.changed.Broadcast()
	c.link.forget(c)
}

// settled reports whether a closed connection is finished.
func (c *Conn) settled() bool { return c.closed && (c.err != nil || len(c.out) == 0 && c.endAcked) }

// send sends a frame with the current acknowledgement and limit. If it is lost, the peer reports the gap, or
// [Conn.tick] sends it again.
func (c *Conn) send(f frame) {
	if c.dialed && !c.heard {
		if time.Since(c.lastIn) < opensFor { // since Dial; later frames do not open the connection
			f.bits |= opens
		}
		if f.at == 0 && len(f.data) > 0 {
			c.times++
		}
	}
	if c.outEnded && f.at+uint64(len(f.data)) == c.end() {
		f.bits |= ends
	}
	f.ack, f.limit = c.got, c.mayArrive()
	if c.inEnded {
		f.ack++ // the end counts as a byte, as in TCP
	}
	c.granted, c.owed = f.limit, false
	if err := c.link.publish(c, &f); err != nil && c.dialed && !c.heard && c.times == 1 && f.at == 0 && len(f.data) > 0 {
		c.fail(ErrUnreachable, false) // not connected to NATS
	}
}

// receive handles a frame from the peer.
func (c *Conn) receive(f *frame) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return
	}
	c.heard, c.lastIn = true, time.Now()
	c.takeAck(f)
	if f.bits&resets != 0 {
		err := ErrLost
		if c.inEnded || c.closed || !c.dialed {
			err = io.ErrUnexpectedEOF // the client has left
		}
		if f.bits&refuses != 0 && c.dialed {
			err = ErrUnreachable
		}
		c.fail(err, false)
		return
	}
	c.takeData(f)
	if f.bits&asks != 0 {
		c.send(frame{at: c.end()})
	}
	c.changed.Broadcast()
	if c.settled() {
		c.link.forget(c)
	}
}

func (c *Conn) takeAck(f *frame) {
	end := c.end()
	if f.ack > c.acked && f.ack <= end+1 {
		n := min(f.ack, end) - c.acked
		c.out = c.out[n:]
		c.acked += n
		c.lastOut = time.Now()
		if len(c.out) == 0 {
			c.out = nil
		}
	}
	if f.ack == end+1 && c.outEnded {
		c.endAcked = true
	}
	if f.limit > c.limit && f.limit <= c.acked+window {
		c.limit = f.limit
	}
}

func (c *Conn) takeData(f *frame) {
	end := f.at + uint64(len(f.data))
	switch {
	case f.at > c.got || end > c.mayArrive():
		c.owed = true // a gap, or beyond the limit: the peer sends it again
		return
	case end > c.got && !c.inEnded:
		if c.closed {
			c.got = end // discarded
		} else {
			c.in = append(c.in, f.data[c.got-f.at:]...)
			c.got = end
		}
		c.owed = true
	case len(f.data) > 0:
		c.owed = true // the acknowledgement was lost
	}
	if f.bits&ends != 0 && end == c.got {
		c.inEnded, c.owed = true, true
	}
}

// Intervals of retransmission.
const (
	tick  = 250 * time.Millisecond
	again = time.Second
	// A frame opens its connection only for this time. The peer remembers finished connections for longer,
	// so that none starts twice.
	opensFor = time.Minute
	overFor  = 2 * opensFor
)

// tick sends acknowledgements, and sends lost data again.
func (c *Conn) tick(now time.Time, alive bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return
	}
	switch {
	case alive:
		c.alone = time.Time{}
	case c.alone.IsZero():
		c.alone = now
	}
	// Its first heartbeat may still be on its way, or arrive before its last response.
	if !alive && now.Sub(c.lastIn) > again && now.Sub(c.alone) > again {
		c.fail(ErrLost, false)
		return
	}
	waits := len(c.out) > 0 || c.outEnded && !c.endAcked || c.blocked > 0
	switch {
	case waits && now.Sub(c.lastOut) >= again:
		c.lastOut = now
		c.resend()
	case c.owed:
		c.send(frame{at: c.end()})
	case now.Sub(c.lastIn) > lostAfter && now.Sub(c.lastOut) >= again:
		// The peer may have ended the connection, and its message may be lost.
		c.lastOut = now
		c.send(frame{bits: asks, at: c.end()})
	}
}

// resend sends all unacknowledged data again, or asks for a new limit.
func (c *Conn) resend() {
	at := c.acked
	for rest := c.out; ; {
		k := min(len(rest), piece)
		c.send(frame{bits: asks, at: at, data: rest[:k]})
		if rest, at = rest[k:], at+uint64(k); len(rest) == 0 || c.err != nil {
			return
		}
	}
}

// unheard handles a report of NATS that a frame had no receiver. That is final only for the first frame:
// later, the node may be reconnecting.
func (c *Conn) unheard() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.dialed && !c.heard && c.times <= 1 {
		c.fail(ErrUnreachable, false)
	}
}

func (c *Conn) LocalAddr() net.Addr  { return address(c.link.self) }
func (c *Conn) RemoteAddr() net.Addr { return address(c.peer) }

// address is the subject of a transport.
type address string

func (address) Network() string  { return "nats" }
func (a address) String() string { return string(a) }

func (c *Conn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

func (c *Conn) SetReadDeadline(t time.Time) error  { return c.deadline(&c.readBy, &c.readWake, t) }
func (c *Conn) SetWriteDeadline(t time.Time) error { return c.deadline(&c.writeBy, &c.writeWake, t) }

func (c *Conn) deadline(by *time.Time, wake **time.Timer, t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return net.ErrClosed
	}
	*by = t
	if *wake != nil {
		(*wake).Stop()
		*wake = nil
	}
	if !t.IsZero() {
		if left := time.Until(t); left > 0 {
			*wake = time.AfterFunc(left, c.wake)
		} else {
			c.changed.Broadcast()
		}
	}
	return nil
}

func (c *Conn) wake() {
	c.mu.Lock()
	c.changed.Broadcast()
	c.mu.Unlock()
}
