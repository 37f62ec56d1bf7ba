package volumes

import (
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

func open(t *testing.T) *Store {
	t.Helper()
	t.Setenv("SBXRUN_DATA_DIR", t.TempDir())
	s, err := Open(true)
	check.Must(t, err)
	t.Cleanup(s.Close)
	return s
}

func busy(err error) bool { return errors.As(err, new(*BusyError)) }

func TestLocks(t *testing.T) {
	s := open(t)
	w, err := s.Use("v", true, nil)
	check.Must(t, err)
	_, err = s.Use("v", true, nil)
	check.That(t, busy(err), "%v", err)
	_, err = s.Use("v", false, nil)
	check.That(t, busy(err), "%v", err)
	err = s.Remove("v")
	check.That(t, busy(err), "%v", err)
	// The keeper's copy holds the lock, too.
	copy, err := unix.FcntlInt(w.Lock.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	check.Must(t, err)
	w.Close()
	var e *BusyError
	_, err = s.Use("v", true, nil)
	check.That(t, errors.As(err, &e) && (len(e.PIDs) <= 0 || e.PIDs[0] == os.Getpid()), "%v %+v", err, e)
	unix.Close(copy)
	a, err := s.Use("v", false, nil)
	check.Must(t, err)
	b, err := s.Use("v", false, nil)
	check.Must(t, err)
	_, err = s.Use("v", true, nil)
	check.That(t, busy(err), "%v", err)
	a.Close()
	b.Close()
	check.OK(t, s.Remove("v"))
}

// A failed sync is an error, but only for a writable volume.
func TestSync(t *testing.T) {
	for _, v := range []*Volume{{Name: "v", data: -1, rw: true}, {Name: "v", data: -1}} {
		err := v.Sync()
		check.That(t, v.rw == (err != nil) && (!v.rw || err.Code == "volume" && err.ExitCode == result.ExitOutput && errors.Is(err, unix.EBADF)), "%v: %v", v.rw, err)
	}
}

// Concurrent creation, use and removal of a volume do not interfere.
func TestTogether(t *testing.T) {
	s := open(t)
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for range 100 {
				v, err := s.Use("v", true, nil)
				if err != nil {
					continue
				}
				file := filepath.Join(v.Path, "mine")
				f, err := os.OpenFile(file, os.O_CREATE|os.O_EXCL, 0o600)
				if err != nil {
					t.Error(err)
				} else {
					f.Close()
					check.OK(t, os.Remove(file))
				}
				v.Close()
				err = s.Remove("v")
				check.That(t, err == nil || busy(err) || os.IsNotExist(err) || err.Error() == `no volume named "v"`, "%v", err)
			}
		})
	}
	all.Wait()
	_ = s.Remove("v")
	names, err := s.names()
	check.That(t, err == nil && len(names) == 0, "left: %q %v", names, err)
}

// Listing volumes does not make them busy.
func TestListed(t *testing.T) {
	s := open(t)
	v, err := s.Use("v", true, nil)
	check.Must(t, err)
	v.Close()
	list := func() {
		_, err := s.List()
		check.OK(t, err)
		time.Sleep(time.Millisecond) // as often as anyone lists them
	}
	stops := []func(){harness.Meanwhile(list), harness.Meanwhile(list)}
	for _, stop := range stops {
		defer stop()
	}
	for i := range 300 {
		v, err := s.Use("v", i%2 == 0, nil)
		check.Require(t, err == nil, "%d: %v", i, err)
		v.Close()
	}
	for _, stop := range stops {
		stop()
	}
	a, errA := s.Use("a", false, nil)
	w, errW := s.Use("w", true, nil)
	check.Must(t, errors.Join(errA, errW))
	defer a.Close()
	defer w.Close()
	all, err := s.List()
	check.That(t, err == nil && len(all) == 3 && all[0].Status == "read" && all[1].Status == "free" && all[2].Status == "written", "%+v %v", all, err)
}

