// Package logfile keeps what a program prints in a file, and reads that file
// while another process still writes to it.
//
// Each stream has a file of its own, which holds its bytes and nothing else: the
// beginning of the stream, exact up to a limit. What was left out is counted, by
// the writer, and is for others to say. Followers open the file for themselves
// and are woken by the kernel (inotify(7)); the writer does not know of them, so
// that a slow one, or a hundred, cost the program nothing.
package stream

import (
	"os"
	"sync"
)

// A Log keeps the head of a stream in a file. One goroutine writes; what the
// Log says of the stream may be asked by any, at any time.
type Log struct {
	file *os.File // still the caller's, who closes it
	max  int64

	mu sync.Mutex // for s, and not held while the disk is waited for
	s  logState
}

type logState struct {
	len, kept int64
	err       error
}

// NewLog returns a Log that keeps at most max bytes in f, or none when max
// is not positive. f is empty, and stays the caller's to close.
func NewLog(f *os.File, max int64) *Log { return &Log{file: f, max: max} }

// Write takes all of p and never fails: a program must not be stopped, or killed
// by SIGPIPE, because its log or the disk is full. After an error nothing more is
// kept, even if there is room again, or the file would have a hole that nobody
// can see.
func (w *Log) Write(p []byte) (int, error) {
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

func (w *Log) state() logState {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.s
}

// Len is the length of the whole stream so far, including what was left out.
func (w *Log) Len() int64 { return w.state().len }

// Truncated reports whether anything was left out.
func (w *Log) Truncated() bool { s := w.state(); return s.len > s.kept }

// Close closes the file; what comes later is only counted. A nil Log has none.
func (w *Log) Close() {
	if w != nil {
		w.file.Close() // what was written is written
	}
}
