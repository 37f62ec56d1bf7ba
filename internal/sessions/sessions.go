// Package sessions manages sandboxes that are kept between calls. A session ends on request, after an idle
// time, at the end of its lifetime, or with its sandbox, together with everything in it. Its cause is
// remembered for a while.
package sessions

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/calls"
	"github.com/sbxrun/sbxrun/internal/cells"
	"github.com/sbxrun/sbxrun/internal/sandbox"
	"github.com/sbxrun/sbxrun/internal/slot"
	"github.com/sbxrun/sbxrun/internal/tenants"
)

// Session is a sandbox that is kept.
type Session struct {
	ID, Tenant string
	Place      slot.Slot
	Processes  *calls.Store
	Made       time.Time
	Expires    time.Time
	Idle       time.Duration
	Limits     api.Limits
	Parts      *sandbox.Parts // end with the slot; nil if none
	Asked      api.Parts      // as the client sees them
	Lease      *tenants.Lease // from [Store.Reserve]; freed by report of [NewStore]

	ctx    context.Context // for everything that runs in the session
	cancel context.CancelFunc

	Capture sync.Mutex // held while a snapshot is taken

	mu     sync.Mutex
	users  int // requests that run something or access files
	free   sync.Cond
	last   time.Time // time of the last use
	cause  result.Cause
	ending bool
	kept   map[string]*interpreter // by language
	gone   chan struct{}
	report *result.Result
}

// Use holds the session, which is not idle until release is called. The context ends with the session.
func (s *Session) Use() (ctx context.Context, release func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ending {
		return nil, nil, ended(s.ID, s.cause)
	}
	s.users++
	return s.ctx, sync.OnceFunc(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.users--
		s.last = time.Now()
		s.free.Broadcast()
	}), nil
}

// interpreter is the interpreter for one language. It starts with its first cell and ends with the session.
type interpreter struct {
	running sync.Mutex // held by a cell, including its time in the queue
	kernel  *cells.Kernel
}

// Interpreter returns the interpreter for a language, reserved for one cell until release is called. Only the
// spec of the first cell is used.
func (s *Session) Interpreter(language string, spec cells.Spec) (k *cells.Kernel, release func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ending { // end may already have closed the interpreters
		return nil, nil, ended(s.ID, s.cause)
	}
	i := s.kept[language]
	if i == nil {
		spec.Room = s.Place
		i = &interpreter{kernel: cells.New(spec)}
		s.kept[language] = i
	}
	if !i.running.TryLock() {
		return nil, nil, api.NewError(api.BusySession, "a cell is running in this session's interpreter", "wait for its answer, or use another session")
	}
	return i.kernel, i.running.Unlock, nil
}

// closeInterpreters ends all interpreters and the cells in them. There are no new ones, because the session
// is ending.
func (s *Session) closeInterpreters() {
	var all sync.WaitGroup
	s.mu.Lock()
	for _, i := range s.kept {
		all.Go(func() { _ = i.kernel.Close() }) // the session's result has the details
	}
	s.mu.Unlock()
	all.Wait()
}

func ended(id string, cause result.Cause) error {
	return api.NewError(api.Ended, "the session "+id+" has ended: "+string(cause), "create a new one")
}

// end ends the session, and returns when all its processes have exited. Only the first cause counts.
func (s *Session) end(cause result.Cause) *result.Result {
	s.mu.Lock()
	if s.ending {
		s.mu.Unlock()
		<-s.gone
		return s.report
	}
	s.ending, s.cause = true, cause
	s.mu.Unlock()
	return s.close()
}

// close ends the session, which is marked as ending.
func (s *Session) close() *result.Result {
	s.cancel()
	s.closeInterpreters() // cells end at once instead of a second after SIGINT
	s.mu.Lock()
	for s.users > 0 { // their contexts are canceled
		s.free.Wait()
	}
	s.mu.Unlock()
	s.Processes.Close()
	s.report, _ = s.Place.Give() // the verdict says more
	close(s.gone)
	return s.report
}

// left returns the remaining idle time. If that is over, it marks the session as ending, so that no further request
// can use it, and returns 0. The caller must end it then.
func (s *Session) left(now time.Time) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.users > 0 || s.ending {
		return s.Idle
	}
	left := max(0, s.last.Add(s.Idle).Sub(now))
	if left == 0 {
		s.ending, s.cause = true, result.IdleTimeout
	}
	return left
}

// Store holds the sessions of all tenants.
type Store struct {
	report func(*Session, *result.Result) // called after each end; frees the lease
	spawn  func(func())                   // runs a function in the background

	taken *tenants.Budget

	mu    sync.Mutex
	all   map[string]*Session
	over  map[string]past     // sessions that have ended
	order map[string][]string // IDs by tenant, oldest first
}

