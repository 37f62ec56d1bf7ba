package server

import (
	"cmp"
	"context"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/admission"
	"github.com/sbxrun/sbxrun/internal/api"
)

// recents holds the most recent calls of each tenant. They contain no more than the log does: no output, and
// the code only if the configuration allows it.
type recents struct {
	mu sync.Mutex
	of map[string][]api.Recent // oldest first
}

const (
	maxTenants = 1000
	maxShown   = 4 << 10 // bytes of code
)

func (r *recents) add(tenant string, one api.Recent) {
	one.Ended = time.Now().UTC()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.of == nil {
		r.of = map[string][]api.Recent{}
	}
	if _, known := r.of[tenant]; !known && len(r.of) >= maxTenants {
		for other := range r.of {
			delete(r.of, other)
			break
		}
	}
	all := r.of[tenant]
	if len(all) == 2*api.MaxRecent { // compact only occasionally
		all = append(all[:0], all[api.MaxRecent:]...)
	}
	r.of[tenant] = append(all, one)
}

// list returns a tenant's recent calls, newest first.
func (r *recents) list(tenant string) []api.Recent {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := slices.Clone(r.of[tenant])
	slices.Reverse(all)
	return append([]api.Recent{}, all[:min(len(all), api.MaxRecent)]...)
}

// shown returns the code to show in the list of recent calls.
func (set *settings) shown(argv []string, code string) string {
	if !set.ShowCode {
		return ""
	}
	if code == "" {
		code = strings.Join(argv, " ")
	}
	// Clone, because a substring keeps the whole text in memory.
	return strings.Clone(strings.ToValidUTF8(code[:min(len(code), maxShown)], ""))
}

// recentCell records a cell. Its interpreter is the only process that can end with the cell.
func (s *Server) recentCell(ex *execution, a *api.CellAnswer) {
	verdict := result.NotApplicable
	if a.Interpreter != nil {
		verdict = a.Interpreter.Teardown.Verdict
	}
	s.recents.add(ex.caller.Tenant, api.Recent{ID: a.ID, Cause: a.Cause, Verdict: verdict, Duration: a.Duration, Code: ex.shown})
}

// SeesAll reports whether a caller may see the activity of all tenants: root, the server's own user, and the
// tenants named in the configuration. Other users of a socket with mode 0660 may not.
func (s *Middleware) SeesAll(by Identity) bool {
	return by.Local || slices.Contains(s.settings.Load().MetricsTenants, by.Tenant)
}

// status returns the status as far as a caller may see it.
func (s *Server) status(by Identity) *api.Status {
	use := s.scheduler.Use(by.Tenant)
	out := &api.Status{
		Version: s.version, Tenant: by.Tenant, Draining: !s.Ready(), Running: use.Running, Waiting: use.Waiting,
		Sessions: len(s.sessions.List(by.Tenant)), Recent: s.recents.list(by.Tenant),
	}
	if s.SeesAll(by) {
		out.Machine = s.Machine()
	}
	return out
}

// Machine returns the state of the whole server.
func (s *Server) Machine() *api.Machine {
	m := &api.Machine{Places: s.settings.Load().Places, Sessions: len(s.sessions.All()), Tasks: []api.TaskBound{}}
	for _, use := range s.scheduler.Uses() {
		m.Running += use.Running
		m.Waiting += use.Waiting
		m.Oldest = max(m.Oldest, result.Milliseconds(use.Oldest))
	}
	m.Kept = int(s.kept.Load())
	m.Rooms.Idle, m.Rooms.All, _ = s.source.Rooms()
	if r, err := admission.Look(); err == nil {
		slices.SortFunc(r.Bounds, func(a, b admission.Bound) int { return cmp.Compare(b.Ratio(), a.Ratio()) })
		for _, b := range r.Bounds {
			m.Tasks = append(m.Tasks, api.TaskBound{Name: b.Path, Current: b.Current, Max: b.Max})
		}
	}
	return m
}

func (s *Server) defineStatus(a huma.API) {
	register(a, s.operation(a, huma.Operation{
		OperationID: "status", Method: http.MethodGet, Path: "/v1/status", Summary: "Get current activity and recent calls",
	}), func(ctx context.Context, _ *struct{}) (*answer[*api.Status], error) {
		out, size := s.status(IdentityOf(ctx)), int64(0)
		for _, r := range out.Recent {
			size += int64(len(r.Code))
		}
		return with(out, s.holdLong(ctx, size))
	})
}
