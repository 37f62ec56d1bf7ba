package cluster

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/internal/tenants"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// Whatever nodes request, and whichever are lost, their allotments never exceed the tenant's limits.
func TestGrant(t *testing.T) {
	c := tenants.Ceilings{Concurrency: 7, Rate: 10}
	var h quotaRecord
	nodes := []string{"node.a.1", "node.b.1", "node.c.1", "node.d.1"}
	began := time.Now()
	now, tokens := began, 0
	gone := map[string]bool{}
	for turn := 1; turn <= 10_000; turn++ {
		node := nodes[rand.IntN(len(nodes))]
		gone = map[string]bool{nodes[rand.IntN(len(nodes))]: rand.IntN(10) == 0}
		delete(gone, node)
		now = now.Add(time.Duration(rand.IntN(100)-10) * time.Millisecond) // clocks differ
		a := quotaMessage{Seq: uint64(turn), Calls: rand.IntN(9), Tokens: rand.IntN(4)}
		given := h.grant(node, a, c, now, func(node string) bool { return gone[node] })
		tokens += given.Tokens
		sum := 0
		for _, has := range h.Held {
			sum += has.Calls
		}
		check.Require(t, sum <= c.Concurrency && given.Calls <= a.Calls && h.Held[node].Calls == given.Calls, "%+v is granted of %+v: %+v", given, a, h)
		_, is := h.Held[node]
		check.Require(t, is == (given.Calls > 0), "%+v is granted of %+v", given, h)
		if given.Calls == 0 {
			continue
		}
		late := h.grant(node, quotaMessage{Seq: a.Seq - 1, Calls: 9}, c, now, func(string) bool { return true })
		check.Require(t, late == (quotaMessage{}) && h.Held[node].Calls == given.Calls, "a late request has changed it: %+v", h)
	}
	most := c.Rate + c.Rate*(now.Sub(began).Seconds()+1)
	check.That(t, float64(tokens) <= most, "%d calls were granted, the maximum is %.0f", tokens, most)
	given := h.grant("node.a.1", quotaMessage{Seq: 20_000, Calls: 9, Tokens: 50}, tenants.Ceilings{}, now, func(string) bool { return false })
	check.That(t, given.Calls == 9 && given.Tokens == 50, "%+v without a limit", given)
	now = now.Add(2 * wantedFor)
	given = h.grant("node.e.1", quotaMessage{Calls: 7}, c, now, func(string) bool { return true })
	check.That(t, given.Calls == 7, "%+v when all others are lost", given)
	given = h.grant("node.f.1", quotaMessage{Calls: 1}, c, now, func(string) bool { return false })
	check.That(t, given.Calls == 0, "%+v when none is left", given)
	given = h.grant("node.e.1", quotaMessage{Calls: 7}, c, now, func(string) bool { return false })
	check.That(t, given.Others == 1, "%+v, while another node wants some", given)
}

// With a thousand nodes that all want more, the record stays within its maximum size. A request without
// effect does not change it.
func TestGrantToMany(t *testing.T) {
	c := tenants.Ceilings{Concurrency: 1000, Rate: 10}
	now := time.Now()
	var h quotaRecord
	here := func(string) bool { return false }
	size := func() int {
		text := harness.JSON(t, h)
		return len(text)
	}
	node := func(i int) string { return fmt.Sprintf("node.%032d.00000000", i) } // the longest name
	for _, a := range []quotaMessage{{Seq: 1 << 20, Calls: 1}, {Seq: 1<<20 + 1, Calls: 2}} {
		for i := range 1000 {
			h.grant(node(i), a, c, now, here)
		}
	}
	all := size()
	t.Logf("%d bytes", all)
	check.That(t, all <= maxQuotaRecord, "%d bytes are more than %d", all, maxQuotaRecord)
	before := fmt.Sprint(h)
	given := h.grant(node(1), quotaMessage{Seq: 1<<20 + 1, Calls: 2}, c, now.Add(wantedFor/4), here)
	check.That(t, given.Calls == 1 && fmt.Sprint(h) == before, "%+v, and the record has changed: %v", given, fmt.Sprint(h) != before)
	for i := range 1000 {
		h.grant(node(i), quotaMessage{Seq: 1<<20 + 2}, c, now.Add(2*wantedFor), here)
	}
	check.That(t, size() <= 200, "%d bytes when no node has any", size())
}
