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

// A detached call is a record in a bucket and a message in a work queue. The record decides who owns the
// call: the one process that succeeds in changing its first revision. A node changes it to start the
// call, when it has a free slot; a gateway, to cancel it. The message only delivers the call to nodes:
// without an acknowledgement it goes to another node, and a second delivery finds a changed record. A
// record with an end never changes again.

// record is the record of a call.
type record struct {
	ID   string          `json:"id"`
	Came time.Time       `json:"came"`
	Hash string          `json:"hash"`           // of the request
	At   string          `json:"at,omitempty"`   // node that owns it
	End  *api.CallStatus `json:"end,omitempty"`  // final status
	Gone bool            `json:"gone,omitempty"` // deleted by its tenant
}

// message is a queued call.
type message struct {
	Record    record          `json:"record"`
	Key       string          `json:"key"` // of the record
	Revision  uint64          `json:"revision"`
	Tenant    string          `json:"tenant"`
	RequestID string          `json:"request_id"`
	Body      json.RawMessage `json:"body"`
}

const (
	// maxWait is the longest time that a call waits for a slot.
	maxWait = time.Hour
	// ackWait is the time from the delivery of a call to its start.
	ackWait = 5 * time.Second
	// maxQueued is the maximum size of a queued call: a NATS message has at most a megabyte.
	maxQueued = 512 << 10
	// queuedPrefix is the prefix of the IDs of queued calls.
	queuedPrefix = "q-"
)

// queue is the work queue with its records.
type queue struct {
	js      jetstream.JetStream
	name    string // of the stream, and prefix of its subjects, one per tenant
	records bucket
}

// consumer is the consumer of the queue, which all nodes share.
const consumer = "nodes"

// maxNodes limits the number of nodes that wait for a call at the same time. NATS's default is 512.
const maxNodes = 1 << 13

func newQueue(js jetstream.JetStream, c *config.Config) *queue {
	ttl := maxWait + time.Duration(c.Call.MaxTimeout) + time.Duration(c.Calls.Keep)
	return &queue{js: js, name: c.NATS.Cluster + "-queue", records: bucket{js: js, name: c.NATS.Cluster + "-calls", ttl: ttl, most: maxQueued, replicas: c.NATS.Replicas}}
}

// tenantKey identifies a tenant in subjects and keys.
func tenantKey(tenant string) string { return sum([]byte(tenant))[:32] }

// open creates the queue if necessary. Only gateways have the right to.
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

// keepConsumer creates the consumer of the queue, if there is none. A durable consumer with three replicas has been
// seen to vanish when NATS servers were restarted in turn. Then all messages are delivered again, and claimed calls
// are not started twice.
func (q *queue) keepConsumer(ctx context.Context) error {
	s, err := q.open(ctx)
	if err != nil {
		return err
	}
	if _, err := s.Consumer(ctx, consumer); !errors.Is(err, jetstream.ErrConsumerNotFound) {
		return err
	}
	// Refused calls are pending until their next delivery. MaxAckPending has no limit, or the calls of one
	// tenant would block those of others.
	_, err = s.CreateOrUpdateConsumer(ctx, jetstream.ConsumerConfig{Durable: consumer, AckPolicy: jetstream.AckExplicitPolicy, AckWait: ackWait, MaxAckPending: -1, MaxDeliver: -1, MaxWaiting: maxNodes})
	return err
}

// waiting returns the number of queued calls and the age of the oldest.
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
	state := s.CachedInfo().State // just fetched
	if state.Msgs > 0 {
		oldest = max(0, time.Since(state.FirstTime)) // by the clock of NATS
	}
	return int(state.Msgs), oldest, nil
}

// ended returns a status that fits into a record. It drops a long command line, which the client knows, but
// keeps the list of collected files, which is only here and has its own limit.
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

// failed returns the status of a call that failed to start, or whose fate is unknown.
func (r *record) failed(started bool, e *api.Error) *api.CallStatus {
	return &api.CallStatus{ID: r.ID, State: api.Over, Came: r.Came, Started: started, Failure: &e.Failure}
}

// status returns the status of a call without asking a node.
func (r *record) status() api.CallStatus {
	switch {
	case r.End != nil:
		return *r.End
	case r.At != "": // started, or starting
		return api.CallStatus{ID: r.ID, State: api.Running, Came: r.Came, Started: true}
	}
	return api.CallStatus{ID: r.ID, State: api.Queued, Came: r.Came}
}
