package cluster

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// A quota reserves no storage: 100 tenants store files and use keys although the sum of their quotas exceeds
// the storage of JetStream.
func TestManyTenants(t *testing.T) {
	t.Parallel()
	const tenants = 100
	o := options(t)
	o.JetStreamMaxStore = 64 << 20
	startNATS(t, o)
	tokens := filepath.Join(harness.Dir(t), "tokens")
	var lines strings.Builder
	for i := range tenants {
		fmt.Fprintf(&lines, "t%d sha256:%x\n", i, sha256.Sum256(fmt.Appendf(nil, "token-%d", i)))
	}
	check.Must(t, os.WriteFile(tokens, []byte(lines.String()), 0o600))
	g := newCluster(t, url(o), 1, 1, "token_file = \""+tokens+"\"\n[rooms]\nmin = 0\nmax = 0\n[tenant]\nfiles = \"16M\"\n").gateways[0]
	request := func(i int, method, path, body string, headers ...string) (int, string) {
		status, text, err := g.raw(t.Context(), method, path, body, append(headers, "Authorization", fmt.Sprintf("Bearer token-%d", i))...)
		check.Must(t, err)
		return status, text
	}
	for i := range tenants {
		text := fmt.Sprintf("file %d", i)
		status, answer := request(i, http.MethodPost, "/v1/files", text, "Content-Type", "application/octet-stream")
		check.Require(t, status == http.StatusCreated, "tenant %d: %d %s", i, status, answer)
		status, answer = request(i, http.MethodGet, "/v1/files/"+sum(text), "")
		check.Require(t, status == http.StatusOK && answer == text, "tenant %d: %d %s", i, status, answer)
	}
	status, _ := request(0, http.MethodGet, "/v1/files/"+sum("file 1"), "")
	check.That(t, status == http.StatusNotFound, "the file of another tenant: %d", status)
	for range 2 {
		status, answer := request(tenants-1, http.MethodPost, "/v1/run", `{"argv":["echo","x"]}`, "Idempotency-Key", "k")
		check.That(t, status == http.StatusOK, "with a key: %d %s", status, answer)
	}
}

// An agent reads a file that a call returned, whichever node gets the request.
func TestMCPFiles(t *testing.T) {
	t.Parallel()
	o := runNATS(t)
	g := newCluster(t, url(o), 3, 1, "[rooms]\nmin = 0\nmax = 0\n").gateways[0]
	var a api.Answer
	_, e, err := g.call(t.Context(), "/v1/run", api.Call{Argv: []string{"sh", "-c", "echo made >out"}, Collect: []string{"out"}}, &a)
	check.Require(t, e == nil && err == nil, "%v %v", e, err)
	uploaded := "uploaded"
	status, _ := g.store(t, uploaded)
	check.Require(t, status == http.StatusCreated, "%v", status)
	const version = "2026-07-28"
	for i := range 12 {
		for id, want := range map[string]string{a.Files[0].ID: "made\n", sum(uploaded): uploaded} {
			uri := "sbxrun://files/" + strings.TrimPrefix(id, "sha256:")
			body, err := json.Marshal(map[string]any{"jsonrpc": "2.0", "id": 1, "method": "resources/read", "params": map[string]any{
				"uri":   uri,
				"_meta": map[string]any{"io.modelcontextprotocol/protocolVersion": version, "io.modelcontextprotocol/clientInfo": map[string]any{"name": "t", "version": "1"}, "io.modelcontextprotocol/clientCapabilities": map[string]any{}},
			}})
			check.Must(t, err)
			_, text, err := g.raw(t.Context(), http.MethodPost, "/mcp", string(body),
				"Accept", "application/json, text/event-stream", "Mcp-Protocol-Version", version, "Mcp-Method", "resources/read", "Mcp-Name", uri)
			check.Must(t, err)
			quoted := harness.JSON(t, want)
			check.Require(t, strings.Contains(text, `"text":`+string(quoted)) || strings.Contains(text, base64.StdEncoding.EncodeToString([]byte(want))),
				"request %d, %s: %s", i, id, text)
		}
	}
}

// A node without a gateway starts nothing for a tenant with limits, and its error says so. Requests about
// volumes must name a node.
func TestNamedNode(t *testing.T) {
	t.Parallel()
	o := runNATS(t)
	c := &cluster{t: t, dir: harness.Dir(t)}
	node := func(name string) *gateway {
		const config = "data_dir = %q\n[rooms]\nmin = 0\nmax = 0\n[tenant]\nconcurrency = 8\nvolumes = 4\n"
		return c.listener("serve", name, url(o), fmt.Sprintf(config, filepath.Join(c.dir, name+".data")))
	}
	own := node("n0")
	node("n1")
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
		var headers []string
		if node != "" {
			headers = []string{"Sbxrun-Node", node}
		}
		status, e, err := g.do(t.Context(), method, path, body, into, headers...)
		check.Must(t, err)
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
