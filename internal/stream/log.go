package stream

import (
	"os"
	"sync/atomic"
)

// A Log keeps the beginning of a stream in a file, exact up to a limit, and counts the rest. Followers open the file
// themselves and are woken by the kernel (inotify(7)), so that slow or many followers cost the program nothing. Only
// one goroutine may write; any may call the other methods.
type Log struct {
	file      *os.File // closed by the caller
	max       int64
	len, kept atomic.Int64
	err       error // used only by Write
}

// NewLog returns a Log that keeps at most max bytes in f, or none if max is not positive. f must be empty.
func NewLog(f *os.File, max int64) *Log { return &Log{file: f, max: max} }

// Write takes all of p and never fails: a full disk must not stop the program or kill it with SIGPIPE. After an error
// nothing more is kept, even if there is space again, because the log would have an invisible gap.
func (w *Log) Write(p []byte) (int, error) {
	if room := w.max - w.kept.Load(); room > 0 && w.err == nil {
		var n int
		n, w.err = w.file.Write(p[:min(int64(len(p)), room)])
		w.kept.Add(int64(n))
	}
	w.len.Add(int64(len(p)))
	return len(p), nil
}

// Len returns the length of the whole stream so far, including dropped output.
func (w *Log) Len() int64 { return w.len.Load() }

// Truncated reports whether anything was left out.
func (w *Log) Truncated() bool {
	n := w.len.Load() // before kept, which Write increases first
	return n > w.kept.Load()
}

// Close closes the file; later writes are only counted. It does nothing on a nil Log.
func (w *Log) Close() {
	if w != nil {
		w.file.Close() // earlier writes are in the file
	}
}
