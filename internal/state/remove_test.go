package state

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
)

// outside is a directory with files that must not change.
func outside(t *testing.T) (dir string, unchanged func()) {
	t.Helper()
	dir = t.TempDir()
	names := []string{"victim", lockName, activityName, recordName, killName, "env", "web"}
	for _, name := range names {
		must(t, os.WriteFile(filepath.Join(dir, name), []byte("untouched"), 0o644))
	}
	return dir, func() {
		t.Helper()
		list, err := os.ReadDir(dir)
		check.That(t, err == nil && len(list) == len(names), "outside: %v, %v", list, err)
		for _, name := range names {
			data, err := os.ReadFile(filepath.Join(dir, name))
			st, serr := os.Stat(filepath.Join(dir, name))
			check.That(t, err == nil && serr == nil && string(data) == "untouched" && st.Mode().Perm() == 0o644, "outside/%s: %q, %v, %v", name, data, st, err)
		}
	}
}

// replace replaces a file with a link.
func replace(t *testing.T, path, target string) {
	t.Helper()
	must(t, os.RemoveAll(path))
	must(t, os.Symlink(target, path))
}

// A symbolic link that replaces a file is not read, written, locked or followed by a removal.
func TestSymlinks(t *testing.T) {
	out, unchanged := outside(t)
	for _, name := range []string{lockName, activityName, recordName, killName, "env"} {
		d := opened(t)
		o := written(t, d, 1, "web")
		must(t, writeFile(o, "env", nil))
		e := found(t, d, "web")
		path := filepath.Join(d.Path(), testID(1), name)
		replace(t, path, filepath.Join(out, name))

		_, err := e.OpenFile(name)
		wantCode(t, "open "+name, err, "state")
		_, err = o.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_TRUNC)
		wantCode(t, "open for writing "+name, err, "state")
		switch name {
		case lockName: // the supervisor looks dead, which ends nothing
			must(t, e.Refresh())
			check.That(t, !e.Alive, "alive because of a foreign lock")
		case activityName:
			_, err := e.HoldActivity()
			wantCode(t, "activity", err, "state")
		case recordName:
			_, err := d.Find(testID(1))
			wantCode(t, "find", err, "state")
			w := wantIDs(t, d)
			check.That(t, len(w) == 1, "warnings: %v", w)
			must(t, o.Write(record("2", Running))) // replaces the link
		case killName:
			_, err := o.ReadKill()
			wantCode(t, "kill", err, "state")
			must(t, e.WriteKill(Kill{}))
		case "env":
			must(t, writeFile(o, name, []byte("x")))
		}
		unchanged()
		replace(t, path, filepath.Join(out, name))
		must(t, o.Remove())
		wantFiles(t, d, "lock", "names")
		unchanged()
	}
}

