package serve

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"
	"github.com/pelletier/go-toml/v2"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// stdio starts sbxrun mcp. At the end of the test it closes stdin; sbxrun must then exit with 0 and leave no process.
func stdio(t *testing.T, config string) (s *server, in io.WriteCloser, out io.ReadCloser) {
	t.Helper()
	dir := harness.Dir(t)
	s = &server{t: t, dir: dir, log: &harness.Log{}, client: &http.Client{}}
	file := filepath.Join(dir, "config.toml")
	check.Must(t, os.WriteFile(file, []byte("state_dir = \""+filepath.Join(dir, "state")+"\"\n"+config), 0o600))
	s.cmd = exec.Command(harness.Binary(t), "mcp", "--config", file)
	s.cmd.Stderr = s.log
	// cmd.StdoutPipe would be closed by Wait before everything is read.
	var far [2]*os.File
	var err error
	var near [2]*os.File
	far[0], near[0], err = os.Pipe()
	check.Must(t, err)
	near[1], far[1], err = os.Pipe()
	check.Must(t, err)
	s.cmd.Stdin, s.cmd.Stdout = far[0], far[1]
	s.ended = harness.Serve(t, s.cmd)
	far[0].Close()
	far[1].Close()
	t.Cleanup(func() {
		near[0].Close()
		near[1].Close()
		if !s.killed {
			s.over()
		}
	})
	return s, near[0], near[1]
}

// over waits until a server whose stdin is closed exits.
func (s *server) over() {
	s.t.Helper()
	s.killed = true
	code := harness.Ended(s.t, s.cmd, s.ended, s.log)
	check.That(s.t, code == 0, "it has ended with %d: %s", code, s.log)
	left, _ := filepath.Glob(filepath.Join(s.dir, "state*"))
	check.That(s.t, len(left) == 0, "left: %v", left)
}

// agent is a client of the protocol.
type agent struct {
	*server
	*mcp.ClientSession
	progress chan *mcp.ProgressNotificationParams // dropped if it is not read
}

const (
	cold   = "[rooms]\nmin = 0\nmax = 0\n"
	legacy = "2025-06-18"

	initialize = `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"` + legacy + `","capabilities":{},"clientInfo":{"name":"t","version":"1"}}}`
)

func (s *server) agent(transport mcp.Transport, version string) *agent {
	s.t.Helper()
	progress := make(chan *mcp.ProgressNotificationParams, 1)
	x, err := mcp.NewClient(&mcp.Implementation{Name: "test"}, &mcp.ClientOptions{ProgressNotificationHandler: func(_ context.Context, r *mcp.ProgressNotificationClientRequest) {
		select {
		case progress <- r.Params:
		default:
		}
	}}).Connect(s.t.Context(), transport, &mcp.ClientSessionOptions{ProtocolVersion: version})
	check.Require(s.t, err == nil, "%v\n%s", err, s.log)
	return &agent{s, x, progress}
}

// agents runs a test with each transport, and with the protocol before and after it became stateless.
func agents(t *testing.T, config string, test func(*testing.T, *agent)) {
	for _, version := range []string{legacy, ""} {
		name := " " + version
		t.Run("stdio"+name, func(t *testing.T) {
			t.Parallel()
			s, in, out := stdio(t, config)
			test(t, s.agent(&mcp.IOTransport{Reader: out, Writer: in}, version))
		})
		t.Run("http"+name, func(t *testing.T) {
			t.Parallel()
			s := serve(t, config)
			a := s.agent(&mcp.StreamableClientTransport{Endpoint: "http://sbxrun/mcp", HTTPClient: &http.Client{Transport: s.client.Transport}}, version)
			t.Cleanup(func() { _ = a.Close() }) // the server's exit is checked
			test(t, a)
		})
	}
}

// use calls a tool, whose result must not be an error.
func (a *agent) use(tool string, arguments map[string]any) *mcp.CallToolResult {
	a.t.Helper()
	r, err := a.CallTool(a.t.Context(), &mcp.CallToolParams{Name: tool, Arguments: arguments})
	check.Require(a.t, err == nil, "%s: %v\n%s", tool, err, a.log)
	check.Require(a.t, !r.IsError, "%s %v: %s", tool, arguments, said(r))
	return r
}

// said returns the text of a result.
func said(r *mcp.CallToolResult) (text string) {
	for _, c := range r.Content {
		if c, ok := c.(*mcp.TextContent); ok {
			text += c.Text
		}
	}
	return text
}

// metaReport returns the report in a result's _meta.
func metaReport[T any](t *testing.T, r *mcp.CallToolResult) (v T) {
	t.Helper()
	check.That(t, r.StructuredContent == nil, "the result has structured content")
	b, err := json.Marshal(r.Meta["sbxrun/report"])
	if err == nil {
		err = json.Unmarshal(b, &v)
	}
	check.Must(t, err)
	return v
}

