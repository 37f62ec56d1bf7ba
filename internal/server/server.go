// Package server is the HTTP front end of the engine. It validates requests, schedules calls by tenant, takes
// a slot for each (package slot) and reports the result. Teardown, limits and proof belong to the engine: a
// call ends with the context of its request, and the engine's report is the answer.
package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/blobs"
	"github.com/sbxrun/sbxrun/internal/calls"
	"github.com/sbxrun/sbxrun/internal/config"
	"github.com/sbxrun/sbxrun/internal/safeopen"
	"github.com/sbxrun/sbxrun/internal/sessions"
	"github.com/sbxrun/sbxrun/internal/slot"
	"github.com/sbxrun/sbxrun/internal/tenants"
)

// Server handles requests. Create one with [New].
type Server struct {
	Middleware
	source    slot.Source
	scheduler *tenants.Scheduler
	files     *blobs.Store
	jobs      *calls.Store
	keys      *calls.Keys
	answers   *calls.Answers // responses for keys
	quota     *calls.Quota
	metrics   *metrics
	recents   recents
	sessions  *sessions.Store
	version   string
	prefix    string // prefix of all IDs
	// processes schedules background processes. They never wait, because they may hold slots for hours.
	processes *tenants.Scheduler
	// kept counts the slots held by survivors of unproven teardowns.
	kept atomic.Int64
	// elsewhere finds a tenant's file that is missing from the content store; nil if there is no other place.
	elsewhere func(ctx context.Context, tenant, id string) (io.ReadCloser, error)
	// join admits a call to the scheduler, which may queue it.
	join func(ctx context.Context, tenant string, c tenants.Ceilings) (*tenants.Ticket, error)

	base context.Context // parent of all work; canceled when the server stops
	end  context.CancelCauseFunc

	stores sync.Map // a mutex for each tenant's directory, held while volumes are counted and created
	// Schedulers for requests whose cost depends on the tenant's data.
	packing  *tenants.Scheduler // snapshots
	walking  *tenants.Scheduler // walks of whole trees
	archives *tenants.Scheduler // archives, transferred at the client's speed

	mu       sync.Mutex
	draining bool
	running  sync.WaitGroup // calls in progress
}

// New creates a server from a checked configuration. source provides its slots.
func New(c config.Config, tokens config.Tokens, source slot.Source, log *slog.Logger, version string) (*Server, error) {
	s := &Server{source: source, scheduler: tenants.NewScheduler(c.Places), processes: tenants.NewScheduler(c.Processes), version: version}
	s.open = s.openImage
	err := s.Middleware.init(c, tokens, log)
	if err != nil {
		return nil, err
	}
	err = ownDirectory(c.StateDir)
	if err != nil {
		return nil, err
	}
	if s.files, err = blobs.Open(filepath.Join(c.StateDir, "files"), time.Duration(c.Files.TTL), int64(c.Files.Quota)); err != nil {
		return nil, err
	}
	spools := filepath.Join(c.StateDir, "output")
	if err := os.MkdirAll(spools, 0o700); err != nil {
		return nil, err
	}
	s.quota = &calls.Quota{Calls: tenants.NewBudget("kept calls", 0), Output: tenants.NewBudget("bytes of kept output", int64(c.Calls.Output))}
	s.quota.Calls.Kept, s.quota.Output.Kept, s.quota.Output.Shared = true, true, true
	s.jobs = calls.NewStore(spools, time.Duration(c.Calls.Keep), s.quota)
	s.keys = calls.NewKeys(keyTTL, maxKeys)
	if s.answers, err = calls.NewAnswers(filepath.Join(c.StateDir, "answers"), int64(c.Calls.Output)); err != nil {
		return nil, err
	}
	s.sessions = sessions.NewStore(s.recordEnd, s.spawn)
	s.metrics = newMetrics(s)
	s.join = func(_ context.Context, tenant string, c tenants.Ceilings) (*tenants.Ticket, error) {
		return s.scheduler.Join(tenant, c)
	}
	const packing = 2 // each needs a processor, and memory for compression
	s.packing, s.walking, s.archives = tenants.NewScheduler(packing), tenants.NewScheduler(math.MaxInt), tenants.NewScheduler(math.MaxInt)
	s.sweep()
	s.base, s.end = context.WithCancelCause(context.Background())
	s.spawn(s.expire)
	return s, nil
}

