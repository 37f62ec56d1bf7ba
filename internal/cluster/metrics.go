package cluster

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/sbxrun/sbxrun/internal/api"
)

// counters are what a gateway has done.
type counters struct {
	registry *prometheus.Registry
	answers  *prometheus.CounterVec
}

func newCounters(g *Gateway) *counters {
	c := &counters{
		registry: prometheus.NewRegistry(),
		answers:  prometheus.NewCounterVec(prometheus.CounterOpts{Name: "sbxrun_gateway_refusals_total", Help: "Requests that the gateway itself has refused, by error.code."}, []string{"code"}),
	}
	c.registry.MustRegister(c.answers, present{g})
	return c
}

// present is what the nodes have told last.
type present struct{ *Gateway }

var (
	descConnected = prometheus.NewDesc("sbxrun_gateway_connected", "1 if the gateway is connected to NATS.", nil, nil)
	descNode      = prometheus.NewDesc("sbxrun_node_ready", "1, or 0 for a node that is draining. A node that is lost has none.", []string{"node"}, nil)
	descRunning   = prometheus.NewDesc("sbxrun_node_running", "Calls that run on a node.", []string{"node"}, nil)
	descWaiting   = prometheus.NewDesc("sbxrun_node_waiting", "Calls that wait on a node.", []string{"node"}, nil)
	descNodeBusy  = prometheus.NewDesc("sbxrun_node_busy_ratio", "Calls that run or wait on a node, as a share of its places.", []string{"node"}, nil)
	descNodeOld   = prometheus.NewDesc("sbxrun_node_oldest_waiting_seconds", "How long the call has waited that has waited longest on a node; 0 if none waits.", []string{"node"}, nil)
	descGone      = prometheus.NewDesc("sbxrun_node_gone", "1 for ten minutes for a node that is gone: it has left, or is lost.", []string{"node", "state"}, nil)
	descPlaces    = prometheus.NewDesc("sbxrun_node_places", "Calls that may run on a node at once.", []string{"node"}, nil)
	descSessions  = prometheus.NewDesc("sbxrun_node_sessions", "Sessions on a node.", []string{"node"}, nil)
	descPressure  = prometheus.NewDesc("sbxrun_node_pressure_ratio", "How much of the tightest bound on tasks of a node is used, 1 for all.", []string{"node"}, nil)
	descNodes     = prometheus.NewDesc("sbxrun_cluster_nodes", "Nodes that take calls.", nil, nil)
	descQueue     = prometheus.NewDesc("sbxrun_cluster_waiting", "Calls that wait, on all nodes and in the queue.", nil, nil)
	descOldest    = prometheus.NewDesc("sbxrun_cluster_oldest_waiting_seconds", "How long the call has waited that has waited longest, on any node or in the queue; 0 if none waits.", nil, nil)
	descBusy      = prometheus.NewDesc("sbxrun_cluster_busy_ratio", "Calls that run or wait, as a share of the places of all nodes that are not draining; what an autoscaler needs.", nil, nil)
)

// Describe sends nothing: what there is depends on the nodes.
func (present) Describe(chan<- *prometheus.Desc) {}

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
func (g present) Collect(out chan<- prometheus.Metric) {
	gauge := func(desc *prometheus.Desc, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, labels...)
	}
	flag := map[bool]float64{true: 1}
	gauge(descConnected, flag[g.bus.Connected()])
	var all api.Load
	nodes, oldest := 0, 0.0
	const perSecond = 1000
	for name, n := range newest(g.members.Found().Nodes) {
		if n.State == api.StateLeft || n.State == api.StateLost {
			gauge(descGone, 1, name, string(n.State))
			continue
		}
		gauge(descNode, flag[n.State == api.StateReady], name)
		gauge(descNodeBusy, n.Busy(), name)
		gauge(descNodeOld, n.Oldest/perSecond, name)
		gauge(descRunning, float64(n.Running), name)
		gauge(descWaiting, float64(n.Waiting), name)
		gauge(descPlaces, float64(n.Places), name)
		gauge(descSessions, float64(n.Sessions), name)
		gauge(descPressure, n.Pressure, name)
		if n.State == api.StateReady {
			nodes++
			all.Places += n.Places
		}
		all.Running += n.Running
		all.Waiting += n.Waiting
		oldest = max(oldest, n.Oldest/perSecond)
	}
	gauge(descNodes, float64(nodes))
	queued, since, err := g.queue.waiting()
	if err != nil {
		return // none is better than one without the queue
	}
	all.Waiting += queued
	oldest = max(oldest, since.Seconds())
	gauge(descQueue, float64(all.Waiting))
	gauge(descOldest, oldest)
	if all.Places > 0 {
		gauge(descBusy, all.Busy())
	}
}
