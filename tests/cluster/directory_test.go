package cluster

import (
	"encoding/json"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// A node without a gateway starts nothing for a tenant with limits, and its error says so. Requests about
// volumes must name a node.
func TestNamedNode(t *testing.T) {
	t.Parallel()
	o := runNATS(t)
	c := &cluster{t: t, dir: harness.Dir(t)}
	const config = "data_dir = %q\n[rooms]\nmin = 0\nmax = 0\n[tenant]\nconcurrency = 8\nvolumes = 4\n"
	var own *gateway // listens on n0 itself
	for _, name := range []string{"n0", "n1"} {
		socket := filepath.Join(c.dir, name+".sock")
		p := c.process("serve", name, url(o), fmt.Sprintf("listen = [\"unix:%s\"]\nstate_dir = %q\n"+config, socket, filepath.Join(c.dir, name), filepath.Join(c.dir, name+".data")))
		if own == nil {
			own = &gateway{process: p, socket: socket, client: unixClient(socket)}
		}
	}
	c.ready(own, 0)
	status, e, err := own.call(t.Context(), "/v1/run", api.Call{Argv: []string{"true"}}, nil)
	check.That(t, err == nil && status == http.StatusServiceUnavailable && !e.Started && strings.Contains(e.Failure.Message, "no gateway"), "%d %+v %v", status, e, err)
	g := c.gateway("g", url(o), "")
	c.ready(g, 2)
	harness.Until(t, harness.Bound, "a call by the node's own listener", func() bool {
		status, _, err := own.call(t.Context(), "/v1/run", api.Call{Argv: []string{"true"}}, nil)
		return err == nil && status == http.StatusOK
	})

	ask := func(method, path, node string, body any, into any) (int, *api.Error) {
		text, _ := json.Marshal(body)
		q, err := http.NewRequestWithContext(t.Context(), method, "http://sbxrun"+path, strings.NewReader(string(text)))
		harness.Must(t, err)
		q.Header.Set("Content-Type", "application/json")
		if node != "" {
			q.Header.Set("Sbxrun-Node", node)
		}
		status, e, err := g.do(q, into)
		harness.Must(t, err)
		return status, e
	}
	run := func(script string) api.Call {
		return api.Call{Argv: []string{"sh", "-c", script}, Parts: api.Parts{Volumes: []api.Volume{{Name: "v", Path: "/v"}}}}
	}
	tool := map[string]any{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": map[string]any{"name": "create_session", "arguments": map[string]any{"snapshot": "s"}}}
	for _, tt := range []struct {
		method, path, node string
		body               any
		status             int
	}{
		{"POST", "/v1/run", "", run("true"), 400},
		{"POST", "/v1/sessions", "", map[string]string{"snapshot": "s"}, 400},
		{"POST", "/v1/calls", "n0", run("true"), 400},
		{"POST", "/mcp", "", tool, 400},
		{"GET", "/v1/volumes", "", nil, 400},
		{"GET", "/v1/snapshots", "", nil, 400},
		{"DELETE", "/v1/volumes/v", "", nil, 400},
		{"GET", "/v1/volumes", "n2", nil, 503},
	} {
		status, e := ask(tt.method, tt.path, tt.node, tt.body, nil)
		check.That(t, status == tt.status && !e.Started, "%s %s: %d %+v", tt.method, tt.path, status, e)
	}
	harness.Until(t, harness.Bound, "both nodes", func() bool {
		n, _ := ask("GET", "/v1/volumes", "n0", nil, nil)
		m, _ := ask("GET", "/v1/volumes", "n1", nil, nil)
		return n == http.StatusOK && m == http.StatusOK
	})
	var a api.Answer
	for range 4 {
		status, e := ask("POST", "/v1/run", "n0", run("echo x >>/v/f; wc -l </v/f"), &a)
		check.Require(t, status == http.StatusOK && strings.HasPrefix(a.ID, "n0."), "%d %+v", status, e)
	}
	check.That(t, strings.TrimSpace(*a.Stdout) == "4", "%q", *a.Stdout)
	for node, want := range map[string]int{"n0": 1, "n1": 0} {
		var list api.Volumes
		status, e := ask("GET", "/v1/volumes", node, nil, &list)
		check.That(t, status == http.StatusOK && len(list.Volumes) == want, "%s: %d %+v %+v", node, status, e, list)
	}
	status, e = ask("DELETE", "/v1/volumes/v", "n0", nil, nil)
	check.That(t, status == http.StatusNoContent || status == http.StatusOK, "%d %+v", status, e)
}