func TestMCPTools(t *testing.T) {
	t.Parallel()
	agents(t, "", func(t *testing.T, a *agent) {
		list, err := a.ListTools(t.Context(), nil)
		check.Must(t, err)
		size, err := json.Marshal(list.Tools)
		check.That(t, err == nil && len(size) <= 10_000, "%v: %d bytes of tools", err, len(size))
		var names []string
		for _, tool := range list.Tools {
			names = append(names, tool.Name)
			reads := slices.Contains([]string{"read_file", "list_files", "list_processes", "read_process"}, tool.Name)
			destroys := slices.Contains([]string{"write_file", "end_session", "stop_process"}, tool.Name)
			h := tool.Annotations
			check.That(t, h != nil && h.Title != "" && h.ReadOnlyHint == reads && (reads || h.DestructiveHint != nil && *h.DestructiveHint == destroys) && h.OpenWorldHint != nil && !*h.OpenWorldHint,
				"%s: %+v", tool.Name, h)
			check.That(t, tool.OutputSchema == nil, "%s has an output schema", tool.Name)
		}
		want := []string{"create_session", "end_session", "list_files", "list_processes", "read_file", "read_process", "run_cell", "run_code", "run_command", "start_process", "stop_process", "write_file"}
		check.That(t, slices.Equal(names, want), "%v", names)
		for _, test := range []struct {
			tool      string
			arguments map[string]any
			cause     string
			code      int
			stdout    string
			words     []string
		}{
			{"run_code", map[string]any{"code": "print(6*7)"}, "exited", 0, "42\n", []string{"exit code 0", "stdout:\n42\n"}},
			{"run_code", map[string]any{"code": "cat; echo err >&2; exit 3", "language": "sh", "stdin": "in"}, "exited", 3, "in", []string{"exit code 3", "stdout:\nin", "stderr:\nerr"}},
			{"run_command", map[string]any{"command": "cat d/a; kill -9 $$", "files": []any{map[string]any{"path": "d/a", "text": "x"}}}, "signaled", 137, "x", []string{"signal KILL"}},
			{"run_command", map[string]any{"command": "-x 2>/dev/null; echo ran"}, "exited", 0, "ran\n", nil}, // a command, not an option of the shell
			{"run_command", map[string]any{"command": "sleep 1000 & sleep 1000", "timeout_ms": 200}, "timeout", 124, "", []string{"timed out after 200 ms", "buffered", "no output"}},
			{"run_command", map[string]any{"command": "sleep 1000 & echo x", "stdin": nil, "session": nil, "unknown": true}, "exited", 0, "x\n", []string{"1 leftover process was killed; start_process"}},
		} {
			r := a.use(test.tool, test.arguments)
			got := metaReport[api.Answer](t, r)
			check.That(t, string(got.Cause) == test.cause && got.ExitCode == test.code && text(got.Stdout) == test.stdout && got.Teardown.Verdict == "proven", "%v: %+v", test.arguments, got)
			for _, word := range test.words {
				check.That(t, strings.Contains(said(r), word), "%v: %q says nothing of %q", test.arguments, said(r), word)
			}
		}
	})
}

// pixel is an image.
const pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="

// Files that a program writes come back: images as images, and all collected files as links that can be read.
func TestMCPFiles(t *testing.T) {
	t.Parallel()
	image, err := base64.StdEncoding.DecodeString(pixel)
	check.Must(t, err)
	agents(t, "", func(t *testing.T, a *agent) {
		session := metaReport[api.Session](t, a.use("create_session", nil)).ID
		for _, session := range []string{"", session} {
			with := func(arguments map[string]any) map[string]any {
				if session != "" {
					arguments["session"] = session
				}
				return arguments
			}
			given := []any{map[string]any{"path": "old.png", "base64": pixel}}
			r := a.use("run_command", with(map[string]any{"command": "cp old.png new.png; echo x >b.csv", "files": given}))
			n := len(r.Content)
			check.Require(t, n == 3, "%d pieces: %s", n, said(r))
			c, ok := r.Content[1].(*mcp.ImageContent)
			check.That(t, ok && c.MIMEType == "image/png" && bytes.Equal(c.Data, image), "%+v", r.Content[1])
			got := metaReport[api.Answer](t, r).Files
			check.That(t, len(got) == 1 && got[0].Path == "new.png", "%+v", got)
			all := a.use("run_command", with(map[string]any{"command": "mkdir -p 'ü d'; echo x >'ü d/b%c.csv'; sleep 0.1", "collect": []string{"*/*.csv"}}))
			for _, want := range []struct {
				link mcp.Content
				text string
				blob []byte
			}{{r.Content[2], "", image}, {all.Content[len(all.Content)-1], "x\n", nil}} {
				link, ok := want.link.(*mcp.ResourceLink)
				check.Require(t, ok && strings.HasPrefix(link.URI, "sbxrun://sessions/"+session+"/files/") == (session != ""), "session %q: %+v", session, want.link)
				got, err := a.ReadResource(t.Context(), &mcp.ReadResourceParams{URI: link.URI})
				check.Require(t, err == nil, "%s: %v", link.URI, err)
				c := got.Contents[0]
				check.That(t, c.Text == want.text && bytes.Equal(c.Blob, want.blob), "%s: %+v", link.URI, c)
			}
			// Nothing is new, so nothing comes back. Earlier files are older than the kernel's clock tick.
			r = a.use("run_command", with(map[string]any{"command": "ls"}))
			check.That(t, len(r.Content) == 1, "%d pieces: %s", len(r.Content), said(r))
		}
		templates, err := a.ListResourceTemplates(t.Context(), nil)
		check.That(t, err == nil && len(templates.ResourceTemplates) == 2, "%v %+v", err, templates)
		for _, uri := range []string{"sbxrun://sessions/" + session + "/files/none", "sbxrun://sessions/none/files/a", "sbxrun://files/none", "file:///etc/passwd", "sbxrun://sessions/" + session + "/files/../../etc/passwd"} {
			r, err := a.ReadResource(t.Context(), &mcp.ReadResourceParams{URI: uri})
			check.That(t, err != nil, "%s: %+v", uri, r)
		}
	})
}