// Cluster makes the server a node of a cluster: its IDs begin with prefix, elsewhere finds files that the
// content store lacks, and join admits calls. join shares the tenants' ceilings with other servers and then
// calls the scheduler of this one. Call it before the first request.
func (s *Server) Cluster(prefix string, elsewhere func(ctx context.Context, tenant, id string) (io.ReadCloser, error), join func(context.Context, string, tenants.Ceilings) (*tenants.Ticket, error)) {
	s.prefix, s.elsewhere, s.join = prefix, elsewhere, join
}

// Scheduler returns the scheduler for calls.
func (s *Server) Scheduler() *tenants.Scheduler { return s.scheduler }

func (s *Server) newID() string { return s.prefix + safeopen.RandomName() }

// ownDirectory creates a directory for stored data. It rejects one that another user could have prepared, as
// anyone can below /tmp.
func ownDirectory(name string) error {
	if err := os.MkdirAll(name, 0o700); err != nil {
		return fmt.Errorf("state_dir: %w; choose a directory that this user can create", err)
	}
	st, err := os.Lstat(name)
	if err != nil {
		return err
	}
	if owner := st.Sys().(*syscall.Stat_t).Uid; !st.IsDir() || int(owner) != os.Geteuid() || st.Mode().Perm()&0o077 != 0 {
		return fmt.Errorf("state_dir %s: must be a directory owned by this user with mode 0700", name)
	}
	return nil
}

// Lifetime and number per tenant of the answers stored for idempotency keys.
const (
	keyTTL  = 10 * time.Minute
	maxKeys = 10_000
)

// expire periodically removes expired data.
func (s *Server) expire() {
	const (
		pause = time.Minute
		sweep = 60 // times pause
	)
	for n := 1; ; n++ {
		select {
		case <-s.base.Done():
			return
		case now := <-time.After(pause):
			err := s.Recover(s.base, func() error {
				s.jobs.Expire(now)
				for _, x := range s.sessions.All() {
					x.Processes.Expire(now)
				}
				s.keys.Expire(now)
				if n%sweep == 0 {
					s.sweep()
				}
				return s.files.Expire(now)
			})
			if err != nil {
				s.log.Warn("expire stored data", "error", err)
			}
		}
	}
}

// errDraining is the cause that ends calls when the server stops.
var errDraining = errors.New("the server is stopping")

func draining() *api.Error {
	return api.NewError(api.Draining, "the server is stopping", "use another server, or try again later")
}

// begin registers a call, unless the server is stopping. The caller calls running.Done.
func (s *Server) begin() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.draining {
		return draining()
	}
	s.running.Add(1)
	return nil
}

// Stop rejects new calls from now on.
func (s *Server) Stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.draining = true
}

// Drain rejects new calls, waits until all calls have ended or ctx is done, and then ends the rest. When it
// returns, all calls and sessions have ended.
func (s *Server) Drain(ctx context.Context) {
	s.Stop()
	ended := make(chan struct{})
	go func() {
		s.running.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-ctx.Done():
	}
	s.end(errDraining)
	<-ended
	s.sessions.Close()
}

// Until returns a context that is also canceled when the server stops.
func (s *Server) Until(ctx context.Context) (context.Context, context.CancelFunc) {
	return Merge(ctx, s.base)
}

// Merge returns a context with the values of a that is canceled, with the same cause, when either is.
func Merge(a, b context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(a)
	stop := context.AfterFunc(b, func() { cancel(context.Cause(b)) })
	return ctx, func() {
		stop()
		cancel(nil)
	}
}

// Ready reports whether the server accepts calls.
func (s *Server) Ready() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.draining
}
