// Package pool keeps rooms warm: built ahead of the calls that run in them. A call in a warm
// room costs little more than fork and exec, and is proven empty as any other.
//
// Of each call anew are the PID, mount, IPC and cgroup namespace, /proc, terminals, and all that it
// can write to: /tmp, the home, /dev/shm and the policy's other directories in memory. The
// user and network namespace, cgroups and the filter for system calls are the room's. So a room is
// one tenant's, from the first call on, until it is ended; and one call runs in it at a time.
//
//	Take    a room for a tenant, or none: then the call builds one of its own
//	Start   one command
//	Give    the room, when the command has ended: for the next call, or to be ended
//
// A room is ended after so many calls, when another tenant needs its place, on any doubt,
// and always after a call that was not proven; another is built in its place. All of them
// end with the process, whatever ends that: each has a keeper above bwrap and another one
// above what was made in it (package proc).
package pool

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/room"
)

// Sizes say how many rooms there are.
type Sizes struct {
	Min   int // rooms that are ready and nobody's yet, as long as there are not Max
	Max   int // rooms in all
	Calls int // of one room, after which it is ended; 0 for any number
}

// Pool is the warm rooms of one policy. Its methods may be called by several goroutines.
type Pool struct {
	policy room.Policy
	sizes  Sizes
	failed func(error)

	ctx    context.Context
	cancel context.CancelFunc
	work   sync.WaitGroup // rooms that are built or ended

	mutex    sync.Mutex
	idle     []*Room // the one that was used last comes last
	rooms    int     // idle, taken, and those that are built or ended
	building int
	left     int           // rooms that were ended, and of which something may be left
	pausing  bool          // after a failure
	pause    time.Duration // how long, the last time
}

// New begins to build rooms, and does not wait for them. failed is told why a room could not
// be built, or how it was left behind; it is called from several goroutines. The caller
// closes the Pool.
func New(policy room.Policy, sizes Sizes, failed func(error)) *Pool {
	p := &Pool{policy: policy, sizes: sizes, failed: failed}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.refill()
	return p
}

// Take returns a room for a call of a tenant with such limits, for the caller alone until it gives it
// back. Nil: there is none, and the caller had better build one. It does not block. The process may have
// come into a cgroup of its own since the first rooms were built (systemd's user manager), so not all
// rooms can have limits.
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
	// All that are idle are others': the one whose owner has waited longest gives way.
	if p.rooms >= p.sizes.Max && len(p.idle) > 0 && p.idle[0].group.Takes(l) {
		p.retire(p.idle[0])
		p.idle = p.idle[1:]
	}
	return nil
}

// give takes a room back.
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

// For so long nothing is built after a failure; after the next one for twice as long.
const (
	firstPause = time.Second
	mostPause  = time.Minute
)

// refill builds rooms in the background, until there are enough. The mutex is held.
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

// Close ends the rooms, and returns when nothing of them is left but those that are taken:
// they end when they are given back.
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
