package cluster

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// window is how many bytes may be on their way, or wait to be read, in each direction of a
// connection: what a slow reader costs.
const window = 128 << 10

// piece is the most that one message carries.
const piece = 32 << 10

// Errors of connections.
var (
	// ErrUnreachable: nothing was delivered.
	ErrUnreachable = errors.New("the node is not connected to NATS")
	// ErrLost: the other side is gone, and what it has done is not known.
	ErrLost = errors.New("the connection over NATS was lost")
)

// Conn is a connection over messages, a [net.Conn]. Its methods may be called at the same time.
type Conn struct {
	link   *Transport
	id     string
	peer   string // the other side's link
	from   string // its name
	dialed bool

	mu      sync.Mutex
	changed sync.Cond
	err     error // of both directions
	closed  bool  // by Close

	// What arrives.
	in       []byte // and was not read
	got      uint64 // bytes that have arrived
	inEnded  bool
	granted  uint64 // the limit that was last told
	owed     bool   // the other side waits for an acknowledgement
	heard    bool   // anything
	lastIn   time.Time
	readBy   time.Time
	readWake *time.Timer

	// What is sent.
	out       []byte // that was not acknowledged
	acked     uint64 // the stream's place of out's first byte
	limit     uint64 // how far may be sent
	outEnded  bool
	endAcked  bool
	blocked   int       // writers that wait
	times     int       // that the first byte was sent
	lastOut   time.Time // progress, or the last attempt
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
			// Told from time to time: each telling is a message.
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

// mayArrive is how far the other side may send.
func (c *Conn) mayArrive() uint64 { return c.got - uint64(len(c.in)) + window }

// end is the stream's place behind all that was sent.
func (c *Conn) end() uint64 { return c.acked + uint64(len(c.out)) }

func late(by time.Time) bool { return !by.IsZero() && !time.Now().Before(by) }

// Write waits while the other side's reader is slow.
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

// CloseWrite says that nothing more is sent.
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

// Close ends both directions. What was written is still delivered.
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
		// Whoever asked has the answer, or does not want it any more.
		c.fail(net.ErrClosed, true)
	case !c.outEnded:
		// Told by the next tick: an answer says itself where it ends, and whoever has it closes the connection.
		c.outEnded, c.owed, c.lastOut = true, true, time.Now()
	}
	c.in = nil
	c.changed.Broadcast()
	if c.settled() {
		c.link.forget(c)
	}
	return nil
}

// Gone reports whether the other side has left, for [server.WhileConnected].
func (c *Conn) Gone() bool { return c.failure() != nil }

// Abort ends the connection at once, with an error for those who read or write.
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

// settled reports whether nothing of a closed connection is left to be done.
func (c *Conn) settled() bool { return c.closed && (c.err != nil || len(c.out) == 0 && c.endAcked) }

// send sends a frame, with what this side has to say at the moment. The other side tells what it is
// missing; and if NATS is away, [Conn.tick] sends it again.
func (c *Conn) send(f frame) {
	if c.dialed && !c.heard {
		if time.Since(c.lastIn) < opensFor { // since it was dialed; later it asks for what the other side may have
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
		f.ack++ // for the end, as in TCP
	}
	c.granted, c.owed = f.limit, false
	if err := c.link.publish(c, &f); err != nil && c.dialed && !c.heard && c.times == 1 && f.at == 0 && len(f.data) > 0 {
		c.fail(ErrUnreachable, false) // not connected: it was not sent
	}
}

// receive takes a frame from the other side.
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
			err = io.ErrUnexpectedEOF // whoever asked has left
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
		c.owed = true // something is missing, or this one is not as agreed: the other side sends it again
		return
	case end > c.got && !c.inEnded:
		if c.closed {
			c.got = end // nobody reads it
		} else {
			c.in = append(c.in, f.data[c.got-f.at:]...)
			c.got = end
		}
		c.owed = true
	case len(f.data) > 0:
		c.owed = true // it has not heard that this has arrived
	}
	if f.bits&ends != 0 && end == c.got {
		c.inEnded, c.owed = true, true
	}
}

// Times of what is sent again.
const (
	tick  = 250 * time.Millisecond
	again = time.Second
	// A connection may be opened for so long. The other side remembers one that is over for longer, so that
	// none is begun twice.
	opensFor = time.Minute
	overFor  = 2 * opensFor
)

// tick acknowledges what has come, and sends again what seems to be lost.
func (c *Conn) tick(now time.Time, alive bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return
	}
	if !alive && now.Sub(c.lastIn) > again { // it may only just have begun to send beats
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
		// The other side may have ended the connection, and NATS have lost that.
		c.lastOut = now
		c.send(frame{bits: asks, at: c.end()})
	}
}

// resend sends all that was not acknowledged, or asks whether more may be sent.
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

// unheard is told when NATS has found nobody to deliver a frame to. That is only final if the
// frame was the first one: a node may be about to connect again.
func (c *Conn) unheard() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.dialed && !c.heard && c.times <= 1 {
		c.fail(ErrUnreachable, false)
	}
}

func (c *Conn) LocalAddr() net.Addr  { return address(c.link.self) }
func (c *Conn) RemoteAddr() net.Addr { return address(c.peer) }

// address is the subject of a link.
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
