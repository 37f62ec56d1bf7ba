package cluster

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/server"
)

// metrics are what a gateway has done.
type metrics struct {
	registry *prometheus.Registry
	answers  *prometheus.CounterVec
}

func newMetrics(g *Gateway) *metrics {
	c := &metrics{
		registry: prometheus.NewRegistry(),
		answers:  prometheus.NewCounterVec(prometheus.CounterOpts{Name: "sbxrun_gateway_refusals_total", Help: "Requests that the gateway itself has refused, by error.code."}, []string{"code"}),
	}
	c.registry.MustRegister(c.answers, nodeGauges{g})
	return c
}

// nodeGauges is what the nodes have told last.
type nodeGauges struct{ *Gateway }

// Describe sends nothing: what there is depends on the nodes.
func (nodeGauges) Describe(chan<- *prometheus.Desc) {}

// newest are nodes by name: after a start there may be two of a name for a moment.
func newest(all []api.Node) map[string]api.Node {
	found := map[string]api.Node{}
	for _, n := range all {
		if old, is := found[n.Name]; !is || old.Heard.Before(n.Heard) {
			found[n.Name] = n
		}
	}
	return found
}

// Collect looks.
func (g nodeGauges) Collect(out chan<- prometheus.Metric) {
	gauge := server.Gauges(out)
	flag := map[bool]float64{true: 1}
	gauge("sbxrun_gateway_connected", "1 if the gateway is connected to NATS.", flag[g.bus.Connected()])
	var all api.Load
	nodes, oldest := 0, 0.0
	const perSecond = 1000
	for name, n := range newest(g.members.Status().Nodes) {
		if n.State == api.StateLeft || n.State == api.StateLost {
			gauge("sbxrun_node_gone", "1 for ten minutes for a node that is gone: it has left, or is lost.", 1, "node", name, "state", string(n.State))
			continue
		}
		gauge("sbxrun_node_ready", "1, or 0 for a node that is draining. A node that is lost has none.", flag[n.State == api.StateReady], "node", name)
		gauge("sbxrun_node_busy_ratio", "Calls that run or wait on a node, as a share of its places.", n.Busy(), "node", name)
		gauge("sbxrun_node_oldest_waiting_seconds", "How long the call has waited that has waited longest on a node; 0 if none waits.", n.Oldest/perSecond, "node", name)
		gauge("sbxrun_node_running", "Calls that run on a node.", float64(n.Running), "node", name)
		gauge("sbxrun_node_waiting", "Calls that wait on a node.", float64(n.Waiting), "node", name)
		gauge("sbxrun_node_places", "Calls that may run on a node at once.", float64(n.Places), "node", name)
		gauge("sbxrun_node_sessions", "Sessions on a node.", float64(n.Sessions), "node", name)
		gauge("sbxrun_node_pressure_ratio", "How much of the tightest bound on tasks of a node is used, 1 for all.", n.Pressure, "node", name)
		if n.State == api.StateReady {
			nodes++
			all.Places += n.Places
		}
		all.Running += n.Running
		all.Waiting += n.Waiting
		oldest = max(oldest, n.Oldest/perSecond)
	}
	gauge("sbxrun_cluster_nodes", "Nodes that take calls.", float64(nodes))
	queued, since, err := g.bus.queue.waiting()
	if err != nil {
		return // none is better than one without the queue
	}
	all.Waiting += queued
	oldest = max(oldest, since.Seconds())
	gauge("sbxrun_cluster_waiting", "Calls that wait, on all nodes and in the queue.", float64(all.Waiting))
	gauge("sbxrun_cluster_oldest_waiting_seconds", "How long the call has waited that has waited longest, on any node or in the queue; 0 if none waits.", oldest)
	if all.Places > 0 {
		gauge("sbxrun_cluster_busy_ratio", "Calls that run or wait, as a share of the places of all nodes that are not draining; what an autoscaler needs.", all.Busy())
	}
}
