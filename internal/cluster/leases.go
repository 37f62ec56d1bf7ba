package cluster

import (
	"context"
	"crypto/sha256"
	"fmt"
	"time"

	"github.com/sbxrun/sbxrun/internal/api"
)

// A request with an idempotency key belongs to one node: the claim on it is written to NATS before it is
// sent, and only whoever writes it first has chosen. A node that has refused because it is ending starts
// nothing more, so that the claim may be moved; any other stays, since the node may begin yet.

// lease is what is known of a key.
type lease struct {
	At   string `json:"at"`   // the node
	Hash string `json:"hash"` // of the request
	// The answer, if it has come and is not too long.
	Status int    `json:"status,omitempty"`
	Answer []byte `json:"answer,omitempty"`
}

const (
	leaseTTL      = 10 * time.Minute // how long a key is known after its request, as by a single server
	renewInterval = leaseTTL / 4     // how often a claim is written while its request runs: the bucket forgets by age
)

// leaseStore are kept in a bucket.
type leaseStore struct{ bucket }

// name is a tenant's key as one of the bucket.
func leaseName(tenant, path, key string) string {
	return sum([]byte(tenant + "\n" + path + "\n" + key))
}

func sum(b []byte) string { return fmt.Sprintf("%x", sha256.Sum256(b)) }

// take writes a claim, unless there is one: then that is returned, and first is false.
func (c *leaseStore) take(name string, mine lease) (is lease, revision uint64, first bool, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), jetStreamTimeout)
	defer cancel()
	if revision, err = c.make(ctx, name, mine); err == nil {
		return mine, revision, true, nil
	}
	if conflict(err) {
		revision, err = c.get(ctx, name, &is)
	}
	switch {
	case err != nil:
		return is, 0, false, leaseError(err)
	case is.Hash != mine.Hash:
		return is, 0, false, api.NewError(api.Idempotency, "the idempotency key was used for another request", "use a new key for each request")
	}
	return is, revision, false, nil
}

// change replaces a claim that nobody else has changed.
func (c *leaseStore) change(name string, to lease, revision uint64) (uint64, error) {
	ctx, cancel := context.WithTimeout(context.Background(), jetStreamTimeout)
	defer cancel()
	revision, err := c.put(ctx, name, to, revision)
	if err != nil {
		return 0, leaseError(err)
	}
	return revision, nil
}

// read reads a claim; its revision is 0 if there is none.
func (c *leaseStore) read(name string) (is lease, revision uint64, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), jetStreamTimeout)
	defer cancel()
	revision, err = c.get(ctx, name, &is)
	return is, revision, err
}

// renew writes a claim every so often until it is stopped; stop returns the last revision.
func (c *leaseStore) renew(name string, is lease, revision uint64, every time.Duration) (stop func() uint64) {
	done, over := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(over)
		for {
			select {
			case <-done:
				return
			case <-time.After(every):
				// What is not written now may be the next time; or it is, and only the answer was lost.
				if next, err := c.change(name, is, revision); err == nil {
					revision = next
				} else if now, at, err := c.read(name); err == nil && now.At == is.At && now.Hash == is.Hash && now.Status == 0 {
					revision = at
				}
			}
		}
	}()
	return func() uint64 {
		close(done)
		<-over
		return revision
	}
}

func leaseError(err error) error { return jetStreamError("the idempotency key cannot be kept", err) }
