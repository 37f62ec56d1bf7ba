package stream

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
)

// binary contains zeros, line breaks and broken characters.
const binary = "\x00\xff\n\r\n\xc3\x28 \xe2\x82\xac\x00\n"

func create(t *testing.T) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "log"))
	check.Must(t, err)
	t.Cleanup(func() { f.Close() })
	return f
}

// content reads f through another descriptor, as followers do.
func content(t *testing.T, f *os.File) string {
	t.Helper()
	data, err := os.ReadFile(f.Name())
	check.Must(t, err)
	return string(data)
}

func write(t *testing.T, w io.Writer, s string) {
	t.Helper()
	n, err := w.Write([]byte(s))
	check.Require(t, n == len(s) && err == nil, "Write of %d bytes: %d, %v", len(s), n, err)
}

func holds(t *testing.T, w *Log, length, kept int64, wantErr error) {
	t.Helper()
	check.That(t, w.Len() == length && w.kept.Load() == kept && w.Truncated() == (kept < length) && errors.Is(w.err, wantErr),
		"length %d, kept %d, truncated %t, error %v; want %d, %d, %t, %v", w.Len(), w.kept.Load(), w.Truncated(), w.err, length, kept, kept < length, wantErr)
}

// A log keeps exactly its limit, for every limit and every piece size.
func TestLogLimit(t *testing.T) {
	for limit := -1; limit <= len(binary)+1; limit++ {
		for piece := 1; piece <= len(binary); piece++ {
			t.Run(fmt.Sprintf("%d by %d", limit, piece), func(t *testing.T) {
				f := create(t)
				w := NewLog(f, int64(limit))
				for rest := binary; rest != ""; {
					n := min(piece, len(rest))
					write(t, w, rest[:n])
					rest = rest[n:]
				}
				write(t, w, "")
				want := binary[:min(max(limit, 0), len(binary))]
				holds(t, w, int64(len(binary)), int64(len(want)), nil)
				check.Equal(t, content(t, f), want, "kept")
			})
		}
	}
}

// Nothing is appended after a short write, so the log has no gap.
func TestLogStopsAfterError(t *testing.T) {
	var old unix.Rlimit
	check.Must(t, unix.Getrlimit(unix.RLIMIT_FSIZE, &old))
	f := create(t)
	w := NewLog(f, 100)
	check.Must(t, unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: 5, Max: old.Max}))
	write(t, w, "12345678")
	check.Must(t, unix.Setrlimit(unix.RLIMIT_FSIZE, &old))
	holds(t, w, 8, 5, unix.EFBIG)
	write(t, w, "9")
	holds(t, w, 9, 5, unix.EFBIG)
	check.Equal(t, content(t, f), "12345", "kept")
}

// The counters can be read during writes (for the race detector). The bytes they count as kept are in the file, and
// nothing counts as truncated before the limit.
func TestLogCounters(t *testing.T) {
	const rounds = 2000
	most := rounds * int64(len(binary)) / 2
	f := create(t)
	w := NewLog(f, most)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range rounds {
			w.Write([]byte(binary)) // never fails
		}
	}()
	for over := false; !over; {
		select {
		case <-done:
			over = true
		default:
		}
		kept, truncated, length := w.kept.Load(), w.Truncated(), w.Len()
		info, err := f.Stat()
		check.Require(t, err == nil && info.Size() >= kept && (!truncated || length > most), "size %d, %v, of which %d kept, of %d, truncated %v", info.Size(), err, kept, length, truncated)
	}
	holds(t, w, rounds*int64(len(binary)), most, nil)
}
