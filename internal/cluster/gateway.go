package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/server"
)

// Gateway forwards requests to nodes.
type Gateway struct {
	middleware *server.Middleware
	members    *Members
	transport  *Transport
	bus        *NATS
	counters   *metrics
	version    string
	log        *slog.Logger
	stop       context.CancelFunc
	web        *http.Server
	draining   atomic.Bool

	mu     sync.Mutex
	active map[string]*nodeLoad // by node
}

// NewGateway joins a cluster.
func NewGateway(bus *NATS, name, version string, middleware *server.Middleware, log *slog.Logger) (*Gateway, error) {
	ctx, stop := context.WithCancel(context.Background())
	g := &Gateway{middleware: middleware, bus: bus, version: version, log: log, stop: stop, active: map[string]*nodeLoad{}}
	g.counters = newMetrics(g)
	instance := NewInstance()
	var err error
	g.members, err = Join(ctx, bus, GatewayKind, func() Heartbeat {
		return Heartbeat{Kind: GatewayKind, Name: name, Instance: instance, Version: version, Draining: g.draining.Load()}
	}, NodeKind, GatewayKind)
	if err != nil {
		stop()
		return nil, err
	}
	if g.transport, err = NewTransport(ctx, bus, subject(GatewayKind, name, instance), g.members.Alive); err != nil {
		stop()
		return nil, err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/files/{id}", g.file) // the only request that nodes may make
	mux.HandleFunc("POST "+quotaPath, g.grantQuota)
	g.web = newHTTPServer(middleware.Parts(mux), log)
	go func() { _ = g.web.Serve(g.transport) }()
	go g.keepQueue(ctx)
	log.Info("gateway", "name", name, "instance", instance)
	return g, nil
}

// Drain announces that this gateway is ending.
func (g *Gateway) Drain() { g.draining.Store(true) }

// Close leaves the cluster and ends requests in progress.
func (g *Gateway) Close() {
	g.members.Leave()
	g.web.Close()
	g.stop()
}

// Handler serves the whole HTTP API.
func (g *Gateway) Handler() http.Handler {
	mux := g.middleware.Mux(g.counters.registry, g.unready)
	mux.HandleFunc("GET /v1/status", g.status)
	mux.HandleFunc("GET /v1/sessions", func(w http.ResponseWriter, r *http.Request) { g.merge(w, r, "sessions", "created_at") })
	mux.HandleFunc("GET /v1/calls", func(w http.ResponseWriter, r *http.Request) { g.merge(w, r, "calls", "came_at") })
	mux.HandleFunc("/v1/sessions/{id}", g.handlePinned)
	mux.HandleFunc("/v1/sessions/{id}/", g.handlePinned)
	mux.HandleFunc("POST /v1/calls", g.enqueue)
	mux.HandleFunc("GET /v1/calls/{id}", g.call) // a node rejects other paths
	mux.HandleFunc("DELETE /v1/calls/{id}", g.call)
	mux.HandleFunc("GET /v1/calls/{id}/output", g.call)
	mux.HandleFunc("/mcp", g.mcp)
	mux.HandleFunc("POST /v1/files", g.store)
	mux.HandleFunc("GET /v1/files/{id}", g.file)
	mux.HandleFunc("/", g.handleAny)
	return g.middleware.Handler(mux)
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // fails only if the client is gone
}

// unready returns the reason why the gateway accepts no calls, or nil.
func (g *Gateway) unready() *api.Error {
	switch {
	case g.draining.Load():
		return api.NewError(api.Draining, "the gateway is draining", "try another one")
	case len(g.members.Of(NodeKind)) == 0 || !g.bus.Connected():
		return g.none()
	}
	return nil
}

// none returns the error for a cluster without nodes.
func (g *Gateway) none() *api.Error {
	if !g.bus.Connected() {
		return api.NewError(api.Busy, "the gateway is not connected to NATS", "try again in a moment")
	}
	return api.NewError(api.Busy, "no node is available", "try again in a moment")
}

// noneOf returns the error if no suitable node is available for a request.
func (g *Gateway) noneOf(r *http.Request) *api.Error {
	if name := r.Header.Get(nodeHeader); name != "" && g.bus.Connected() {
		return api.NewError(api.Busy, "the node in the header "+nodeHeader+" is missing or draining", "try again in a moment")
	}
	return g.none()
}

// handleAny forwards a request to the least busy node.
func (g *Gateway) handleAny(w http.ResponseWriter, r *http.Request) {
	body, err := g.body(w, r)
	if err == nil {
		_, err = targetNode(r, body)
	}
	if err != nil {
		api.AsError(err).Write(w)
		return
	}
	if r.Header.Get(keyHeader) != "" && r.Method == http.MethodPost {
		g.answer(w, r)(g.idempotent(w, r, body))
		return
	}
	res, _, err := g.sendToAny(r, body)
	g.answer(w, r)(res, err)
}

// body reads the whole body of a request, which may be sent more than once.
func (g *Gateway) body(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	if r.Body == nil || r.Body == http.NoBody || r.ContentLength == 0 {
		return nil, nil
	}
	return g.middleware.Body(w, r)
}

// attempts is the number of nodes to try before a client gets their refusal.
const attempts = 4

// sendToAny sends a request to a node, and to others as long as they do not start it.
func (g *Gateway) sendToAny(r *http.Request, body []byte) (res *http.Response, at string, err error) {
	var refused *http.Response
	tried := map[string]bool{}
	for range attempts {
		at, leave, ok := g.place(r.Header.Get(nodeHeader), tried)
		if !ok {
			break
		}
		tried[at] = true
		if refused != nil {
			refused.Body.Close()
		}
		res, err := g.transport.do(forwardRequest(r, body), at)
		switch {
		case errors.Is(err, ErrUnreachable):
			leave()
			refused = nil
			continue
		case err != nil:
			leave()
			return nil, at, err
		}
		res.Body = closeHook{res.Body, leave} // the request ends with its response
		if !refusedWith(res, api.Busy, api.Draining, api.Quota, api.QuotaKept) {
			return res, at, nil
		}
		refused = res
	}
	if refused != nil {
		return refused, "", nil
	}
	return nil, "", g.noneOf(r)
}

// refusedWith reports whether a node refused to start a request, with one of these codes.
func refusedWith(res *http.Response, codes ...api.Code) bool {
	if !slices.Contains([]int{http.StatusServiceUnavailable, http.StatusTooManyRequests, http.StatusConflict}, res.StatusCode) {
		return false
	}
	const most = 64 << 10
	text, err := io.ReadAll(io.LimitReader(res.Body, most))
	res.Body = rest{io.MultiReader(bytes.NewReader(text), res.Body), res.Body}
	var e api.Error
	e.Started = true
	return err == nil && json.Unmarshal(text, &e) == nil && !e.Started && slices.Contains(codes, e.Failure.Code)
}

type rest struct {
	io.Reader
	io.Closer
}

// handlePinned forwards a request to the node that assigned the ID in its path.
func (g *Gateway) handlePinned(w http.ResponseWriter, r *http.Request) {
	at, err := g.home(r.PathValue("id"), strings.HasPrefix(r.URL.Path, "/v1/sessions/"))
	if err != nil {
		w.Header().Set("Connection", "close") // or net/http would first read the body
		api.AsError(err).Write(w)
		return
	}
	out := forwardRequest(r, nil)
	if r.ContentLength != 0 {
		there, leave := server.WhileConnected(r.Context())
		defer leave()
		out = out.WithContext(there)
		// The response does not close the body: the rest is still read.
		out.Body, out.ContentLength = io.NopCloser(r.Body), r.ContentLength
	}
	g.answer(w, r)(g.transport.do(out, at))
}

// home returns the node of a session or call.
func (g *Gateway) home(id string, session bool) (at string, err error) {
	at, ok := home(id)
	switch {
	case !ok && session:
		return "", api.NewError(api.NoSuchSession, "no such session", "GET /v1/sessions lists them")
	case !ok:
		return "", api.NewError(api.NoSuchCall, "no such call", "GET /v1/calls lists them")
	case !g.members.Alive(at):
		return "", api.NewError(api.Ended, "the node of "+id+" was lost, with everything on it", "make a new one")
	case !g.members.Has(at):
		return "", g.none()
	}
	return at, nil
}

// forwardRequest returns the request for a node, with a body in memory.
func forwardRequest(r *http.Request, body []byte) *http.Request {
	who := server.IdentityOf(r.Context())
	out := &http.Request{
		Method: r.Method, URL: &url.URL{Scheme: "http", Host: "node", Path: r.URL.Path, RawPath: r.URL.RawPath, RawQuery: r.URL.RawQuery},
		Host: "node", Header: http.Header{}, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, ContentLength: int64(len(body)),
	}
	copyHeader(out.Header, r.Header)
	for _, name := range []string{"Authorization", "Cookie", "Expect", "Origin"} {
		out.Header.Del(name)
	}
	out.Header.Set(server.TenantHeader, who.Tenant)
	out.Header.Del(server.LocalHeader)
	if r.Context().Value(checkKey{}) == nil {
		out.Header.Del(server.CheckHeader)
	} else {
		out.Header.Set(server.CheckHeader, "1")
	}
	if who.Local {
		out.Header.Set(server.LocalHeader, "1")
	}
	out.Header.Set("X-Request-Id", who.RequestID)
	if out.Header.Get("User-Agent") == "" {
		out.Header.Set("User-Agent", "") // prevent net/http from adding its own
	}
	if len(body) > 0 {
		out.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(body)), nil }
		out.Body, _ = out.GetBody()
	}
	return out.WithContext(r.Context())
}