// Cells keep definitions, return values and figures, and report exceptions as results.
func TestMCPCells(t *testing.T) {
	t.Parallel()
	image, err := base64.StdEncoding.DecodeString(pixel)
	check.Must(t, err)
	agents(t, "", func(t *testing.T, a *agent) {
		session := metaReport[api.Session](t, a.use("create_session", nil)).ID
		cell := func(code string, more ...any) (*mcp.CallToolResult, api.CellAnswer) {
			arguments := map[string]any{"session": session, "code": code}
			for i := 0; i+1 < len(more); i += 2 {
				arguments[more[i].(string)] = more[i+1]
			}
			r := a.use("run_cell", arguments)
			return r, metaReport[api.CellAnswer](t, r)
		}
		r, c := cell("x = 6\nprint('in', 'print')\nx * 7")
		check.That(t, c.Cause == "done" && c.State == "kept" && c.Number == 1 && said(r) == "cell 1: done\nstdout:\nin print\n\nvalue:\n42", "%q %+v", said(r), c)
		r, c = cell("1/0")
		check.That(t, c.Exception != nil && c.State == "kept" && strings.HasPrefix(said(r), "cell 2 failed: ZeroDivisionError: ") && strings.Contains(said(r), "Traceback"),
			"%q %+v", said(r), c)
		r, c = cell("'a' * 1_000_000")
		check.That(t, len(said(r)) <= 80<<10 && c.Results[0].Truncated, "%d characters", len(said(r)))
		r, _ = cell(`import base64
class Picture:
    def _repr_png_(self): return base64.b64decode("` + pixel + `")
open("new.png", "wb").write(Picture()._repr_png_())
Picture()`)
		var pictures, links int
		for _, c := range r.Content {
			switch c := c.(type) {
			case *mcp.ImageContent:
				pictures++
				check.That(t, c.MIMEType == "image/png" && bytes.Equal(c.Data, image), "%+v", c)
			case *mcp.ResourceLink:
				links++
			}
		}
		check.That(t, pictures == 2 && links == 1, "%d images and %d links: %s", pictures, links, said(r))
		r, c = cell("while True: pass", "timeout_ms", 200)
		check.That(t, c.TimedOut && strings.Contains(said(r), "timed out after 200 ms"), "%q", said(r))
		r, c = cell("import os; os._exit(3)")
		check.That(t, c.State == "lost" && strings.Contains(said(r), "all variables are lost"), "%q", said(r))
		r, c = cell("x")
		check.That(t, c.Number == 1 && c.Exception != nil, "%q", said(r))
		for word, arguments := range map[string]map[string]any{
			"language":        {"session": session, "code": "1", "language": "sh"},
			"no such session": {"session": "none", "code": "1"},
			"session":         {"code": "1"},
		} {
			r, err := a.CallTool(t.Context(), &mcp.CallToolParams{Name: "run_cell", Arguments: arguments})
			check.That(t, err != nil || r.IsError && strings.Contains(said(r), word), "%v: %+v", arguments, r)
		}
		r = a.use("end_session", map[string]any{"session": session})
		check.That(t, strings.Contains(said(r), "proven"), "%s", said(r))
	})
}

