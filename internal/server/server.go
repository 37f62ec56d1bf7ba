// Package server is the HTTP front of the engine. It checks what is asked, lets calls in by
// tenant, takes a place for each (package place), and tells how it ended. Nothing of ending,
// limits or proof is here: a call ends with the context of its request, and what the engine
// reports is the answer.
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

// Server answers requests. Make one with [New].
type Server struct {
	Middleware
	source    slot.Source
	scheduler *tenants.Scheduler
	files     *blobs.Store
	jobs      *calls.Store
	keys      *calls.Keys
	quota     *calls.Quota
	metrics   *metrics
	recents   recents
	sessions  *sessions.Store
	version   string
	prefix    string // of ids
	// processes lets in background processes, of which none waits: they may hold places for hours.
	processes *tenants.Scheduler
	// kept counts the places that survivors of unproven ends hold.
	kept atomic.Int64
	// elsewhere finds a tenant's file that the content store has not; nil if there is no other place.
	elsewhere func(ctx context.Context, tenant, id string) (io.ReadCloser, error)
	// join lets a call in by the gate, or has it wait there for its turn.
	join func(ctx context.Context, tenant string, c tenants.Ceilings) (*tenants.Ticket, error)

	base context.Context // of all that runs; ends with the server
	end  context.CancelCauseFunc

	stores sync.Map // of a tenant's directory a mutex, while its volumes are counted and made
	// Gates of requests whose work depends on what a tenant has stored.
	packing  *tenants.Scheduler // snapshots
	walking  *tenants.Scheduler // reading whole trees
	archives *tenants.Scheduler // reading and writing them as fast as the client does

	mu       sync.Mutex
	draining bool
	running  sync.WaitGroup // calls that were let begin
}

// New makes a server with a checked configuration, whose places come from source.
func New(c config.Config, tokens config.Tokens, source slot.Source, log *slog.Logger, version string) (*Server, error) {
	s := &Server{source: source, scheduler: tenants.NewScheduler(c.Places), processes: tenants.NewScheduler(c.Processes), version: version}
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
	s.quota = &calls.Quota{Calls: tenants.NewBudget("calls that are kept", 0), Output: tenants.NewBudget("bytes of output that is kept", int64(c.Calls.Output))}
	s.quota.Calls.Kept, s.quota.Output.Kept, s.quota.Output.Shared = true, true, true
	s.jobs = calls.NewStore(spools, time.Duration(c.Calls.Keep), s.quota)
	s.keys = calls.NewKeys(keyTTL, maxKeys)
	s.sessions = sessions.NewStore(s.recordEnd, s.spawn)
	s.metrics = newMetrics(s)
	s.join = func(_ context.Context, tenant string, c tenants.Ceilings) (*tenants.Ticket, error) {
		return s.scheduler.Join(tenant, c)
	}
	const packing = 2 // each takes a processor, and memory for the compression
	s.packing, s.walking, s.archives = tenants.NewScheduler(packing), tenants.NewScheduler(math.MaxInt), tenants.NewScheduler(math.MaxInt)
	s.sweep()
	s.base, s.end = context.WithCancelCause(context.Background())
	s.spawn(s.expire)
	return s, nil
}

// Cluster makes the server one of several: all ids that it gives begin with prefix; files that the content
// store has not are looked for elsewhere; and calls are let in by join, which shares the ceilings of tenants
// with other servers and calls the gate of this one. It is called before the first request.
func (s *Server) Cluster(prefix string, elsewhere func(ctx context.Context, tenant, id string) (io.ReadCloser, error), join func(context.Context, string, tenants.Ceilings) (*tenants.Ticket, error)) {
	s.prefix, s.elsewhere, s.join = prefix, elsewhere, join
}

// Scheduler lets calls in here.
func (s *Server) Scheduler() *tenants.Scheduler { return s.scheduler }

func (s *Server) newID() string { return s.prefix + safeopen.RandomName() }

// ownDirectory makes a directory for what is stored, and refuses one that somebody else could
// have prepared: below /tmp everybody can.
func ownDirectory(name string) error {
	if err := os.MkdirAll(name, 0o700); err != nil {
		return fmt.Errorf("state_dir: %w; set it to a directory that this user can make", err)
	}
	st, err := os.Lstat(name)
	if err != nil {
		return err
	}
	if owner := st.Sys().(*syscall.Stat_t).Uid; !st.IsDir() || int(owner) != os.Geteuid() || st.Mode().Perm()&0o077 != 0 {
		return fmt.Errorf("state_dir %s: it must be a directory of this user's own, closed to others (mode 0700)", name)
	}
	return nil
}

// Answers are kept for idempotency keys so long, and of each tenant so many at most.
const (
	keyTTL  = 10 * time.Minute
	maxKeys = 10_000
)

// expire removes from time to time what is too old.
func (s *Server) expire() {
	const (
		pause = time.Minute
		sweep = 60 // pauses
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
				s.log.Warn("content store", "error", err)
			}
		}
	}
}

// errDraining ends calls when the server does.
var errDraining = errors.New("the server is ending")

func draining() *api.Error {
	return api.NewError(api.Draining, "the server is ending, and starts nothing more", "try another one, or again in a moment")
}

// begin counts a call in, unless the server is ending. The caller says Done to running.
func (s *Server) begin() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.draining {
		return draining()
	}
	s.running.Add(1)
	return nil
}

// Stop lets nothing more begin.
func (s *Server) Stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.draining = true
}

// Drain lets nothing more begin, waits until all calls have ended or ctx is done, and then
// ends what is left. When it returns, nothing of any call is left.
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

// Until returns a context that ends with a request's, and with the server's.
func (s *Server) Until(ctx context.Context) (context.Context, context.CancelFunc) {
	return Merge(ctx, s.base)
}

// Both returns a context with the values of a, that ends with either, and of the same cause.
func Merge(a, b context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(a)
	stop := context.AfterFunc(b, func() { cancel(context.Cause(b)) })
	return ctx, func() {
		stop()
		cancel(nil)
	}
}

// Ready reports whether calls are taken.
func (s *Server) Ready() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.draining
}
