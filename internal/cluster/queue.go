package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/config"
)

// A call that nobody waits for is a record in a bucket and a message in a work queue. The record decides:
// whoever changes it from the revision that it was made with, and only one can, has the call. A node does
// so to start it, when it has a place for it; a gateway does so to cancel it. The message only brings
// calls to nodes: one that a node has not acknowledged comes to another, and one that comes twice
// finds its record changed. A record that has an end never changes again.

// record is what is known of a call.
type record struct {
	ID   string          `json:"id"`
	Came time.Time       `json:"came"`
	Hash string          `json:"hash"`           // of the request
	At   string          `json:"at,omitempty"`   // the node that has it
	End  *api.CallStatus `json:"end,omitempty"`  // when it has ended
	Gone bool            `json:"gone,omitempty"` // its tenant has deleted it
}

// message is a call in the queue.
type message struct {
	Record    record          `json:"record"`
	Key       string          `json:"key"` // of the record
	Revision  uint64          `json:"revision"`
	Tenant    string          `json:"tenant"`
	RequestID string          `json:"request_id"`
	Body      json.RawMessage `json:"body"`
}

const (
	// maxWait is how long a call may wait for a place.
	maxWait = time.Hour
	// ackWait is how long a node may take from the receipt of a call to its start.
	ackWait = 5 * time.Second
	// maxQueued is how long a call in the queue may be: a message of NATS has a megabyte.
	maxQueued = 512 << 10
	// queuedPrefix begins the ids of calls that come by the queue.
	queuedPrefix = "q-"
)

// queue is the work queue, and the records.
type queue struct {
	js      jetstream.JetStream
	name    string // of the stream, and of its subjects; a tenant's calls have one each
	records bucket
}

// consumer is the queue's, which all nodes share.
const consumer = "nodes"

// maxNodes is how many may ask the queue for a call at the same time; NATS has a bound of 512 of its own.
const maxNodes = 1 << 13

func newQueue(js jetstream.JetStream, c *config.Config) *queue {
	ttl := maxWait + time.Duration(c.Call.MaxTimeout) + time.Duration(c.Calls.Keep)
	return &queue{js: js, name: c.NATS.Cluster + "-queue", records: bucket{js: js, name: c.NATS.Cluster + "-calls", ttl: ttl, most: maxQueued, replicas: c.NATS.Replicas}}
}

// tenantKey is a tenant as a part of subjects and keys.
func tenantKey(tenant string) string { return sum([]byte(tenant))[:32] }

// open makes what there is not yet. Gateways call it; nodes may not make anything.
func (q *queue) open(ctx context.Context) (jetstream.Stream, error) {
	if _, err := q.records.open(ctx); err != nil {
		return nil, err
	}
	s, err := q.js.Stream(ctx, q.name)
	if !errors.Is(err, jetstream.ErrStreamNotFound) {
		return s, err
	}
	s, err = q.js.CreateStream(ctx, jetstream.StreamConfig{
		Name: q.name, Subjects: []string{q.name + ".*"}, Retention: jetstream.WorkQueuePolicy, Replicas: q.records.replicas,
		MaxAge: maxWait, Discard: jetstream.DiscardNew, MaxMsgSize: 2 * maxQueued,
	})
	return s, err
}

// keepConsumer makes the consumer of the queue, if there is none. A durable one of three replicas was
// seen to vanish when servers of NATS were restarted in turn; all that is in the queue comes once more
// then, and what was claimed is not started again.
func (q *queue) keepConsumer(ctx context.Context) error {
	s, err := q.open(ctx)
	if err != nil {
		return err
	}
	if _, err := s.Consumer(ctx, consumer); !errors.Is(err, jetstream.ErrConsumerNotFound) {
		return err
	}
	// What was refused is pending too, until it is sent again: there is no bound on that, or one
	// tenant's calls would keep those of others.
	_, err = s.CreateOrUpdateConsumer(ctx, jetstream.ConsumerConfig{Durable: consumer, AckPolicy: jetstream.AckExplicitPolicy, AckWait: ackWait, MaxAckPending: -1, MaxDeliver: -1, MaxWaiting: maxNodes})
	return err
}

// waiting returns how many calls are in the queue, and how long the oldest has been.
func (q *queue) waiting() (n int, oldest time.Duration, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	s, err := q.js.Stream(ctx, q.name)
	switch {
	case errors.Is(err, jetstream.ErrStreamNotFound), errors.Is(err, jetstream.ErrJetStreamNotEnabled), errors.Is(err, jetstream.ErrJetStreamNotEnabledForAccount):
		return 0, 0, nil
	case err != nil:
		return 0, 0, err
	}
	state := s.CachedInfo().State // it was just asked for
	if state.Msgs > 0 {
		oldest = max(0, time.Since(state.FirstTime)) // by NATS's clock
	}
	return int(state.Msgs), oldest, nil
}

// ended is a status that fits into a record: without a long command line, which whoever has sent it knows. Of the
// files that were collected nothing else tells; their names have a bound of their own, which fits.
func ended(s api.CallStatus) *api.CallStatus {
	const long, most = 64 << 10, maxQueued - 16<<10
	larger := func(than int) bool {
		text, err := json.Marshal(s)
		return err != nil || len(text) > than
	}
	if s.Report != nil && larger(long) {
		short := *s.Report
		short.Argv = nil
		s.Report = &short
	}
	if larger(most) {
		s.Shorten()
	}
	return &s
}

// failed is the status of a call that has come to nothing, or of which nobody knows.
func (r *record) failed(started bool, e *api.Error) *api.CallStatus {
	return &api.CallStatus{ID: r.ID, State: api.Over, Came: r.Came, Started: started, Failure: &e.Failure}
}

// status is what is told of a call that no node is asked about.
func (r *record) status() api.CallStatus {
	switch {
	case r.End != nil:
		return *r.End
	case r.At != "": // it has begun, or does now
		return api.CallStatus{ID: r.ID, State: api.Running, Came: r.Came, Started: true}
	}
	return api.CallStatus{ID: r.ID, State: api.Queued, Came: r.Came}
}
