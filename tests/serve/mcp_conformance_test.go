//go:build mcpclients

package serve

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os/exec"
	"path/filepath"
	"testing"
)

// The server passes the official conformance suite, except for the scenarios that call the suite's own tools, prompts and
// resources.
func TestMCPConformance(t *testing.T) {
	t.Parallel()
	dir := modules(t)
	s := serve(t, cold)
	proxy := httptest.NewServer(fullDuplex{&httputil.ReverseProxy{ // the suite wants a port, and no token
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(&url.URL{Scheme: "http", Host: "sbxrun"})
			r.Out.Host = r.In.Host
		},
		Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", s.socket())
		}},
	}})
	t.Cleanup(proxy.Close)
	for _, scenario := range []string{
		"server-initialize", "logging-set-level", "ping", "tools-list", "server-sse-multiple-streams", "resources-list", "prompts-list",
		"dns-rebinding-protection",
	} {
		command := exec.Command("node", filepath.Join(dir, "node_modules/@modelcontextprotocol/conformance/dist/index.js"), "server", "--url", proxy.URL+"/mcp", "--scenario", scenario)
		command.Dir = s.dir
		if out, err := combined(command); err != nil {
			t.Errorf("%s: %v: %s", scenario, err, out)
		}
	}
}
