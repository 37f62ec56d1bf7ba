package calls

import (
	"crypto/sha256"
	"sync"
	"time"

	"github.com/sbxrun/sbxrun/internal/api"
)

// Keys remembers answers by idempotency keys: a request that is sent once more gets the answer
// of the first, and is not carried out again.
type Keys struct {
	keep  time.Duration
	most  int
	bytes int64

	mu   sync.Mutex
	all  map[string]*Key
	held int64 // bytes of all answers
}

// Key is a request that was seen with a key.
type Key struct {
	hash  [sha256.Size]byte
	done  chan struct{} // closed when there is an answer, or will be none
	came  time.Time
	size  int64
	Value any // after Done
}

// NewKeys keeps answers for a time, and takes no more when there are so many, or so many bytes
// of them.
func NewKeys(keep time.Duration, most int, bytes int64) *Keys {
	return &Keys{keep: keep, most: most, bytes: bytes, all: map[string]*Key{}}
}

func (k *Keys) full() bool { return len(k.all) >= k.most || k.held >= k.bytes }

// Begin returns the request of this name, and whether it is the first one: then Settle has to be
// called. Another body for the same name is an error.
func (k *Keys) Begin(name string, body []byte) (key *Key, first bool, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	now := time.Now()
	hash := sha256.Sum256(body)
	if key = k.all[name]; key != nil && (now.Sub(key.came) <= k.keep || !key.settled()) {
		if key.hash != hash {
			return nil, false, api.NewError(api.Idempotency, "the key was used for another request", "take a new key for each request")
		}
		return key, false, nil
	}
	if key != nil {
		k.drop(name)
	}
	if k.full() {
		for name, old := range k.all {
			if old.settled() && now.Sub(old.came) > k.keep {
				k.drop(name)
			}
		}
		if k.full() {
			return nil, false, api.NewError(api.Quota, "there are too many idempotency keys", "they are kept for "+k.keep.String())
		}
	}
	key = &Key{hash: hash, done: make(chan struct{}), came: now}
	k.all[name] = key
	return key, true, nil
}

func (k *Keys) drop(name string) {
	k.held -= k.all[name].size
	delete(k.all, name)
}

// Settle says what the answer is, and about how many bytes that has. An answer of -1 bytes is
// not kept: the next request of that name is a first one.
func (k *Keys) Settle(name string, key *Key, value any, size int64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	key.Value = value
	close(key.done)
	if size < 0 {
		k.drop(name)
		return
	}
	key.size = size
	k.held += size
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