type past struct {
	tenant string
	cause  result.Cause
	at     time.Time
}

// NewStore returns an empty store. It calls report after each end, which must free the session's lease, and
// spawn for background work.
func NewStore(tell func(*Session, *result.Result), spawn func(func())) *Store {
	return &Store{report: tell, spawn: spawn, all: map[string]*Session{}, over: map[string]past{}, order: map[string][]string{}, taken: tenants.NewBudget("sessions", 0)}
}

// Reserve takes a lease for one more session of a tenant.
func (st *Store) Reserve(tenant string, most int) (*tenants.Lease, error) {
	if most == 0 { // 0 would mean no limit to the budget
		return nil, api.NewError(api.Policy, "sessions are disabled for this tenant", "the operator can enable them with sessions of [tenant] in the server's configuration")
	}
	lease, err := st.taken.Take(tenant, 1, int64(most))
	if err != nil {
		return nil, api.NewError(api.QuotaKept, fmt.Sprintf("the tenant has reached its limit of %d sessions", most), "end one")
	}
	return lease, nil
}

// Add adds a session whose exported fields are set.
func (st *Store) Add(s *Session) {
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.free.L, s.kept = &s.mu, map[string]*interpreter{}
	s.gone, s.last = make(chan struct{}), time.Now()
	st.mu.Lock()
	st.all[s.ID] = s
	st.mu.Unlock()
	st.spawn(func() { st.watch(s) })
}

// watch ends a session when its time is over or its sandbox has ended.
func (st *Store) watch(s *Session) {
	life := time.NewTimer(time.Until(s.Expires))
	defer life.Stop()
	for {
		left := s.left(time.Now())
		if left == 0 {
			st.ended(s, s.close())
			return
		}
		idle := time.NewTimer(left)
		select {
		case <-idle.C:
		case <-life.C:
			st.End(s, result.Timeout)
		case <-s.Place.Ended():
			st.End(s, result.Lost)
		case <-s.gone:
			idle.Stop()
			return
		}
		idle.Stop()
	}
}

// End ends a session, and returns its result when all its processes have exited.
func (st *Store) End(s *Session, cause result.Cause) *result.Result {
	res := s.end(cause)
	st.ended(s, res)
	return res
}

// ended records the end of a session.
func (st *Store) ended(s *Session, res *result.Result) {
	st.mu.Lock()
	_, there := st.all[s.ID]
	delete(st.all, s.ID)
	if there {
		st.remember(s)
	}
	st.mu.Unlock()
	if there {
		st.report(s, res)
	}
}

// How long, and how many, ended sessions are remembered.
const (
	keepEnded = time.Hour
	maxEnded  = 10_000 // per tenant
)

// remember stores the cause of a session's end and forgets old ones. The mutex is held.
func (st *Store) remember(s *Session) {
	now := time.Now()
	st.over[s.ID] = past{s.Tenant, s.cause, now}
	st.order[s.Tenant] = append(st.order[s.Tenant], s.ID)
	for tenant, ids := range st.order {
		for len(ids) > 0 && (len(ids) > maxEnded || now.Sub(st.over[ids[0]].at) > keepEnded) {
			delete(st.over, ids[0])
			ids = ids[1:]
		}
		if st.order[tenant] = ids; len(ids) == 0 {
			delete(st.order, tenant)
		}
	}
}

// Get returns a tenant's session. The error says that it does not exist, or why it ended.
func (st *Store) Get(tenant, id string) (*Session, error) {
	st.mu.Lock()
	defer st.mu.Unlock()
	if s := st.all[id]; s != nil && s.Tenant == tenant {
		return s, nil
	}
	if p, ok := st.over[id]; ok && p.tenant == tenant {
		return nil, ended(id, p.cause)
	}
	return nil, api.NewError(api.NoSuchSession, "no such session", "GET /v1/sessions lists them")
}

// All returns the sessions of all tenants.
func (st *Store) All() []*Session {
	st.mu.Lock()
	defer st.mu.Unlock()
	return slices.Collect(maps.Values(st.all))
}

// List returns a tenant's sessions, oldest first.
func (st *Store) List(tenant string) []*Session {
	found := slices.DeleteFunc(st.All(), func(s *Session) bool { return s.Tenant != tenant })
	slices.SortFunc(found, func(a, b *Session) int {
		return cmp.Or(a.Made.Compare(b.Made), strings.Compare(a.ID, b.ID))
	})
	return found
}

// Close ends all sessions at once and waits for them.
func (st *Store) Close() {
	var all sync.WaitGroup
	for _, s := range st.All() {
		all.Go(func() { st.End(s, result.Canceled) })
	}
	all.Wait()
}
