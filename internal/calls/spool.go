package calls

import (
	"context"
	"io"
	"os"
	"sync"
)

// Spool stores the beginning of a stream, up to a limit, for any number of readers. It uses an unlinked file,
// which disappears with the process.
type Spool struct {
	file *os.File
	max  int64

	mu    sync.Mutex
	kept  int64 // bytes stored
	total int64 // bytes written
	ended bool
	err   error
	more  chan struct{} // closed and replaced on each change
}

// NewSpool creates a spool in dir.
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

// Write stores p as far as it fits and never fails, because a program must not end over output that perhaps
// no one reads.
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

// End marks the end of the stream.
func (s *Spool) End() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ended {
		s.ended = true
		s.wake()
	}
}

// Size returns the bytes stored, the bytes written, and whether the stream has ended.
func (s *Spool) Size() (kept, total int64, ended bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.kept, s.total, s.ended
}

// Wait waits until more than from bytes are stored, the stream has ended, or ctx is done.
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

// Section returns a reader for the stored bytes between two offsets.
func (s *Spool) Section(from, to int64) *io.SectionReader {
	return io.NewSectionReader(s.file, from, max(0, to-from))
}

// Close discards the stored data.
func (s *Spool) Close() {
	s.End()
	s.file.Close()
}
