package server

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
)

// CheckOrigin accepts pages of this server and programs, and no one else, with a token or without.
func TestCheckOrigin(t *testing.T) {
	for _, tt := range []struct {
		host, origin string
		ok           bool
	}{
		{"localhost:8080", "", true},
		{"localhost:8080", "http://localhost:8080", true},
		{"sbx.example.com", "https://sbx.example.com", true},
		{"localhost:8080", "https://agents.example.com", true}, // in hosts
		{"localhost:8080", "http://localhost:9090", false},
		{"localhost:8080", "https://example.org", false},
		{"localhost:8080", "null", false},
		{"localhost:8080", "file:///", false},
	} {
		r := httptest.NewRequest(http.MethodGet, "http://"+tt.host+"/mcp", nil)
		r.Header.Set("Authorization", "Bearer token")
		if tt.origin != "" {
			r.Header.Set("Origin", tt.origin)
		}
		err := CheckOrigin(r, []string{"agents.example.com"})
		check.That(t, (err == nil) == tt.ok, "%s from %q: %v", tt.host, tt.origin, err)
	}
}
