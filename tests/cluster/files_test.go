package cluster

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
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
	harness.Must(t, os.WriteFile(tokens, []byte(lines.String()), 0o600))
	g := newCluster(t, url(o), 1, 1, "token_file = \""+tokens+"\"\n[rooms]\nmin = 0\nmax = 0\n[tenant]\nfiles = \"16M\"\n").gateways[0]
	request := func(i int, method, path, body string, headers ...string) (int, string) {
		q, err := http.NewRequestWithContext(t.Context(), method, "http://sbxrun"+path, strings.NewReader(body))
		harness.Must(t, err)
		q.Header.Set("Authorization", fmt.Sprintf("Bearer token-%d", i))
		q.Header.Set("Content-Type", "application/json")
		for i := 0; i < len(headers); i += 2 {
			q.Header.Set(headers[i], headers[i+1])
		}
		res, err := g.client.Do(q)
		harness.Must(t, err)
		defer res.Body.Close()
		text, err := io.ReadAll(res.Body)
		harness.Must(t, err)
		return res.StatusCode, string(text)
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
			harness.Must(t, err)
			q, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://sbxrun/mcp", bytes.NewReader(body))
			harness.Must(t, err)
			for name, value := range map[string]string{"Content-Type": "application/json", "Accept": "application/json, text/event-stream", "Mcp-Protocol-Version": version, "Mcp-Method": "resources/read", "Mcp-Name": uri} {
				q.Header.Set(name, value)
			}
			res, err := g.client.Do(q)
			harness.Must(t, err)
			text, err := io.ReadAll(res.Body)
			harness.Must(t, err)
			res.Body.Close()
			quoted, err := json.Marshal(want)
			harness.Must(t, err)
			check.Require(t, strings.Contains(string(text), `"text":`+string(quoted)) || strings.Contains(string(text), base64.StdEncoding.EncodeToString([]byte(want))),
				"request %d, %s: %s", i, id, text)
		}
	}
}
