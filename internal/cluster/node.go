package cluster

import (
	"context"
	"io"
	"log/slog"
	"net/http"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/server"
)

// Node offers a server to gateways.
type Node struct {
	bus     Bus
	members *Members
	web     *http.Server
	calls   *puller
	stop    context.CancelFunc
}

// NewNode lets handler serve the requests that gateways forward, for the server s. Gateways use the node
// after its first heartbeat.
func NewNode(bus *NATS, name, version string, s *server.Server, handler http.Handler, log *slog.Logger) (*Node, error) {
	ctx, stop := context.WithCancel(context.Background())
	instance := NewInstance()
	beat := func() Heartbeat {
		return Heartbeat{Kind: NodeKind, Name: name, Instance: instance, Version: version, Draining: !s.Ready(), Load: load(s)}
	}
	n := &Node{bus: bus, stop: stop}
	var err error
	if n.members, err = Join(ctx, bus, NodeKind, beat, GatewayKind); err != nil {
		stop()
		return nil, err
	}
	link, err := NewTransport(ctx, bus, subject(NodeKind, name, instance), n.members.Alive)
	if err != nil {
		stop()
		return nil, err
	}
	quotas := &quotas{s: s, scheduler: s.Scheduler(), link: link, members: n.members, all: map[string]*quota{}}
	s.Cluster(Prefix(name, instance), func(ctx context.Context, tenant, id string) (io.ReadCloser, error) {
		f, _, err := link.file(server.As(ctx, tenant, ""), id, n.members.Of(GatewayKind))
		return f, err
	}, quotas.join)
	go quotas.run(ctx)
	n.web = newHTTPServer(handler, log)
	go func() { _ = n.web.Serve(link) }()
	n.calls = &puller{nc: bus.Conn, queue: bus.queue, s: s, at: subject(NodeKind, name, instance), log: log}
	go n.calls.run(ctx)
	log.Info("node", "name", name, "instance", instance)
	return n, nil
}

// newHTTPServer returns a server for requests over NATS.
func newHTTPServer(handler http.Handler, log *slog.Logger) *http.Server {
	web := server.Web(handler, server.Passed, log)
	web.MaxHeaderBytes *= 2         // the gateway adds fields
	web.SetKeepAlivesEnabled(false) // each request has its own connection
	return web
}

func load(s *server.Server) api.Load {
	m := s.Machine()
	l := api.Load{Places: m.Places, Running: m.Running, Kept: m.Kept, Waiting: m.Waiting, Oldest: m.Oldest, RoomsIdle: m.Rooms.Idle, RoomsAll: m.Rooms.All, Sessions: m.Sessions}
	if len(m.Tasks) > 0 && m.Tasks[0].Max > 0 {
		l.Pressure = float64(m.Tasks[0].Current) / float64(m.Tasks[0].Max)
	}
	return l
}

// Announce tells gateways at once that the node is draining.
func (n *Node) Announce() { n.members.Announce() }

// Close leaves the cluster and disconnects from NATS, after the server has ended. Responses in progress
// have until ctx is done; new requests are refused.
func (n *Node) Close(ctx context.Context) {
	recorded := make(chan struct{})
	go func() {
		n.calls.under.Wait()
		close(recorded)
	}()
	select {
	case <-recorded:
	case <-ctx.Done():
	}
	if n.web.Shutdown(ctx) != nil {
		n.web.Close()
	}
	n.members.Leave() // last, because gateways abandon requests to a node that has left
	n.bus.Close()
	n.stop()
}
