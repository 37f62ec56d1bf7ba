// Package tenants divides the server among its tenants. It limits how much each may do at once, how many of
// its calls may wait, and their rate, and decides who gets a free place: the tenant that holds the fewest, so
// that long calls count for as long as they run. Equal tenants alternate. The last places are reserved for
// tenants that hold none.
package tenants

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/sbxrun/sbxrun/internal/api"
)

// Ceilings limit one tenant. Zero means no limit, except for Queue.
type Ceilings struct {
	Concurrency int     // running calls
	Queue       int     // waiting calls
	Rate        float64 // calls per second; the burst is the same, at least 1
}

// Scheduler admits calls.
type Scheduler struct {
	mu      sync.Mutex
	places  int // free
	reserve int // places for tenants that hold none
	turns   []*tenant
	tenants map[string]*tenant
	freed   chan struct{} // nil if no one is waiting for a place
}

// tenant is the state of one tenant.
type tenant struct {
	running int
	waiting []*Ticket // in order of arrival
	max     int
	tokens  float64 // of the rate limit, at the time
	at      time.Time
}

// NewScheduler returns a scheduler with this many places. One in 16 is reserved for tenants that hold none.
func NewScheduler(places int) *Scheduler {
	const reserved = 16
	return &Scheduler{places: places, reserve: places / reserved, tenants: map[string]*tenant{}}
}

// maxIdleTenants is the number of idle tenants remembered for their rates.
const maxIdleTenants = 10_000

// Ticket is a call that has been admitted or is waiting. The caller must call Leave.
type Ticket struct {
	gate   *Scheduler
	tenant *tenant
	in     chan struct{} // closed on admission
	came   time.Time
	left   bool
}

// Join admits a call or queues it, without waiting. The error is an [*api.Error]: the queue is full or the
// rate exceeded.
func (g *Scheduler) Join(name string, c Ceilings) (*Ticket, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	t := g.tenants[name]
	if t == nil {
		if len(g.tenants) >= maxIdleTenants {
			g.forget()
		}
		t = &tenant{tokens: max(1, c.Rate), at: time.Now()}
		g.tenants[name] = t
	}
	t.max = c.Concurrency
	if !t.spend(c.Rate) {
		return nil, api.NewError(api.Quota, "the tenant's rate limit is exceeded", "send fewer calls per second")
	}
	turn := &Ticket{gate: g, tenant: t, in: make(chan struct{}), came: time.Now()}
	switch {
	case len(t.waiting) == 0 && g.fits(t):
		g.admit(t)
		close(turn.in)
		return turn, nil
	case len(t.waiting) < c.Queue:
		if len(t.waiting) == 0 {
			g.turns = append(g.turns, t)
		}
		t.waiting = append(t.waiting, turn)
		return turn, nil
	case t.below():
		return nil, api.NewError(api.Busy, "the server is running as many calls as it may", "try again later")
	}
	return nil, api.NewError(api.Quota, "the tenant has reached its limit of running and waiting calls", "wait until a call has ended")
}

// Wait waits for admission. The error is the cause of ctx.
func (u *Ticket) Wait(ctx context.Context) error {
	select {
	case <-u.in:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Leave gives up the place, or the wait for one. Later calls do nothing.
func (u *Ticket) Leave() {
	g, t := u.gate, u.tenant
	g.mu.Lock()
	defer g.mu.Unlock()
	if u.left {
		return
	}
	u.left = true
	if i := slices.Index(t.waiting, u); i >= 0 {
		t.waiting = slices.Delete(t.waiting, i, i+1)
		g.settle(t)
		return
	}
	t.running--
	g.places++
	if g.next(); g.places > 0 && g.freed != nil {
		close(g.freed)
		g.freed = nil
	}
}

// Free returns the number of free places, and a channel that is closed when one becomes free.
func (g *Scheduler) Free() (int, <-chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.freed == nil {
		g.freed = make(chan struct{})
	}
	return g.places, g.freed
}

// below reports whether the tenant is below its ceiling.
func (t *tenant) below() bool { return t.max == 0 || t.running < t.max }

// fits reports whether the tenant may start one more call now. The mutex is held.
func (g *Scheduler) fits(t *tenant) bool {
	return t.below() && (g.places > g.reserve || g.places > 0 && t.running == 0)
}

// spend takes one call from the rate limit.
func (t *tenant) spend(rate float64) bool {
	if rate <= 0 {
		return true
	}
	now := time.Now()
	t.tokens = min(max(1, rate), t.tokens+now.Sub(t.at).Seconds()*rate)
	t.at = now
	if t.tokens < 1 {
		return false
	}
	t.tokens--
	return true
}

func (g *Scheduler) admit(t *tenant) {
	t.running++
	g.places--
}

// next admits waiting calls, starting with the tenant that runs the fewest; equal tenants alternate.
func (g *Scheduler) next() {
	for g.places > 0 {
		i := -1
		for k, t := range g.turns {
			if g.fits(t) && (i < 0 || t.running < g.turns[i].running) {
				i = k
			}
		}
		if i < 0 {
			return
		}
		t := g.turns[i]
		g.turns = append(slices.Delete(g.turns, i, i+1), t)
		w := t.waiting[0]
		t.waiting = t.waiting[1:]
		g.settle(t)
		g.admit(t)
		close(w.in)
	}
}

// SetConcurrency changes a tenant's ceiling for later calls. 0 means none at all.
func (g *Scheduler) SetConcurrency(name string, n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if t := g.tenants[name]; t != nil {
		if t.max = n; n == 0 {
			t.max = -1 // 0 would mean no limit
		}
		g.next()
	}
}

// Use returns the current use of a tenant.
func (g *Scheduler) Use(name string) Use {
	g.mu.Lock()
	defer g.mu.Unlock()
	if t := g.tenants[name]; t != nil {
		return t.use()
	}
	return Use{}
}

// settle removes a tenant without waiting calls from the order.
func (g *Scheduler) settle(t *tenant) {
	if len(t.waiting) > 0 {
		return
	}
	if i := slices.Index(g.turns, t); i >= 0 {
		g.turns = slices.Delete(g.turns, i, i+1)
	}
}

// forget drops idle tenants.
func (g *Scheduler) forget() {
	for name, t := range g.tenants {
		if t.running == 0 && len(t.waiting) == 0 {
			delete(g.tenants, name)
		}
	}
}

// Use counts a tenant's calls.
type Use struct {
	Running, Waiting int
	Oldest           time.Duration // waiting time of the oldest call
}

func (t *tenant) use() Use {
	u := Use{Running: t.running, Waiting: len(t.waiting)}
	if u.Waiting > 0 {
		u.Oldest = time.Since(t.waiting[0].came)
	}
	return u
}

// Uses returns the current use of all known tenants.
func (g *Scheduler) Uses() map[string]Use {
	g.mu.Lock()
	defer g.mu.Unlock()
	all := make(map[string]Use, len(g.tenants))
	for name, t := range g.tenants {
		all[name] = t.use()
	}
	return all
}
