// Package logfile keeps what a program prints in a file, and reads that file
// while another process still writes to it.
//
// Each stream has a file of its own, which holds its bytes and nothing else: the
// beginning of the stream, exact up to a limit. What was left out is counted, by
// the writer, and is for others to say. Followers open the file for themselves
// and are woken by the kernel (inotify(7)); the writer does not know of them, so
// that a slow one, or a hundred, cost the program nothing.
package logfile

import (
	"os"
	"sync"
)

// A Writer keeps the head of a stream in a file. One goroutine writes; what the
// Writer says of the stream may be asked by any, at any time.
type Writer struct {
	file *os.File // still the caller's, who closes it
	max  int64

	mu sync.Mutex // for s, and not held while the disk is waited for
	s  state
}

type state struct {
	len, kept int64
	err       error
}

// NewWriter returns a Writer that keeps at most max bytes in f, or none when max
// is not positive. f is empty, and stays the caller's to close.
func NewWriter(f *os.File, max int64) *Writer { return &Writer{file: f, max: max} }

// Write takes all of p and never fails: a program must not be stopped, or killed
// by SIGPIPE, because its log or the disk is full. After an error nothing more is
// kept, even if there is room again, or the file would have a hole that nobody
// can see.
func (w *Writer) Write(p []byte) (int, error) {
	s := w.s // nobody else changes it
	s.len += int64(len(p))
	if room := w.max - s.kept; room > 0 && s.err == nil {
		var n int
		n, s.err = w.file.Write(p[:min(int64(len(p)), room)])
		s.kept += int64(n)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.s = s
	return len(p), nil
}

func (w *Writer) state() state {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.s
}

// Len is the length of the whole stream so far, including what was left out.
func (w *Writer) Len() int64 { return w.state().len }

// Truncated reports whether anything was left out.
func (w *Writer) Truncated() bool { s := w.state(); return s.len > s.kept }

// Close closes the file; what comes later is only counted. A nil Writer has none.
func (w *Writer) Close() {
	if w != nil {
		w.file.Close() // what was written is written
	}
}
