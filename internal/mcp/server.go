// Package mcp lets agents use the server by the Model Context Protocol: tools that run code and
// keep sessions, and files as resources, on stdio and over HTTP. What a tool does is what the
// HTTP interface does, by the same functions; here are only its words.
//
// A call ends with the first of its own deadline, the client's notifications/cancelled, and,
// over HTTP, the client's leaving. The SDK tells handlers of the last only with the newest
// protocol, so each has the context of its HTTP request from here (see [Front.ServeHTTP]).
package mcp

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/server"
)

// Front serves the protocol.
type Front struct {
	server   *server.Server
	version  string
	log      *slog.Logger
	network  bool // sandboxes have one
	protocol *sdk.Server

	// The HTTP side: requests that are being answered, by the word that their header has; and
	// clients of the protocol before 2026-07-28, which keep a connection's state, by tenant, so
	// that nobody can use another tenant's.
	requests  sync.Map // string -> context.Context
	stateless http.Handler
	mu        sync.Mutex
	stateful  map[string]*connections
}

// instructions is what an agent reads first.
const instructions = `Runs programs in a sandbox of their own on this machine. When a call returns, everything that it has started is gone.
A call without a session begins in an empty working directory, and nothing of it stays; images that it writes there come back, other files if collect names them.
For files that stay from call to call, make a session with create_session and give its id to the other tools; end it with end_session.
run_cell keeps variables from cell to cell, in an interpreter of a session.
A non-zero exit code and a timeout are results like others: read them. An error means that nothing was run, unless it says otherwise.`

// New makes the front of a server.
func New(s *server.Server, version string, log *slog.Logger) *Front {
	f := &Front{server: s, version: version, log: log, stateful: map[string]*connections{}}
	c := s.Settings()
	f.network = c.Sandbox.Network == "host" || len(c.Tenant.Network) > 0
	f.protocol = f.speak()
	f.stateless = f.handler(f.protocol, true)
	return f
}

// Renew offers what the server's languages are now.
func (f *Front) Renew() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.addTools(f.protocol)
	for _, c := range f.stateful {
		f.addTools(c.protocol)
	}
}

// speak is the SDK's server, with all that there is to be used.
func (f *Front) speak() *sdk.Server {
	p := sdk.NewServer(&sdk.Implementation{Name: "sbxrun", Title: "sbxrun", Version: f.version}, &sdk.ServerOptions{
		Instructions: instructions, Logger: slog.New(quiet{f.log.Handler()}),
		Capabilities: &sdk.ServerCapabilities{Tools: &sdk.ToolCapabilities{}, Resources: &sdk.ResourceCapabilities{}},
	})
	f.addTools(p)
	f.addResources(p)
	return p
}

// quiet leaves out what the SDK tells of each connection.
type quiet struct{ slog.Handler }

func (q quiet) Enabled(ctx context.Context, level slog.Level) bool {
	return level >= slog.LevelWarn && q.Handler.Enabled(ctx, level)
}

// callerOf returns the context in which a request is carried out: whose it is, until the
// client takes it back or leaves.
func (f *Front) callerOf(ctx context.Context, extra *sdk.RequestExtra) (context.Context, context.CancelFunc, error) {
	if extra == nil || extra.Header.Get(header) == "" {
		ctx, cancel := context.WithCancel(ctx) // stdio: whose it is was said at the start
		return ctx, cancel, nil
	}
	request, ok := f.requests.Load(extra.Header.Get(header))
	if !ok {
		return nil, nil, api.NewError(api.Ended, "the client has disconnected", "")
	}
	both, cancel := server.Merge(request.(context.Context), ctx)
	return both, cancel, nil
}

// progress tells a client that has asked for it every few seconds that a call goes on, so that
// it does not give up, until ctx ends. Over HTTP the SDK finds the request's own stream by asked,
// the context that it has given to the tool.
func progress(ctx, asked context.Context, req *sdk.CallToolRequest) {
	token := req.Params.GetProgressToken()
	if token == nil {
		return
	}
	const pause = 5 * time.Second
	tick := time.NewTicker(pause)
	defer tick.Stop()
	for n := 1; ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			err := req.Session.NotifyProgress(asked, &sdk.ProgressNotificationParams{
				ProgressToken: token, Progress: (time.Duration(n) * pause).Seconds(), Message: "running",
			})
			if err != nil {
				return // the call has its own deadline
			}
		}
	}
}

// failure is an error in words for an agent.
func failure(err error) error {
	e := api.AsError(err)
	text := e.Failure.Message
	switch {
	case e.Failure.Code == api.NoSuchSession || e.Failure.Code == api.Ended:
		text += "; create_session makes a new session"
	case e.Failure.Hint != "" && !strings.Contains(e.Failure.Hint, "GET "): // of the rest of the interface, which is HTTP's
		text += "; " + e.Failure.Hint
	}
	if !e.Started {
		text += " (nothing was run)"
	}
	return errors.New(text)
}
