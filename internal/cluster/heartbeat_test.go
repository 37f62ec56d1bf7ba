package cluster

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// watched are members of which one, a node, was heard at a time.
func watched(t *testing.T, bus *fakeBus) (m *Members, at time.Time) {
	t.Helper()
	m = newMembers(bus)
	at = time.Now()
	m.check(at)
	<-m.kick
	b := Heartbeat{Kind: NodeKind, Name: "n", Instance: NewInstance()}
	text, err := json.Marshal(b)
	harness.Must(t, err)
	m.receive(heartbeats+NodeKind+".n", "", text, false)
	return m, at
}

// looks looks as [Members.run] does, after some time until some other.
func (m *Members) looks(at time.Time, after, until time.Duration) (there bool) {
	for d := after; d <= until; d += tick {
		m.check(at.Add(d))
	}
	return len(m.Of(NodeKind)) == 1
}

// Who was cut off itself gives others time to be heard again, also if nobody has seen it, and tells of
// itself at once.
func TestReconnected(t *testing.T) {
	t.Parallel()
	bus := &fakeBus{}
	m, at := watched(t, bus)
	if m.looks(at, tick, lostAfter+time.Second) {
		t.Error("a node that is silent is not lost")
	}
	m, at = watched(t, bus)
	m.looks(at, tick, lostAfter-time.Second)
	bus.mu.Lock()
	bus.made++
	bus.mu.Unlock()
	if !m.looks(at, lostAfter-tick, 2*lostAfter-time.Second) {
		t.Error("a node is lost whose beats had no time to come")
	}
	if len(m.kick) == 0 {
		t.Error("nothing is told")
	}
	if m.looks(at, 2*lostAfter-time.Second, 2*lostAfter+time.Second) {
		t.Error("a node that stays silent is not lost")
	}
}

// Who was stopped has heard nobody, and judges by the time after that.
func TestStopped(t *testing.T) {
	t.Parallel()
	m, at := watched(t, &fakeBus{})
	m.looks(at, tick, time.Second)
	if !m.looks(at, 5*lostAfter, 6*lostAfter-tick) {
		t.Error("a node is lost whose beats had no time to come")
	}
	if len(m.kick) == 0 {
		t.Error("nothing is told")
	}
	if m.looks(at, 6*lostAfter-tick, 6*lostAfter+time.Second) {
		t.Error("a node that stays silent is not lost")
	}
}
