package cluster

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/server"
)

// metrics are the metrics of a gateway.
type metrics struct {
	registry *prometheus.Registry
	answers  *prometheus.CounterVec
}

func newMetrics(g *Gateway) *metrics {
	c := &metrics{
		registry: prometheus.NewRegistry(),
		answers:  prometheus.NewCounterVec(prometheus.CounterOpts{Name: "sbxrun_gateway_refusals_total", Help: "Requests refused by the gateway itself, by error.code."}, []string{"code"}),
	}
	c.registry.MustRegister(c.answers, nodeGauges{g})
	return c
}

// nodeGauges are the metrics of nodes, from their last heartbeats.
type nodeGauges struct{ *Gateway }

// Describe sends nothing, because the metrics depend on the nodes.
func (nodeGauges) Describe(chan<- *prometheus.Desc) {}

// newest returns nodes by name. After a restart there may be two with the same name for a moment.
func newest(all []api.Node) map[string]api.Node {
	found := map[string]api.Node{}
	for _, n := range all {
		if old, is := found[n.Name]; !is || old.Heard.Before(n.Heard) {
			found[n.Name] = n
		}
	}
	return found
}

// Collect sends the metrics.
func (g nodeGauges) Collect(out chan<- prometheus.Metric) {
	gauge := server.Gauges(out)
	flag := map[bool]float64{true: 1}
	gauge("sbxrun_gateway_connected", "1 if the gateway is connected to NATS.", flag[g.bus.Connected()])
	var all api.Load
	nodes, oldest := 0, 0.0
	const perSecond = 1000
	for name, n := range newest(g.members.Status().Nodes) {
		if n.State == api.StateLeft || n.State == api.StateLost {
			gauge("sbxrun_node_gone", "1 for ten minutes after a node leaves or is lost.", 1, "node", name, "state", string(n.State))
			continue
		}
		gauge("sbxrun_node_ready", "1 if the node takes calls, 0 if it is draining; absent if it is lost.", flag[n.State == api.StateReady], "node", name)
		gauge("sbxrun_node_busy_ratio", "Running and waiting calls on a node, divided by its slots.", n.Busy(), "node", name)
		gauge("sbxrun_node_oldest_waiting_seconds", "Age of the oldest waiting call on a node; 0 if there is none.", n.Oldest/perSecond, "node", name)
		gauge("sbxrun_node_running", "Running calls on a node.", float64(n.Running), "node", name)
		gauge("sbxrun_node_waiting", "Waiting calls on a node.", float64(n.Waiting), "node", name)
		gauge("sbxrun_node_places", "Slots of a node: calls that may run at once.", float64(n.Places), "node", name)
		gauge("sbxrun_node_sessions", "Sessions on a node.", float64(n.Sessions), "node", name)
		gauge("sbxrun_node_pressure_ratio", "Used share of the tightest task limit of a node.", n.Pressure, "node", name)
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
		return // without the queue the sums would be wrong
	}
	all.Waiting += queued
	oldest = max(oldest, since.Seconds())
	gauge("sbxrun_cluster_waiting", "Waiting calls on all nodes and in the queue.", float64(all.Waiting))
	gauge("sbxrun_cluster_oldest_waiting_seconds", "Age of the oldest waiting call on any node or in the queue; 0 if there is none.", oldest)
	if all.Places > 0 {
		gauge("sbxrun_cluster_busy_ratio", "Running and waiting calls, divided by the slots of all nodes that are not draining; for an autoscaler.", all.Busy())
	}
}
