package mcp

import (
	"bytes"
	"crypto/rand"
	"errors"
	"io"
	"net/http"
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

	// forgotten is when the state of a client is dropped that sends nothing more. Sessions of
	// sandboxes are not part of it.
	forgotten = 10 * time.Minute
)

// handler is the SDK's.
func (f *Front) handler(stateless bool) http.Handler {
	return sdk.NewStreamableHTTPHandler(func(*http.Request) *sdk.Server { return f.protocol }, &sdk.StreamableHTTPOptions{
		Stateless: stateless, SessionTimeout: forgotten, MaxRequestBodyBytes: f.settings.MaxBody,
		// Over TCP there is a token, which no web page has.
		DisableLocalhostProtection: true,
	})
}

// ServeHTTP answers a request of which is known whose it is.
func (f *Front) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	// All of the body at once: after its deadline the connection would count as closed.
	text, err := server.Body(w, r, f.settings.MaxBody)
	if err != nil {
		e := api.AsError(err)
		if big := (*http.MaxBytesError)(nil); errors.As(err, &big) {
			e = api.NewError(api.TooLarge, "the request is too large", "")
		}
		e.Write(w)
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
	f.handlerOf(r).ServeHTTP(server.Patient(w), r)
}

func (f *Front) handlerOf(r *http.Request) http.Handler {
	if r.Header.Get("Mcp-Protocol-Version") >= sessionless {
		return f.stateless
	}
	tenant := server.Tenant(r.Context())
	f.mu.Lock()
	defer f.mu.Unlock()
	h := f.stateful[tenant]
	if h == nil {
		h = f.handler(false)
		f.stateful[tenant] = h
	}
	return h
}
