package pool

import (
	"context"
	"testing"

	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/place"
)

// Rooms that can have no limits, as where systemd would have to move this process for them, are not taken
// for a command with limits, and stay.
func TestTakeWithLimits(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // nothing is built
	p := &Pool{sizes: Sizes{Max: 1}, ctx: ctx, idle: []*Room{{}}, rooms: 1}
	for _, l := range []limits.Request{{Memory: 1 << 30}, {FSize: 1000}} {
		if r := p.take("a", l); r != nil || len(p.idle) != 1 {
			t.Errorf("%+v: %v, %d idle", l, r, len(p.idle))
		}
	}
}

// Interpreters that are being started for one tenant, or for programs of another kind, are none of another's.
func TestCountAhead(t *testing.T) {
	python := place.Policy{Program: &place.Program{File: "main.py"}}
	node := place.Policy{Program: &place.Program{File: "main.js"}}
	s := &Source{ahead: []*ahead{{tenant: "a", policy: python}}, pending: []*ahead{{tenant: "a", policy: python}, {tenant: "a", policy: node}, {tenant: "b", policy: node}}}
	for _, want := range []struct {
		tenant string
		policy place.Policy
		n      int
	}{{"a", python, 2}, {"a", node, 1}, {"b", python, 0}, {"b", node, 1}} {
		if n := s.count(want.tenant, want.policy); n != want.n {
			t.Errorf("%d of %s for %s, want %d", n, want.tenant, want.policy.Program.File, want.n)
		}
	}
}
