package workspace

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// A path with ".." is found although files are being renamed all the time.
func TestOpenInsideRenames(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"root/a/b", "elsewhere/x"} {
		check.Must(t, os.MkdirAll(filepath.Join(dir, name), 0o700))
	}
	root, err := unix.Open(filepath.Join(dir, "root"), unix.O_PATH, 0)
	check.Must(t, err)
	defer unix.Close(root)
	now, next := filepath.Join(dir, "elsewhere/x"), filepath.Join(dir, "elsewhere/y")
	defer harness.Meanwhile(func() {
		check.OK(t, os.Rename(now, next))
		now, next = next, now
	})()
	for range 2000 {
		fd, err := (&Root{fd: root}).open("a/b/../../a/../a/b", unix.O_RDONLY, 0)
		check.Must(t, err)
		unix.Close(fd)
	}
}
