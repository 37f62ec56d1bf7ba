package calls

import (
	"context"
	"crypto/sha256"
	"sync"
	"time"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/tenants"
)

// Keys remembers answers by idempotency keys: a request that is sent once more gets the answer
// of the first, and is not carried out again.
type Keys struct {
	keep time.Duration
	most int // of each tenant

	mu  sync.Mutex
	all map[string]map[string]*Key // by tenant and name: no tenant uses up what others have
}

// Key is a request that was seen with a key.
type Key struct {
	hash  [sha256.Size]byte
	done  chan struct{}  // closed when there is an answer, or will be none
	since time.Time      // when it came, and then when it was settled
	lease *tenants.Lease // what its answer takes
	Value any            // after Done

	ctx    context.Context // of the first one's values
	cancel context.CancelCauseFunc
	asking int // requests whose clients are there
}

// NewKeys keeps answers for a time from when they are there, and of each tenant no more than so many.
func NewKeys(keep time.Duration, most int) *Keys {
	return &Keys{keep: keep, most: most, all: map[string]map[string]*Key{}}
}

// Begin returns a tenant's request of this name, and whether it is the first one: then Settle has
// to be called. Another body for the same name is an error. ctx is this request's.
func (k *Keys) Begin(ctx context.Context, tenant, name string, body []byte) (key *Key, first bool, err error) {
	hash := sha256.Sum256(body) // of megabytes: no other tenant waits for it
	k.mu.Lock()
	defer k.mu.Unlock()
	defer func() {
		if err == nil {
			key.asking++
			context.AfterFunc(ctx, func() { k.leave(key, context.Cause(ctx)) })
		}
	}()
	now := time.Now()
	own := k.all[tenant]
	if key = own[name]; key != nil && (now.Sub(key.since) <= k.keep || !key.settled()) {
		if key.hash != hash {
			return nil, false, api.NewError(api.Idempotency, "the key was used for another request", "take a new key for each request")
		}
		return key, false, nil
	}
	if key != nil {
		k.drop(tenant, name)
	}
	if len(own) >= k.most {
		k.expire(tenant, now)
		if len(own) >= k.most {
			return nil, false, api.NewError(api.QuotaKept, "the tenant has too many idempotency keys", "they are kept for "+k.keep.String())
		}
	}
	if k.all[tenant] == nil {
		k.all[tenant] = map[string]*Key{}
	}
	key = &Key{hash: hash, done: make(chan struct{}), since: now}
	key.ctx, key.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	k.all[tenant][name] = key
	return key, true, nil
}

// leave is called when the context of a request that asks for a key is done.
func (k *Keys) leave(key *Key, cause error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if key.asking--; key.asking == 0 {
		key.cancel(cause)
	}
}

func (k *Keys) drop(tenant, name string) {
	k.all[tenant][name].lease.Free()
	if delete(k.all[tenant], name); len(k.all[tenant]) == 0 {
		delete(k.all, tenant)
	}
}

// Settle says what the answer is. What is not kept can be tried again: the next request of that
// name is a first one. The lease is freed when the answer is forgotten.
func (k *Keys) Settle(tenant, name string, key *Key, value any, keep bool, lease *tenants.Lease) {
	k.mu.Lock()
	defer k.mu.Unlock()
	key.Value, key.lease, key.since = value, lease, time.Now()
	close(key.done)
	if !keep {
		k.drop(tenant, name)
	}
}

// Expire forgets what is old enough.
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
			k.drop(tenant, name)
		}
	}
}

// Context has the values of the first request's, and is done when all that have asked for the key are.
func (key *Key) Context() context.Context { return key.ctx }

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
