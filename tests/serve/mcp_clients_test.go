//go:build mcpclients

package serve

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// modules returns the directory in which internal/setup/mcp.sh has installed the official MCP clients.
func modules(t *testing.T) string {
	t.Helper()
	dir := os.Getenv("SBXRUN_MCP_CLIENTS")
	check.Require(t, dir != "", "run internal/setup/mcp.sh, which sets SBXRUN_MCP_CLIENTS")
	return dir
}

// content is a piece of a tool's result, as the official SDK returns it.
type content struct{ Type, Text, Data, MimeType, URI string }

type toolResult struct {
	Content           []content
	IsError           bool
	StructuredContent any
	Meta              map[string]any `json:"_meta"`
}

// said returns the text of a result.
func (r *toolResult) said() (text string) {
	for _, c := range r.Content {
		text += c.Text
	}
	return text
}

// The official TypeScript SDK lists tools, runs code, gets images and files, and cancels a call.
func TestMCPTypeScript(t *testing.T) {
	t.Parallel()
	dir := modules(t)
	run := func(t *testing.T, s *server, args ...string) {
		command := exec.Command("node", append([]string{"testdata/mcp_client.mjs", dir}, args...)...)
		log := &harness.Log{}
		command.Stderr = log
		text, err := combined(command)
		check.Require(t, err == nil, "%v: %s %s", err, log, s.log)
		var got struct {
			Tools                     json.RawMessage
			Code, Image, Usage, After toolResult
			File                      struct {
				Contents []struct{ Blob, MimeType string }
			}
			Canceled string
		}
		check.Must(t, json.Unmarshal(text, &got))
		check.That(t, len(got.Tools) <= 10_000 && !strings.Contains(string(got.Tools), "outputSchema"), "%d bytes of tools", len(got.Tools))
		check.That(t, got.Code.said() == "exit code 0\nstdout:\n42\n" && got.Code.StructuredContent == nil && got.Code.Meta["sbxrun/report"] != nil,
			"run_code: %+v", got.Code)
		c := got.Image.Content
		check.That(t, len(c) == 3 && c[1].Type == "image" && c[1].Data == pixel && c[1].MimeType == "image/png" && c[2].Type == "resource_link",
			"an image: %+v", got.Image)
		files := got.File.Contents
		check.That(t, len(files) == 1 && files[0].Blob == pixel && files[0].MimeType == "image/png", "a resource: %+v", got.File)
		check.That(t, got.Usage.IsError && strings.HasPrefix(got.Usage.said(), "timeout_ms: must not be negative; ") && strings.HasSuffix(got.Usage.said(), "(nothing was run)"),
			"a wrong argument: %+v", got.Usage)
		check.That(t, got.Canceled != "answered" && strings.Contains(got.Canceled, "enough") && got.After.said() == "exit code 0\nstdout:\nafter\n",
			"canceled: %s, then %+v", got.Canceled, got.After)
	}
	t.Run("stdio", func(t *testing.T) {
		t.Parallel()
		file := filepath.Join(harness.Dir(t), "config.toml")
		check.Must(t, os.WriteFile(file, []byte("state_dir = \""+filepath.Join(filepath.Dir(file), "state")+"\"\n"+cold), 0o600))
		run(t, &server{log: &harness.Log{}}, "stdio", harness.Binary(t), "mcp", "--config", file)
	})
	t.Run("http", func(t *testing.T) {
		t.Parallel()
		s, address := overTCP(t, cold, "one")
		run(t, s, "http", "http://"+address+"/mcp", "one-token")
		s.idle()
		harness.Until(t, harness.Bound, "the log", func() bool { return strings.Contains(s.log.String(), `"cause":"canceled"`) })
	})
}

// The Inspector's command line lists tools and calls one, over stdio and HTTP.
func TestMCPInspector(t *testing.T) {
	t.Parallel()
	inspector := filepath.Join(modules(t), "node_modules/.bin/mcp-inspector")
	s, address := overTCP(t, cold, "one")
	file := filepath.Join(s.dir, "mcp.toml")
	check.Must(t, os.WriteFile(file, []byte("state_dir = \""+filepath.Join(s.dir, "mcp-state")+"\"\n"+cold), 0o600))
	script := filepath.Join(s.dir, "mcp.sh") // the Inspector takes --config for itself
	check.Must(t, os.WriteFile(script, []byte("#!/bin/sh\nexec '"+harness.Binary(t)+"' mcp --config '"+file+"'\n"), 0o755))
	// The last version for Node.js 20 cannot send a token.
	withToken := httptest.NewServer(fullDuplex{&httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) {
		r.SetURL(&url.URL{Scheme: "http", Host: address})
		r.Out.Header.Set("Authorization", "Bearer one-token")
	}}})
	t.Cleanup(withToken.Close)
	for name, target := range map[string]string{"stdio": script, "http": withToken.URL + "/mcp"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inspect := func(args ...string) string {
				t.Helper()
				out, err := combined(exec.Command(inspector, append([]string{"--cli", target}, args...)...))
				check.That(t, err == nil, "%v: %s", err, out)
				return string(out)
			}
			got := inspect("--method", "tools/list")
			check.That(t, strings.Contains(got, `"run_code"`), "%s", got)
			got = inspect("--method", "tools/call", "--tool-name", "run_code", "--tool-arg", "code=print(6*7)")
			check.That(t, strings.Contains(got, `stdout:\n42\n`), "%s", got)
		})
	}
}

// fullDuplex keeps net/http from closing the body of a request before the response (golang.org/issue/40747). Each request
// has its own connection, because in this mode net/http may still read the body when the next request comes.
type fullDuplex struct{ http.Handler }

func (h fullDuplex) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	_ = http.NewResponseController(w).EnableFullDuplex()
	w.Header().Set("Connection", "close")
	h.Handler.ServeHTTP(w, r)
}
