package pool

import (
	"context"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/slot"
	"github.com/sbxrun/sbxrun/tests/check"
)

// Take does not return, and keeps, a room without cgroups for a command with limits.
func TestTakeWithLimits(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // no room is built
	p := &Pool{sizes: Sizes{Max: 1}, ctx: ctx, idle: []*Room{{group: limits.Without()}}, rooms: 1}
	for _, l := range []limits.Request{{Memory: 1 << 30}, {Pids: 10, NoFile: 64}} {
		r := p.Take("a", l)
		check.That(t, r == nil && len(p.idle) == 1, "%+v: %v, %d idle", l, r, len(p.idle))
	}
	// A resource limit of processes needs no cgroup.
	l := (limits.Request{NoFile: 64})
	check.That(t, p.idle[0].group.Takes(l) && p.idle[0].group.Renew(l) == nil, "%+v: refused", l)
}

// A command with limits gets a room that supports them even if others come first; one without gets any room.
func TestTakeOfBothKinds(t *testing.T) {
	p := New(slot.Policy{Policy: room.Policy{Cwd: room.CwdNone}}, Sizes{Min: 2, Max: 2}, func(err error) { t.Error(err) })
	defer p.Close()
	idle := func() (n int) {
		p.mutex.Lock()
		defer p.mutex.Unlock()
		return len(p.idle)
	}
	for end := time.Now().Add(time.Minute); idle() < 2; time.Sleep(time.Millisecond) {
		check.Require(t, !time.Now().After(end), "no two rooms are ready")
	}
	limited := limits.Request{Pids: 10}
	can, cannot := p.idle[0], p.idle[1] // Take tries the last one first
	if !can.group.Takes(limited) {
		t.Log("nobody here can set limits")
		return
	}
	group := cannot.group
	cannot.group = limits.Without()
	defer func() { cannot.group = group }() // to be removed
	for range 2 {                           // first unassigned, then the tenant's
		got := p.Take("a", limited)
		check.Require(t, got == can, "with limits: %p of %p and %p", got, can, cannot)
		got = p.Take("a", limited)
		check.Require(t, got == nil, "the other one was taken for limits")
		got = p.Take("a", limits.Request{})
		check.Require(t, got == cannot, "without limits: %p of %p and %p", got, can, cannot)
		p.give(can, true)
		p.give(cannot, true)
	}
}

// count counts interpreters of one tenant and one kind of program, ready or being started.
func TestCountAhead(t *testing.T) {
	python := slot.Policy{Program: &slot.Program{File: "main.py"}}
	node := slot.Policy{Program: &slot.Program{File: "main.js"}}
	s := &Source{ahead: []*ahead{{tenant: "a", policy: python}}, pending: []*ahead{{tenant: "a", policy: python}, {tenant: "a", policy: node}, {tenant: "b", policy: node}}}
	for _, want := range []struct {
		tenant string
		policy slot.Policy
		n      int
	}{{"a", python, 2}, {"a", node, 1}, {"b", python, 0}, {"b", node, 1}} {
		n := s.count(want.tenant, want.policy)
		check.That(t, n == want.n, "%d of %s for %s, want %d", n, want.tenant, want.policy.Program.File, want.n)
	}
}
