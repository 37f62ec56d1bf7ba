// Package calls stores background commands: their output, readable from any offset, and for a time their
// reports.
package calls

import (
	"cmp"
	"context"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/tenants"
)

// Call is a background command. It is the sink of its output.
type Call struct {
	ID     string
	Tenant string
	Came   time.Time

	Input *Input // nil without later stdin

	out, err *Spool
	kept     leases
	cancel   context.CancelFunc
	runs     chan struct{} // closed when it runs
	ended    chan struct{}

	mu      sync.Mutex
	state   api.State
	began   bool
	signal  func(syscall.Signal) error
	answer  *api.Answer
	failure *api.Error
	since   time.Time // time of its end
}

// Writers returns the writers for the command.
func (c *Call) Writers() (stdout, stderr io.Writer) { return c.out, c.err }

// Started records that the command runs; signal sends it a signal.
func (c *Call) Started(signal func(syscall.Signal) error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.state, c.began, c.signal = api.Running, true, signal
	close(c.runs)
}

// Output adds the sizes of the output to the report; the output itself is read by offset.
func (c *Call) Output(r *result.Report) {
	count := func(s *Spool) (*int64, *bool) {
		kept, total, _ := s.Size()
		truncated := total > kept
		return &total, &truncated
	}
	r.StdoutBytes, r.StdoutTruncated = count(c.out)
	r.StderrBytes, r.StderrTruncated = count(c.err)
}

// End records the end of the command: its answer, which takes size bytes of memory, or an error.
func (c *Call) End(a *api.Answer, size int64, err error) {
	c.out.End()
	c.err.End()
	if c.Input != nil {
		c.Input.End()
	}
	out, _, _ := c.out.Size()
	stderr, _, _ := c.err.Size()
	c.kept.output.Shrink(out + stderr)
	c.kept.memory.Shrink(size)
	c.mu.Lock()
	c.state, c.answer, c.signal, c.since = api.Over, a, nil, time.Now()
	if err != nil {
		c.answer, c.failure = nil, api.AsError(err)
	}
	c.mu.Unlock()
	c.cancel()
	close(c.ended)
}

// Cancel ends the command.
func (c *Call) Cancel() { c.cancel() }

// Ended is closed when the command has ended, or was dropped before it began.
func (c *Call) Ended() <-chan struct{} { return c.ended }

// Signal sends a signal to all processes of the command. It waits until the command runs, because "not
// running" would be taken for ended.
func (c *Call) Signal(ctx context.Context, sig syscall.Signal) error {
	select {
	case <-c.runs:
	case <-c.ended:
	case <-ctx.Done():
	}
	c.mu.Lock()
	signal := c.signal
	c.mu.Unlock()
	if signal == nil {
		return api.NewError(api.Ended, "the command is not running", "")
	}
	if signal(sig) != nil {
		return api.NewError(api.Ended, "the command has ended", "")
	}
	return nil
}

// Stream returns the spool of stdout or stderr.
func (c *Call) Stream(name string) *Spool {
	if name == "stderr" {
		return c.err
	}
	return c.out
}

// Status describes the command.
func (c *Call) Status() api.CallStatus {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := api.CallStatus{ID: c.ID, State: c.state, Started: c.began, Report: c.answer, Came: c.Came}
	if c.failure != nil {
		s.Failure, s.Report = &c.failure.Failure, c.failure.Report
		s.Started = s.Started || c.failure.Started // unknown after a panic
	}
	s.StdoutBytes, _, _ = c.out.Size()
	s.StderrBytes, _, _ = c.err.Size()
	return s
}

// Quota counts the calls of all stores of a server and the bytes of their output.
type Quota struct{ Calls, Output *tenants.Budget }

// Limits are one tenant's part of a quota.
type Limits struct{ Calls, Output int64 }

// leases are held until the call is dropped.
type leases struct{ call, output, memory *tenants.Lease }

