package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"
)

// Found is who takes part.
type Found struct {
	Nodes    []Beat `json:"nodes"`
	Gateways []Beat `json:"gateways"`
}

// LookFor is how long [Look] takes at most.
const LookFor = 5 * time.Second

// Look asks who takes part, and returns those that have answered when for a moment nobody else did.
func Look(ctx context.Context, bus Bus) (*Found, error) {
	const moment = 500 * time.Millisecond
	var mu sync.Mutex
	all := map[string]Beat{}
	heard := make(chan struct{}, 1)
	err := bus.Subscribe(beats+"*.*", func(subject, _ string, data []byte, _ bool) {
		var b Beat
		if json.Unmarshal(data, &b) != nil || subject != beats+b.Kind+"."+b.Name || b.Gone {
			return
		}
		mu.Lock()
		all[b.subject()] = b
		mu.Unlock()
		select {
		case heard <- struct{}{}:
		default:
		}
	})
	if err != nil {
		return nil, err
	}
	for bus.Publish(askBeats, "", nil) != nil {
		select {
		case <-ctx.Done():
			return nil, errors.New("NATS does not answer")
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
	mu.Lock()
	defer mu.Unlock()
	out := &Found{Nodes: []Beat{}, Gateways: []Beat{}}
	for _, b := range all {
		if b.Kind == NodeKind {
			out.Nodes = append(out.Nodes, b)
		} else {
			out.Gateways = append(out.Gateways, b)
		}
	}
	for _, list := range [][]Beat{out.Nodes, out.Gateways} {
		slices.SortFunc(list, func(a, b Beat) int { return strings.Compare(a.subject(), b.subject()) })
	}
	return out, nil
}
