package server

import (
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/admission"
	"github.com/sbxrun/sbxrun/internal/api"
)

// metrics counts events. Gauges are read when they are collected.
type metrics struct {
	registry *prometheus.Registry
	calls    *prometheus.CounterVec
	cells    *prometheus.CounterVec
	refused  *prometheus.CounterVec
	unproven atomic.Int64 // commands, interpreters and sessions
	duration *prometheus.HistogramVec
	queue    prometheus.Histogram
	setup    *prometheus.HistogramVec
	teardown prometheus.Histogram
}

// Durations of calls range from a prestarted sandbox to minutes; setup and teardown are short.
var (
	longTimes  = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300}
	shortTimes = []float64{.00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 5}
)

func newMetrics(s *Server) *metrics {
	histogram := func(name, help string, buckets []float64) prometheus.HistogramOpts {
		return prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets}
	}
	m := &metrics{
		registry: prometheus.NewRegistry(),
		calls:    prometheus.NewCounterVec(prometheus.CounterOpts{Name: "sbxrun_calls_total", Help: "Finished commands by cause."}, []string{"tenant", "cause", "room"}),
		cells:    prometheus.NewCounterVec(prometheus.CounterOpts{Name: "sbxrun_cells_total", Help: "Finished cells by cause and state of the interpreter."}, []string{"tenant", "cause", "state"}),
		refused:  prometheus.NewCounterVec(prometheus.CounterOpts{Name: "sbxrun_refused_total", Help: "Calls that failed to start, by error code."}, []string{"tenant", "code"}),
		duration: prometheus.NewHistogramVec(histogram("sbxrun_call_duration_seconds", "Time from the start of a command to its proven end.", longTimes), []string{"room"}),
		queue:    prometheus.NewHistogram(histogram("sbxrun_call_queue_seconds", "Time that calls spent in the queue.", longTimes)),
		setup:    prometheus.NewHistogramVec(histogram("sbxrun_call_setup_seconds", "Time until a command runs.", shortTimes), []string{"room"}),
		teardown: prometheus.NewHistogram(histogram("sbxrun_call_teardown_seconds", "Time from the decision to end a command to the proof.", shortTimes)),
	}
	m.registry.MustRegister(m.calls, m.cells, m.refused, m.duration, m.queue, m.setup, m.teardown,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), present{s})
	return m
}

// ended counts a finished command.
func (m *metrics) ended(tenant string, a *api.Answer) {
	const perSecond = 1000
	m.calls.WithLabelValues(tenant, string(a.Cause), a.Room).Inc()
	m.queue.Observe(a.QueueMS / perSecond)
	if a.Teardown.Verdict == result.Unproven {
		m.unproven.Add(1)
	}
	m.duration.WithLabelValues(a.Room).Observe(a.Duration / perSecond)
	if a.Setup != nil {
		m.setup.WithLabelValues(a.Room).Observe(*a.Setup / perSecond)
	}
	if a.TeardownT != nil {
		m.teardown.Observe(*a.TeardownT / perSecond)
	}
}

// cell counts a finished cell.
func (m *metrics) cell(tenant string, a *api.CellAnswer) {
	const perSecond = 1000
	m.cells.WithLabelValues(tenant, string(a.Cause), a.State).Inc()
	m.queue.Observe(a.QueueMS / perSecond)
	if a.Interpreter != nil && a.Interpreter.Teardown.Verdict == result.Unproven {
		m.unproven.Add(1)
	}
}

// Gauges returns a function that sends a gauge; labels alternates names and values.
func Gauges(out chan<- prometheus.Metric) func(name, help string, value float64, labels ...string) {
	return func(name, help string, value float64, labels ...string) {
		var names, values []string
		for pair := range slices.Chunk(labels, 2) {
			names, values = append(names, pair[0]), append(values, pair[1])
		}
		out <- prometheus.MustNewConstMetric(prometheus.NewDesc(name, help, names, nil), prometheus.GaugeValue, value, values...)
	}
}

// present collects the gauges.
type present struct{ *Server }

// Describe sends nothing, because the metrics depend on the tenants.
func (present) Describe(chan<- *prometheus.Desc) {}

// Collect implements [prometheus.Collector].
func (s present) Collect(out chan<- prometheus.Metric) {
	gauge := Gauges(out)
	uses := s.scheduler.Uses()
	var l api.Load
	var oldest time.Duration
	for _, tenant := range slices.Sorted(maps.Keys(uses)) {
		gauge("sbxrun_running", "Running calls.", float64(uses[tenant].Running), "tenant", tenant)
		gauge("sbxrun_waiting", "Queued calls.", float64(uses[tenant].Waiting), "tenant", tenant)
		l.Running += uses[tenant].Running
		l.Waiting += uses[tenant].Waiting
		oldest = max(oldest, uses[tenant].Oldest)
	}
	l.Places = s.settings.Load().Places
	gauge("sbxrun_places", "Number of calls that may run at once.", float64(l.Places))
	gauge("sbxrun_busy_ratio", "Running and queued calls relative to the slots, for autoscalers.", l.Busy())
	gauge("sbxrun_oldest_waiting_seconds", "Waiting time of the oldest queued call; 0 if there is none.", oldest.Seconds())
	for tenant, use := range s.processes.Uses() {
		gauge("sbxrun_processes", "Running background processes.", float64(use.Running), "tenant", tenant)
	}
	gauge("sbxrun_kept_places", "Slots of calls and sessions that are held because processes survived an unproven teardown.", float64(s.kept.Load()))
	idle, all, left := s.source.Rooms()
	for state, n := range map[string]int{"idle": idle, "busy": all - idle} {
		gauge("sbxrun_rooms", "Prestarted sandboxes: waiting for a call (idle), or in use, starting or ending (busy).", float64(n), "state", state)
	}
	out <- prometheus.MustNewConstMetric(prometheus.NewDesc("sbxrun_unproven_total", "Unproven teardowns of commands, interpreters, sessions and prestarted sandboxes.", nil, nil), prometheus.CounterValue, float64(s.metrics.unproven.Load()+int64(left)))
	sessions := map[string]int{}
	for _, x := range s.sessions.All() {
		sessions[x.Tenant]++
	}
	for tenant, n := range sessions {
		gauge("sbxrun_sessions", "Sessions.", float64(n), "tenant", tenant)
	}
	for tenant, n := range s.files.Used() {
		gauge("sbxrun_stored_bytes", "Bytes in the content store.", float64(n), "tenant", tenant)
	}
	if r, err := admission.Look(); err == nil {
		gauge("sbxrun_pressure_ratio", "Used fraction of the tightest limit on tasks.", r.Tightest().Ratio())
		for _, b := range r.Bounds {
			gauge("sbxrun_tasks", "Tasks that count toward a limit.", float64(b.Current), "bound", b.Path)
			gauge("sbxrun_tasks_max", "Maximum number of tasks of a limit.", float64(b.Max), "bound", b.Path)
		}
	}
	ready := 0.0
	if s.Ready() {
		ready = 1
	}
	gauge("sbxrun_ready", "1, or 0 while the server is stopping.", ready)
}