// The same holds for directories and for the files of the state directory itself.
func TestSymlinkedDirectories(t *testing.T) {
	out, unchanged := outside(t)
	in := func(d *Dir, name string) string { return filepath.Join(d.Path(), name) }

	t.Run("sandbox", func(t *testing.T) {
		d := opened(t)
		replace(t, in(d, testID(1)), out)
		replace(t, in(d, testID(2)), testID(1))
		replace(t, in(d, "."+testID(3)), out)
		w := wantIDs(t, d)
		check.That(t, len(w) == 2, "warnings: %v", w)
		_, err := d.Find(testID(1))
		wantCode(t, "find", err, "state")
		_, err = d.Create(testID(1), "")
		wantCode(t, "create in its place", err, "state")
		_, err = d.Create(testID(3), "")
		wantCode(t, "create through it", err, "state")
		w = d.Sweep()
		check.That(t, w == nil, "%v", w)
		wantFiles(t, d, "lock")
		unchanged()
	})
	t.Run("sandbox that was there", func(t *testing.T) {
		d := opened(t)
		o := written(t, d, 1, "")
		e := found(t, d, testID(1))
		must(t, os.Rename(in(d, testID(1)), in(d, "moved")))
		must(t, os.Symlink(out, in(d, testID(1))))
		must(t, writeFile(o, "env", nil)) // by its descriptor
		wantCode(t, "kill", e.WriteKill(Kill{}), "state")
		_, err := e.OpenFile("env")
		wantCode(t, "read", err, "state")
		_, err = e.HoldActivity()
		wantCode(t, "activity", err, "state")
		wantCode(t, "refresh", e.Refresh(), "state")
		wantCode(t, "remove", e.Remove(), "state")
		_ = o.Remove() // may fail
		unchanged()
	})
	t.Run("lock", func(t *testing.T) {
		d := opened(t)
		replace(t, in(d, lockName), filepath.Join(out, "victim"))
		_, err := d.Create(testID(1), "")
		wantCode(t, "create", err, "state")
		wantFiles(t, d, "lock")
		unchanged()
	})
	t.Run("names", func(t *testing.T) {
		d := opened(t)
		replace(t, in(d, namesName), out)
		_, err := d.Create(testID(1), "web")
		wantCode(t, "create", err, "state")
		wantFiles(t, d, "lock", "names")
		o := written(t, d, 2, "")
		o.Name = "web"
		wantCode(t, "close", o.Close(), "state")
		_, err = d.Find("web")
		wantCode(t, "find", err, "no-such-sandbox")
		_ = d.Sweep()
		unchanged()
	})
	t.Run("name", func(t *testing.T) {
		d := opened(t)
		o := written(t, d, 1, "web")
		replace(t, in(d, "names/web"), filepath.Join(out, "victim"))
		if e := found(t, d, "web"); e.ID != testID(1) { // by its record
			t.Errorf("%+v", e)
		}
		replace(t, in(d, "names/other"), testID(1)) // not its name
		_, err := d.Find("other")
		wantCode(t, "find", err, "no-such-sandbox")
		must(t, o.Close())
		w := d.Sweep()
		check.That(t, w == nil, "%v", w)
		wantFiles(t, d, testID(1), testID(1)+"/activity", testID(1)+"/lock", testID(1)+"/record.json", "lock", "names")
		unchanged()
	})
}

// Kinds of files that would block a reader, or that are foreign.
func TestOtherKinds(t *testing.T) {
	for name, plant := range map[string]func(path string) error{
		"pipe":      func(path string) error { return unix.Mkfifo(path, 0o600) },
		"directory": func(path string) error { return os.Mkdir(path, 0o700) },
		"socket":    func(path string) error { return unix.Mknod(path, unix.S_IFSOCK|0o600, 0) },
	} {
		d := opened(t)
		path := filepath.Join(d.Path(), testID(1))
		o := written(t, d, 1, "web")
		for _, file := range []string{recordName, killName, "env"} {
			must(t, os.RemoveAll(filepath.Join(path, file)))
			must(t, plant(filepath.Join(path, file)))
		}
		_, err := o.ReadKill()
		wantCode(t, name, err, "state")
		_, err = d.Find(testID(1))
		wantCode(t, name, err, "state")
		_, err = o.OpenFile("env", os.O_WRONLY|os.O_CREATE)
		wantCode(t, name, err, "state")
		w := wantIDs(t, d)
		check.That(t, len(w) == 1, "%s: warnings %v", name, w)
		must(t, o.Close())
		if name == "directory" {
			// A foreign directory may contain data.
			w := d.Sweep()
			check.That(t, len(w) == 1, "%s: warnings %v", name, w)
			must(t, os.Remove(filepath.Join(path, "env")))
			must(t, os.Remove(filepath.Join(path, killName)))
			must(t, os.Remove(filepath.Join(path, recordName)))
		}
		w = d.Sweep()
		check.That(t, w == nil, "%s: %v", name, w)
		wantFiles(t, d, "lock", "names")
	}
}

