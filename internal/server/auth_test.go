package server

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
)

// Every response has a request ID: the client's if it may be logged, or a new one.
func TestRequestID(t *testing.T) {
	h := handler(t)
	for id, kept := range map[string]bool{
		"a": true, "A-z_0.9": true, strings.Repeat("a", 128): true,
		"": false, strings.Repeat("a", 129): false, "a b": false, "a\n": false, "a\"": false, "é": false,
	} {
		w := ask(h, http.MethodGet, "/healthz", "", "X-Request-Id", id)
		got := w.Header().Get("X-Request-Id")
		check.That(t, (got == id) == kept && validID(got) && w.Code == 200, "%q: %q, %d", id, got, w.Code)
	}
}

// An unknown token is an error, even on a Unix socket, whose user would be known.
func TestTokenUnknown(t *testing.T) {
	h := handler(t)
	for header, want := range map[string]int{"": 404, "Bearer x": 401, "Bearer ": 401, "Basic x": 401, "x": 401} {
		w := ask(h, http.MethodGet, "/v1/calls/none", "", "Authorization", header)
		check.That(t, w.Code == want, "%q: %d %s", header, w.Code, w.Body)
	}
}

// A gateway must name a tenant whose name is a file name.
func TestTenantOfGateway(t *testing.T) {
	s := newServer(t, nowhere{})
	h := s.Handler(http.NotFoundHandler())
	for tenant, want := range map[string]int{"ci": 200, "uid-1000": 200, "": 401, "..": 401, "../x": 401, "a/b": 401, "uid-..": 401, "uid-": 401} {
		w := httptest.NewRecorder()
		r := httptest.NewRequestWithContext(Passed(t.Context(), nil), http.MethodGet, "http://node/v1/sessions", nil)
		r.Header.Set(TenantHeader, tenant)
		h.ServeHTTP(w, r)
		check.That(t, w.Code == want, "%q: %d %s", tenant, w.Code, w.Body)
	}
}
