package cluster

import (
	"context"
	"crypto/rand"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"time"
)

// Bus is a connection to a message server.
type Bus interface {
	// Publish sends a message. If it fails, the message was not sent.
	Publish(subject, reply string, data []byte) error
	// Subscribe calls each with all messages of a subject, one after the other. nobody means that a
	// message with this subject as its reply had no receiver.
	Subscribe(subject string, each func(subject, reply string, data []byte, nobody bool)) error
	Connected() bool
	// Reconnects returns the number of reconnects.
	Reconnects() uint64
	// Close handles the received messages, sends the published ones, and disconnects.
	Close()
}

// Transport is one end of many connections over a bus.
type Transport struct {
	bus  Bus
	self string // subject prefix of its connections
	name string // of this node or gateway
	base context.Context
	// alive reports whether another transport may still be alive.
	alive func(peer string) bool

	mu       sync.Mutex
	all      map[string]*Conn
	over     map[string]time.Time // connections from others, with the time of their end
	accepted chan *Conn
	open     context.Context // done when no more connections are accepted
	shut     context.CancelFunc
	buffer   []byte
}

// NewTransport returns a transport that lasts until ctx is done, and is also a [net.Listener].
// Connections end when alive reports that the other side is lost.
func NewTransport(ctx context.Context, bus Bus, self string, alive func(peer string) bool) (*Transport, error) {
	const backlog = 1024
	l := &Transport{bus: bus, self: self, name: nameIn(self), base: ctx, alive: alive, all: map[string]*Conn{}, over: map[string]time.Time{}, accepted: make(chan *Conn, backlog)}
	l.open, l.shut = context.WithCancel(ctx)
	if err := bus.Subscribe(self+".*.*", l.dispatch); err != nil {
		return nil, err
	}
	go l.ticks()
	return l, nil
}

// Dial starts a connection. It sends nothing before the first Write.
func (l *Transport) Dial(peer string) *Conn {
	c := newConn(l, rand.Text(), peer, true)
	l.mu.Lock()
	l.all[c.id] = c
	l.mu.Unlock()
	return c
}

func (l *Transport) Accept() (net.Conn, error) {
	select {
	case c := <-l.accepted:
		return c, nil
	case <-l.open.Done():
		return nil, net.ErrClosed
	}
}

// Close stops accepting connections. Open connections continue until the context of the transport is
// done.
func (l *Transport) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.shut()
	for {
		select {
		case c := <-l.accepted: // will not be accepted
			delete(l.all, c.id)
			l.reset(c.peer, c.id, resets|refuses)
		default:
			return nil
		}
	}
}

// reset tells a peer that a connection does not exist. With [refuses], nothing of its request was
// started, so another node may get it.
func (l *Transport) reset(peer, id string, bits byte) {
	_ = l.bus.Publish(peer+"."+l.name+"."+id, "", (&frame{bits: bits}).append(nil)) // if it fails, the peer asks again
}

func (l *Transport) Addr() net.Addr { return address(l.self) }

// publish sends a frame. Its subject ends with the name of the sender, which NATS protects, and the ID of
// the connection.
func (l *Transport) publish(c *Conn, f *frame) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.buffer = f.append(l.buffer[:0]) // the bus copies it
	reply := ""
	// With a reply subject, NATS reports a missing receiver. For later frames that would say nothing about
	// the first one, which may have started the request.
	if f.at == 0 && len(f.data) > 0 || f.bits&asks != 0 {
		reply = l.self + "." + c.from + "." + c.id
	}
	return l.bus.Publish(c.peer+"."+l.name+"."+c.id, reply, l.buffer)
}

// forget drops a finished connection.
func (l *Transport) forget(c *Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.all[c.id] == c {
		delete(l.all, c.id)
		if !c.dialed {
			l.over[c.id] = time.Now()
		}
	}
}

func (l *Transport) dispatch(subject, reply string, data []byte, nobody bool) {
	from, id, ok := strings.Cut(strings.TrimPrefix(subject, l.self+"."), ".")
	if !ok {
		return
	}
	l.mu.Lock()
	c := l.all[id]
	l.mu.Unlock()
	if c != nil && c.from != from {
		return // from another sender that knows the ID
	}
	if nobody {
		if c != nil {
			c.unheard()
		}
		return
	}
	f, err := parse(data)
	if err != nil {
		return // not a frame
	}
	if c == nil {
		if c = l.accept(from, id, reply, &f); c == nil {
			return
		}
	}
	c.receive(&f)
}

// accept creates a connection from its first frame.
func (l *Transport) accept(from, id, reply string, f *frame) *Conn {
	peer, ok := strings.CutSuffix(reply, "."+l.name+"."+id)
	if !ok || nameIn(peer) != from || f.bits&resets != 0 || f.bits&(opens|asks) == 0 {
		return nil // the rest of a finished connection needs no response
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	_, was := l.over[id]
	switch {
	case was || f.bits&opens == 0:
		l.reset(peer, id, resets)
		return nil
	case l.open.Err() != nil:
		l.reset(peer, id, resets|refuses)
		return nil
	case f.at != 0:
		return nil // earlier frames were lost and will be sent again
	}
	c := newConn(l, id, peer, false)
	select {
	case l.accepted <- c:
		l.all[id] = c
		return c
	default: // the backlog is full; the peer will send the frame again
		return nil
	}
}

// ticks runs the timers of all connections.
func (l *Transport) ticks() {
	t := time.NewTicker(tick)
	defer t.Stop()
	for {
		select {
		case now := <-t.C:
			if l.bus.Connected() { // otherwise silence means nothing
				for _, c := range l.conns() {
					c.tick(now, l.alive(c.peer))
				}
			}
			l.expire(now)
		case <-l.base.Done():
			for _, c := range l.conns() {
				c.Abort(net.ErrClosed)
			}
			return
		}
	}
}

func (l *Transport) expire(now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	maps.DeleteFunc(l.over, func(_ string, at time.Time) bool { return now.Sub(at) > overFor })
}

func (l *Transport) conns() []*Conn {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Collect(maps.Values(l.all))
}
