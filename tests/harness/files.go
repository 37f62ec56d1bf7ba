package harness

import (
	"encoding/json"
	"io"
	"os"

	"github.com/sbxrun/sbxrun/tests/check"
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
