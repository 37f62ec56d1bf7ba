package cluster

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// fakeBus delivers messages within this process, except for those that lose selects.
type fakeBus struct {
	mu   sync.Mutex
	subs []*fakeSub
	lose func(data []byte) bool
	away bool
	made uint64
}

type fakeSub struct {
	subject string
	queue   chan func()
	each    func(subject, reply string, data []byte, nobody bool)
}

func (b *fakeBus) Connected() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return !b.away
}

func (*fakeBus) Close() {}

func (b *fakeBus) Reconnects() uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.made
}

func (b *fakeBus) Subscribe(subject string, each func(subject, reply string, data []byte, nobody bool)) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := &fakeSub{subject, make(chan func(), 1<<16), each}
	b.subs = append(b.subs, s)
	go func() {
		for f := range s.queue {
			f()
		}
	}()
	return nil
}

func (b *fakeBus) Publish(subject, reply string, data []byte) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.away {
		return errors.New("away")
	}
	if b.lose != nil && b.lose(data) {
		return nil
	}
	data = bytes.Clone(data)
	found := false
	for _, s := range b.subs {
		if matches(s.subject, subject) {
			found = true
			s.queue <- func() { s.each(subject, reply, data, false) }
		}
	}
	for _, s := range b.subs {
		if !found && reply != "" && matches(s.subject, reply) {
			s.queue <- func() { s.each(reply, "", nil, true) }
		}
	}
	return nil
}

func matches(pattern, subject string) bool {
	p, s := strings.Split(pattern, "."), strings.Split(subject, ".")
	if len(p) != len(s) {
		return false
	}
	for i := range p {
		if p[i] != "*" && p[i] != s[i] {
			return false
		}
	}
	return true
}

// pair returns two transports.
func pair(t *testing.T, bus *fakeBus) (dials, accepts *Transport, alive *sync.Map) {
	t.Helper()
	alive = &sync.Map{}
	there := func(peer string) bool {
		_, gone := alive.Load(peer)
		return !gone
	}
	dials, err := NewTransport(t.Context(), bus, "gateway.g.1", there)
	if err == nil {
		accepts, err = NewTransport(t.Context(), bus, "node.n.1", there)
	}
	check.Must(t, err)
	return dials, accepts, alive
}

// connect opens a connection from one transport to another, and writes a byte.
func connect(t *testing.T, dials, accepts *Transport) (c, other *Conn) {
	t.Helper()
	c = dials.Dial("node.n.1")
	_, err := c.Write([]byte("x"))
	check.Must(t, err)
	far, err := accepts.Accept()
	check.Must(t, err)
	return c, far.(*Conn)
}

// bounded fails a test that hangs.
func bounded(t *testing.T, do func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		do()
	}()
	select {
	case <-done:
	case <-time.After(harness.Bound):
		t.Fatal("timeout")
	}
}

// Both sides read what the other has written, and see its end, even if messages are lost.
func TestConn(t *testing.T) {
	for _, tt := range []struct {
		name string
		lose func([]byte) bool
		size int
	}{
		{"nothing is lost", nil, 3 << 20},
		{"messages are lost", func([]byte) bool { return rand.IntN(16) == 0 }, 100 << 10},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			dials, accepts, _ := pair(t, &fakeBus{lose: tt.lose})
			sent := make([]byte, tt.size)
			for i := range sent {
				sent[i] = byte(rand.Uint32())
			}
			bounded(t, func() {
				go func() {
					c, err := accepts.Accept()
					if err != nil {
						t.Error(err)
						return
					}
					text, err := io.ReadAll(c)
					check.That(t, err == nil && bytes.Equal(text, sent), "%d of %d bytes arrive, or different ones: %v", len(text), len(sent), err)
					_, err = c.Write(text)
					check.OK(t, err)
					c.Close()
				}()
				c := dials.Dial("node.n.1")
				_, err := c.Write(sent)
				check.OK(t, err)
				check.OK(t, c.CloseWrite())
				text, err := io.ReadAll(c)
				check.That(t, err == nil && bytes.Equal(text, sent), "%d of %d bytes come back, or others: %v", len(text), len(sent), err)
				c.Close()
				empty(t, dials)
				empty(t, accepts)
			})
		})
	}
}

