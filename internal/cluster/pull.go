package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/config"
	"github.com/sbxrun/sbxrun/internal/server"
)

// puller takes calls from the queue for a node.
type puller struct {
	nc    *nats.Conn
	queue *queue
	s     *server.Server
	at    string // the node
	log   *slog.Logger
	under sync.WaitGroup // calls without a recorded end
}

// run takes calls one after the other, each when a slot is free, until the server is draining.
func (p *puller) run(ctx context.Context) {
	const pause = time.Second
	for ctx.Err() == nil && p.s.Ready() {
		if n, more := p.s.Scheduler().Free(); n == 0 {
			select {
			case <-more:
			case <-time.After(pause): // check again whether to continue
			}
			continue
		}
		m, err := p.next(ctx)
		switch {
		case err != nil: // there is no queue yet, or no connection
			select {
			case <-ctx.Done():
			case <-time.After(pause):
			}
		case m != nil:
			p.take(ctx, m)
		}
	}
}

// next waits a while for a call, and returns nil if there was none. It uses a single request of JetStream,
// because nodes have few rights.
func (p *puller) next(ctx context.Context) (*nats.Msg, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*jetStreamTimeout)
	defer cancel()
	// Each request has its own inbox: the shared one (RequestWithContext) received nothing after NATS had been
	// unreachable, as TestNATSAway shows.
	inbox := p.nc.NewInbox()
	answer, err := p.nc.SubscribeSync(inbox)
	if err != nil {
		return nil, err
	}
	defer func() { _ = answer.Unsubscribe() }() // fails only when the connection is closed
	if err := p.nc.PublishRequest("$JS.API.CONSUMER.MSG.NEXT."+p.queue.name+"."+consumer, inbox, fmt.Appendf(nil, `{"batch":1,"expires":%d}`, jetStreamTimeout)); err != nil {
		return nil, err
	}
	m, err := answer.NextMsgWithContext(ctx)
	if err != nil {
		return nil, err
	}
	switch status := m.Header.Get("Status"); status {
	case "":
		return m, nil
	case "404", "408": // timeout
		return nil, nil
	default:
		return nil, fmt.Errorf("JetStream: %s %s", status, m.Header.Get("Description"))
	}
}

// take admits and starts a call, or returns it to the queue.
func (p *puller) take(ctx context.Context, m *nats.Msg) {
	var c message
	if json.Unmarshal(m.Data, &c) != nil || !config.ValidTenant(c.Tenant) {
		_ = m.Term() // from another version; its record will expire as not started
		return
	}
	a, err := p.s.Admit(server.As(ctx, c.Tenant, c.RequestID), c.Record.ID, c.Body)
	var e *api.Error
	switch {
	case errors.Is(err, server.ErrHere): // delivered again
		_ = m.Ack()
		return
	case err != nil:
		e = api.AsError(err)
		if code := e.Failure.Code; code == api.Busy || code == api.Quota || code == api.QuotaKept || code == api.Draining {
			_ = m.NakWithDelay(later(m)) // if this is lost, it is delivered after ackWait
			return
		}
	}
	p.under.Go(func() { p.start(ctx, m, &c, a, e) })
}

// later returns the delay before the next delivery of a refused call.
func later(m *nats.Msg) time.Duration {
	const first, most = 100 * time.Millisecond, 2 * time.Second
	if of, err := m.Metadata(); err == nil && of.NumDelivered < 5 {
		return first << of.NumDelivered
	}
	return most
}

// start claims a call and starts it, unless it was refused permanently, and records its end.
func (p *puller) start(ctx context.Context, m *nats.Msg, c *message, a *server.Detached, refused *api.Error) {
	r := c.Record
	if r.At = p.at; refused != nil {
		r.End = r.failed(false, refused)
	}
	asking, cancel := context.WithTimeout(ctx, ackWait/2)
	revision, err := p.queue.records.put(asking, c.Key, &r, c.Revision)
	cancel()
	if err != nil {
		// Another node has it, or its owner is unknown; it must not start here.
		if a != nil {
			a.GiveUp()
		}
		// A replicated bucket may report a conflict for a change that is still in progress.
		const sure = 5
		if of, whose := m.Metadata(); conflict(err) && whose == nil && of.NumDelivered > sure {
			_ = m.Ack()
		} else {
			_ = m.NakWithDelay(later(m))
		}
		return
	}
	_ = m.Ack() // if this is lost, the call is delivered again, and its record has changed
	if a == nil {
		return
	}
	call := a.Start()
	<-call.Ended()
	r.End = ended(call.Status())
	for ctx.Err() == nil {
		asking, cancel := context.WithTimeout(ctx, jetStreamTimeout)
		_, err := p.queue.records.put(asking, c.Key, &r, revision)
		cancel()
		if err == nil || conflict(err) { // or a gateway recorded an end
			return
		}
		select {
		case <-ctx.Done():
		case <-time.After(tick):
		}
	}
	p.log.Warn("cannot record the end of a call", "id", r.ID, "error", errors.Join(err, ctx.Err()))
}