func TestMCPSession(t *testing.T) {
	t.Parallel()
	agents(t, "", func(t *testing.T, a *agent) {
		id := metaReport[api.Session](t, a.use("create_session", map[string]any{"idle_timeout_ms": 60_000, "files": []any{map[string]any{"path": "a", "text": "1"}}})).ID
		in := func(arguments map[string]any) map[string]any {
			arguments["session"] = id
			return arguments
		}
		long := strings.Repeat("é", 40<<10)
		a.use("write_file", in(map[string]any{"path": "d/b", "text": long}))
		a.use("write_file", in(map[string]any{"path": "c", "base64": "/wA="}))
		r := a.use("run_code", in(map[string]any{"language": "sh", "code": "cat a; wc -c <d/b; echo new >e"}))
		check.That(t, metaReport[api.Answer](t, r).Stdout != nil && strings.Contains(said(r), "181920"), "%s", said(r))
		r = a.use("list_files", in(map[string]any{}))
		check.That(t, strings.Contains(said(r), "d/b\tfile\t81920 bytes\n") && strings.Contains(said(r), "e\tfile\t4 bytes\n"), "%s", said(r))
		type content struct {
			Text, Base64 string
			Next         *int64 `json:"next_offset"`
		}
		var whole string
		for from := int64(0); ; {
			got := metaReport[content](t, a.use("read_file", in(map[string]any{"path": "d/b", "offset": from})))
			whole += got.Text
			if got.Next == nil {
				break
			}
			from = *got.Next
		}
		check.That(t, whole == long, "%d bytes of %d", len(whole), len(long))
		got := metaReport[content](t, a.use("read_file", in(map[string]any{"path": "c"})))
		check.That(t, got.Base64 == "/wA=", "%+v", got)
		a.use("write_file", in(map[string]any{"path": "f", "base64": "YcM="})) // an a, and half an é
		got = metaReport[content](t, a.use("read_file", in(map[string]any{"path": "f"})))
		check.That(t, got.Base64 == "YcM=" && got.Next == nil, "%+v", got)
		r = a.use("end_session", in(map[string]any{}))
		check.That(t, strings.Contains(said(r), "proven"), "%s", said(r))
		r, err := a.CallTool(t.Context(), &mcp.CallToolParams{Name: "run_command", Arguments: in(map[string]any{"command": "true"})})
		check.That(t, err == nil && r.IsError && strings.Contains(said(r), "has ended"), "%v %+v", err, r)
	})
}

// An invalid argument is a result that the agent reads, and nothing runs.
func TestMCPUsage(t *testing.T) {
	t.Parallel()
	agents(t, cold+"[tenant]\nmemory = \"64M\"\n", func(t *testing.T, a *agent) {
		for _, test := range []struct {
			tool      string
			arguments any
			word      string
		}{
			{"run_code", map[string]any{"code": "1", "language": "cobol"}, "cobol"},
			{"run_code", map[string]any{"code": "1", "timeout_ms": -1}, "timeout_ms"},
			{"run_code", map[string]any{"code": "1", "session": "none"}, "create_session"},
			{"run_code", map[string]any{"code": "1", "files": []any{map[string]any{"path": "../a", "text": ""}}}, ".."},
			{"run_code", map[string]any{"code": "1", "files": []any{map[string]any{"path": "a"}}}, "one of"},
			{"run_code", map[string]any{"code": "1", "collect": []string{"["}}, "collect"},
			{"run_code", []any{1}, "arguments"},
			{"stop_process", map[string]any{"session": "none", "process": "x"}, "no such session"},
			{"run_command", map[string]any{"command": "a\x00b"}, "NUL"},
			{"create_session", map[string]any{"lifetime_ms": -1}, "lifetime_ms"},
			{"end_session", map[string]any{"session": "none"}, "no such session"},
			{"write_file", map[string]any{"session": "none", "path": "a"}, "text or base64"},
			{"write_file", map[string]any{"session": "none", "path": "a", "base64": "?"}, "base64"},
			{"read_file", map[string]any{"session": "none", "path": "a"}, "no such session"},
			{"list_files", map[string]any{}, "session"},
		} {
			r, err := a.CallTool(t.Context(), &mcp.CallToolParams{Name: test.tool, Arguments: test.arguments})
			check.That(t, err == nil && r.IsError && strings.Contains(said(r), test.word) && strings.HasSuffix(said(r), " (nothing was run)"), "%s %v: %v %+v", test.tool, test.arguments, err, r)
		}
		_, err := a.CallTool(t.Context(), &mcp.CallToolParams{Name: "none"})
		check.That(t, err != nil, "there is a tool none")
		check.That(t, !strings.Contains(a.log.String(), `"msg":"call"`), "something was run: %s", a.log)
	})
}

// notifications/cancelled, or a disconnect over HTTP, ends the call with all its processes.
func TestMCPCanceled(t *testing.T) {
	t.Parallel()
	agents(t, cold, func(t *testing.T, a *agent) {
		ctx, cancel := context.WithCancel(t.Context())
		gone := make(chan struct{})
		go func() {
			defer close(gone)
			_, _ = a.CallTool(ctx, &mcp.CallToolParams{Name: "run_command", Arguments: map[string]any{"command": "trap '' TERM; setsid sleep 4321 & sleep 4321; sleep 4321"}})
		}()
		a.busy(2, "sleep 4321")
		cancel()
		<-gone
		a.idle()
		a.logs(`"cause":"canceled"`)
		// And the server keeps serving.
		r := a.use("run_command", map[string]any{"command": "echo next"})
		check.That(t, strings.Contains(said(r), "next"), "%s", said(r))
	})
}

