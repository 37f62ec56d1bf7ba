package proxy

import (
	"cmp"
	"os"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/network"
)

// counters are the numbers of the report, by host.
type counters struct {
	control *os.File // to sbxrun, for the first refusal of each host; may be nil
	mu      sync.Mutex
	hosts   map[string]*counter
	named   [ofPort + 1]int // hosts with their own line, by kind
}

// Kinds of lines in the report. The sandbox chooses the names of the first two, so each kind has its own
// limit.
const (
	ofHost = iota // permitted
	ofRefused
	ofPort // published, or for a Unix socket
)

// counter counts the connections of one host.
type counter struct {
	connections, refused, sent, received atomic.Int64
	reason                               atomic.Pointer[string]
}

// of returns the counter of a host. Hosts beyond the limit of their kind share one.
func (c *counters) of(kind int, host string) *counter {
	host = network.Clean(host)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.hosts == nil {
		c.hosts = map[string]*counter{}
	}
	if n := c.hosts[host]; n != nil {
		return n
	}
	if c.named[kind] >= network.MaxHosts && kind != ofPort {
		host = network.OtherHosts
		if n := c.hosts[host]; n != nil {
			return n
		}
	}
	c.named[kind]++
	n := new(counter)
	c.hosts[host] = n
	return n
}

func (c *counters) refuse(t target, why string) {
	host, why := network.Clean(t.String()), network.Clean(why)
	n := c.of(ofRefused, host)
	n.reason.Store(&why)
	if n.refused.Add(1) > 1 || c.control == nil {
		return
	}
	// Tell sbxrun before the sandbox, so that sbxrun usually knows the refusal when the command fails
	// because of it. Send fails only if sbxrun is dead.
	_ = network.Send(c.control, network.Message{Refused: &result.ReportHost{Host: host, Refused: 1, Reason: why}})
}

// report returns all counters, sorted by name.
func (c *counters) report() *result.ReportNetwork {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := &result.ReportNetwork{Hosts: []result.ReportHost{}}
	for host, n := range c.hosts {
		h := result.ReportHost{Host: host, Connections: n.connections.Load(), Refused: n.refused.Load(), Sent: n.sent.Load(), Received: n.received.Load()}
		if why := n.reason.Load(); why != nil {
			h.Reason = network.Clean(*why)
		}
		r.Hosts = append(r.Hosts, h)
	}
	slices.SortFunc(r.Hosts, func(a, b result.ReportHost) int { return cmp.Compare(a.Host, b.Host) })
	return r
}
