// Package tenants divides the server among those who call it: how much each may do at once,
// how many of its calls may wait, how often it may come; and whose turn it is when a place
// becomes free. That is the tenant that holds the fewest places, so long calls count for as long as they
// run; among equals tenants take turns. The last places are for tenants that hold none.
package tenants

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/sbxrun/sbxrun/internal/api"
)

// Ceilings are what one tenant may do. Zero is no bound, but for Queue, which is then none
// that waits.
type Ceilings struct {
	Concurrency int     // calls that run
	Queue       int     // calls that wait
	Rate        float64 // calls a second; as many as that, or one, may come at once
}

// Scheduler lets calls in.
type Scheduler struct {
	mu      sync.Mutex
	places  int // that are free
	reserve int // of the places, for tenants that hold none
	turns   []*tenant
	tenants map[string]*tenant
	freed   chan struct{} // nil if nobody waits for a place
}

// tenant is one that has called.
type tenant struct {
	running int
	waiting []*Ticket // in the order in which they came; those that gave up are taken out
	max     int
	tokens  float64 // of the rate, at the time
	at      time.Time
}

// NewScheduler returns a gate with so many places. One in 16 is reserved for tenants that hold none.
func NewScheduler(places int) *Scheduler {
	const reserved = 16
	return &Scheduler{places: places, reserve: places / reserved, tenants: map[string]*tenant{}}
}

// most is how many tenants are remembered that do nothing; what is remembered is their rate.
const maxIdleTenants = 10_000

// Ticket is a call that is in, or waits to be let in. It must leave in the end.
type Ticket struct {
	gate   *Scheduler
	tenant *tenant
	in     chan struct{} // closed when it is let in
	came   time.Time
	left   bool
}

// Join lets a call in, or has it wait for its turn, without waiting. An error is an
// [*api.Error]: there is no room even for one that waits.
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
		return nil, api.NewError(api.Quota, "the tenant's rate is used up", "send fewer calls a second")
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
		return nil, api.NewError(api.Busy, "all places of the server are taken", "try again later")
	}
	return nil, api.NewError(api.Quota, "all of the tenant's places are taken", "wait for a call's end")
}

// Wait waits for the turn. An error is the cause of ctx.
func (u *Ticket) Wait(ctx context.Context) error {
	select {
	case <-u.in:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Leave gives up the place, or the turn if the call was not let in. Only the first one does anything.
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

// Free returns how many places are free, and a channel that is closed when one becomes so.
func (g *Scheduler) Free() (int, <-chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.freed == nil {
		g.freed = make(chan struct{})
	}
	return g.places, g.freed
}

// below reports whether one more call of the tenant may run.
func (t *tenant) below() bool { return t.max == 0 || t.running < t.max }

// fits reports whether one more call of a tenant may run now. The mutex is held.
func (g *Scheduler) fits(t *tenant) bool {
	return t.below() && (g.places > g.reserve || g.places > 0 && t.running == 0)
}

// spend takes one call from the rate.
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

// next lets calls in: of the tenants that may have one more, that with the fewest running; of these the first
// in turn.
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

// SetConcurrency has no more than so many calls of a tenant run, from the next one on. None may be
// none, too.
func (g *Scheduler) SetConcurrency(name string, n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if t := g.tenants[name]; t != nil {
		if t.max = n; n == 0 {
			t.max = -1 // 0 is no bound
		}
		g.next()
	}
}

// Use returns what a tenant has going on.
func (g *Scheduler) Use(name string) Use {
	g.mu.Lock()
	defer g.mu.Unlock()
	if t := g.tenants[name]; t != nil {
		return t.use()
	}
	return Use{}
}

// settle takes a tenant that has nothing waiting out of the turns.
func (g *Scheduler) settle(t *tenant) {
	if len(t.waiting) > 0 {
		return
	}
	if i := slices.Index(g.turns, t); i >= 0 {
		g.turns = slices.Delete(g.turns, i, i+1)
	}
}

// forget drops the tenants that do nothing.
func (g *Scheduler) forget() {
	for name, t := range g.tenants {
		if t.running == 0 && len(t.waiting) == 0 {
			delete(g.tenants, name)
		}
	}
}

// Use is what a tenant has going on.
type Use struct {
	Running, Waiting int
	Oldest           time.Duration // how long the first of those that wait has waited
}

func (t *tenant) use() Use {
	u := Use{Running: t.running, Waiting: len(t.waiting)}
	if u.Waiting > 0 {
		u.Oldest = time.Since(t.waiting[0].came)
	}
	return u
}

// Uses returns that of all tenants that were seen.
func (g *Scheduler) Uses() map[string]Use {
	g.mu.Lock()
	defer g.mu.Unlock()
	all := make(map[string]Use, len(g.tenants))
	for name, t := range g.tenants {
		all[name] = t.use()
	}
	return all
}
