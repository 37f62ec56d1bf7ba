package public

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
)

// Only files of limited size that everybody can read are copied from /etc.
func TestEtcFile(t *testing.T) {
	dir := t.TempDir()
	write := func(name string, mode os.FileMode, size int64) string {
		name = filepath.Join(dir, name)
		check.Must(t, errors.Join(os.WriteFile(name, nil, 0o600), os.Truncate(name, size), os.Chmod(name, mode)))
		return name
	}
	check.Must(t, unix.Mkfifo(filepath.Join(dir, "fifo"), 0o644))
	check.Must(t, os.Symlink("public", filepath.Join(dir, "link")))
	for name, want := range map[string]bool{
		write("public", 0o644, 5): true, write("largest", 0o644, maxCopy): true, filepath.Join(dir, "link"): true,
		write("secret", 0o600, 5): false, write("group", 0o640, 5): false, write("large", 0o644, maxCopy+1): false, dir: false, filepath.Join(dir, "fifo"): false, dir + "/none": false,
	} {
		_, ok := Copy(name)
		check.That(t, ok == want, "%s: %v", name, ok)
	}
}
