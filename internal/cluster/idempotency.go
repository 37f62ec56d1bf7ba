package cluster

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/server"
)

// keyHeader is the header with a client's idempotency key.
const keyHeader = "Idempotency-Key"

// maxAnswer is the size of the largest response that is stored with its key: a NATS message has at most a
// megabyte.
const maxAnswer = 256 << 10

// idempotent sends a request with an idempotency key to the node that the key belongs to.
func (g *Gateway) idempotent(w http.ResponseWriter, r *http.Request, body []byte) (*http.Response, error) {
	name := leaseName(server.IdentityOf(r.Context()).Tenant, r.URL.Path, r.Header.Get(keyHeader))
	tried := map[string]bool{}
	ours := false // this gateway wrote the lease last
	for range attempts {
		at, leave, ok := g.place(r.Header.Get(nodeHeader), tried)
		if !ok {
			return nil, g.noneOf(r)
		}
		defer leave()
		is, revision, first, err := g.bus.leases.take(name, lease{At: at, Hash: sum(body)})
		switch {
		case err != nil:
			return nil, err
		case is.Status != 0:
			if err := g.middleware.Hold(r.Context(), int64(len(is.Answer))); err != nil { // the client may read slowly
				return nil, err
			}
			w.Header().Set("Idempotency-Replayed", "true")
			return storedAnswer(is), nil
		case !first && !g.members.Alive(is.At):
			return nil, ErrLost // it may have run there
		case !first && !g.members.Has(is.At):
			return nil, g.none()
		}
		ours = ours || first
		stop := func() uint64 { return revision }
		if ours {
			stop = g.bus.leases.renew(name, is, revision, renewInterval)
		}
		res, err := g.transport.do(forwardRequest(r, body), is.At)
		revision = stop()
		if err != nil {
			return nil, err
		}
		if !refusedWith(res, api.Draining) {
			return g.keep(name, is, revision, res), nil
		}
		// A draining node starts nothing more.
		res.Body.Close()
		tried[is.At] = true
		next, leaveNext, ok := g.place(r.Header.Get(nodeHeader), tried)
		if !ok {
			return nil, draining()
		}
		leaveNext()
		is.At = next
		if _, err := g.bus.leases.change(name, is, revision); err != nil {
			return nil, err // another gateway handles the key
		}
		ours = true
		tried = map[string]bool{}
	}
	return nil, draining()
}

func draining() error {
	return api.NewError(api.Draining, "the nodes are draining", "try again in a moment")
}

// storedAnswer returns the response in a lease.
func storedAnswer(c lease) *http.Response {
	return &http.Response{
		StatusCode: c.Status, Header: http.Header{"Content-Type": {"application/json"}},
		ContentLength: int64(len(c.Answer)), Body: io.NopCloser(bytes.NewReader(c.Answer)),
	}
}

// keep stores a final response in its lease, in case its node is lost.
func (g *Gateway) keep(name string, c lease, revision uint64, res *http.Response) *http.Response {
	if res.StatusCode/100 != 2 || res.Header.Get("Idempotency-Replayed") != "" {
		return res
	}
	text, err := io.ReadAll(io.LimitReader(res.Body, maxAnswer+1))
	res.Body = rest{io.MultiReader(bytes.NewReader(text), res.Body), res.Body}
	if err == nil && len(text) <= maxAnswer && json.Valid(text) {
		c.Status, c.Answer = res.StatusCode, text
		if _, err := g.bus.leases.change(name, c, revision); err != nil {
			if e, ok := errors.AsType[*api.Error](err); ok {
				g.log.Warn("cannot store a response", "error", e.Failure.Message)
			}
		}
	}
	return res
}