// A client that asks for progress learns that a call is still running.
func TestMCPProgress(t *testing.T) {
	t.Parallel()
	agents(t, cold, func(t *testing.T, a *agent) {
		ctx, cancel := context.WithCancel(t.Context())
		gone := make(chan struct{})
		go func() {
			defer close(gone)
			p := &mcp.CallToolParams{Name: "run_command", Arguments: map[string]any{"command": "sleep 4327", "timeout_ms": 200_000}}
			p.SetProgressToken("token")
			_, _ = a.CallTool(ctx, p)
		}()
		select {
		case p := <-a.progress:
			check.That(t, p.ProgressToken == "token" && p.Progress > 0, "%+v", p)
		case <-time.After(harness.Bound):
			t.Error("no progress is told")
		}
		cancel()
		<-gone
	})
}

// Closing the connection without a message ends the call, also with the older protocol, which has one for it.
func TestMCPLeaves(t *testing.T) {
	t.Parallel()
	s := serve(t, cold)
	headers := s.hello()
	const call = `{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"run_command","arguments":{"command":"setsid sleep 4322 & sleep 4322; true"}}}`
	s.begin(2, "sleep 4322", "/mcp", call, headers...)()
	s.idle()
	s.logs(`"cause":"canceled"`)
}

// A client of the older protocol cancels a request by a message, gets no response, and stays connected.
func TestMCPCanceledByMessage(t *testing.T) {
	t.Parallel()
	s := serve(t, cold)
	headers := s.hello()
	answered := make(chan string)
	go func() {
		status, b, _, err := s.try(t.Context(), http.MethodPost, "/mcp", `{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"run_command","arguments":{"command":"setsid sleep 4325 & sleep 4325; true"}}}`, headers...)
		check.That(t, err == nil && status == http.StatusOK, "%d %v", status, err)
		answered <- string(b)
	}()
	s.busy(2, "sleep 4325")
	s.answers(http.StatusAccepted, "", http.MethodPost, "/mcp", `{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":7}}`, headers...)
	s.idle()
	b := <-answered
	check.That(t, !strings.Contains(b, `"id"`), "a response to a canceled request: %s", b)
	s.logs(`"cause":"canceled"`)
}

// The oldest connections are closed to make room for new ones, and the others go on.
func TestMCPConnections(t *testing.T) {
	t.Parallel()
	s := serve(t, cold)
	const list = `{"jsonrpc":"2.0","id":2,"method":"tools/list"}`
	first := s.hello()
	var last []string
	for range 80 {
		last = s.hello()
	}
	harness.Until(t, harness.Bound, "the end of the first", func() bool {
		status, _ := s.ask(http.MethodPost, "/mcp", list, first...)
		return status == http.StatusNotFound
	})
	s.answers(http.StatusOK, "", http.MethodPost, "/mcp", list, last...)
}

// hello opens a connection of the older protocol, and returns the headers for later requests.
func (s *server) hello() []string {
	s.t.Helper()
	const accept = "application/json, text/event-stream"
	_, _, h, err := s.try(s.t.Context(), http.MethodPost, "/mcp", initialize, "Accept", accept)
	check.Require(s.t, err == nil && h.Get("Mcp-Session-Id") != "", "%v %v", err, h)
	headers := []string{"Accept", accept, "Mcp-Protocol-Version", legacy, "Mcp-Session-Id", h.Get("Mcp-Session-Id")}
	status, b := s.ask(http.MethodPost, "/mcp", `{"jsonrpc":"2.0","method":"notifications/initialized"}`, headers...)
	check.Require(s.t, status == http.StatusAccepted, "%d %s", status, b)
	return headers
}

// Invalid HTTP requests are answered with an error, and end nothing.
func TestMCPRequests(t *testing.T) {
	t.Parallel()
	s := serve(t, "max_body = \"100k\"\n"+cold)
	headers := s.hello()
	status, e := s.refused(http.MethodPost, "/mcp", strings.Repeat("x", 200<<10), headers...)
	check.That(t, status == http.StatusRequestEntityTooLarge, "%d %v", status, e)
	for _, test := range []struct {
		method, body string
		headers      []string
		status       int
	}{
		{http.MethodPost, "{", headers, http.StatusBadRequest},
		{http.MethodPost, `{"jsonrpc":"2.0","id":1,"method":"tools/list"}`, headers[2:], http.StatusBadRequest}, // no Accept
		{http.MethodPost, `{"jsonrpc":"2.0","id":1,"method":"tools/list"}`, append(slices.Clone(headers[:4]), "Mcp-Session-Id", "none"), http.StatusNotFound},
		{http.MethodPut, "", headers, http.StatusMethodNotAllowed},
	} {
		s.answers(test.status, "", test.method, "/mcp", test.body, test.headers...)
	}
	// A request without the version header is one of 2025-03-26, which allows batches.
	var old []string
	for i := 0; i < len(headers); i += 2 {
		if headers[i] != "Mcp-Protocol-Version" {
			old = append(old, headers[i], headers[i+1])
		}
	}
	const batch = ` [{"jsonrpc":"2.0","id":1,"method":"ping"},{"jsonrpc":"2.0","id":2,"method":"ping"}]`
	s.refuses(api.Usage, http.MethodPost, "/mcp", batch, old...)
	s.answers(http.StatusOK, "", http.MethodPost, "/mcp", `{"jsonrpc":"2.0","id":1,"method":"tools/list"}`, headers...)
}