func (l *leases) free() {
	l.call.Free()
	l.output.Free()
	l.memory.Free()
}

// Store holds the background commands of all tenants, or of one session.
type Store struct {
	dir   string        // for spools
	keep  time.Duration // how long a finished call is kept
	quota *Quota

	mu  sync.Mutex
	all map[string]*Call
}

// NewStore returns a store with its spools in dir, which keeps finished calls for a time.
func NewStore(dir string, keep time.Duration, shelf *Quota) *Store {
	return &Store{dir: dir, keep: keep, quota: shelf, all: map[string]*Call{}}
}

// Add creates a call. Its context is canceled by Cancel and by its end. Add reserves the maximum output in
// advance, so that a running command never loses output to other calls. It takes over the lease on memory.
func (b *Store) Add(ctx context.Context, id, tenant string, input *Input, maxOutput int64, share Limits, memory *tenants.Lease) (_ context.Context, _ *Call, err error) {
	b.Expire(time.Now())
	c := &Call{ID: id, Tenant: tenant, Came: time.Now().UTC(), state: api.Queued, runs: make(chan struct{}), ended: make(chan struct{}), kept: leases{memory: memory}}
	defer func() {
		if err != nil {
			c.kept.free()
		}
	}()
	if c.kept.call, err = b.quota.Calls.Take(tenant, 1, share.Calls); err != nil {
		return nil, nil, err
	}
	if c.kept.output, err = b.quota.Output.Take(tenant, 2*maxOutput, share.Output); err != nil {
		return nil, nil, err
	}
	if c.out, err = NewSpool(b.dir, maxOutput); err != nil {
		return nil, nil, err
	}
	if c.err, err = NewSpool(b.dir, maxOutput); err != nil {
		c.out.Close()
		return nil, nil, err
	}
	c.Input = input
	ctx, c.cancel = context.WithCancel(ctx)
	b.mu.Lock()
	b.all[id] = c
	b.mu.Unlock()
	return ctx, c, nil
}

// Drop discards a call that has ended or never began.
func (b *Store) Drop(c *Call) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.drop(c)
}

func (b *Store) drop(c *Call) {
	if b.all[c.ID] == c {
		delete(b.all, c.ID)
		c.cancel()
		c.out.Close()
		c.err.Close()
		c.kept.free()
		c.mu.Lock()
		c.answer = c.answer.Short() // a key may still refer to the call
		c.mu.Unlock()
		select {
		case <-c.ended:
		default: // never began; release those who wait for its end
			close(c.ended)
		}
	}
}

// Get returns a tenant's call, or nil.
func (b *Store) Get(tenant, id string) *Call {
	b.mu.Lock()
	defer b.mu.Unlock()
	if c := b.all[id]; c != nil && c.Tenant == tenant {
		return c
	}
	return nil
}

// List returns a tenant's calls, oldest first.
func (b *Store) List(tenant string) []*Call {
	b.mu.Lock()
	defer b.mu.Unlock()
	var found []*Call
	for _, c := range b.all {
		if c.Tenant == tenant {
			found = append(found, c)
		}
	}
	slices.SortFunc(found, func(a, b *Call) int {
		return cmp.Or(a.Came.Compare(b.Came), strings.Compare(a.ID, b.ID))
	})
	return found
}

// Expire drops calls that ended long enough ago.
func (b *Store) Expire(now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, c := range b.all {
		c.mu.Lock()
		old := c.state == api.Over && now.Sub(c.since) > b.keep
		c.mu.Unlock()
		if old {
			b.drop(c)
		}
	}
}

// Close ends all calls, waits for them, and drops them.
func (b *Store) Close() {
	b.mu.Lock()
	all := slices.Collect(maps.Values(b.all))
	b.mu.Unlock()
	for _, c := range all {
		c.Cancel()
	}
	for _, c := range all {
		<-c.Ended()
		b.Drop(c)
	}
}
