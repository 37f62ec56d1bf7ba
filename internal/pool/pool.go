// Package pool builds rooms before the calls that run in them. A call in such a warm room costs little
// more than fork and exec, and its teardown is proven like any other.
//
// Each call gets new PID, mount, IPC and cgroup namespaces, /proc, terminals, and everything that it can write to:
// /tmp, the home directory, /dev/shm and the policy's other directories in memory. It shares the user and network
// namespaces, the cgroups and the system call filter with other calls in the room. Therefore a room belongs to one
// tenant from its first call until its end, and runs one call at a time.
//
//	Take    returns a room for a tenant, or nil: then the call builds its own
//	Start   starts one command
//	Give    returns the room to the pool after the command, for the next call or to be ended
//
// The pool ends a room after a number of calls, if another tenant needs its slot, if anything about it is
// in doubt, and always after an unproven teardown. It then builds another. All rooms end with this process,
// however it ends, because each has a keeper above bwrap and one above the processes inside (package proc).
package pool

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/slot"
)

// Sizes limits a Pool.
type Sizes struct {
	Min   int // unassigned rooms to keep ready, within Max
	Max   int // rooms in total
	Calls int // calls per room; 0 for no limit
}

// Pool holds the warm rooms of one policy. It is safe for concurrent use.
type Pool struct {
	policy slot.Policy
	sizes  Sizes
	failed func(error)

	ctx    context.Context
	cancel context.CancelFunc
	work   sync.WaitGroup // building and ending rooms

	mutex    sync.Mutex
	idle     []*Room // in order of last use, oldest first
	rooms    int     // idle, taken, being built and being ended
	building int
	left     int           // rooms whose teardown failed
	pausing  bool          // after a failure
	pause    time.Duration // the last pause
}

// New returns a Pool and starts to build its rooms in the background. The policy has no parts, limits, lifetime or
// program. failed is called, from several goroutines, with the error of a room that could not be built or ended. The
// caller closes the Pool.
func New(policy slot.Policy, sizes Sizes, failed func(error)) *Pool {
	p := &Pool{policy: policy, sizes: sizes, failed: failed}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.refill()
	return p
}

// Take returns a room for a tenant's call with these limits, or nil if none is available. The room is the
// caller's until Give. Take does not block. Not all rooms support limits: this process may have moved to its
// own cgroup (systemd's user manager) after the first rooms were built.
func (p *Pool) Take(tenant string, l limits.Request) *Room {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	defer p.refill()
	for _, fits := range []func(*Room) bool{
		func(r *Room) bool { return r.used > 0 && r.tenant == tenant },
		func(r *Room) bool { return r.used == 0 },
	} {
		for i := len(p.idle) - 1; i >= 0; i-- {
			r := p.idle[i]
			if !fits(r) || !r.group.Takes(l) {
				continue
			}
			p.idle = slices.Delete(p.idle, i, i+1)
			if !r.usable() {
				p.retire(r)
				continue
			}
			r.tenant = tenant
			r.used++
			return r
		}
	}
	// All idle rooms belong to other tenants: end the one unused for longest.
	if p.rooms >= p.sizes.Max && len(p.idle) > 0 && p.idle[0].group.Takes(l) {
		p.retire(p.idle[0])
		p.idle = p.idle[1:]
	}
	return nil
}

// give returns a room to the pool, or ends it unless again is true.
func (p *Pool) give(r *Room, again bool) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if again && p.ctx.Err() == nil && (p.sizes.Calls == 0 || r.used < p.sizes.Calls) {
		p.idle = append(p.idle, r)
	} else {
		p.retire(r)
	}
	p.refill()
}

// retire ends a room in the background. The mutex is held.
func (p *Pool) retire(r *Room) {
	p.work.Go(func() {
		err := r.end()
		if err != nil {
			p.failed(err)
		}
		p.mutex.Lock()
		defer p.mutex.Unlock()
		p.rooms--
		if err != nil {
			p.left++
		}
		p.refill()
	})
}

// The pause between failed builds doubles, from firstPause to mostPause.
const (
	firstPause = time.Second
	mostPause  = time.Minute
)

// refill starts to build missing rooms in the background. The mutex is held.
func (p *Pool) refill() {
	nobodys := 0
	for _, r := range p.idle {
		if r.used == 0 {
			nobodys++
		}
	}
	for ; p.ctx.Err() == nil && !p.pausing && nobodys+p.building < p.sizes.Min && p.rooms < p.sizes.Max; p.building++ {
		p.rooms++
		p.work.Go(p.build)
	}
}

// build builds a room.
func (p *Pool) build() {
	r, err := build(p.ctx, p.policy)
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.building--
	switch {
	case err == nil && p.ctx.Err() == nil:
		r.pool, p.pause = p, 0
		p.idle = slices.Insert(p.idle, 0, r)
		return
	case err == nil:
		p.retire(r)
		return
	}
	p.rooms--
	if p.ctx.Err() != nil {
		return
	}
	p.failed(err)
	if p.pausing {
		return
	}
	p.pausing, p.pause = true, min(max(2*p.pause, firstPause), mostPause)
	time.AfterFunc(p.pause, func() {
		p.mutex.Lock()
		defer p.mutex.Unlock()
		p.pausing = false
		p.refill()
	})
}

// Close ends all idle rooms and waits for their end. Rooms that are taken end when they are given back.
func (p *Pool) Close() {
	p.cancel()
	p.mutex.Lock()
	for _, r := range p.idle {
		p.retire(r)
	}
	p.idle = nil
	p.mutex.Unlock()
	p.work.Wait()
}
