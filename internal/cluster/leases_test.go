package cluster

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/sbxrun/sbxrun/tests/check"
)

// stream accepts writes. It returns the next revision, or an error every other time.
type stream struct {
	jetstream.JetStream
	tries   chan bool
	written uint64
	failed  bool
}

func (s *stream) Publish(context.Context, string, []byte, ...jetstream.PublishOpt) (*jetstream.PubAck, error) {
	s.tries <- true
	if s.failed = !s.failed; s.failed {
		return nil, errors.New("no majority")
	}
	s.written++
	return &jetstream.PubAck{Sequence: s.written}, nil
}

func (s *stream) CreateOrUpdateStream(context.Context, jetstream.StreamConfig) (jetstream.Stream, error) {
	return nil, errors.New("no majority")
}

// A lease is renewed while its request runs, because the bucket drops old values.
func TestRenew(t *testing.T) {
	s := &stream{tries: make(chan bool), written: 7}
	c := &leaseStore{bucket{js: s, name: "keys"}}
	stop := c.renew("k", lease{At: "n"}, 7, time.Millisecond)
	for range 6 {
		<-s.tries
	}
	go func() {
		for range s.tries { // one that is on its way
		}
	}()
	defer close(s.tries)
	revision := stop()
	check.That(t, revision >= 9 && revision == s.written, "the last revision is %d, written was %d", revision, s.written)
}
