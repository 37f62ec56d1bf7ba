package server

import (
	"math"
	"slices"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/config"
	"github.com/sbxrun/sbxrun/internal/sessions"
	"github.com/sbxrun/sbxrun/internal/values"
	"github.com/sbxrun/sbxrun/tests/check"
)

// A call with unlimited output, of a tenant without a limit, does not overflow the budget of others.
func TestEndlessOutput(t *testing.T) {
	s := newServer(t, nowhere{}, func(c *config.Config) { c.Tenant.MaxOutput, c.Tenant.Output = 0, 0 })
	for _, size := range []int64{math.MaxInt64/2 + 1, math.MaxInt64} {
		ex, err := s.check(Identity{Tenant: "uid-1"}, &api.Call{Argv: []string{"true"}, Limits: api.Limits{MaxOutput: size}})
		check.Must(t, err)
		check.That(t, ex.maxOutput == outputCap && len(ex.clamped) == 1, "%d bytes, %v", ex.maxOutput, ex.clamped)
		_, err = s.launch(t.Context(), s.jobs, ex, func() {})
		check.That(t, err != nil && api.AsError(err).Failure.Code == api.Busy, "%v", err)
	}
	check.Equal(t, s.quota.Output.Used("uid-1"), 0)
}

// The tenant's max_timeout limits all executions. In addition call.max_timeout limits calls and cells, and the
// end of the session limits its background processes.
func TestTimeouts(t *testing.T) {
	s := newServer(t, nowhere{}, func(c *config.Config) {
		own := c.Tenant
		own.MaxTimeout = values.Duration(2 * time.Minute)
		c.Tenants = map[string]config.Tenant{"bound": own}
	})
	session := &sessions.Session{Expires: time.Now().Add(3 * time.Hour)}
	call := func(w Identity, ms float64) (*execution, error) {
		return s.check(w, &api.Call{Argv: []string{"true"}, TimeoutMS: ms})
	}
	cell := func(w Identity, ms float64) (*execution, error) {
		ex, _, err := s.checkCell(w, &api.Cell{Language: "python", TimeoutMS: ms})
		return ex, err
	}
	process := func(w Identity, ms float64) (*execution, error) {
		return s.checkIn(w, session, &api.Call{Argv: []string{"true"}, TimeoutMS: ms})
	}
	const second, hour = 1000, 3600 * 1000
	for _, test := range []struct {
		what, tenant string
		check        func(Identity, float64) (*execution, error)
		asked        float64
		want         time.Duration
		clamped      bool
	}{
		{"a call", "a", call, 0, 30 * time.Second, false},
		{"a call", "a", call, hour, 5 * time.Minute, true},
		{"a call", "bound", call, hour, 2 * time.Minute, true},
		{"a cell", "a", cell, hour, 5 * time.Minute, true},
		{"a cell", "bound", cell, 0, 30 * time.Second, false},
		{"a cell", "bound", cell, hour, 2 * time.Minute, true},
		{"a process", "a", process, 0, 3 * time.Hour, false},
		{"a process", "a", process, second, time.Second, false},
		{"a process", "a", process, hour, time.Hour, false},
		{"a process", "a", process, 4 * hour, 3 * time.Hour, true},
		{"a process", "bound", process, 0, 2 * time.Minute, false},
		{"a process", "bound", process, hour, 2 * time.Minute, true},
	} {
		ex, err := test.check(Identity{Tenant: test.tenant}, test.asked)
		check.Require(t, err == nil, "%s: %v", test.what, err)
		late := test.want - ex.timeout
		check.That(t, late >= 0 && late <= time.Minute && (late <= 0 || test.want >= 3*time.Hour) && slices.Contains(ex.clamped, "timeout_ms") == test.clamped,
			"%s of %s that asks for %v ms: %v, clamped %v; want %v", test.what, test.tenant, test.asked, ex.timeout, ex.clamped, test.want)
	}
}
