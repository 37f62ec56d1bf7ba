package mcp

import (
	"bytes"
	"crypto/rand"
	"io"
	"net/http"
	"slices"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/server"
)

const (
	// header leads from what the SDK hands to a tool back to the HTTP request. It is set here,
	// whatever the client has sent.
	header = "Sbxrun-Mcp-Request"

	// sessionless is the version of the protocol from which on a connection has no state.
	sessionless = "2026-07-28"

	// forgotten is when the state of a client is dropped that sends nothing more, and
	// mostConnections of how many is kept, of each tenant. Clients that meet an unknown id seldom
	// begin anew by themselves, so it is long. Sessions of sandboxes are not part of it.
	forgotten       = 24 * time.Hour
	mostConnections = 64
)

// connections are those of one tenant that have a state.
type connections struct {
	protocol *sdk.Server
	http.Handler
}

// handler is the SDK's.
func (f *Front) handler(p *sdk.Server, stateless bool) http.Handler {
	return sdk.NewStreamableHTTPHandler(func(*http.Request) *sdk.Server { return p }, &sdk.StreamableHTTPOptions{
		Stateless: stateless, SessionTimeout: forgotten, MaxRequestBodyBytes: int64(f.server.Settings().MaxBody),
		// Over TCP there is a token, which no web page has.
		DisableLocalhostProtection: true,
	})
}

// ServeHTTP answers a request of which is known whose it is.
func (f *Front) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	// All of the body at once: after its deadline the connection would count as closed.
	text, err := f.server.Body(w, r)
	if err != nil {
		api.AsError(err).Write(w)
		return
	}
	// Versions of the protocol before 2025-06-18 have batches. One request with thousands of messages would
	// count as one of those that a tenant may have at once.
	if bytes.HasPrefix(bytes.TrimSpace(text), []byte("[")) {
		api.NewError(api.Usage, "several messages in a request are not supported", "send one message per request").Write(w)
		return
	}
	// Body has reserved memory for three of them. The SDK makes more copies, and repeats ids, names and arguments
	// in its errors.
	const copies = 5
	if err := f.server.Hold(r.Context(), copies*int64(len(text))); err != nil {
		api.AsError(err).Write(w)
		return
	}
	r.Body = io.NopCloser(bytes.NewReader(text))
	ctx, cancel := f.server.Until(r.Context())
	defer cancel()
	word := rand.Text()
	f.requests.Store(word, ctx)
	defer f.requests.Delete(word)
	r = r.WithContext(ctx)
	r.Header.Set(header, word)
	f.handlerOf(r).ServeHTTP(w, r)
}

func (f *Front) handlerOf(r *http.Request) http.Handler {
	if r.Header.Get("Mcp-Protocol-Version") >= sessionless {
		return f.stateless
	}
	tenant := server.IdentityOf(r.Context()).Tenant
	f.mu.Lock()
	defer f.mu.Unlock()
	c := f.stateful[tenant]
	if c == nil {
		c = &connections{protocol: f.speak()}
		c.Handler = f.handler(c.protocol, false)
		f.stateful[tenant] = c
	}
	if r.Header.Get("Mcp-Session-Id") == "" { // one more, for which the oldest makes room
		all := slices.Collect(c.protocol.Sessions())
		for _, old := range all[:max(0, len(all)-mostConnections+1)] {
			go old.Close() // waits for what runs there
		}
	}
	return c
}
