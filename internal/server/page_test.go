package server

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/check"
)

// The client of a Unix socket may be a forwarder with a browser behind it. Requests that another site's page
// makes it send are rejected, whatever name that site has given to the address.
func TestPagesOfOthers(t *testing.T) {
	h := handler(t)
	const body = `{"argv":["true"]}`
	for _, test := range []struct {
		name, method, host string
		headers            map[string]string
		refused            bool
	}{
		{"a program", "POST", "sbxrun", nil, false},
		{"a program, by address", "POST", "127.0.0.1:8080", nil, false},
		{"a program, by IPv6 address", "POST", "[::1]:8080", nil, false},
		{"our page", "POST", "localhost:8080", map[string]string{"Origin": "http://localhost:8080", "Sec-Fetch-Site": "same-origin"}, false},
		{"our page without Sec-Fetch-Site", "POST", "localhost:8080", map[string]string{"Origin": "http://localhost:8080"}, false},
		{"another site's", "POST", "localhost:8080", map[string]string{"Origin": "https://example.org", "Sec-Fetch-Site": "cross-site"}, true},
		{"another site's without Sec-Fetch-Site", "POST", "localhost:8080", map[string]string{"Origin": "https://example.org"}, true},
		{"a file's, or a frame in a sandbox", "POST", "localhost:8080", map[string]string{"Origin": "null"}, true},
		{"another port's", "POST", "localhost:8080", map[string]string{"Origin": "http://localhost:9090", "Sec-Fetch-Site": "same-site"}, true},
		{"another site's, to end something", "DELETE", "localhost:8080", map[string]string{"Origin": "https://example.org", "Sec-Fetch-Site": "cross-site"}, true},
		{"a link", "GET", "localhost:8080", map[string]string{"Sec-Fetch-Site": "cross-site"}, false}, // cannot read the response
		{"a name that leads here", "POST", "rebound.example.org:8080", map[string]string{"Origin": "http://rebound.example.org:8080"}, true},
		{"to read by it", "GET", "rebound.example.org:8080", nil, true},
		{"a name with a dot at its end", "GET", "localhost.", nil, true},
		{"the name of the configuration", "POST", "Sbx.example.com:8080", map[string]string{"Origin": "http://Sbx.example.com:8080"}, false},
		{"one below it", "GET", "a.sbx.example.com", nil, true},
	} {
		for _, path := range []string{"/v1/calls", "/"} {
			r := httptest.NewRequest(test.method, "http://sbxrun"+path, strings.NewReader(body))
			r.Host = test.host
			r.Header.Set("Content-Type", "application/json")
			for name, value := range test.headers {
				r.Header.Set(name, value)
			}
			w := httptest.NewRecorder()
			h.ServeHTTP(w, r)
			refused := w.Code == api.Codes()[api.Policy] && strings.Contains(w.Body.String(), `"started":false`)
			check.That(t, refused == test.refused, "%s: %s %s: %d %s", test.name, test.method, path, w.Code, w.Body)
		}
	}
}

// Without a token, only the page is served, with status 401. Its policy has the hashes of its own style and script.
func TestPage(t *testing.T) {
	h := handler(t)
	w := ask(h, http.MethodGet, "/", "")
	check.Require(t, w.Code == http.StatusOK && strings.Contains(w.Body.String(), "<title>sbxrun</title>"), "%d %.100s", w.Code, w.Body)
	for name, want := range map[string]string{
		"Content-Type": "text/html", "Content-Security-Policy": "frame-ancestors 'none'", "X-Frame-Options": "DENY", "X-Content-Type-Options": "nosniff",
		"Referrer-Policy": "no-referrer", "Cache-Control": "no-store",
	} {
		got := w.Header().Get(name)
		check.That(t, strings.Contains(got, want), "%s: %q, want %q", name, got, want)
	}
	policy := w.Header().Get("Content-Security-Policy")
	check.That(t, strings.HasPrefix(policy, "default-src 'none'; ") && !strings.Contains(policy, "unsafe"), "%v", policy)
	for _, bad := range []string{"innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "http:", "https:", " style=", " onclick="} {
		check.That(t, !strings.Contains(w.Body.String(), bad), "the page has %q", bad)
	}
	check.Equal(t, ask(h, http.MethodGet, "/other", "").Code, http.StatusNotFound)
	w = ask(h, http.MethodPost, "/", "")
	check.That(t, w.Code == http.StatusNotFound || w.Code == http.StatusMethodNotAllowed, "%d", w.Code)
}

// The number of recent calls and the number of tenants with recent calls are limited.
func TestRecent(t *testing.T) {
	var r recents
	got := r.list("a")
	check.That(t, got != nil && len(got) == 0, "%v", got)
	for i := range 1000 {
		r.add("a", api.Recent{Duration: float64(i)})
		got := r.list("a")
		check.Require(t, len(got) == min(i+1, api.MaxRecent) && got[0].Duration == float64(i) && got[len(got)-1].Duration == float64(i+1-len(got)), "after %d: %v", i, got)
	}
	got = r.list("b")
	check.That(t, len(got) == 0, "another tenant's: %v", got)
	for i := range 2 * maxTenants {
		r.add(string(rune('a'+i)), api.Recent{})
	}
	check.That(t, len(r.of) == maxTenants, "%d tenants", len(r.of))
}
