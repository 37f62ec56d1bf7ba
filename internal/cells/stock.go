package cells

import (
	"context"
	"sync"
)

// Stock has interpreters that were started ahead, for one room and language, so that nobody
// waits for their start. Each is a process of its own, started like any other, and is given
// away once: nothing is shared but the room.
type Stock struct {
	spec Spec
	size int
	ctx  context.Context
	end  context.CancelFunc

	mu       sync.Mutex
	ready    []*Kernel
	starting sync.WaitGroup
	pending  int
}

// Ahead has n interpreters started in the background, and as many again as are taken. The
// caller closes the Stock before the room.
func Ahead(spec Spec, n int) *Stock {
	s := &Stock{spec: spec, size: n}
	s.ctx, s.end = context.WithCancel(context.Background())
	s.fill()
	return s
}

// fill starts what is missing. One that cannot be started is tried again with the next Start,
// whose caller is told why.
func (s *Stock) fill() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.ctx.Err() == nil && len(s.ready)+s.pending < s.size {
		s.pending++
		s.starting.Go(func() {
			k, err := Start(s.ctx, s.spec)
			s.mu.Lock()
			defer s.mu.Unlock()
			s.pending--
			if err == nil {
				s.ready = append(s.ready, k)
			}
		})
	}
}

// Start is [Start], and takes an interpreter that was started ahead, if there is one. Another
// one takes its place.
func (s *Stock) Start(ctx context.Context) (*Kernel, error) {
	defer s.fill()
	for {
		s.mu.Lock()
		var k *Kernel
		if len(s.ready) > 0 {
			k, s.ready = s.ready[0], s.ready[1:]
		}
		s.mu.Unlock()
		switch {
		case k == nil:
			return Start(ctx, s.spec)
		case k.live.alive():
			return k, nil
		}
		_ = k.Close() // it has ended, and its proof is nobody's
	}
}

// Ready returns how many are there to be taken.
func (s *Stock) Ready() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.ready)
}

// Close ends those that nobody has taken.
func (s *Stock) Close() error {
	s.mu.Lock()
	s.end() // nothing is started from here on
	s.mu.Unlock()
	s.starting.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	var first error
	for _, k := range s.ready {
		if err := k.Close(); first == nil {
			first = err
		}
	}
	s.ready = nil
	return first
}
