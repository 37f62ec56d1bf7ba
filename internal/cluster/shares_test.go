package cluster

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/internal/tenants"
)

// Whatever nodes ask for, and whichever are lost, they have no more than the tenant may, and no call comes
// before its time.
func TestGrant(t *testing.T) {
	c := tenants.Ceilings{Concurrency: 7, Rate: 10}
	var h held
	nodes := []string{"node.a.1", "node.b.1", "node.c.1", "node.d.1"}
	began := time.Now()
	now, tokens := began, 0
	gone := map[string]bool{}
	for turn := 1; turn <= 10_000; turn++ {
		node := nodes[rand.IntN(len(nodes))]
		gone = map[string]bool{nodes[rand.IntN(len(nodes))]: rand.IntN(10) == 0}
		delete(gone, node)
		now = now.Add(time.Duration(rand.IntN(100)-10) * time.Millisecond) // clocks differ
		a := asked{Turn: uint64(turn), Calls: rand.IntN(9), Tokens: rand.IntN(4)}
		given := h.grant(node, a, c, now, func(node string) bool { return gone[node] })
		sum := 0
		for _, has := range h.Held {
			sum += has.Calls
		}
		if sum > c.Concurrency || given.Calls > a.Calls || h.Held[node].Calls != given.Calls {
			t.Fatalf("%+v is granted of %+v: %+v", given, a, h)
		}
		if late := h.grant(node, asked{Turn: a.Turn - 1, Calls: 9}, c, now, func(string) bool { return true }); late != (asked{}) || h.Held[node].Calls != given.Calls {
			t.Fatalf("a question that comes late has changed it: %+v", h)
		}
		tokens += given.Tokens
	}
	if most := c.Rate + c.Rate*(now.Sub(began).Seconds()+1); float64(tokens) > most {
		t.Errorf("%d calls are granted, at most %.0f may be", tokens, most)
	}
	now = now.Add(2 * wantedFor)
	if given := h.grant("node.e.1", asked{Calls: 7}, c, now, func(string) bool { return true }); given.Calls != 7 {
		t.Errorf("%+v when all others are lost", given)
	}
	if given := h.grant("node.f.1", asked{Calls: 1}, c, now, func(string) bool { return false }); given.Calls != 0 {
		t.Errorf("%+v when there is none left", given)
	}
	if given := h.grant("node.e.1", asked{Calls: 7}, c, now, func(string) bool { return false }); given.Others != 1 {
		t.Errorf("%+v, and another one wants some", given)
	}
}