// A process that lists volumes slowly is waited for, while a volume in use is an error soon.
func TestListedSlowly(t *testing.T) {
	s := open(t)
	for _, looks := range []bool{true, false} {
		held, err := s.Use("v", true, nil)
		check.Must(t, err)
		var all sync.WaitGroup
		if looks {
			dir, err := s.marked("v", unix.LOCK_SH, 0) // like [Store.look]
			check.Must(t, err)
			all.Go(func() {
				time.Sleep(3 * patience)
				held.Close()
				dir.Close()
			})
		}
		v, err := s.Use("v", true, nil)
		all.Wait()
		switch {
		case err == nil:
			v.Close()
			check.That(t, looks, "two write")
		case looks || !busy(err):
			t.Error(err)
		}
		if !looks {
			held.Close()
		}
	}
	held, err := s.lock("v", true, 0)
	check.Must(t, err)
	defer held.Close()
	// Two processes that list do not wait for each other.
	dir, err := s.marked("v", unix.LOCK_SH, 0)
	check.Must(t, err)
	defer dir.Close()
	begin := time.Now()
	_, busy := s.look("v", true)
	check.That(t, busy && time.Since(begin) < longer, "%v after %v", busy, time.Since(begin))
}

func TestLeftovers(t *testing.T) {
	s := open(t)
	for _, name := range []string{".rm-1/d/e", ".new-1", "v/data"} {
		check.Must(t, os.MkdirAll(filepath.Join(s.dir.Path, name), 0o700))
	}
	making, err := s.marked(".", unix.LOCK_SH, 0)
	check.Must(t, err)
	left, err := s.Leftovers()
	check.That(t, len(left) == 1 && err == nil, "while one is made: %v %v", left, err)
	making.Close()
	left, err = s.Leftovers()
	check.That(t, len(left) == 2 && err == nil, "%v %v", left, err)
	for _, l := range left {
		check.OK(t, s.Discard(l))
	}
	names, _ := s.names()
	check.That(t, len(names) == 1, "%v", names)
}

func TestStoreRefused(t *testing.T) {
	data := t.TempDir()
	dir := filepath.Join(data, "volumes")
	t.Setenv("SBXRUN_DATA_DIR", data)
	check.Must(t, os.Mkdir(dir, 0o755))
	_, err := Open(true)
	check.That(t, err != nil, "open to others")
	check.Must(t, errors.Join(os.Chmod(dir, 0o700), os.Rename(dir, dir+"-there"), os.Symlink(dir+"-there", dir)))
	_, err = Open(true)
	check.That(t, err != nil, "a link")
	t.Setenv("SBXRUN_DATA_DIR", "relative")
	_, err = Open(true)
	check.That(t, err != nil, "relative")
}

func TestHoldersIn(t *testing.T) {
	const device = "fe:00:5678"
	for line, want := range map[string]int{
		"1: FLOCK  ADVISORY  WRITE 1234 fe:00:5678 0 EOF": 1, "1: FLOCK  ADVISORY  READ  1234 fe:00:5678 0 EOF": 1,
		"1: POSIX  ADVISORY  WRITE 1234 fe:00:5678 0 EOF": 0, "1: FLOCK  ADVISORY  WRITE 1234 fe:00:567 0 EOF": 0,
		"1: FLOCK  ADVISORY  WRITE 0 fe:00:5678 0 EOF": 0, "1: FLOCK  ADVISORY  WRITE -1 fe:00:5678 0 EOF": 0,
		"1: -> FLOCK  ADVISORY  WRITE 9 fe:00:5678 0 EOF": 0, "": 0, "x": 0,
	} {
		got := holdersIn(line, device)
		check.That(t, len(got) == want, "%q: %v", line, got)
	}
}

// Discard removes only a volume that was created and never used.
func TestDiscard(t *testing.T) {
	path := filepath.Join(t.TempDir(), "data", "volumes")
	open := func() *Store {
		s, err := OpenAt(path, true)
		check.Must(t, err)
		t.Cleanup(s.Close)
		return s
	}
	use := func(s *Store, name string, write bool) *Volume {
		v, err := s.Use(name, write, nil)
		check.Must(t, err)
		return v
	}
	discard := func(what string, v *Volume, gone bool) {
		t.Helper()
		err := v.Discard()
		v.Close()
		_, missing := os.Stat(v.Path)
		check.That(t, err == nil && os.IsNotExist(missing) == gone, "%s: %v, %v", what, err, missing)
	}
	discard("new", use(open(), "v", true), true)
	_, err := os.Stat(filepath.Dir(path))
	check.That(t, os.IsNotExist(err), "the directories made for it: %v", err)
	s := open()
	written := use(s, "written", true)
	check.Must(t, os.WriteFile(filepath.Join(written.Path, "file"), nil, 0o600))
	discard("written", written, false)
	read := use(s, "read", false)
	other := use(s, "read", false)
	discard("used by another", read, false)
	discard("not made by this one", other, false)
	_, err = os.Stat(path)
	check.OK(t, err)
}
