package harness

import (
	"encoding/json"
	"io"
	"os"

	"github.com/sbxrun/sbxrun/tests/check"
	"golang.org/x/sys/unix"
)

// ReadFile returns the contents of a file.
func ReadFile(t T, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(name)
	check.Must(t, err)
	return b
}

// ReadAll returns the rest of a stream.
func ReadAll(t T, r io.Reader) []byte {
	t.Helper()
	b, err := io.ReadAll(r)
	check.Must(t, err)
	return b
}

// ReadDir returns the entries of a directory.
func ReadDir(t T, name string) []os.DirEntry {
	t.Helper()
	list, err := os.ReadDir(name)
	check.Must(t, err)
	return list
}

// JSON encodes a value.
func JSON(t T, v any) []byte {
	t.Helper()
	b, err := json.Marshal(v)
	check.Must(t, err)
	return b
}

// Null opens /dev/null until the test ends.
func Null(t T) *os.File {
	t.Helper()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	check.Must(t, err)
	t.Cleanup(func() { null.Close() })
	return null
}

// Pipe returns a pipe whose ends are closed when the test ends, if not before.
func Pipe(t T) (r, w *os.File) {
	t.Helper()
	r, w, err := os.Pipe()
	check.Must(t, err)
	t.Cleanup(func() {
		r.Close()
		w.Close()
	})
	return r, w
}

// Descriptors counts the open descriptors of the test process.
func Descriptors(t T) int {
	t.Helper()
	return len(ReadDir(t, "/proc/self/fd"))
}

// LimitDescriptors allows the test process no new descriptors from n on until restore is called.
func LimitDescriptors(t T, n int) (restore func()) {
	t.Helper()
	var before unix.Rlimit
	check.Must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &before))
	check.Must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(n), Max: before.Max}))
	return func() {
		check.OK(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &before))
	}
}
