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
	"github.com/sbxrun/sbxrun/internal/server"
)

// puller takes calls from the queue, for a node.
type puller struct {
	nc    *nats.Conn
	queue *queue
	s     *server.Server
	at    string // the node
	log   *slog.Logger
	under sync.WaitGroup // calls whose ends are not recorded
}

// run takes one call after the other, each when there is a place for it, until the server takes no more.
func (p *puller) run(ctx context.Context) {
	const pause = time.Second
	for ctx.Err() == nil && p.s.Ready() {
		if n, more := p.s.Scheduler().Free(); n == 0 {
			select {
			case <-more:
			case <-time.After(pause): // is it still to go on?
			}
			continue
		}
		m, err := p.next(ctx)
		switch {
		case err != nil: // until a gateway has made the queue, or NATS is there
			select {
			case <-ctx.Done():
			case <-time.After(pause):
			}
		case m != nil:
			p.take(ctx, m)
		}
	}
}

// next waits a while for a call; nil if none has come. It is one request, and no more of JetStream: what a node
// asks for it must have the right to.
func (p *puller) next(ctx context.Context) (*nats.Msg, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*jetStreamTimeout)
	defer cancel()
	// An inbox of its own for each: at that of all requests (RequestWithContext) nothing came any more after NATS
	// had been away, as TestNATSAway shows.
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
	case "404", "408": // the time is over
		return nil, nil
	default:
		return nil, fmt.Errorf("JetStream: %s %s", status, m.Header.Get("Description"))
	}
}

// take lets a call in, and starts it; or has another node do so.
func (p *puller) take(ctx context.Context, m *nats.Msg) {
	var c message
	if json.Unmarshal(m.Data, &c) != nil {
		_ = m.Term() // of another version; its record says in the end that it has not begun
		return
	}
	a, err := p.s.Admit(server.As(ctx, c.Tenant, c.RequestID), c.Record.ID, c.Body)
	var e *api.Error
	switch {
	case errors.Is(err, server.ErrHere): // it comes once more
		_ = m.Ack()
		return
	case err != nil:
		e = api.AsError(err)
		if code := e.Failure.Code; code == api.Busy || code == api.Quota || code == api.QuotaKept || code == api.Draining {
			_ = m.NakWithDelay(later(m)) // without it, it comes after ackWait
			return
		}
	}
	p.under.Go(func() { p.start(ctx, m, &c, a, e) })
}

// later is how long a call is left alone that was refused.
func later(m *nats.Msg) time.Duration {
	const first, most = 100 * time.Millisecond, 2 * time.Second
	if of, err := m.Metadata(); err == nil && of.NumDelivered < 5 {
		return first << of.NumDelivered
	}
	return most
}

// start claims a call and starts it, unless it was refused for good, and records how it has ended.
func (p *puller) start(ctx context.Context, m *nats.Msg, c *message, a *server.Detached, refused *api.Error) {
	r := c.Record
	if r.At = p.at; refused != nil {
		r.End = r.failed(false, refused)
	}
	asking, cancel := context.WithTimeout(ctx, ackWait/2)
	revision, err := p.queue.records.put(asking, c.Key, &r, c.Revision)
	cancel()
	if err != nil {
		// Somebody else has it; or it is not known who, and then it must not start.
		if a != nil {
			a.GiveUp()
		}
		// A replicated bucket also says that a record has changed while that is only under way.
		const sure = 5
		if of, whose := m.Metadata(); conflict(err) && whose == nil && of.NumDelivered > sure {
			_ = m.Ack()
		} else {
			_ = m.NakWithDelay(later(m))
		}
		return
	}
	_ = m.Ack() // should it be lost, the call comes once more, and its record has changed
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
		if err == nil || conflict(err) { // or a gateway was first
			return
		}
		select {
		case <-ctx.Done():
		case <-time.After(tick):
		}
	}
	p.log.Warn("the end of a call is not recorded", "id", r.ID, "error", errors.Join(err, ctx.Err()))
}
