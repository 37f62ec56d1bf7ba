package room

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// Whoever the layer belongs to puts a link in the place of a directory in it, at the moment when
// that is made: what the link leads to stays as it is.
func TestUpperRace(t *testing.T) {
	top := t.TempDir()
	outside, upper := filepath.Join(top, "outside"), filepath.Join(top, "layers/0/upper")
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.Mkdir(outside, 0o700))
	must(os.Mkdir(filepath.Join(top, "layers"), 0o700))
	dir, err := unix.Open(filepath.Join(top, "layers"), unix.O_PATH|unix.O_CLOEXEC, 0)
	must(err)
	defer unix.Close(dir)
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
			}
			if unix.Rename(upper, top+"/away") == nil {
				_ = unix.Symlink(outside, upper) // it may be there again
				_ = unix.Rmdir(top + "/away")
			}
		}
	}()
	var p Plan
	for range 500 {
		_ = p.makeUpper(dir, 0, 0o755)                   // it may well fail
		_ = os.RemoveAll(filepath.Join(top, "layers/0")) // it may change meanwhile, and then goes the next time
	}
	close(stop)
	<-stopped
	info, err := os.Stat(outside)
	must(err)
	if info.Mode().Perm() != 0o700 {
		t.Errorf("a directory outside has the mode %o", info.Mode().Perm())
	}
}