// empty waits until a transport has no connections.
func empty(t *testing.T, l *Transport) {
	for end := time.Now().Add(30 * time.Second); len(l.conns()) > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Errorf("%s: a connection is left", l.self)
			return
		}
	}
}

// A reader that does not read stops the writer, and needs no more memory than the window.
func TestSlowReader(t *testing.T) {
	t.Parallel()
	dials, accepts, _ := pair(t, &fakeBus{})
	c := dials.Dial("node.n.1")
	go func() { // sets the deadline when the window is full
		for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
			c.mu.Lock()
			full := c.acked+uint64(len(c.out)) == window && c.blocked > 0
			c.mu.Unlock()
			if full {
				break
			}
		}
		_ = c.SetWriteDeadline(time.Now().Add(200 * time.Millisecond)) // no more may be written in that time
	}()
	n, err := c.Write(make([]byte, 10*window))
	check.That(t, n == window && errors.Is(err, os.ErrDeadlineExceeded), "%d bytes, %v", n, err)
	other, err := accepts.Accept()
	check.Must(t, err)
	late := other.(*Conn)
	late.mu.Lock()
	defer late.mu.Unlock()
	check.That(t, len(late.in) <= window, "%d bytes are waiting", len(late.in))
}

// If no one receives the first frame, the error says that nothing was delivered; after a response, it does not.
func TestNobody(t *testing.T) {
	t.Parallel()
	bus := &fakeBus{}
	dials, accepts, alive := pair(t, bus)
	c := dials.Dial("node.other.1")
	_, _ = c.Write([]byte("x")) // delivered or not is not known yet
	_, err := c.Read(make([]byte, 1))
	check.That(t, errors.Is(err, ErrUnreachable), "%v", err)
	heard, _ := connect(t, dials, accepts)
	alive.Store("node.n.1", true) // is gone
	bounded(t, func() {
		_, err := heard.Read(make([]byte, 1))
		check.That(t, errors.Is(err, ErrLost), "%v", err)
	})
	bus.mu.Lock()
	bus.away = true
	bus.mu.Unlock()
	away := dials.Dial("node.n.1")
	_, err = away.Write([]byte("x"))
	check.That(t, errors.Is(err, ErrUnreachable), "%v", err)
}

// A transport that is closing refuses new connections, and those that no one has accepted. The peer learns
// that nothing was started.
func TestRefused(t *testing.T) {
	t.Parallel()
	dials, accepts, _ := pair(t, &fakeBus{})
	for range 2 {
		c := dials.Dial("node.n.1")
		_, err := c.Write([]byte("x"))
		check.Must(t, err)
		for end := time.Now().Add(time.Minute); len(accepts.accepted) == 0 && accepts.open.Err() == nil && time.Now().Before(end); {
			time.Sleep(time.Millisecond)
		}
		check.Must(t, accepts.Close())
		bounded(t, func() {
			_, err := c.Read(make([]byte, 1))
			check.That(t, errors.Is(err, ErrUnreachable), "%v", err)
		})
	}
	empty(t, accepts)
}

// The peer notices when a side leaves.
func TestLeaving(t *testing.T) {
	t.Parallel()
	dials, accepts, _ := pair(t, &fakeBus{})
	c, other := connect(t, dials, accepts)
	_, err := other.Read(make([]byte, 1))
	check.Must(t, err)
	c.Abort(context.Canceled)
	bounded(t, func() {
		n, err := other.Read(make([]byte, 1))
		check.That(t, err != nil, "%d bytes", n)
	})
	_, err = c.Read(make([]byte, 1))
	check.That(t, errors.Is(err, context.Canceled), "%v", err)
}

