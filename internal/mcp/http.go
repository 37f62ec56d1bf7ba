package mcp

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"net/http"
	"slices"
	"sync/atomic"
	"time"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/server"
)

const (
	// requestHeader connects a message of the SDK to its HTTP request. ServeHTTP overwrites the
	// client's value.
	requestHeader = "Sbxrun-Mcp-Request"

	// sessionless is the first version of the protocol whose connections are stateless.
	sessionless = "2026-07-28"

	// A stateful connection is dropped after connectionTimeout without a request, or when its tenant opens more than
	// maxConnections. Many clients do not reconnect when their connection is unknown, so the timeout is long.
	// Sessions of sandboxes do not depend on connections.
	connectionTimeout = 24 * time.Hour
	maxConnections    = 64
)

// maxMessage is the maximum size of a message other than a tool call, in bytes. The SDK keeps the parameters of some, such
// as initialize, for as long as the connection, and no reservation covers that memory.
const maxMessage = 16 << 10

// isToolCall reports whether a message calls a tool. It reads the message as the SDK does.
func isToolCall(text []byte) bool {
	m, err := jsonrpc.DecodeMessage(text)
	r, ok := m.(*jsonrpc.Request)
	return err == nil && ok && r.Method == "tools/call"
}

type sdkHandler = http.Handler

// request is an HTTP request in progress.
type request struct {
	ctx      context.Context
	canceled atomic.Bool // by notifications/cancelled: the client expects no response
}

// noticeCanceled marks HTTP requests that the client has canceled, for [responseWriter]. On stdio,
// [stdioConn] drops the response.
func (f *Server) noticeCanceled(next sdk.MethodHandler) sdk.MethodHandler {
	return func(ctx context.Context, method string, req sdk.Request) (sdk.Result, error) {
		res, err := next(ctx, method, req)
		if extra := req.GetExtra(); ctx.Err() != nil && extra != nil {
			if r, ok := f.requests.Load(extra.Header.Get(requestHeader)); ok && r.(*request).ctx.Err() == nil {
				r.(*request).canceled.Store(true)
			}
		}
		return res, err
	}
}

// responseWriter drops the response to a canceled request.
type responseWriter struct {
	http.ResponseWriter
	request *request
}

func (w *responseWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *responseWriter) Write(b []byte) (int, error) {
	if w.request.canceled.Load() {
		return len(b), nil
	}
	return w.ResponseWriter.Write(b)
}

func (f *Server) handler(p *sdk.Server, stateless bool) http.Handler {
	return sdk.NewStreamableHTTPHandler(func(*http.Request) *sdk.Server { return p }, &sdk.StreamableHTTPOptions{
		Stateless: stateless, SessionTimeout: connectionTimeout, MaxRequestBodyBytes: int64(f.server.Settings().MaxBody),
		DisableLocalhostProtection: true, // package server checks Host and Origin
	})
}

// ServeHTTP handles an authenticated request.
func (f *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if err := server.CheckOrigin(r, f.server.Settings().Hosts); err != nil {
		w.Header().Set("Connection", "close") // or net/http would first read the body
		api.AsError(err).Write(w)
		return
	}
	// Read the whole body now: a later read would hit the read deadline, which looks like a disconnect.
	text, err := f.server.Body(w, r)
	if err != nil {
		api.AsError(err).Write(w)
		return
	}
	// Protocol versions before 2025-06-18 have batches. A batch of thousands of messages would count as
	// a single request of its tenant.
	if bytes.HasPrefix(bytes.TrimSpace(text), []byte("[")) {
		api.NewError(api.Usage, "batches of messages are not supported", "send one message per request").Write(w)
		return
	}
	if len(text) > maxMessage && !isToolCall(text) {
		api.NewError(api.TooLarge, fmt.Sprintf("only tool calls may have more than %d bytes", maxMessage), "").Write(w)
		return
	}
	// Body reserves memory for three copies. The SDK makes more, and repeats IDs, names and arguments in
	// its errors.
	const copies = 5
	if err := f.server.Hold(r.Context(), copies*int64(len(text))); err != nil {
		api.AsError(err).Write(w)
		return
	}
	r.Body = io.NopCloser(bytes.NewReader(text))
	ctx, cancel := f.server.Until(r.Context())
	defer cancel()
	id, entry := rand.Text(), &request{ctx: ctx}
	f.requests.Store(id, entry)
	defer f.requests.Delete(id)
	r = r.WithContext(ctx)
	r.Header.Set(requestHeader, id)
	f.handlerOf(r).ServeHTTP(&responseWriter{w, entry}, r)
}

func (f *Server) handlerOf(r *http.Request) http.Handler {
	t := f.tenant(server.IdentityOf(r.Context()).Tenant)
	if r.Header.Get("Mcp-Protocol-Version") >= sessionless {
		return t.handlers.stateless
	}
	if r.Header.Get("Mcp-Session-Id") == "" { // a new connection replaces the oldest ones
		all := slices.Collect(t.stateful.Sessions())
		for _, old := range all[:max(0, len(all)-maxConnections+1)] {
			go old.Close() // waits for its running calls
		}
	}
	return t.handlers.stateful
}
