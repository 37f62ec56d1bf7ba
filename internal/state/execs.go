package state

import (
	"errors"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

// Execs opens the records of the detached execs in a sandbox. Where there never was one
// that is a directory without any, as of [Look].
func (e *Entry) Execs() (*Dir, error) {
	d := &Dir{root: folder{-1, filepath.Join(e.dir.root.path, e.ID, execsName)}, clock: e.dir.clock, box: e}
	err := e.in(func(f folder) error {
		root, err := f.sub(execsName)
		if err == nil {
			d.root = root
		}
		if errors.Is(err, unix.ENOENT) {
			return nil
		}
		return err
	})
	return d, err
}

// keptExecs is how many execs that have ended a sandbox has on record. Each may have
// two logs.
const keptExecs = 32

// MakeExecs is Execs for a new one: there is a directory.
func (e *Entry) MakeExecs() (*Dir, error) {
	err := e.in(func(f folder) error {
		if err := unix.Mkdirat(f.fd, execsName, 0o700); err != nil && err != unix.EEXIST {
			return f.fail("mkdir", execsName, err)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return e.Execs()
}

// Forget removes the oldest of the execs that have ended, but for those that are kept.
func (d *Dir) Forget() (err error) {
	entries, _ := d.List()
	ended := slices.DeleteFunc(entries, func(e *Entry) bool { return e.Alive })
	for _, old := range ended[:max(0, len(ended)-keptExecs)] {
		err = result.All(err, old.Remove())
	}
	return err
}

// awaitExecs gives those who supervise an exec in a sandbox that has ended a moment to say
// so. The execs themselves have ended with it.
func (e *Entry) awaitExecs() {
	const moment, look = time.Second, 2 * time.Millisecond
	execs, err := e.Execs()
	if err != nil {
		return
	}
	defer execs.Close()
	for end := time.Now().Add(moment); time.Now().Before(end); time.Sleep(look) {
		entries, _ := execs.List()
		if !slices.ContainsFunc(entries, func(e *Entry) bool { return e.Alive }) {
			return
		}
	}
}