// A message counts eight times against the tenant's memory for requests, because the protocol's
// library copies it more often.
func TestMCPMemory(t *testing.T) {
	t.Parallel()
	s := serve(t, cold+"[tenant]\nbuffers = \"1M\"\n")
	headers := s.hello()
	for size, want := range map[int]int{100 << 10: http.StatusOK, 200 << 10: http.StatusForbidden} {
		body := `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"` + strings.Repeat("x", size) + `"}}`
		s.answers(want, "", http.MethodPost, "/mcp", body, headers...)
	}
}

// The text of a result counts, too.
func TestMCPResultMemory(t *testing.T) {
	t.Parallel()
	s := serve(t, cold+"[tenant]\nbuffers = \"1M\"\n")
	headers, path := s.hello(), s.session(`{}`)
	for size, want := range map[int]string{1 << 10: `"size":1024`, 64 << 10: "bytes of requests and answers"} {
		s.answers(http.StatusCreated, "", http.MethodPut, path+"/files/a", strings.Repeat("<", size))
		answer := s.use(headers, "read_file", map[string]any{"session": strings.TrimPrefix(path, "/v1/sessions/"), "path": "a"})
		check.That(t, strings.Contains(answer, want), "%d bytes: %.300s", size, answer)
	}
}

// A result does not repeat a long command.
func TestMCPLongCommand(t *testing.T) {
	t.Parallel()
	s := serve(t, cold)
	headers, session := s.hello(), strings.TrimPrefix(s.session(`{}`), "/v1/sessions/")
	command := strings.Repeat("<", 1<<20)
	answer := s.use(headers, "run_command", map[string]any{"command": command})
	check.That(t, strings.Contains(answer, "start-failed") && len(answer) <= 10_000, "%d bytes: %.300s", len(answer), answer)
	_, id, _ := strings.Cut(s.use(headers, "start_process", map[string]any{"session": session, "command": command}), "process ")
	id, _, _ = strings.Cut(id, `"`)
	for _, tool := range []string{"read_process", "stop_process"} {
		answer := s.use(headers, tool, map[string]any{"session": session, "process": id, "wait_ms": 60_000})
		check.That(t, strings.Contains(answer, "start-failed") && len(answer) <= 10_000, "%s: %d bytes: %.300s", tool, len(answer), answer)
	}
}

// use calls a tool on a connection, and returns the response.
func (s *server) use(headers []string, tool string, arguments map[string]any) string {
	s.t.Helper()
	b, err := json.Marshal(map[string]any{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": map[string]any{"name": tool, "arguments": arguments}})
	check.Must(s.t, err)
	status, answer := s.ask(http.MethodPost, "/mcp", string(b), headers...)
	check.Require(s.t, status == http.StatusOK, "%d %.300s", status, answer)
	return string(answer)
}

// A server that is shutting down does not wait for agents that only listen.
func TestMCPDrain(t *testing.T) {
	t.Parallel()
	s := serve(t, cold)
	headers := s.hello()
	r, err := send(t.Context(), s.client, http.MethodGet, "http://sbxrun/mcp", nil, headers...)
	check.Require(t, err == nil && r.StatusCode == http.StatusOK, "%v %v", err, r)
	defer r.Body.Close()
	began := time.Now()
	s.end()
	harness.Within(t, "the end", time.Since(began), 0, 2*time.Second)
}

// On a signal, and when stdin is closed, sbxrun mcp exits even if its answers are not read.
func TestMCPUnread(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*server, io.Closer) error{
		"signal": func(s *server, _ io.Closer) error { return s.cmd.Process.Signal(unix.SIGTERM) },
		"stdin":  func(_ *server, in io.Closer) error { return in.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, in, _ := stdio(t, cold)
			lines := []string{
				initialize,
				`{"jsonrpc":"2.0","method":"notifications/initialized"}`,
				`{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"run_command","arguments":{"command":"setsid sleep 4326 & sleep 4326; true"}}}`,
			}
			for id := range 40 { // more answers than a pipe holds
				lines = append(lines, `{"jsonrpc":"2.0","id":`+itoa(10+id)+`,"method":"tools/list"}`)
			}
			_, err := io.WriteString(in, strings.Join(lines, "\n")+"\n")
			check.Must(t, err)
			s.busy(2, "sleep 4326")
			check.Must(t, end(s, in))
			s.over()
		})
	}
}