// Sweep removes incomplete and half-removed sandboxes, and none that is alive or has a record.
func TestSweep(t *testing.T) {
	d := opened(t)
	in := func(name string) string { return filepath.Join(d.Path(), name) }
	written(t, d, 1, "alive")
	created(t, d, 2, "young")
	must(t, written(t, d, 3, "ended").Close())
	must(t, created(t, d, 4, "interrupted").Close())
	broken := written(t, d, 5, "broken")
	must(t, os.Truncate(in(testID(5)+"/"+recordName), 10))
	must(t, broken.Close())
	living := written(t, d, 6, "broken-alive")
	must(t, os.Truncate(in(testID(6)+"/"+recordName), 10))
	must(t, os.Mkdir(in("."+testID(7)), 0o700))
	must(t, os.Mkdir(in("."+testID(8)), 0o700))
	must(t, os.WriteFile(in("."+testID(8)+"/"+lockName), nil, 0o600))
	must(t, os.Mkdir(in(testID(9)), 0o700))
	must(t, os.WriteFile(in(testID(10)), nil, 0o600))
	// Foreign files.
	for _, name := range []string{".x", ".hidden", "x", "0123", ".0123456789abcde", "0123456789ABCDEF"} {
		must(t, os.WriteFile(in(name), nil, 0o600))
	}
	must(t, os.Symlink(testID(5), in("names/stale")))
	w := d.Sweep()
	check.That(t, w == nil, "%v", w)
	w = wantIDs(t, d, 1, 3)
	check.That(t, len(w) == 1, "warnings: %v", w)
	must(t, living.Remove())
	for _, name := range []string{".x", ".hidden", "x", "0123", ".0123456789abcde", "0123456789ABCDEF"} {
		must(t, os.Remove(in(name)))
	}
	wantFiles(t, d, testID(1), testID(1)+"/activity", testID(1)+"/lock", testID(1)+"/record.json",
		testID(2), testID(2)+"/activity", testID(2)+"/lock",
		testID(3), testID(3)+"/activity", testID(3)+"/lock", testID(3)+"/record.json", "lock", "names", "names/alive", "names/young")
}

// Concurrent creation, listing, removal and sweeping do not disturb each other.
func TestSweepWhileCreating(t *testing.T) {
	d := opened(t)
	done := make(chan bool)
	go func() {
		defer close(done)
		for i := range 40 {
			o, err := d.Create(testID(i), "web")
			if err != nil {
				t.Error(err)
				return
			}
			check.OK(t, o.Write(record("2026", Running)))
			e, err := d.Find("web")
			if err != nil || !e.Alive {
				t.Errorf("%+v, %v", e, err)
				return
			}
			if i%2 == 0 {
				err = o.Remove()
			} else if err = o.Close(); err == nil {
				err = e.Remove()
			}
			check.That(t, err == nil, "%v", err)
		}
	}()
	for {
		select {
		case <-done:
			wantFiles(t, d, "lock", "names")
			return
		default:
			w := d.Sweep()
			check.That(t, w == nil, "%v", w)
			entries, w := d.List()
			check.That(t, w == nil && len(entries) <= 1, "%v, %v", entries, w)
		}
	}
}

// Remove leaves a directory in a sandbox's directory alone and names everything that stays.
func TestRemoveWithDirectories(t *testing.T) {
	d := opened(t)
	must(t, written(t, d, 1, "web").Close())
	path := filepath.Join(d.Path(), testID(1))
	for _, name := range []string{path + "/first", path + "/second"} {
		must(t, os.Mkdir(name, 0o700))
		must(t, os.WriteFile(name+"/x", nil, 0o600))
	}
	e := found(t, d, "web")
	err := e.Remove()
	wantCode(t, "remove", err, "state")
	for _, want := range []string{"/first: ", "/second: "} {
		check.That(t, err != nil && strings.Contains(err.Error(), want) && !strings.Contains(err.Error(), "\n"), "no %q in %v", want, err)
	}
	must(t, e.Refresh()) // it is still there, and still known
	must(t, os.RemoveAll(path+"/first"))
	must(t, os.RemoveAll(path+"/second"))
	must(t, e.Remove())
	wantFiles(t, d, "lock", "names")
}
