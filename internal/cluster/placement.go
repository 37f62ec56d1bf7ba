package cluster

import (
	"maps"
	"math/rand/v2"
	"sync"
)

// nodeLoad counts the requests of this gateway at a node.
type nodeLoad struct {
	now      int // in progress
	reported int // in progress at the node's last heartbeat
	beats    uint64
}

// place chooses the least busy node that was not tried, at random among equals. With a name, it chooses the
// node of that name. It counts what this gateway has sent since the node's last heartbeat. The caller
// calls leave at the end of the request.
func (g *Gateway) place(name string, tried map[string]bool) (at string, leave func(), ok bool) {
	nodes := g.members.of(NodeKind)
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.active) > 2*len(nodes)+8 { // most of them are gone
		maps.DeleteFunc(g.active, func(id string, _ *nodeLoad) bool { return !g.members.Has(id) })
	}
	best, same := 0.0, 0
	for _, n := range nodes {
		id := n.subject()
		if n.Draining || tried[id] || name != "" && n.Name != name {
			continue
		}
		u := g.active[id]
		if u == nil {
			u = &nodeLoad{}
			g.active[id] = u
		}
		if u.beats != n.count {
			u.beats, u.reported = n.count, u.now
		}
		share := float64(n.Running+n.Waiting+u.now-u.reported) / float64(max(1, n.Places))
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
	u := g.active[at]
	u.now++
	return at, sync.OnceFunc(func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		u.now--
	}), true
}
