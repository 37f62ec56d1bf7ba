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

// counters are what the report says, by host.
type counters struct {
	control *os.File // to sbxrun, which hears of each host that is refused once; nil for nobody
	mu      sync.Mutex
	hosts   map[string]*counter
	named   [ofPort + 1]int // how many of them have a line of their own, by kind
}

// What has a line in the report. The sandbox chooses names of the first two kinds, and could fill all lines with
// those of one.
const (
	ofHost = iota // that was permitted
	ofRefused
	ofPort // published, or a unix socket's
)

// counter is what was done with one host.
type counter struct {
	connections, refused, sent, received atomic.Int64
	reason                               atomic.Pointer[string]
}

// of returns a counter by its name: for those beyond the number of their kind the one of all others.
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
	// Before the sandbox knows, so that sbxrun mostly has it on record before a command has ended
	// for it. An error means that there is nobody, who needs no words.
	_ = network.Send(c.control, network.Message{Refused: &result.ReportHost{Host: host, Refused: 1, Reason: why}})
}

// report is all that was counted, in the order of the names.
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