// hops are the header fields for a single connection (RFC 9110, 7.6.1).
var hops = []string{"Connection", "Keep-Alive", "Proxy-Connection", "Proxy-Authenticate", "Proxy-Authorization", "Te", "Trailer", "Transfer-Encoding", "Upgrade"}

// copyHeader copies a header without the fields for a single connection.
func copyHeader(to, from http.Header) {
	maps.Copy(to, from)
	for _, named := range from["Connection"] {
		for name := range strings.SplitSeq(named, ",") {
			to.Del(strings.TrimSpace(name))
		}
	}
	for _, name := range hops {
		to.Del(name)
	}
}

// answer forwards a response, or reports an error.
func (g *Gateway) answer(w http.ResponseWriter, r *http.Request) func(*http.Response, error) {
	return func(res *http.Response, err error) {
		if err != nil {
			g.failed(w, r, err)
			return
		}
		defer res.Body.Close()
		copyHeader(w.Header(), res.Header)
		w.WriteHeader(res.StatusCode)
		flush := http.NewResponseController(w).Flush
		buf := pieces.Get().(*[piece]byte)
		defer pieces.Put(buf)
		for {
			n, err := res.Body.Read(buf[:])
			if n > 0 {
				if _, err := w.Write(buf[:n]); err != nil {
					return // the client is gone
				}
			}
			switch {
			case err == io.EOF:
				return
			case err != nil:
				panic(http.ErrAbortHandler) // a partial response must not look complete
			case res.ContentLength < 0 && flush() != nil:
				return
			}
		}
	}
}

// failed responds to a request without a response from a node.
func (g *Gateway) failed(w http.ResponseWriter, r *http.Request, err error) {
	id := server.IdentityOf(r.Context()).RequestID
	var ours *api.Error
	switch {
	case errors.As(err, &ours):
	case r.Context().Err() != nil:
		panic(http.ErrAbortHandler) // the client is gone, or half-closed: an empty response must not look like one
	case errors.Is(err, ErrUnreachable):
		ours = api.NewError(api.Busy, "the node is not connected to NATS at the moment", "try again in a moment")
	default:
		g.log.Warn("lost", "request", id, "error", err.Error())
		ours = api.NewError(api.Lost, "the node was lost before it responded, with everything that ran there", "it may have run; retry it only if it may run twice")
		ours.Started = true
	}
	g.counters.answers.WithLabelValues(string(ours.Failure.Code)).Inc()
	ours.Write(w)
}
