package proc

import (
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
)

// With AsUser new files belong to the user, and files that the user may not open are refused. Afterwards this process has
// its own IDs and is dumpable.
func TestAsUser(t *testing.T) {
	dir := t.TempDir()
	secret := filepath.Join(dir, "secret")
	err := os.WriteFile(secret, nil, 0o600)
	check.Must(t, err)
	user := &Cred{UID: uint32(os.Geteuid()), GID: uint32(os.Getegid())}
	denied := false
	if os.Geteuid() == 0 {
		user, denied = &Cred{UID: 65534, GID: 65534}, true
		for at := dir; at != "/"; at = filepath.Dir(at) {
			check.Must(t, os.Chmod(at, 0o777|os.ModeSticky))
			if filepath.Dir(at) == os.TempDir() {
				break
			}
		}
	}
	if os.Geteuid() != 0 {
		user = nil // an ordinary user cannot act as another
	}
	err = AsUser(user, func() error {
		if f, err := os.Open(secret); (err != nil) != denied {
			t.Errorf("open: %v", err)
		} else if err == nil {
			f.Close()
		}
		return os.WriteFile(filepath.Join(dir, "made"), nil, 0o600)
	})
	check.Must(t, err)
	var st unix.Stat_t
	check.Must(t, unix.Stat(filepath.Join(dir, "made"), &st))
	check.That(t, user == nil || st.Uid == user.UID && st.Gid == user.GID, "owner %d:%d", st.Uid, st.Gid)
	n, err := unix.PrctlRetInt(unix.PR_GET_DUMPABLE, 0, 0, 0, 0)
	check.That(t, n == 1 && err == nil, "dumpable %d, %v", n, err)
	if f, err := os.Open(secret); err != nil {
		t.Error("afterwards:", err)
	} else {
		f.Close()
	}
}

// The number of threads is bounded, however many goroutines act as a user. A panic reaches the caller, and the
// thread stays usable.
func TestAsUserThreads(t *testing.T) {
	var user *Cred // an ordinary user cannot act as another
	if os.Geteuid() == 0 {
		user = &Cred{UID: 65534, GID: 65534}
	}
	var all sync.WaitGroup
	var most atomic.Int64
	before := tasks(t)
	for range 300 {
		all.Go(func() {
			for range 20 {
				err := AsUser(user, func() error {
					if n := int64(tasks(t)); n > most.Load() {
						most.Store(n)
					}
					return nil
				})
				check.That(t, err == nil, "%v", err)
			}
		})
	}
	all.Wait()
	// The runtime has some threads for system calls, too.
	limit := int64(before + userThreads + 2*runtime.GOMAXPROCS(0) + 8)
	check.That(t, most.Load() <= limit, "%d threads, want at most %d", most.Load(), limit)
	for range 2 * userThreads {
		func() {
			defer func() {
				check.That(t, recover() == "mistake", "no panic")
			}()
			_ = AsUser(user, func() error { panic("mistake") })
		}()
	}
	check.Equal(t, AsUser(user, func() error { return os.ErrExist }), os.ErrExist)
}
