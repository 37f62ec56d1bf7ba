package calls

import (
	"context"
	"io"
	"os"
	"sync"
)

// Spool keeps a stream for readers that come and go: its beginning, up to a bound, in a file
// without a name, which goes with the process however that ends.
type Spool struct {
	file *os.File
	max  int64

	mu    sync.Mutex
	kept  int64 // bytes in the file
	total int64 // bytes that were written to it
	ended bool
	err   error
	more  chan struct{} // closed, and made anew, when any of these changes
}

// NewSpool makes a spool in a directory.
func NewSpool(dir string, max int64) (*Spool, error) {
	f, err := os.CreateTemp(dir, "spool-")
	if err != nil {
		return nil, err
	}
	if err := os.Remove(f.Name()); err != nil {
		f.Close()
		return nil, err
	}
	return &Spool{file: f, max: max, more: make(chan struct{})}, nil
}

// Write keeps p as far as there is room, and never fails: a program is not ended for what
// nobody may ever read.
func (s *Spool) Write(p []byte) (int, error) {
	s.mu.Lock()
	at := s.kept
	fits := p[:min(int64(len(p)), s.max-s.kept)]
	failed := s.err != nil
	s.mu.Unlock()
	n := 0
	var err error
	if !failed && len(fits) > 0 {
		n, err = s.file.WriteAt(fits, at)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		s.err = err
	}
	s.kept += int64(n)
	s.total += int64(len(p))
	s.wake()
	return len(p), nil
}

func (s *Spool) wake() {
	close(s.more)
	s.more = make(chan struct{})
}

// End says that no more comes.
func (s *Spool) End() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ended {
		s.ended = true
		s.wake()
	}
}

// Size is how much is kept, how much was written, and whether no more comes.
func (s *Spool) Size() (kept, total int64, ended bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.kept, s.total, s.ended
}

// Wait waits until more than from is kept, or no more comes, or ctx is done.
func (s *Spool) Wait(ctx context.Context, from int64) (kept int64, ended bool) {
	for {
		s.mu.Lock()
		kept, ended, more := s.kept, s.ended, s.more
		s.mu.Unlock()
		if kept > from || ended || ctx.Err() != nil {
			return kept, ended
		}
		select {
		case <-more:
		case <-ctx.Done():
		}
	}
}

// Section reads what is kept between two offsets.
func (s *Spool) Section(from, to int64) *io.SectionReader {
	return io.NewSectionReader(s.file, from, max(0, to-from))
}

// Close gives up what is kept.
func (s *Spool) Close() {
	s.End()
	s.file.Close()
}
