package cluster

import (
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// watched returns members with one node, and the time of its heartbeat.
func watched(t *testing.T, bus *fakeBus) (m *Members, at time.Time) {
	t.Helper()
	m = newMembers(bus)
	at = time.Now()
	m.check(at)
	<-m.kick
	b := Heartbeat{Kind: NodeKind, Name: "n", Instance: NewInstance()}
	text := harness.JSON(t, b)
	m.receive(heartbeats+NodeKind+".n", "", text, false)
	return m, at
}

// looks calls check as [Members.run] does, for a period of time.
func (m *Members) looks(at time.Time, after, until time.Duration) (there bool) {
	for d := after; d <= until; d += tick {
		m.check(at.Add(d))
	}
	return len(m.Of(NodeKind)) == 1
}

// After a reconnect, even an unnoticed one, others have time for a heartbeat before they count as lost, and
// the process sends one at once.
func TestReconnected(t *testing.T) {
	t.Parallel()
	bus := &fakeBus{}
	m, at := watched(t, bus)
	check.That(t, !m.looks(at, tick, lostAfter+time.Second), "a silent node is not lost")
	m, at = watched(t, bus)
	m.looks(at, tick, lostAfter-time.Second)
	bus.mu.Lock()
	bus.made++
	bus.mu.Unlock()
	check.That(t, m.looks(at, lostAfter-tick, 2*lostAfter-time.Second), "a node is lost before its heartbeat had time to arrive")
	check.That(t, len(m.kick) != 0, "no heartbeat is sent")
	check.That(t, !m.looks(at, 2*lostAfter-time.Second, 2*lostAfter+time.Second), "a node that stays silent is not lost")
}

// After this process was stopped, others have time for a heartbeat before they count as lost.
func TestStopped(t *testing.T) {
	t.Parallel()
	m, at := watched(t, &fakeBus{})
	m.looks(at, tick, time.Second)
	check.That(t, m.looks(at, 5*lostAfter, 6*lostAfter-tick), "a node is lost before its heartbeat had time to arrive")
	check.That(t, len(m.kick) != 0, "no heartbeat is sent")
	check.That(t, !m.looks(at, 6*lostAfter-tick, 6*lostAfter+time.Second), "a node that stays silent is not lost")
}
