package calls

import (
	"crypto/sha256"
	"sync"
	"time"

	"github.com/sbxrun/sbxrun/internal/api"
)

// Keys stores answers by idempotency key, so that a repeated request returns the first answer instead of
// running again.
type Keys struct {
	keep time.Duration
	most int // per tenant

	mu  sync.Mutex
	all map[string]map[string]*Key // by tenant and key
}

// Key is a request with an idempotency key.
type Key struct {
	hash  [sha256.Size]byte
	done  chan struct{} // closed when settled
	since time.Time     // time of the request, later of the answer
	drop  func()        // discards a stored answer; may be nil
	Value any           // valid after Done
}

// NewKeys returns a store that keeps at most most answers per tenant, each for keep after it is settled.
func NewKeys(keep time.Duration, most int) *Keys {
	return &Keys{keep: keep, most: most, all: map[string]map[string]*Key{}}
}

// Begin returns the tenant's request with this key, and whether it is the first one; if so, the caller must
// call Settle. A different body for the same key is an error.
func (k *Keys) Begin(tenant, name string, body []byte) (key *Key, first bool, err error) {
	hash := sha256.Sum256(body) // outside the lock, because it may be megabytes
	k.mu.Lock()
	defer k.mu.Unlock()
	now := time.Now()
	own := k.all[tenant]
	if key = own[name]; key != nil && (now.Sub(key.since) <= k.keep || !key.settled()) {
		if key.hash != hash {
			return nil, false, api.NewError(api.Idempotency, "the idempotency key was used for another request", "use a new key for each request")
		}
		return key, false, nil
	}
	if key != nil {
		k.forget(tenant, name)
	}
	if len(own) >= k.most {
		k.expire(tenant, now)
		if len(own) >= k.most {
			return nil, false, api.NewError(api.QuotaKept, "the tenant has too many idempotency keys", "keys expire after "+k.keep.String())
		}
	}
	if k.all[tenant] == nil {
		k.all[tenant] = map[string]*Key{}
	}
	key = &Key{hash: hash, done: make(chan struct{}), since: now}
	k.all[tenant][name] = key
	return key, true, nil
}

func (k *Keys) forget(tenant, name string) {
	if drop := k.all[tenant][name].drop; drop != nil {
		drop()
	}
	if delete(k.all[tenant], name); len(k.all[tenant]) == 0 {
		delete(k.all, tenant)
	}
}

// Settle sets the answer. If it is not kept, the next request with this key counts as the first one again. drop is
// called when the key is forgotten.
func (k *Keys) Settle(tenant, name string, key *Key, value any, keep bool, drop func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	key.Value, key.drop, key.since = value, drop, time.Now()
	close(key.done)
	if !keep {
		k.forget(tenant, name)
	}
}

// Expire drops old answers.
func (k *Keys) Expire(now time.Time) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for tenant := range k.all {
		k.expire(tenant, now)
	}
}

func (k *Keys) expire(tenant string, now time.Time) {
	for name, old := range k.all[tenant] {
		if old.settled() && now.Sub(old.since) > k.keep {
			k.forget(tenant, name)
		}
	}
}

// Done is closed when the first request is settled.
func (key *Key) Done() <-chan struct{} { return key.done }

func (key *Key) settled() bool {
	select {
	case <-key.done:
		return true
	default:
		return false
	}
}
