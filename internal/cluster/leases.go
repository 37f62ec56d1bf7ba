package cluster

import (
	"context"
	"crypto/sha256"
	"fmt"
	"time"

	"github.com/sbxrun/sbxrun/internal/api"
)

// A request with an idempotency key belongs to one node. The gateway writes a lease for the key to NATS
// before it sends the request; the first writer decides on the node. If that node refuses because it is
// draining, it starts nothing more, so the lease may move to another node. Otherwise it stays, because
// the node may still start the request.

// lease is the record of a key.
type lease struct {
	At   string `json:"at"`   // the node
	Hash string `json:"hash"` // of the request
	// The response, unless it is missing or too long.
	Status int    `json:"status,omitempty"`
	Answer []byte `json:"answer,omitempty"`
}

const (
	leaseTTL      = 10 * time.Minute // how long a key is kept after its request, as on a single server
	renewInterval = leaseTTL / 4     // while the request runs, because the bucket drops old values
)

// leaseStore keeps leases in a bucket.
type leaseStore struct{ bucket }

// leaseName returns the bucket's key for a tenant's key.
func leaseName(tenant, path, key string) string {
	return sum([]byte(tenant + "\n" + path + "\n" + key))
}

func sum(b []byte) string { return fmt.Sprintf("%x", sha256.Sum256(b)) }

// take creates a lease. If there is one already, it returns that, and first is false.
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

// change replaces a lease if it still has this revision.
func (c *leaseStore) change(name string, to lease, revision uint64) (uint64, error) {
	ctx, cancel := context.WithTimeout(context.Background(), jetStreamTimeout)
	defer cancel()
	revision, err := c.put(ctx, name, to, revision)
	if err != nil {
		return 0, leaseError(err)
	}
	return revision, nil
}

// read reads a lease. The revision is 0 if there is none.
func (c *leaseStore) read(name string) (is lease, revision uint64, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), jetStreamTimeout)
	defer cancel()
	revision, err = c.get(ctx, name, &is)
	return is, revision, err
}

// renew writes a lease again at every interval, until stop, which returns the last revision.
func (c *leaseStore) renew(name string, is lease, revision uint64, every time.Duration) (stop func() uint64) {
	done, over := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(over)
		for {
			select {
			case <-done:
				return
			case <-time.After(every):
				// The next attempt may succeed; or this one did, and only the response was lost.
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

func leaseError(err error) error { return jetStreamError("cannot store the idempotency key", err) }
