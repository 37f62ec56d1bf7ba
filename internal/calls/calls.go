// Package calls keeps commands that nobody waits for: what they write, from any offset and as
// often as it is asked for, and in the end their reports, for a time.
package calls

import (
	"context"
	"io"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/api"
)

// Call is a command that nobody waits for. It is what its output goes to.
type Call struct {
	ID     string
	Tenant string
	Came   time.Time

	out, err *Spool
	cancel   context.CancelFunc
	ended    chan struct{}

	mu      sync.Mutex
	state   api.State
	signal  func(syscall.Signal) error
	answer  *api.Answer
	failure *api.Error
	since   time.Time // its end
}

// Writers are what its command writes to.
func (c *Call) Writers() (stdout, stderr io.Writer) { return c.out, c.err }

// Started says that the command runs, and how it is signalled.
func (c *Call) Started(signal func(syscall.Signal) error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.state, c.signal = api.Running, signal
}

// Output says in the report how much was written. The text itself is asked for by offset.
func (c *Call) Output(r *result.Report) {
	count := func(s *Spool) (*int64, *bool) {
		kept, total, _ := s.Size()
		truncated := total > kept
		return &total, &truncated
	}
	r.StdoutBytes, r.StdoutTruncated = count(c.out)
	r.StderrBytes, r.StderrTruncated = count(c.err)
}

// End says how it has ended: by an answer or an error.
func (c *Call) End(a *api.Answer, err error) {
	c.out.End()
	c.err.End()
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

// Ended is closed when it has ended.
func (c *Call) Ended() <-chan struct{} { return c.ended }

// Signal sends a signal to all processes of the command.
func (c *Call) Signal(sig syscall.Signal) error {
	c.mu.Lock()
	signal := c.signal
	c.mu.Unlock()
	if signal == nil {
		return api.NewError(api.Ended, "the command does not run", "")
	}
	if signal(sig) != nil {
		return api.NewError(api.Ended, "the command has ended", "")
	}
	return nil
}

// Stream is its stdout or its stderr.
func (c *Call) Stream(name string) *Spool {
	if name == "stderr" {
		return c.err
	}
	return c.out
}

// Status is what is told of it.
func (c *Call) Status() api.CallStatus {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := api.CallStatus{ID: c.ID, State: c.state, Report: c.answer, Came: c.Came}
	if c.failure != nil {
		s.Failure, s.Report = &c.failure.Failure, c.failure.Report
	}
	s.StdoutBytes, _, _ = c.out.Size()
	s.StderrBytes, _, _ = c.err.Size()
	return s
}

// Book has the calls of all tenants, or those of one session.
type Book struct {
	dir  string        // for spools
	keep time.Duration // how long after its end a call is kept
	most int           // of each tenant

	mu  sync.Mutex
	all map[string]*Call
}

// NewBook has spools in a directory, and keeps what has ended for a time.
func NewBook(dir string, keep time.Duration, most int) *Book {
	return &Book{dir: dir, keep: keep, most: most, all: map[string]*Call{}}
}

// Add makes a call, whose context is canceled by its Cancel and by its end.
func (b *Book) Add(ctx context.Context, id, tenant string, maxOutput int64) (context.Context, *Call, error) {
	b.Expire(time.Now())
	b.mu.Lock()
	n := 0
	for _, c := range b.all {
		if c.Tenant == tenant {
			n++
		}
	}
	b.mu.Unlock()
	if n >= b.most {
		return nil, nil, api.NewError(api.Quota, "the tenant has too many calls that are kept", "delete those that have ended")
	}
	c := &Call{ID: id, Tenant: tenant, Came: time.Now().UTC(), state: api.Queued, ended: make(chan struct{})}
	var err error
	if c.out, err = NewSpool(b.dir, maxOutput); err != nil {
		return nil, nil, err
	}
	if c.err, err = NewSpool(b.dir, maxOutput); err != nil {
		c.out.Close()
		return nil, nil, err
	}
	ctx, c.cancel = context.WithCancel(ctx)
	b.mu.Lock()
	b.all[id] = c
	b.mu.Unlock()
	return ctx, c, nil
}

// Drop forgets a call that has ended, or never began.
func (b *Book) Drop(c *Call) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.drop(c)
}

func (b *Book) drop(c *Call) {
	if b.all[c.ID] == c {
		delete(b.all, c.ID)
		c.cancel()
		c.out.Close()
		c.err.Close()
	}
}

// Get returns a tenant's call, or nil.
func (b *Book) Get(tenant, id string) *Call {
	b.mu.Lock()
	defer b.mu.Unlock()
	if c := b.all[id]; c != nil && c.Tenant == tenant {
		return c
	}
	return nil
}

// List returns a tenant's calls, in the order in which they came.
func (b *Book) List(tenant string) []*Call {
	b.mu.Lock()
	defer b.mu.Unlock()
	var found []*Call
	for _, c := range b.all {
		if c.Tenant == tenant {
			found = append(found, c)
		}
	}
	slices.SortFunc(found, func(a, b *Call) int {
		if n := a.Came.Compare(b.Came); n != 0 {
			return n
		}
		return strings.Compare(a.ID, b.ID)
	})
	return found
}

// Expire forgets what has ended long enough ago.
func (b *Book) Expire(now time.Time) {
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

// Close ends all calls, waits for their ends, and forgets them.
func (b *Book) Close() {
	b.mu.Lock()
	var all []*Call
	for _, c := range b.all {
		all = append(all, c)
	}
	b.mu.Unlock()
	for _, c := range all {
		c.Cancel()
	}
	for _, c := range all {
		<-c.Ended()
		b.Drop(c)
	}
}
