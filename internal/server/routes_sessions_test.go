package server

import (
	"net/http"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/internal/calls"
	"github.com/sbxrun/sbxrun/internal/sessions"
	"github.com/sbxrun/sbxrun/tests/check"
)

// A background process with parts is rejected, because parts belong to the session.
func TestProcessWithParts(t *testing.T) {
	var s *Server
	h := handler(t, func(its *Server) {
		s = its
		set := *s.settings.Load()
		set.Tenant.Network, set.DataDir = []string{"example.org"}, t.TempDir()
		s.settings.Store(&set)
	})
	s.sessions.Add(&sessions.Session{
		ID: "one", Tenant: "uid-1", Place: brokenPlace{&broken{}}, Expires: time.Now().Add(time.Hour), Idle: time.Hour,
		Processes: calls.NewStore(t.TempDir(), time.Hour, s.quota),
	})
	w := ask(h, http.MethodPost, "/v1/sessions/one/processes", `{"argv":["true"],"network":{"allow":["example.org"]}}`)
	check.That(t, w.Code == http.StatusBadRequest, "%d %s", w.Code, w.Body)
}
