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

// Bus is what is needed of a message server.
type Bus interface {
	// Publish sends a message. An error says that it was not sent.
	Publish(subject, reply string, data []byte) error
	// Subscribe has each called with all messages of a subject, one after the other. nobody is set
	// if this tells that nobody received what was sent with this subject as the reply.
	Subscribe(subject string, each func(subject, reply string, data []byte, nobody bool)) error
	Connected() bool
	// Reconnects is how often the connection was made anew.
	Reconnects() uint64
	// Close delivers what has come and sends what was published, and ends the connection.
	Close()
}

// Transport is one end of many connections.
type Transport struct {
	bus  Bus
	self string // the subject below which connections are
	name string // of this node or gateway
	base context.Context
	// alive reports whether another link is there, as far as is known.
	alive func(peer string) bool

	mu       sync.Mutex
	all      map[string]*Conn
	over     map[string]time.Time // connections of others that have ended, and when
	accepted chan *Conn
	open     context.Context // done when nothing more is accepted
	shut     context.CancelFunc
	buffer   []byte
}

// NewTransport has connections until ctx is done. It is also a [net.Listener]. Connections end with the
// other side, which alive reports on.
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

// Dial begins a connection. Nothing is sent until something is written.
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

// Close has nothing more accepted. What is under way goes on until the context of
// the link is done.
func (l *Transport) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.shut()
	for {
		select {
		case c := <-l.accepted: // nobody takes it any more
			delete(l.all, c.id)
			l.reset(c.peer, c.id, resets|refuses)
		default:
			return nil
		}
	}
}

// reset says that there is no such connection; with [refuses], that nothing of it was begun: another node
// may have what it asks for.
func (l *Transport) reset(peer, id string, bits byte) {
	_ = l.bus.Publish(peer+"."+l.name+"."+id, "", (&frame{bits: bits}).append(nil)) // the other side asks again
}

func (l *Transport) Addr() net.Addr { return address(l.self) }

// publish sends a frame. The last words of its subject are the name of the sender, which NATS lets nobody
// else use, and the id of the connection.
func (l *Transport) publish(c *Conn, f *frame) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.buffer = f.append(l.buffer[:0]) // the bus copies it
	reply := ""
	// NATS tells by it that there is nobody. Of a later frame that would say nothing of the first, which
	// may have begun something.
	if f.at == 0 && len(f.data) > 0 || f.bits&asks != 0 {
		reply = l.self + "." + c.from + "." + c.id
	}
	return l.bus.Publish(c.peer+"."+l.name+"."+c.id, reply, l.buffer)
}

// forget drops a connection of which nothing is left to be done.
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
		return // of somebody who has learned the id
	}
	if nobody {
		if c != nil {
			c.unheard()
		}
		return
	}
	f, err := parse(data)
	if err != nil {
		return // of nobody here
	}
	if c == nil {
		if c = l.accept(from, id, reply, &f); c == nil {
			return
		}
	}
	c.receive(&f)
}

// accept makes a connection of a first frame.
func (l *Transport) accept(from, id, reply string, f *frame) *Conn {
	peer, ok := strings.CutSuffix(reply, "."+l.name+"."+id)
	if !ok || nameIn(peer) != from || f.bits&resets != 0 || f.bits&(opens|asks) == 0 {
		return nil // what is left of a connection that is over needs no answer
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
		return nil // what comes before it was lost, and is sent again
	}
	c := newConn(l, id, peer, false)
	select {
	case l.accepted <- c:
		l.all[id] = c
		return c
	default: // the server does not come after; a connection that is not accepted is sent again
		return nil
	}
}

// ticks does for all connections what has to be done after a time.
func (l *Transport) ticks() {
	t := time.NewTicker(tick)
	defer t.Stop()
	for {
		select {
		case now := <-t.C:
			if l.bus.Connected() { // else nothing arrives, and nobody is lost
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
