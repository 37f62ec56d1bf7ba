package state

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// attempt creates a sandbox with its record and access file, or undoes that.
func attempt(path string) (d *Dir, o *Claim, err error) {
	if d, err = Open(Caller{StateDir: path, UID: os.Geteuid()}); err != nil {
		return nil, nil, err
	}
	if o, err = d.Create(testID(1), "web"); err != nil {
		return d, nil, err
	}
	if err = o.Write(record("1", Starting)); err == nil {
		err = writeFile(o, "env", make([]byte, 5000))
	}
	if err != nil {
		if rerr := o.Remove(); rerr != nil {
			err = fmt.Errorf("%w; and then: %w", err, rerr)
		}
		return d, nil, err
	}
	return d, o, nil
}

// wantNothing checks that a sandbox has left no files.
func wantNothing(t *testing.T, path string) {
	t.Helper()
	_ = filepath.WalkDir(path, func(p string, _ os.DirEntry, err error) error {
		check.That(t, p == path || p == path+"/lock" || p == path+"/names", "left: %s, %v", p, err)
		return nil
	})
}

// Wherever descriptors run out, the error is clear and nothing is left behind.
func TestNoDescriptors(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // which would close files of earlier tests
	path := filepath.Join(t.TempDir(), "state")
	restore := func() {}
	free := func(n int) {
		restore()
		lowest, err := unix.Dup(0)
		must(t, err)
		unix.Close(lowest)
		restore = harness.LimitDescriptors(t, lowest+n)
	}
	defer func() { restore() }()
	for n := 0; ; n++ {
		free(n)
		d, o, err := attempt(path)
		restore()
		if err == nil {
			check.That(t, n >= 5, "%d descriptors were enough", n)
			// Readers need descriptors too. A sandbox does not look dead if there are none.
			free(0)
			entries, w := d.List()
			check.That(t, len(entries) == 0 && len(w) == 1, "%v, %v", entries, w)
			free(2)
			entries, w = d.List()
			check.That(t, len(entries) == 0 && len(w) == 1, "%v, %v", entries, w)
			for m := range 3 {
				free(m)
				w := d.Sweep()
				check.That(t, len(w) == 1, "with %d descriptors, sweep: %v", m, w)
			}
			restore()
			e := found(t, d, "web")
			check.That(t, e.Alive, "not alive")
			// A failed start can be undone even if descriptors run out later.
			free(20)
			var taken []int
			for fd, err := unix.Dup(0); err == nil; fd, err = unix.Dup(0) {
				taken = append(taken, fd)
			}
			wantCode(t, "write", o.Write(record("2", Running)), "state")
			err := o.Remove()
			for _, fd := range taken {
				unix.Close(fd)
			}
			must(t, err)
			wantNothing(t, path)
			return
		}
		wantCode(t, fmt.Sprintf("%d descriptors", n), err, "state")
		check.That(t, errors.Is(err, unix.EMFILE), "%d descriptors: %v", n, err)
		wantNothing(t, path)
		if d != nil {
			d.Close()
		}
		check.Require(t, n <= 50, "not even with 50")
	}
}

// Full and read-only file systems, and those without inodes, give clear errors. They are
// mounted in a mount namespace of the test.
func TestFullDisk(t *testing.T) {
	if os.Getenv(roleVar) != "mount" {
		c := exec.Command("unshare", "--user", "--map-root-user", "--mount", os.Args[0], "-test.run=^TestFullDisk$")
		c.Env = append(os.Environ(), roleVar+"=mount")
		out, err := c.CombinedOutput()
		check.That(t, err == nil, "in a mount namespace of its own: %v\n%s", err, out)
		return
	}
	mounted := func(options string) (path string) {
		t.Helper()
		dir := t.TempDir()
		must(t, unix.Mount("tmpfs", dir, "tmpfs", 0, options))
		t.Cleanup(func() { must(t, unix.Unmount(dir, unix.MNT_DETACH)) })
		return dir
	}
	// enough retries with increasing resources, and expects clear errors before success.
	enough := func(what string, least int, options func(n int) string) {
		for n := 1; n < 50; n++ {
			path := mounted(options(n)) + "/state"
			_, _, err := attempt(path)
			if err == nil {
				check.That(t, n >= least, "%d %s were enough", n, what)
				return
			}
			wantCode(t, fmt.Sprintf("%d %s", n, what), err, "state")
			check.That(t, errors.Is(err, unix.ENOSPC), "%d %s: %v", n, what, err)
			wantNothing(t, path)
		}
		t.Errorf("not even 50 %s are enough", what)
	}
	enough("inodes", 9, func(n int) string { return fmt.Sprintf("mode=700,nr_inodes=%d", n) })
	enough("pages", 3, func(n int) string { return fmt.Sprintf("mode=700,size=%dk", 4*n) })

	// If the disk gets full later, the record stays, and cleanup works.
	dir := mounted("mode=700,size=64k")
	d, o, err := attempt(dir + "/state")
	must(t, err)
	err = os.WriteFile(dir+"/filler", make([]byte, 1<<20), 0o600)
	check.Require(t, errors.Is(err, unix.ENOSPC), "%v", err)
	r := record("2", Running)
	err = o.Write(r)
	wantCode(t, "write", err, "state")
	e := found(t, d, "web")
	check.That(t, e.Record.CreatedAt == "1" && e.Status() == "starting", "%+v", e)
	err = found(t, d, "web").WriteKill(Kill{Signal: "TERM"})
	wantCode(t, "kill", err, "state")
	must(t, o.Close())
	must(t, found(t, d, "web").Remove())
	wantNothing(t, d.Path())

	// On a read-only file system, sandboxes can be listed but not started.
	o = written(t, d, 2, "")
	frozen := mounted("mode=700")
	must(t, unix.Mount(dir, frozen, "", unix.MS_BIND, ""))
	defer func() { must(t, unix.Unmount(frozen, unix.MNT_DETACH)) }()
	must(t, unix.Mount("", frozen, "", unix.MS_REMOUNT|unix.MS_RDONLY|unix.MS_BIND, ""))
	caller := Caller{StateDir: frozen + "/state", UID: os.Geteuid()}
	for name, open := range map[string]func(Caller) (*Dir, error){"Open": Open, "Look": Look} {
		d, err := open(caller)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		e := found(t, d, testID(2))
		check.That(t, e.Alive, "%s: not alive", name)
		_, err = d.Create(testID(3), "web")
		wantCode(t, name+" and create", err, "state")
		check.That(t, errors.Is(err, unix.EROFS), "%v", err)
		d.Close()
	}
	caller.StateDir += "2"
	_, err = Open(caller)
	wantCode(t, "read-only parent", err, "state")
	check.That(t, errors.Is(err, unix.EROFS), "%v", err)
	o.giveUp()
}