// When an agent closes stdin, its calls, its sessions and sbxrun end.
func TestMCPStdinCloses(t *testing.T) {
	t.Parallel()
	for _, config := range []string{cold, ""} {
		s, in, out := stdio(t, config)
		a := s.agent(&mcp.IOTransport{Reader: out, Writer: in}, "")
		id := metaReport[api.Session](t, a.use("create_session", nil)).ID
		for _, arguments := range []map[string]any{{}, {"session": id}} {
			arguments["command"] = "trap '' TERM; setsid sleep 4323 & sleep 4323; true"
			go func() { _, _ = a.CallTool(t.Context(), &mcp.CallToolParams{Name: "run_command", Arguments: arguments}) }()
		}
		s.busy(4, "sleep 4323")
		var below []harness.Proc
		for _, pid := range harness.Descendants(s.cmd.Process.Pid) {
			if p, there := harness.ReadProc(pid); there {
				below = append(below, p)
			}
		}
		in.Close()
		s.over()
		for _, p := range below {
			now, there := harness.ReadProc(p.PID)
			check.That(t, !there || now.Start != p.Start, "process %d is left", p.PID)
		}
	}
}

// SIGKILL leaves no process, and the next sbxrun mcp removes leftovers from the state directory.
func TestMCPKilled(t *testing.T) {
	t.Parallel()
	for range max(1, harness.Soak(t)/10) {
		s, in, out := stdio(t, "")
		a := s.agent(&mcp.IOTransport{Reader: out, Writer: in}, "")
		go func() {
			_, _ = a.CallTool(t.Context(), &mcp.CallToolParams{Name: "run_command", Arguments: map[string]any{"command": "setsid sleep 4324 & sleep 4324; true"}})
		}()
		s.busy(2, "sleep 4324")
		s.kill()
		left, _ := filepath.Glob(filepath.Join(s.dir, "state-mcp-*"))
		check.Require(t, len(left) == 1, "%v", left)
		old := time.Now().Add(-time.Hour)
		check.Must(t, os.Chtimes(left[0], old, old))
		next := exec.Command(harness.Binary(t), "mcp", "--config", filepath.Join(s.dir, "config.toml"))
		if out, err := combined(next); err != nil { // stdin is empty
			t.Fatalf("%v: %s", err, out)
		}
		left, _ = filepath.Glob(filepath.Join(s.dir, "state*"))
		check.That(t, len(left) == 0, "left: %v", left)
	}
}

// Output is counted, but neither stored nor sent.
func TestMCPOutput(t *testing.T) {
	t.Parallel()
	agents(t, cold, func(t *testing.T, a *agent) {
		const size = 256 << 20
		r := a.use("run_command", map[string]any{"command": "head -c 256M /dev/zero | tr '\\0' x; echo end", "timeout_ms": 300_000})
		got := metaReport[api.Answer](t, r)
		check.That(t, got.StdoutBytes != nil && *got.StdoutBytes == size+4 && got.StdoutTruncated != nil && *got.StdoutTruncated, "%v bytes", got.StdoutBytes)
		b, err := json.Marshal(r)
		const most = 128 << 10
		check.That(t, err == nil && len(b) <= most && strings.HasSuffix(said(r), "end\n") && strings.Contains(said(r), "bytes left out"), "%d bytes of answer: %v", len(b), err)
		const memory = 100 << 20
		peak := (&harness.Process{PID: a.cmd.Process.Pid}).PeakRSS()
		check.That(t, peak != 0 && peak <= memory, "it has had %d bytes of memory", peak)
	})
}

// stdout carries only the protocol, whatever a program writes. Invalid input gets an error and ends nothing.
func TestMCPStdout(t *testing.T) {
	t.Parallel()
	_, in, out := stdio(t, "")
	lines := []string{
		initialize,
		`{"jsonrpc":"2.0","method":"notifications/initialized"}`,
		`{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"run_command","arguments":{"command":"echo out; echo err >&2; echo tty >/dev/tty; ls -l /proc/self/fd"}}}`,
	}
	_, err := io.WriteString(in, strings.Join(lines, "\n")+"\n")
	check.Must(t, err)
	dec := json.NewDecoder(out)
	for id := 1; id <= 2; id++ {
		var m struct {
			JSONRPC string
			ID      int
			Result  json.RawMessage
		}
		err := dec.Decode(&m)
		check.Require(t, err == nil && m.JSONRPC == "2.0" && m.ID == id && len(m.Result) != 0, "%v %+v", err, m)
	}
	_, err = io.WriteString(in, "no protocol\n{\"foo\":1}\n[1\n[]\n[1]\n"+`[{"jsonrpc":"2.0","id":4,"method":"ping"}]`+"\n\n"+`{"jsonrpc":"2.0","id":3,"method":"ping"}`+"\n")
	check.Must(t, err)
	// Errors may come between answers.
	codes := map[int]int{}
	for range 7 {
		var m struct {
			ID    *int
			Error *struct{ Code int }
		}
		err := dec.Decode(&m)
		check.Require(t, err == nil && (m.ID == nil) != (m.Error == nil), "%v %+v", err, m)
		if m.Error != nil {
			codes[m.Error.Code]++
		} else if codes[0]++; *m.ID != 3 {
			t.Errorf("an answer to %d", *m.ID)
		}
	}
	check.That(t, codes[-32700] == 2 && codes[-32600] == 4 && codes[0] == 1, "%v", codes)
}

