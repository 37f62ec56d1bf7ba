// Package mcp serves tools for agents: the Model Context Protocol, over stdio and over HTTP. Its
// tools run code, keep sessions and transfer files through the same functions as the HTTP API.
//
// A call ends at its own deadline, when the client cancels it (notifications/cancelled) and, over
// HTTP, when the client disconnects. The SDK reports a disconnect to handlers only with the newest
// version of the protocol, so each handler also gets the context of its HTTP request (see
// [Server.ServeHTTP]).
package mcp

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/server"
)

// Server serves the protocol.
type Server struct {
	server  *server.Server
	version string
	log     *slog.Logger

	requests sync.Map // HTTP requests in progress: the value of requestHeader -> *request
	mu       sync.Mutex
	tenants  map[string]*tenant
}

// tenant has the protocol servers of one tenant, so that no other tenant can use its connections, and its
// tools say whether its sandboxes have a network.
type tenant struct {
	name      string
	stateless *sdk.Server // protocol version 2026-07-28 and later, and stdio
	stateful  *sdk.Server // earlier versions over HTTP, whose connections have a state
	handlers  struct{ stateless, stateful sdkHandler }
}

// instructions is the first text that an agent reads.
const instructions = `Runs programs in a sandbox on this machine. Everything that a call started has exited when the call returns, except for what start_process started.
A call without a session starts in an empty working directory, and its files are deleted afterwards. Images that it writes there are returned; other files are returned if collect matches them.
To keep files between calls, create a session with create_session and pass its id to the other tools; end it with end_session.
run_cell keeps variables between cells, in an interpreter of the session. start_process runs a server in the background of a session.
A non-zero exit code or a timeout is a normal result. An error means that nothing was run, unless it says otherwise.`

// New returns an MCP server in front of s.
func New(s *server.Server, version string, log *slog.Logger) *Server {
	return &Server{server: s, version: version, log: log, tenants: map[string]*tenant{}}
}

// UpdateTools offers the languages and hints of the current configuration.
func (f *Server) UpdateTools() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, t := range f.tenants {
		f.addTools(t.stateless, t.name)
		f.addTools(t.stateful, t.name)
	}
}

// tenant returns the protocol servers of a tenant. It creates them on first use.
func (f *Server) tenant(name string) *tenant {
	f.mu.Lock()
	defer f.mu.Unlock()
	t := f.tenants[name]
	if t == nil {
		t = &tenant{name: name, stateless: f.newProtocol(name), stateful: f.newProtocol(name)}
		t.handlers.stateless, t.handlers.stateful = f.handler(t.stateless, true), f.handler(t.stateful, false)
		f.tenants[name] = t
	}
	return t
}

// newProtocol returns an SDK server with all tools and resources.
func (f *Server) newProtocol(tenant string) *sdk.Server {
	p := sdk.NewServer(&sdk.Implementation{Name: "sbxrun", Title: "sbxrun", Version: f.version}, &sdk.ServerOptions{
		Instructions: instructions, Logger: slog.New(warnings{f.log.Handler()}),
		Capabilities: &sdk.ServerCapabilities{Tools: &sdk.ToolCapabilities{}, Resources: &sdk.ResourceCapabilities{}},
		// Tools depend on the tenant, and files are private.
		SetCacheable: func(_ context.Context, _ sdk.Request, c *sdk.Cacheable) { c.CacheScope = "private" },
	})
	p.AddReceivingMiddleware(f.noticeCanceled)
	f.addTools(p, tenant)
	f.addResources(p)
	return p
}

// warnings drops the SDK's messages about each connection.
type warnings struct{ slog.Handler }

func (w warnings) Enabled(ctx context.Context, level slog.Level) bool {
	return level >= slog.LevelWarn && w.Handler.Enabled(ctx, level)
}

// callContext returns the context of a request: it carries the caller's identity, and ends when the
// client cancels the request or disconnects.
func (f *Server) callContext(ctx context.Context, extra *sdk.RequestExtra) (context.Context, context.CancelFunc, error) {
	if extra == nil || extra.Header.Get(requestHeader) == "" {
		ctx, cancel := context.WithCancel(ctx) // stdio: Serve has set the identity
		return ctx, cancel, nil
	}
	r, ok := f.requests.Load(extra.Header.Get(requestHeader))
	if !ok {
		return nil, nil, api.NewError(api.Ended, "the client has disconnected", "")
	}
	both, cancel := server.Merge(r.(*request).ctx, ctx)
	return both, cancel, nil
}

// reportProgress tells a client that asked for it every few seconds that a call is running, until ctx
// ends, so that the client does not give up. Over HTTP, the SDK finds the stream of the request by
// handler, the context that it passed to the tool.
func reportProgress(ctx, handler context.Context, req *sdk.CallToolRequest) {
	token := req.Params.GetProgressToken()
	if token == nil {
		return
	}
	const interval = 5 * time.Second
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for n := 1; ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			err := req.Session.NotifyProgress(handler, &sdk.ProgressNotificationParams{
				ProgressToken: token, Progress: (time.Duration(n) * interval).Seconds(), Message: "running",
			})
			if err != nil {
				return // the call still has its deadline
			}
		}
	}
}

// toolError is an error as an agent reads it.
func toolError(err error) error {
	e := api.AsError(err)
	text := e.Failure.Message
	switch {
	case e.Failure.Code == api.NoSuchSession || e.Failure.Code == api.Ended:
		text += "; create_session makes a new session"
	case e.Failure.Code == api.NoSuchProcess:
		text += "; list_processes lists them"
	case e.Failure.Hint != "" && !strings.Contains(e.Failure.Hint, "GET "): // hints about the HTTP API do not help here
		text += "; " + e.Failure.Hint
	}
	if !e.Started {
		text += " (nothing was run)"
	}
	return errors.New(text)
}
