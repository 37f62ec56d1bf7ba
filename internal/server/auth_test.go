package server

import (
	"context"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/internal/config"
	"github.com/sbxrun/sbxrun/tests/check"
)

// Every response has a request ID: the client's if it may be logged, or a new one.
func TestRequestID(t *testing.T) {
	c := config.Default()
	c.StateDir = filepath.Join(t.TempDir(), "state")
	s, err := New(c, nil, &broken{}, slog.New(slog.DiscardHandler), "test")
	check.Must(t, err)
	h := s.Handler(http.NotFoundHandler())
	for id, kept := range map[string]bool{
		"a": true, "A-z_0.9": true, strings.Repeat("a", 128): true,
		"": false, strings.Repeat("a", 129): false, "a b": false, "a\n": false, "a\"": false, "é": false,
	} {
		w := httptest.NewRecorder()
		r := httptest.NewRequest(http.MethodGet, "http://sbxrun/healthz", nil)
		r.Header["X-Request-Id"] = []string{id}
		h.ServeHTTP(w, r)
		got := w.Header().Get("X-Request-Id")
		check.That(t, (got == id) == kept && validID(got) && w.Code == 200, "%q: %q, %d", id, got, w.Code)
	}
}

// An unknown token is an error, even on a Unix socket, whose user would be known.
func TestTokenUnknown(t *testing.T) {
	c := config.Default()
	c.StateDir = filepath.Join(t.TempDir(), "state")
	s, err := New(c, nil, &broken{}, slog.New(slog.DiscardHandler), "test")
	check.Must(t, err)
	h := s.Handler(http.NotFoundHandler())
	for header, want := range map[string]int{"": 404, "Bearer x": 401, "Bearer ": 401, "Basic x": 401, "x": 401} {
		w := httptest.NewRecorder()
		r := httptest.NewRequest(http.MethodGet, "http://sbxrun/v1/calls/none", nil)
		if header != "" {
			r.Header.Set("Authorization", header)
		}
		h.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), peerKey, "uid-1")))
		check.That(t, w.Code == want, "%q: %d %s", header, w.Code, w.Body)
	}
}
