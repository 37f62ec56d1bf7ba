package cluster

import (
	"math/rand/v2"
	"sync"
)

// use is what this gateway has under way at a node.
type use struct {
	now   int // requests
	told  int // of those, how many there were when the node was last heard
	beats uint64
}

// choose takes the node with the most places left, of those that were not tried; of several any. With a name
// it takes the node of that name.
// What this gateway has sent since the node was last heard is counted in. leave is called when the
// request is over.
func (g *Gateway) choose(name string, tried map[string]bool) (at string, leave func(), ok bool) {
	nodes := g.members.of(NodeKind)
	g.mu.Lock()
	defer g.mu.Unlock()
	g.forget(nodes)
	best, same := 0.0, 0
	for _, n := range nodes {
		id := n.subject()
		if n.Draining || tried[id] || name != "" && n.Name != name {
			continue
		}
		u := g.under[id]
		if u == nil {
			u = &use{}
			g.under[id] = u
		}
		if u.beats != n.count {
			u.beats, u.told = n.count, u.now
		}
		share := float64(n.Running+n.Waiting+u.now-u.told) / float64(max(1, n.Places))
		switch {
		case !ok || share < best:
			at, best, same, ok = id, share, 1, true
		case share == best:
			if same++; rand.IntN(same) == 0 {
				at = id
			}
		}
	}
	if !ok {
		return "", nil, false
	}
	u := g.under[at]
	u.now++
	return at, sync.OnceFunc(func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		u.now--
	}), true
}

// forget drops what is known of nodes that are gone.
func (g *Gateway) forget(nodes []member) {
	if len(g.under) <= 2*len(nodes)+8 {
		return
	}
	there := map[string]bool{}
	for _, n := range nodes {
		there[n.subject()] = true
	}
	for id := range g.under {
		if !there[id] {
			delete(g.under, id)
		}
	}
}
