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

// recents are the last calls of each tenant. There is no more of them than the log has: no
// output, and what was run only where the configuration says so.
type recents struct {
	mu sync.Mutex
	of map[string][]api.Recent // the last one last
}

// Bounds of what is remembered.
const (
	maxTenants = 1000    // tenants
	maxShown   = 4 << 10 // bytes of what was run
)

func (r *recents) add(tenant string, one api.Recent) {
	one.Ended = time.Now().UTC()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.of == nil {
		r.of = map[string][]api.Recent{}
	}
	if _, known := r.of[tenant]; !known && len(r.of) >= maxTenants {
		for other := range r.of { // any
			delete(r.of, other)
			break
		}
	}
	all := r.of[tenant]
	if len(all) == 2*api.MaxRecent { // moved from time to time, and not with each call
		all = append(all[:0], all[api.MaxRecent:]...)
	}
	r.of[tenant] = append(all, one)
}

// list returns a tenant's, the last one first.
func (r *recents) list(tenant string) []api.Recent {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := slices.Clone(r.of[tenant])
	slices.Reverse(all)
	return append([]api.Recent{}, all[:min(len(all), api.MaxRecent)]...)
}

// shown is what a status tells of the code of a call.
func (set *settings) shown(argv []string, code string) string {
	if !set.ShowCode {
		return ""
	}
	if code == "" {
		code = strings.Join(argv, " ")
	}
	// A copy: a part of a text keeps all of it.
	return strings.Clone(strings.ToValidUTF8(code[:min(len(code), maxShown)], ""))
}

// recentCell: what ends with a cell is its interpreter, if anything.
func (s *Server) recentCell(ex *execution, a *api.CellAnswer) {
	verdict := result.NotApplicable
	if a.Interpreter != nil {
		verdict = a.Interpreter.Teardown.Verdict
	}
	s.recents.add(ex.caller.Tenant, api.Recent{ID: a.ID, Cause: a.Cause, Verdict: verdict, Duration: a.Duration, Code: ex.shown})
}

// SeesAll reports whether a client may see what all tenants do: the server's user may, and root, who
// can look for themselves, and the tenants that the configuration names. Of a socket with mode 0660
// others are users, too.
func (s *Middleware) SeesAll(by Identity) bool {
	return by.Local || slices.Contains(s.settings.Load().MetricsTenants, by.Tenant)
}

// status is what a client may see.
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

// Machine is what the whole server does.
func (s *Server) Machine() *api.Machine {
	m := &api.Machine{Places: s.settings.Load().Places, Sessions: len(s.sessions.All()), Tasks: []api.TaskBound{}}
	for _, use := range s.scheduler.Uses() {
		m.Running += use.Running
		m.Waiting += use.Waiting
		m.Oldest = max(m.Oldest, result.Milliseconds(use.Oldest))
	}
	m.Kept = int(s.kept.Load())
	m.Rooms.Idle, m.Rooms.All, _ = s.source.Rooms()
	if r, err := admission.Look(); err == nil { // else nothing is known
		slices.SortFunc(r.Bounds, func(a, b admission.Bound) int { return cmp.Compare(b.Ratio(), a.Ratio()) })
		for _, b := range r.Bounds {
			m.Tasks = append(m.Tasks, api.TaskBound{Name: b.Path, Current: b.Current, Max: b.Max})
		}
	}
	return m
}

func (s *Server) defineStatus(a huma.API) {
	register(a, s.operation(a, huma.Operation{
		OperationID: "status", Method: http.MethodGet, Path: "/v1/status", Summary: "Tell what goes on, and how the last calls have ended",
	}), func(ctx context.Context, _ *struct{}) (*answer[*api.Status], error) {
		return with(s.status(IdentityOf(ctx)), nil)
	})
}
