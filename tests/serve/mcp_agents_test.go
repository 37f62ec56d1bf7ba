package serve

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// An agent starts a server in the background of a session, uses it from other calls, reads its output
// and stops it.
func TestMCPProcesses(t *testing.T) {
	t.Parallel()
	agents(t, cold, func(t *testing.T, a *agent) {
		session := metaReport[api.Session](t, a.use("create_session", nil)).ID
		in := func(arguments map[string]any) map[string]any {
			arguments["session"] = session
			return arguments
		}
		id := metaReport[api.CallStatus](t, a.use("start_process", in(map[string]any{"command": "echo started; exec python3 -u -m http.server 8000"}))).ID
		harness.Until(t, harness.Bound, "the server", func() bool {
			r := a.use("run_code", in(map[string]any{"code": "import urllib.request\ntry: print(urllib.request.urlopen('http://localhost:8000/').status)\nexcept OSError: pass"}))
			return strings.Contains(said(r), "200")
		})
		r := a.use("list_processes", in(map[string]any{}))
		check.That(t, strings.Contains(said(r), "process "+id+": running"), "%s", said(r))
		r = a.use("read_process", in(map[string]any{"process": id}))
		check.That(t, strings.Contains(said(r), "running") && strings.Contains(said(r), "stdout:\nstarted\n") && strings.Contains(said(r), `"GET / HTTP/1.1" 200`), "%s", said(r))
		r = a.use("read_process", in(map[string]any{"process": id, "stream": "stdout", "offset": 6}))
		check.That(t, strings.Contains(said(r), "stdout from byte 6:\nd\n"), "%s", said(r))
		r = a.use("stop_process", in(map[string]any{"process": id}))
		check.That(t, strings.Contains(said(r), "process "+id+": ended") && strings.Contains(said(r), "started"), "%s", said(r))
		failed := metaReport[api.CallStatus](t, a.use("start_process", in(map[string]any{"command": "exit 3"}))).ID
		r = a.use("read_process", in(map[string]any{"process": failed, "wait_ms": 60_000}))
		check.That(t, strings.Contains(said(r), "process "+failed+": ended (exited, exit code 3)"), "%s", said(r))
		none, err := a.CallTool(t.Context(), &mcp.CallToolParams{Name: "read_process", Arguments: in(map[string]any{"process": "none"})})
		check.That(t, err == nil && none.IsError && strings.Contains(said(none), "list_processes"), "%v %+v", err, none)
	})
}

// With mcp.structured, tools have output schemas, and their reports are structured content.
func TestMCPStructured(t *testing.T) {
	t.Parallel()
	agents(t, cold+"[mcp]\nstructured = true\n", func(t *testing.T, a *agent) {
		list, err := a.ListTools(t.Context(), nil)
		harness.Must(t, err)
		for _, tool := range list.Tools {
			if out, _ := tool.OutputSchema.(map[string]any); out["type"] != "object" {
				t.Errorf("%s: the output schema is %v", tool.Name, tool.OutputSchema)
			}
		}
		r := a.use("run_code", map[string]any{"code": "print(6*7)"})
		text, err := json.Marshal(r.StructuredContent)
		var got api.Answer
		if err == nil {
			err = json.Unmarshal(text, &got)
		}
		check.That(t, err == nil && got.Stdout != nil && *got.Stdout == "42\n" && r.Meta["sbxrun/report"] == nil && strings.Contains(said(r), "42"), "%v: %s", err, text)
	})
}

// The tools that run code have an open world only for tenants with a network; and lists and files are
// private.
func TestMCPPerTenant(t *testing.T) {
	t.Parallel()
	s, address := overTCP(t, cold+"[tenants.two]\nnetwork = [\"example.org\"]\nsessions = 4\n", "one", "two")
	for token, open := range map[string]bool{"one-token": false, "two-token": true} {
		client := &http.Client{Transport: withToken{token}}
		a := s.agent(&mcp.StreamableClientTransport{Endpoint: "http://" + address + "/mcp", HTTPClient: client}, "")
		list, err := a.ListTools(t.Context(), nil)
		harness.Must(t, err)
		check.That(t, list.CacheScope == "private", "tools/list has the cache scope %q", list.CacheScope)
		for _, tool := range list.Tools {
			want := open && strings.HasPrefix(tool.Name, "run_") || open && tool.Name == "start_process"
			if got := tool.Annotations.OpenWorldHint; got == nil || *got != want {
				t.Errorf("%s, %s: %v, want %v", token, tool.Name, got, want)
			}
		}
		session := metaReport[api.Session](t, a.use("create_session", map[string]any{"files": []any{map[string]any{"path": "a", "text": "x"}}})).ID
		file, err := a.ReadResource(t.Context(), &mcp.ReadResourceParams{URI: "sbxrun://sessions/" + session + "/files/a"})
		check.That(t, err == nil && file.CacheScope == "private", "%v, %+v", err, file)
		a.use("end_session", map[string]any{"session": session})
		_ = a.Close()
	}
}

type withToken struct{ token string }

func (b withToken) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+b.token)
	return http.DefaultTransport.RoundTrip(r)
}

// A page of another site is refused, even if it has a token.
func TestMCPOrigin(t *testing.T) {
	t.Parallel()
	_, address := overTCP(t, cold, "one")
	for origin, want := range map[string]int{"": http.StatusOK, "http://" + address: http.StatusOK, "https://example.org": http.StatusForbidden, "null": http.StatusForbidden} {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		q, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+address+"/mcp", strings.NewReader(`{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"`+legacy+`","capabilities":{},"clientInfo":{"name":"t","version":"1"}}}`))
		harness.Must(t, err)
		q.Header.Set("Content-Type", "application/json")
		q.Header.Set("Accept", "application/json, text/event-stream")
		q.Header.Set("Authorization", "Bearer one-token")
		if origin != "" {
			q.Header.Set("Origin", origin)
		}
		r, err := http.DefaultClient.Do(q)
		harness.Must(t, err)
		_, _ = io.Copy(io.Discard, r.Body)
		r.Body.Close()
		check.That(t, r.StatusCode == want, "origin %q: %s, want %d", origin, r.Status, want)
	}
}