// A frame from another sender than the peer is ignored even if it has the right ID. No one can open a
// connection under another name.
func TestName(t *testing.T) {
	t.Parallel()
	bus := &fakeBus{}
	dials, accepts, _ := pair(t, bus)
	c, other := connect(t, dials, accepts)
	for _, forged := range []struct{ subject, reply string }{
		{"gateway.g.1.thief." + c.id, "node.n.1.g." + c.id},
		{"node.n.1.thief." + c.id, "gateway.g.1.n." + c.id},
		{"node.n.1.thief.another", "gateway.g.1.n.another"},
	} {
		for _, f := range []frame{{bits: resets}, {bits: opens, data: []byte("xforged")}} {
			check.Must(t, bus.Publish(forged.subject, forged.reply, f.append(nil)))
		}
	}
	_, err := c.Write([]byte("y"))
	check.Must(t, err)
	bounded(t, func() {
		text := make([]byte, 2)
		_, err := io.ReadFull(other, text)
		check.That(t, err == nil && string(text) == "xy", "%q, %v", text, err)
	})
	check.Equal(t, len(accepts.accepted), 0)
}

// If NATS has lost the message about the end of a connection, the peer asks after a silence.
func TestLeavingUnheard(t *testing.T) {
	t.Parallel()
	var lost atomic.Bool
	bus := &fakeBus{lose: func(data []byte) bool { return data[0]&resets != 0 && lost.CompareAndSwap(false, true) }}
	dials, accepts, _ := pair(t, bus)
	c, other := connect(t, dials, accepts)
	c.Abort(context.Canceled)
	other.tick(time.Now().Add(2*lostAfter), true)
	bounded(t, func() {
		text, err := io.ReadAll(other)
		check.That(t, err != nil, "%q", text)
	})
}

// The last heartbeat of a node may be received before its last response, which has a second then, however long the
// connection was silent before.
func TestLastResponse(t *testing.T) {
	t.Parallel()
	dials, accepts, alive := pair(t, &fakeBus{})
	c, other := connect(t, dials, accepts)
	gone := time.Now().Add(time.Minute)
	c.tick(gone, false)
	alive.Store("node.n.1", true) // is gone, also for the transport's own ticks
	_, err := other.Write([]byte("y"))
	check.Must(t, err)
	bounded(t, func() {
		text := make([]byte, 1)
		_, err := io.ReadFull(c, text)
		check.That(t, err == nil && string(text) == "y", "%q, %v", text, err)
	})
	c.tick(gone.Add(again+tick), false)
	bounded(t, func() {
		_, err := c.Read(make([]byte, 1))
		check.That(t, errors.Is(err, ErrLost), "%v", err)
	})
}

// A client that was disconnected for longer than the peer remembers finished connections starts nothing
// twice. Unfinished connections continue.
func TestCutOff(t *testing.T) {
	t.Parallel()
	var cut atomic.Bool
	bus := &fakeBus{lose: func(data []byte) bool { return cut.Load() && data[0]&opens == 0 }}
	dials, accepts, _ := pair(t, bus)
	dial := func() (c, other *Conn) {
		cut.Store(true) // the first frame arrives, but no answer
		c, other = connect(t, dials, accepts)
		c.mu.Lock()
		defer c.mu.Unlock()
		c.lastIn = c.lastIn.Add(-3 * time.Minute)
		return c, other
	}
	c, other := dial()
	cut.Store(false)
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		c.mu.Lock()
		heard, err := c.heard, c.err
		c.mu.Unlock()
		check.Require(t, err == nil && !time.Now().After(end), "an open connection does not continue: : %v", err)
		if heard {
			break
		}
	}
	other.Close()

	c, other = dial()
	other.Abort(ErrLost)
	accepts.expire(time.Now().Add(3 * time.Minute))
	cut.Store(false)
	bounded(t, func() {
		_, err := c.Read(make([]byte, 1))
		check.That(t, errors.Is(err, ErrLost), "%v", err)
	})
	check.Equal(t, len(accepts.accepted), 0)
}

func FuzzParse(f *testing.F) {
	f.Add((&frame{bits: opens, at: 1, ack: 2, limit: 3, data: []byte("x")}).append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		x, err := parse(b)
		if err != nil {
			return
		}
		again := x.append(nil)
		check.That(t, bytes.Equal(again, b), "%x, then %x", b, again)
		l := &Transport{bus: &fakeBus{}, self: "a", all: map[string]*Conn{}, over: map[string]time.Time{}, open: t.Context()}
		c := newConn(l, "c", "b", true)
		c.receive(&x)
		check.That(t, len(c.in) <= window, "%d bytes are waiting", len(c.in))
	})
}