// No tenant reaches another's connection or sessions.
func TestMCPTenants(t *testing.T) {
	t.Parallel()
	s, _ := overTCP(t, cold, "one", "two")
	ask := func(token, body string, headers ...string) (int, string, http.Header) {
		t.Helper()
		headers = append([]string{"Accept", "application/json, text/event-stream", "Authorization", "Bearer " + token}, headers...)
		status, b, h, err := s.try(t.Context(), http.MethodPost, "/mcp", body, headers...)
		check.Require(t, err == nil, "%v\n%s", err, s.log)
		return status, string(b), h
	}
	const list = `{"jsonrpc":"2.0","id":2,"method":"tools/list"}`
	_, _, h := ask("one-token", initialize)
	id := h.Get("Mcp-Session-Id")
	check.Require(t, id != "", "%v", h)
	ask("one-token", `{"jsonrpc":"2.0","method":"notifications/initialized"}`, "Mcp-Session-Id", id)
	status, b, _ := ask("one-token", list, "Mcp-Session-Id", id)
	check.That(t, status == http.StatusOK && strings.Contains(b, "run_code"), "%d %s", status, b)
	status, b, _ = ask("two-token", list, "Mcp-Session-Id", id)
	check.That(t, status == http.StatusNotFound, "%d %s", status, b)
	_, b, _ = ask("one-token", `{"jsonrpc":"2.0","id":3,"method":"tools/call","params":{"name":"create_session","arguments":{}}}`, "Mcp-Session-Id", id)
	session := b[strings.Index(b, "session ")+len("session "):][:16]
	_, _, h = ask("two-token", initialize)
	ask("two-token", `{"jsonrpc":"2.0","method":"notifications/initialized"}`, "Mcp-Session-Id", h.Get("Mcp-Session-Id"))
	_, b, _ = ask("two-token", `{"jsonrpc":"2.0","id":3,"method":"tools/call","params":{"name":"end_session","arguments":{"session":"`+session+`"}}}`, "Mcp-Session-Id", h.Get("Mcp-Session-Id"))
	check.That(t, strings.Contains(b, "no such session"), "%s", b)
}

// The command lines for agents in docs/guides/agents.md are correct, and it names each tool.
func TestMCPDocs(t *testing.T) {
	t.Parallel()
	text := harness.ReadFile(t, "../../docs/guides/agents.md")
	for _, tool := range []string{"run_code", "run_command", "run_cell", "create_session", "end_session", "write_file", "read_file", "list_files", "start_process", "list_processes", "read_process", "stop_process"} {
		check.That(t, strings.Contains(string(text), "| `"+tool+"` |"), "nothing of %s", tool)
	}
	blocks := strings.Split(string(text), "\n```")
	check.That(t, len(blocks) >= 2, "there are no blocks")
	for i := 1; i < len(blocks); i += 2 {
		kind, block, _ := strings.Cut(blocks[i], "\n")
		var v map[string]any
		var err error
		switch kind {
		case "json":
			err = json.Unmarshal([]byte(block), &v)
		case "toml":
			err = toml.Unmarshal([]byte(block), &v)
		default:
			t.Errorf("block of %q", kind)
		}
		check.That(t, err == nil, "%s: %v", block, err)
	}
}

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
		harness.Until(t, harness.Bound, "the server's output", func() bool {
			r = a.use("read_process", in(map[string]any{"process": id}))
			return strings.Contains(said(r), "running") && strings.Contains(said(r), "stdout:\nstarted\n") && strings.Contains(said(r), `"GET / HTTP/1.1" 200`)
		})
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
		check.Must(t, err)
		for _, tool := range list.Tools {
			out, _ := tool.OutputSchema.(map[string]any)
			check.That(t, out["type"] == "object", "%s: the output schema is %v", tool.Name, tool.OutputSchema)
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
		check.Must(t, err)
		check.That(t, list.CacheScope == "private", "tools/list has the cache scope %q", list.CacheScope)
		for _, tool := range list.Tools {
			want := open && strings.HasPrefix(tool.Name, "run_") || open && tool.Name == "start_process"
			got := tool.Annotations.OpenWorldHint
			check.That(t, got != nil && *got == want, "%s, %s: %v, want %v", token, tool.Name, got, want)
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
	for origin, want := range map[string]int{"http://" + address: http.StatusOK, "https://example.org": http.StatusForbidden, "null": http.StatusForbidden} {
		headers := append(bearer("one"), "Accept", "application/json, text/event-stream", "Origin", origin)
		status, _, _, err := exchange(t.Context(), http.DefaultClient, http.MethodPost, "http://"+address+"/mcp", initialize, headers...)
		check.That(t, err == nil && status == want, "origin %q: %d, %v, want %d", origin, status, err, want)
	}
}
