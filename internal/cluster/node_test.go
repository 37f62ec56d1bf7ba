package cluster

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/check"
)

// A response in progress while its node ends arrives, even after a pause.
func TestNodeEnds(t *testing.T) {
	t.Parallel()
	bus := &fakeBus{}
	ctx, stop := context.WithCancel(t.Context())
	at := subject(NodeKind, "n", NewInstance())
	members, err := Join(ctx, bus, NodeKind, func() Heartbeat { return Heartbeat{Kind: NodeKind, Name: "n", Instance: at[len("node.n."):]} })
	check.Must(t, err)
	accepts, err := NewTransport(ctx, bus, at, func(string) bool { return true })
	check.Must(t, err)
	begun := make(chan struct{})
	n := &Node{bus: bus, members: members, stop: stop, calls: &puller{}, web: newHTTPServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		close(begun)
		time.Sleep(2 * again)
		_, _ = io.WriteString(w, "answer")
	}), slog.New(slog.DiscardHandler))}
	go func() { _ = n.web.Serve(accepts) }()

	others, err := Join(t.Context(), bus, GatewayKind, func() Heartbeat { return Heartbeat{Kind: GatewayKind, Name: "g", Instance: NewInstance()} }, NodeKind)
	check.Must(t, err)
	bounded(t, func() {
		for !others.Has(at) {
			time.Sleep(time.Millisecond)
		}
	})
	dials, err := NewTransport(t.Context(), bus, "gateway.g.1", others.Has)
	check.Must(t, err)
	go func() {
		<-begun
		n.Close(t.Context())
	}()
	bounded(t, func() {
		r := &http.Request{Method: http.MethodGet, Host: "node", URL: &url.URL{Scheme: "http", Host: "node", Path: "/"}, Header: http.Header{}}
		res, err := dials.do(r.WithContext(t.Context()), at)
		if err != nil {
			t.Error(err)
			return
		}
		defer res.Body.Close()
		text, err := io.ReadAll(res.Body)
		check.That(t, err == nil && string(text) == "answer", "%q, %v", text, err)
		for others.Has(at) { // it has left
			time.Sleep(time.Millisecond)
		}
	})
}
