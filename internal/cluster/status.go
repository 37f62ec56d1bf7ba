package cluster

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/sbxrun/sbxrun/internal/api"
)

// Status lists the members of a cluster.
type Status struct {
	Nodes    []api.Node `json:"nodes"`
	Gateways []api.Node `json:"gateways"`
}

// Status returns the known members, and the nodes that a gateway has lost.
func (m *Members) Status() *Status {
	out := &Status{Nodes: []api.Node{}, Gateways: []api.Node{}}
	there, gone := map[string]bool{}, map[string]api.Node{}
	for _, x := range m.of(NodeKind, GatewayKind) {
		if x.Kind == NodeKind {
			there[x.Name] = true
			out.Nodes = append(out.Nodes, x.node())
			continue
		}
		out.Gateways = append(out.Gateways, x.node())
		for _, n := range x.Missing {
			if old, ok := gone[n.Name]; !ok || old.Heard.Before(n.Heard) {
				gone[n.Name] = n
			}
		}
	}
	for name, n := range gone {
		if !there[name] {
			out.Nodes = append(out.Nodes, n)
		}
	}
	for _, list := range [][]api.Node{out.Nodes, out.Gateways} {
		slices.SortFunc(list, func(a, b api.Node) int { return strings.Compare(a.Name+"."+a.Instance, b.Name+"."+b.Instance) })
	}
	return out
}

// QueryTimeout bounds [QueryStatus].
const QueryTimeout = 5 * time.Second

// QueryStatus asks all members for a heartbeat. It returns when no new one has arrived for half a second.
func QueryStatus(ctx context.Context, bus *NATS) (*Status, error) {
	const moment = 500 * time.Millisecond
	m := newMembers(bus)
	heard := make(chan struct{}, 1)
	err := bus.Subscribe(heartbeats+"*.*", func(subject, reply string, data []byte, nobody bool) {
		m.receive(subject, reply, data, nobody)
		select {
		case heard <- struct{}{}:
		default:
		}
	})
	if err != nil {
		return nil, err
	}
	for bus.Publish(askHeartbeats+NodeKind, "", nil) != nil || bus.Publish(askHeartbeats+GatewayKind, "", nil) != nil {
		select {
		case <-ctx.Done():
			return nil, bus.Why()
		case <-time.After(moment / 10):
		}
	}
	for quiet := false; !quiet; {
		select {
		case <-heard:
		case <-time.After(moment):
			quiet = true
		case <-ctx.Done():
			quiet = true
		}
	}
	return m.Status(), nil
}
