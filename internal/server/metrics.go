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
		calls:    prometheus.NewCounterVec(prometheus.CounterOpts{Name: "sbxrun_calls_total", Help: "Commands that have ended, by what ended them."}, []string{"tenant", "cause", "room"}),
		cells:    prometheus.NewCounterVec(prometheus.CounterOpts{Name: "sbxrun_cells_total", Help: "Cells that have ended, by what ended them, and by what has become of the interpreter's state."}, []string{"tenant", "cause", "state"}),
		refused:  prometheus.NewCounterVec(prometheus.CounterOpts{Name: "sbxrun_refused_total", Help: "Calls of which nothing was started, by error.code."}, []string{"tenant", "code"}),
		duration: prometheus.NewHistogramVec(histogram("sbxrun_call_duration_seconds", "From the beginning of a command to its proven end.", longTimes), []string{"room"}),
		queue:    prometheus.NewHistogram(histogram("sbxrun_call_queue_seconds", "How long calls have waited for their turns.", longTimes)),
		setup:    prometheus.NewHistogramVec(histogram("sbxrun_call_setup_seconds", "Until a command runs.", shortTimes), []string{"room"}),
		teardown: prometheus.NewHistogram(histogram("sbxrun_call_teardown_seconds", "From the decision to end a command to the proof.", shortTimes)),
	}
	m.registry.MustRegister(m.calls, m.cells, m.refused, m.duration, m.queue, m.setup, m.teardown,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), present{s})
	return m
}

// ended counts a command.
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

// cell counts a cell.
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
		gauge("sbxrun_running", "Calls that run.", float64(uses[tenant].Running), "tenant", tenant)
		gauge("sbxrun_waiting", "Calls that wait for their turns.", float64(uses[tenant].Waiting), "tenant", tenant)
		l.Running += uses[tenant].Running
		l.Waiting += uses[tenant].Waiting
		oldest = max(oldest, uses[tenant].Oldest)
	}
	l.Places = s.settings.Load().Places
	gauge("sbxrun_places", "Calls that may run at once.", float64(l.Places))
	gauge("sbxrun_busy_ratio", "Calls that run or wait, as a share of the places; what an autoscaler needs.", l.Busy())
	gauge("sbxrun_oldest_waiting_seconds", "How long the call has waited that has waited longest; 0 if none waits.", oldest.Seconds())
	for tenant, use := range s.processes.Uses() {
		gauge("sbxrun_processes", "Background processes that run.", float64(use.Running), "tenant", tenant)
	}
	gauge("sbxrun_kept_places", "Places, and shares of sessions, that are kept because processes have survived an unproven end.", float64(s.kept.Load()))
	idle, all, left := s.source.Rooms()
	for state, n := range map[string]int{"idle": idle, "busy": all - idle} {
		gauge("sbxrun_rooms", "Warm rooms that wait for a call (idle), and those that are in use, or are being made or ended (busy).", float64(n), "state", state)
	}
	out <- prometheus.MustNewConstMetric(prometheus.NewDesc("sbxrun_unproven_total", "Commands, interpreters, sessions and warm rooms of which something may be left.", nil, nil), prometheus.CounterValue, float64(s.metrics.unproven.Load()+int64(left)))
	sessions := map[string]int{}
	for _, x := range s.sessions.All() {
		sessions[x.Tenant]++
	}
	for tenant, n := range sessions {
		gauge("sbxrun_sessions", "Sessions that live.", float64(n), "tenant", tenant)
	}
	for tenant, n := range s.files.Used() {
		gauge("sbxrun_stored_bytes", "Bytes in the content store.", float64(n), "tenant", tenant)
	}
	if r, err := admission.Look(); err == nil {
		gauge("sbxrun_pressure_ratio", "How much of the tightest bound on tasks is used, 1 for all.", r.Tightest().Ratio())
		for _, b := range r.Bounds {
			gauge("sbxrun_tasks", "Tasks in use against a bound.", float64(b.Current), "bound", b.Path)
			gauge("sbxrun_tasks_max", "How many tasks a bound allows.", float64(b.Max), "bound", b.Path)
		}
	}
	ready := 0.0
	if s.Ready() {
		ready = 1
	}
	gauge("sbxrun_ready", "1, or 0 when the server is ending.", ready)
}
