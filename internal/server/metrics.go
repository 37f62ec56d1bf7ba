package server

import (
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/pressure"
)

// metrics count what has happened; what is the case is looked at when it is asked for.
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

// Times of calls go from what a warm room takes to minutes; those of the way in and out are
// short.
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

// present is what is the case at the moment.
type present struct{ *Server }

var (
	descRunning  = prometheus.NewDesc("sbxrun_running", "Calls that run.", []string{"tenant"}, nil)
	descWaiting  = prometheus.NewDesc("sbxrun_waiting", "Calls that wait for their turns.", []string{"tenant"}, nil)
	descBusy     = prometheus.NewDesc("sbxrun_busy_ratio", "Calls that run or wait, as a share of the places; what an autoscaler needs.", nil, nil)
	descOldest   = prometheus.NewDesc("sbxrun_oldest_waiting_seconds", "How long the call has waited that has waited longest; 0 if none waits.", nil, nil)
	descPlaces   = prometheus.NewDesc("sbxrun_places", "Calls that may run at once.", nil, nil)
	descRooms    = prometheus.NewDesc("sbxrun_rooms", "Warm rooms that wait for a call (idle), and those that are in use, or are being made or ended (busy).", []string{"state"}, nil)
	descSessions = prometheus.NewDesc("sbxrun_sessions", "Sessions that live.", []string{"tenant"}, nil)
	descStored   = prometheus.NewDesc("sbxrun_stored_bytes", "Bytes in the content store.", []string{"tenant"}, nil)
	descPressure = prometheus.NewDesc("sbxrun_pressure_ratio", "How much of the tightest bound on tasks is used, 1 for all.", nil, nil)
	descTasks    = prometheus.NewDesc("sbxrun_tasks", "Tasks in use against a bound.", []string{"bound"}, nil)
	descTasksMax = prometheus.NewDesc("sbxrun_tasks_max", "How many tasks a bound allows.", []string{"bound"}, nil)
	descUnproven = prometheus.NewDesc("sbxrun_unproven_total", "Commands, interpreters, sessions and warm rooms of which something may be left.", nil, nil)
	descReady    = prometheus.NewDesc("sbxrun_ready", "1, or 0 when the server is ending.", nil, nil)
)

// Describe sends nothing: what there is depends on the tenants.
func (present) Describe(chan<- *prometheus.Desc) {}

// Collect looks.
func (s present) Collect(out chan<- prometheus.Metric) {
	gauge := func(desc *prometheus.Desc, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, labels...)
	}
	uses := s.gate.Uses()
	var l api.Load
	var oldest time.Duration
	for _, tenant := range slices.Sorted(maps.Keys(uses)) {
		gauge(descRunning, float64(uses[tenant].Running), tenant)
		gauge(descWaiting, float64(uses[tenant].Waiting), tenant)
		l.Running += uses[tenant].Running
		l.Waiting += uses[tenant].Waiting
		oldest = max(oldest, uses[tenant].Oldest)
	}
	l.Places = s.settings.Load().Places
	gauge(descPlaces, float64(l.Places))
	gauge(descBusy, l.Busy())
	gauge(descOldest, oldest.Seconds())
	idle, all, left := s.source.Rooms()
	gauge(descRooms, float64(idle), "idle")
	gauge(descRooms, float64(all-idle), "busy")
	out <- prometheus.MustNewConstMetric(descUnproven, prometheus.CounterValue, float64(s.metrics.unproven.Load()+int64(left)))
	sessions := map[string]int{}
	for _, x := range s.rooms.All() {
		sessions[x.Tenant]++
	}
	for tenant, n := range sessions {
		gauge(descSessions, float64(n), tenant)
	}
	for tenant, n := range s.files.Used() {
		gauge(descStored, float64(n), tenant)
	}
	if r, err := pressure.Look(); err == nil {
		gauge(descPressure, r.Tightest().Ratio())
		for _, b := range r.Bounds {
			gauge(descTasks, float64(b.Current), b.Path)
			gauge(descTasksMax, float64(b.Max), b.Path)
		}
	}
	ready := 0.0
	if s.Ready() {
		ready = 1
	}
	gauge(descReady, ready)
}
