package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/sbxrun/sbxrun/internal/api"
)

// bucket is a key-value bucket of JetStream. The first user creates it.
type bucket struct {
	js       jetstream.JetStream
	name     string
	ttl      time.Duration
	most     int32 // maximum size of a value
	replicas int

	mu sync.Mutex
	kv jetstream.KeyValue
}

// jetStreamTimeout bounds each request to JetStream, which does not respond without a majority.
const jetStreamTimeout = 3 * time.Second

func (b *bucket) open(ctx context.Context) (jetstream.KeyValue, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.kv != nil {
		return b.kv, nil
	}
	// Like jetstream's buckets, except for AllowDirect and AllowRollup. With AllowDirect, a replica could
	// respond that has not yet received an acknowledged write. With AllowRollup, a node could delete all
	// records with the header of a single message, even those that it does not know.
	_, err := b.js.CreateOrUpdateStream(ctx, jetstream.StreamConfig{
		Name: "KV_" + b.name, Subjects: []string{"$KV." + b.name + ".>"}, MaxMsgsPerSubject: 1, MaxMsgSize: b.most, MaxAge: b.ttl,
		Replicas: b.replicas, Discard: jetstream.DiscardNew, DenyDelete: true,
	})
	if err != nil && !errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) { // another gateway has created it
		return nil, err
	}
	kv, err := b.js.KeyValue(ctx, b.name)
	if err == nil {
		b.kv = kv
	}
	return kv, err
}

// stay recreates a bucket that has disappeared: NATS may have been restarted without its store.
func (b *bucket) stay(ctx context.Context) error {
	b.mu.Lock()
	opened := b.kv != nil
	b.mu.Unlock()
	if !opened {
		return nil
	}
	_, err := b.js.Stream(ctx, "KV_"+b.name)
	if !errors.Is(err, jetstream.ErrStreamNotFound) {
		return err
	}
	b.mu.Lock()
	b.kv = nil
	b.mu.Unlock()
	_, err = b.open(ctx)
	return err
}

// get reads a value. The revision is 0 if there is none.
func (b *bucket) get(ctx context.Context, key string, into any) (revision uint64, err error) {
	kv, err := b.open(ctx)
	if err != nil {
		return 0, err
	}
	entry, err := kv.Get(ctx, key)
	if errors.Is(err, jetstream.ErrKeyNotFound) || errors.Is(err, jetstream.ErrInvalidKey) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	return entry.Revision(), json.Unmarshal(entry.Value(), into)
}

// make creates a value. If there is one already, the error is a [conflict].
func (b *bucket) make(ctx context.Context, key string, value any) (uint64, error) {
	if _, err := b.open(ctx); err != nil {
		return 0, err
	}
	return b.put(ctx, key, value, 0)
}

// put replaces a revision of a value; 0 creates a value. It does not open the bucket, because nodes have no
// right to read.
func (b *bucket) put(ctx context.Context, key string, value any, revision uint64) (uint64, error) {
	text, err := json.Marshal(value)
	if err != nil {
		return 0, err
	}
	return publish(ctx, b.js, "$KV."+b.name+"."+key, text, jetstream.WithExpectLastSequencePerSubject(revision))
}

// publish writes to a stream. It retries, because a new stream does not respond at once.
func publish(ctx context.Context, js jetstream.JetStream, subject string, text []byte, options ...jetstream.PublishOpt) (uint64, error) {
	const attempts = int(jetStreamTimeout / tick)
	ack, err := js.Publish(ctx, subject, text, append(options, jetstream.WithRetryAttempts(attempts), jetstream.WithRetryWait(tick))...)
	if err != nil {
		return 0, err
	}
	return ack.Sequence, nil
}

// jetStreamError returns the error of a request that was not started because JetStream failed.
func jetStreamError(what string, err error) error {
	return api.NewError(api.Busy, what+": JetStream: "+err.Error(), "try again in a moment")
}

// conflict reports whether an update failed because the revision has changed. Replicated streams use a
// different code for that.
func conflict(err error) bool {
	var e *jetstream.APIError
	return errors.As(err, &e) && (e.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence || e.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequenceConstant)
}
