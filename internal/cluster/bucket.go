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

// bucket is one of JetStream's, which whoever needs it first makes.
type bucket struct {
	js       jetstream.JetStream
	name     string
	ttl      time.Duration
	most     int32 // bytes of a value
	replicas int

	mu sync.Mutex
	kv jetstream.KeyValue
}

// jetStreamTimeout bounds each question to JetStream, which without a majority does not answer.
const jetStreamTimeout = 3 * time.Second

func (b *bucket) open(ctx context.Context) (jetstream.KeyValue, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.kv != nil {
		return b.kv, nil
	}
	// As jetstream makes buckets, but for AllowDirect: with that any replica would answer, also one that
	// has not heard of what this gateway has just been told is written; and for AllowRollup: with that a
	// node could delete all records, those that it does not know included, by the header of one message.
	_, err := b.js.CreateOrUpdateStream(ctx, jetstream.StreamConfig{
		Name: "KV_" + b.name, Subjects: []string{"$KV." + b.name + ".>"}, MaxMsgsPerSubject: 1, MaxMsgSize: b.most, MaxAge: b.ttl,
		Replicas: b.replicas, Discard: jetstream.DiscardNew, DenyDelete: true,
	})
	if err != nil && !errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) { // by another gateway, meanwhile
		return nil, err
	}
	kv, err := b.js.KeyValue(ctx, b.name)
	if err == nil {
		b.kv = kv
	}
	return kv, err
}

// stay has a bucket be made anew that was opened and is gone: NATS may have been started without its store.
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

// get reads a value. Its revision is 0 if there is none.
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

// make makes a value, unless there is one: see [changed].
func (b *bucket) make(ctx context.Context, key string, value any) (uint64, error) {
	if _, err := b.open(ctx); err != nil {
		return 0, err
	}
	return b.put(ctx, key, value, 0)
}

// put changes a value from a revision; 0 makes one. Nodes have no right to read, so that it is done
// without opening the bucket.
func (b *bucket) put(ctx context.Context, key string, value any, revision uint64) (uint64, error) {
	text, err := json.Marshal(value)
	if err != nil {
		return 0, err
	}
	return publish(ctx, b.js, "$KV."+b.name+"."+key, text, jetstream.WithExpectLastSequencePerSubject(revision))
}

// publish writes to a stream. One that was made a moment ago does not listen yet.
func publish(ctx context.Context, js jetstream.JetStream, subject string, text []byte, options ...jetstream.PublishOpt) (uint64, error) {
	const attempts = int(jetStreamTimeout / tick)
	ack, err := js.Publish(ctx, subject, text, append(options, jetstream.WithRetryAttempts(attempts), jetstream.WithRetryWait(tick))...)
	if err != nil {
		return 0, err
	}
	return ack.Sequence, nil
}

// jetStreamError is the error of what was not begun for want of JetStream.
func jetStreamError(what string, err error) error {
	return api.NewError(api.Busy, what+": JetStream: "+err.Error(), "try again in a moment")
}

// conflict reports whether an update has failed because somebody else was first. Replicated streams say
// it by another code.
func conflict(err error) bool {
	var e *jetstream.APIError
	return errors.As(err, &e) && (e.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence || e.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequenceConstant)
}
