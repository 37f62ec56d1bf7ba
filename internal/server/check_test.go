package server

import (
	"log/slog"
	"math"
	"path/filepath"
	"testing"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/config"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// A call that asks for more output than can be counted, of a tenant without a bound, leaves the budget
// as it is for others.
func TestEndlessOutput(t *testing.T) {
	c := config.Default()
	c.StateDir, c.Tenant.MaxOutput, c.Tenant.Output = filepath.Join(t.TempDir(), "state"), 0, 0
	s, err := New(c, nil, nowhere{}, slog.New(slog.DiscardHandler), "test")
	harness.Must(t, err)
	defer s.Drain(t.Context())
	for _, size := range []int64{math.MaxInt64/2 + 1, math.MaxInt64} {
		o, err := s.check(Who{Tenant: "uid-1"}, &api.Call{Argv: []string{"true"}, Limits: api.Limits{MaxOutput: size}})
		harness.Must(t, err)
		if o.maxOutput != mostOutput || len(o.clamped) != 1 {
			t.Errorf("%d bytes, %v", o.maxOutput, o.clamped)
		}
		if _, err := s.launch(t.Context(), s.book, o, func() {}); err == nil || api.AsError(err).Failure.Code != api.Busy {
			t.Errorf("%v", err)
		}
	}
	if used := s.shelf.Output.Used("uid-1"); used != 0 {
		t.Errorf("%d bytes are taken", used)
	}
}
