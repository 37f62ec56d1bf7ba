package main

import (
	"context"
	"log/slog"
	"reflect"
	"sync"
	"time"

	"github.com/sbxrun/sbxrun/internal/config"
	"github.com/sbxrun/sbxrun/internal/pool"
	"github.com/sbxrun/sbxrun/internal/slot"
)

// rooms is the source of sandboxes for calls: a pool of warm rooms for the host's root, and one for each image that
// is configured for it. The pool of an image ends when a reload finds another image under its name.
type rooms struct {
	host   slot.Source // also for everything that is not warm
	free   func()      // frees host
	failed func(error)

	mutex  sync.Mutex
	pools  map[string]*imagePool // by the keys of the images
	ending sync.WaitGroup        // former pools
}

type imagePool struct {
	*pool.Source
	policy slot.Policy
	sizes  pool.Sizes
}

// newRooms starts to create warm rooms for the host's root at once; update does so for images. The caller closes it.
func newRooms(c *config.Config, log *slog.Logger) (*rooms, error) {
	r := &rooms{host: slot.OnDemand{}, free: func() {}, failed: func(err error) { log.Warn("warm sandbox", "error", err) }}
	policy, err := c.Policy()
	if err == nil && c.Rooms.Max > 0 {
		warm := pool.NewSource(slot.OnDemand{}, slot.Policy{Policy: policy, ProofTimeout: time.Duration(c.ProofTimeout)}, pool.Sizes(c.Rooms), r.failed)
		r.host, r.free = warm, warm.Close
	}
	return r, err
}

// Take implements [slot.Source].
func (r *rooms) Take(ctx context.Context, tenant string, p slot.Policy) (slot.Slot, error) {
	return r.sourceFor(p).Take(ctx, tenant, p)
}

func (r *rooms) sourceFor(p slot.Policy) slot.Source {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	for _, each := range r.pools {
		if p.Rootfs() == each.policy.Rootfs() && reflect.DeepEqual(each.policy.Policy, p.Policy) {
			return each
		}
	}
	return r.host
}

// Rooms implements [slot.Source].
func (r *rooms) Rooms() (idle, all, left int) {
	idle, all, left = r.host.Rooms()
	r.mutex.Lock()
	defer r.mutex.Unlock()
	for _, each := range r.pools {
		i, a, l := each.Rooms()
		idle, all, left = idle+i, all+a, left+l
	}
	return idle, all, left
}

// update starts pools for new images, and ends the pools of images that are gone, have changed, or want other sizes.
func (r *rooms) update(images map[string]config.Image, policies map[string]slot.Policy) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	was := r.pools
	r.pools = map[string]*imagePool{}
	for key, policy := range policies {
		next := &imagePool{policy: policy, sizes: pool.Sizes(images[key].Rooms)}
		if old := was[key]; old != nil && old.sizes == next.sizes && reflect.DeepEqual(old.policy, policy) {
			next = old
			delete(was, key)
		} else {
			next.Source = pool.NewSource(slot.OnDemand{}, policy, next.sizes, r.failed)
		}
		r.pools[key] = next
	}
	for _, old := range was {
		r.ending.Go(old.Close)
	}
}

func (r *rooms) close() {
	r.update(nil, nil)
	r.free()
	r.ending.Wait()
}
