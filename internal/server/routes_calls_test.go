package server

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/calls"
	"github.com/sbxrun/sbxrun/internal/network"
	"github.com/sbxrun/sbxrun/internal/sessions"
	"github.com/sbxrun/sbxrun/internal/tenants"
	"github.com/sbxrun/sbxrun/internal/values"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// A followed output is aborted when the server stops, so that it does not look complete.
func TestFollowedUntilStop(t *testing.T) {
	s := newServer(t, nowhere{})
	_, call, err := s.jobs.Add(t.Context(), "one", "uid-1", nil, 100, calls.Limits{}, nil)
	check.Must(t, err)
	stdout, _ := call.Writers()
	_, _ = stdout.Write([]byte("part")) // never fails
	web := httptest.NewServer(as("uid-1", s.Handler(http.NotFoundHandler())))
	defer web.Close()
	r, err := http.Get(web.URL + "/v1/calls/one/output?follow=1")
	check.Must(t, err)
	defer r.Body.Close()
	_, err = io.ReadFull(r.Body, make([]byte, len("part")))
	check.Must(t, err)
	s.end(errDraining)
	rest, err := io.ReadAll(r.Body)
	check.That(t, len(rest) == 0 && errors.Is(err, io.ErrUnexpectedEOF), "%q, %v", rest, err)
	call.End(nil, 0, draining())
}

// A list of calls reserves memory while it is sent, and does not include long command lines.
func TestListHolds(t *testing.T) {
	var s *Server
	h := handler(t, func(its *Server) { s = its })
	argv := make([]string, 400) // empty words take memory, too
	for range 100 {
		id := s.newID()
		_, call, err := s.jobs.Add(t.Context(), id, "uid-1", nil, 0, calls.Limits{}, nil)
		check.Must(t, err)
		call.End(&api.Answer{Report: result.Report{ID: id, Argv: argv}}, 0, nil)
	}
	w := ask(h, http.MethodGet, "/v1/calls", "")
	check.That(t, w.Code == http.StatusOK && !strings.Contains(w.Body.String(), `"",""`), "%d, %d bytes", w.Code, w.Body.Len())
	set := *s.settings.Load()
	set.Tenant.Buffers = values.Size(100*answerRest - 1)
	s.settings.Store(&set)
	w = ask(h, http.MethodGet, "/v1/calls", "")
	check.That(t, w.Code == http.StatusForbidden && w.Body.Len() <= 1000, "%d, %d bytes", w.Code, w.Body.Len())
}

// The size of a report includes its hosts, and a short report has none.
func TestHostsCount(t *testing.T) {
	a := &api.Answer{}
	before := answerSize(a)
	host := result.ReportHost{Host: strings.Repeat("a", network.MaxText), Reason: strings.Repeat("b", network.MaxText)}
	a.Network = &result.ReportNetwork{Hosts: slices.Repeat([]result.ReportHost{host}, 2*network.MaxHosts)}
	size := answerSize(a) - before
	const least = 2 * network.MaxHosts * 2 * network.MaxText
	most := (&execution{parts: &parts{Parts: api.Parts{Network: &api.Network{}}}}).lists()
	check.That(t, size >= least && size <= most, "%d bytes, want %d to %d", size, least, most)
	check.That(t, a.Short().Network == nil, "%+v", a.Short())
}

// Lists of the content store and of snapshots wait for a ticket, as lists of workspaces do.
func TestListsAtOnce(t *testing.T) {
	var s *Server
	h := handler(t, func(its *Server) { s = its })
	for _, q := range []struct{ method, path string }{{http.MethodGet, "/v1/files"}, {http.MethodGet, "/v1/snapshots"}, {http.MethodDelete, "/v1/snapshots/x"}} {
		var turns []*tenants.Ticket
		for range eachTenant.Concurrency {
			turn, err := s.walking.Join("uid-1", eachTenant)
			check.Must(t, err)
			turns = append(turns, turn)
		}
		answered := make(chan int, 1)
		go func() { answered <- ask(h, q.method, q.path, "").Code }()
		harness.Until(t, harness.Bound, q.path+" to wait", func() bool { return s.walking.Use("uid-1").Waiting == 1 })
		for _, turn := range turns {
			turn.Leave()
		}
		status := <-answered
		check.That(t, status == http.StatusOK || status == http.StatusNotFound, "%s: %d", q.path, status)
	}
}

// Descriptions of sessions and recent calls, which can be long, reserve memory, too.
func TestDescriptionsHold(t *testing.T) {
	var s *Server
	h := handler(t, func(its *Server) { s = its })
	long := strings.Repeat("a", 4000)
	asked := api.Parts{Overlay: &api.Overlay{Path: "/" + long}, Volumes: slices.Repeat([]api.Volume{{Path: "/" + long}}, 3), Network: &api.Network{Allow: []string{long}}}
	x := &sessions.Session{ID: "x", Tenant: "uid-1", Place: brokenPlace{&broken{}}, Processes: calls.NewStore("", 0, nil), Asked: asked, Idle: time.Hour, Expires: time.Now().Add(time.Hour)}
	s.sessions.Add(x)
	for range 5 {
		s.recents.add("uid-1", api.Recent{Code: long})
	}
	for buffers, want := range map[int]int{0: http.StatusOK, 100_000: http.StatusForbidden} { // 0 is no limit
		set := *s.settings.Load()
		set.Tenant.Buffers = values.Size(buffers)
		s.settings.Store(&set)
		for _, path := range []string{"/v1/sessions", "/v1/sessions/x", "/v1/status"} {
			w := ask(h, http.MethodGet, path, "")
			check.That(t, w.Code == want, "%s with %d bytes: %d, %d bytes", path, buffers, w.Code, w.Body.Len())
		}
	}
}
