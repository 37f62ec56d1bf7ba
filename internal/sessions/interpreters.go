package sessions

import (
	"context"
	"sync"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/cells"
)

// Interpreter is the one of a session for a language. It is started with its first cell, and
// ends with the session.
type Interpreter struct {
	session *Session
	running sync.Mutex    // a cell, from before it waits for its turn; the rest is who has it's
	kernel  *cells.Kernel // nil before the first cell; written with the session's lock, too
}

// Interpreter takes the one for a language, for one cell. The release is called when that is
// over.
func (s *Session) Interpreter(language string) (i *Interpreter, release func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if i = s.kept[language]; i == nil {
		i = &Interpreter{session: s}
		if s.kept == nil {
			s.kept = map[string]*Interpreter{}
		}
		s.kept[language] = i
	}
	if !i.running.TryLock() {
		return nil, nil, api.NewError(api.BusySession, "a cell is running in this session's interpreter", "wait for its answer, or use another session")
	}
	return i, i.running.Unlock, nil
}

// Run runs a cell in it, see [cells.Kernel.Run]. Its room is the session's.
func (i *Interpreter) Run(ctx context.Context, spec cells.Spec, c cells.Cell) (*cells.Answer, error) {
	s := i.session
	s.mu.Lock()
	if s.ending { // who ends it may have looked already
		s.mu.Unlock()
		return nil, ended(s.ID, s.cause)
	}
	if i.kernel == nil {
		spec.Room = s.Place
		i.kernel = cells.New(spec)
	}
	s.mu.Unlock()
	return i.kernel.Run(ctx, c)
}

// closeInterpreters ends those there are, with the cells that run in them. No more come: the
// session is ending.
func (s *Session) closeInterpreters() {
	var all sync.WaitGroup
	s.mu.Lock()
	for _, i := range s.kept {
		if i.kernel != nil {
			all.Go(func() { _ = i.kernel.Close() }) // the session's end says more
		}
	}
	s.mu.Unlock()
	all.Wait()
}
