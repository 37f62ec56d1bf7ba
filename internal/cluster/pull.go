package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/server"
)

// puller takes calls from the queue, for a node.
type puller struct {
	queue *queue
	s     *server.Server
	at    string // the node
	log   *slog.Logger
	under sync.WaitGroup // calls whose ends are not recorded
}

// run takes one call after the other, each when there is a place for it, until the server takes no more.
func (p *puller) run(ctx context.Context) {
	const pause = time.Second
	var from jetstream.Consumer
	for ctx.Err() == nil && p.s.Ready() {
		if n, more := p.s.Free(); n == 0 {
			select {
			case <-more:
			case <-time.After(pause): // is it still to go on?
			}
			continue
		}
		m, err := p.next(ctx, &from)
		switch {
		case err != nil:
			from = nil // until a gateway has made the queue, or NATS is there
			select {
			case <-ctx.Done():
			case <-time.After(pause):
			}
		case m != nil:
			p.take(ctx, m)
		}
	}
}

// next waits a while for a call; nil if none has come.
func (p *puller) next(ctx context.Context, from *jetstream.Consumer) (jetstream.Msg, error) {
	if *from == nil {
		asking, cancel := context.WithTimeout(ctx, askWithin)
		defer cancel()
		var err error
		if *from, err = p.queue.js.Consumer(asking, p.queue.name, consumer); err != nil {
			return nil, err
		}
	}
	batch, err := (*from).Fetch(1, jetstream.FetchMaxWait(askWithin))
	if err != nil {
		return nil, err
	}
	m := <-batch.Messages()
	return m, batch.Error()
}

// take lets a call in, and starts it; or has another node do so.
func (p *puller) take(ctx context.Context, m jetstream.Msg) {
	var c message
	if json.Unmarshal(m.Data(), &c) != nil {
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
		if code := e.Failure.Code; code == api.Busy || code == api.Quota || code == api.Draining {
			_ = m.NakWithDelay(later(m)) // without it, it comes after ackWait
			return
		}
	}
	p.under.Go(func() { p.start(ctx, m, &c, a, e) })
}

// later is how long a call is left alone that was refused.
func later(m jetstream.Msg) time.Duration {
	const first, most = 100 * time.Millisecond, 2 * time.Second
	if of, err := m.Metadata(); err == nil && of.NumDelivered < 5 {
		return first << of.NumDelivered
	}
	return most
}

// start claims a call and starts it, unless it was refused for good, and records how it has ended.
func (p *puller) start(ctx context.Context, m jetstream.Msg, c *message, a *server.Admitted, refused *api.Error) {
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
		if of, whose := m.Metadata(); changed(err) && whose == nil && of.NumDelivered > sure {
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
		asking, cancel := context.WithTimeout(ctx, askWithin)
		_, err := p.queue.records.put(asking, c.Key, &r, revision)
		cancel()
		if err == nil || changed(err) { // or a gateway was first
			return
		}
		select {
		case <-ctx.Done():
		case <-time.After(tick):
		}
	}
	p.log.Warn("the end of a call is not recorded", "id", r.ID, "error", errors.Join(err, ctx.Err()))
}
