package state

import (
	"errors"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/safeopen"
)

// Execs opens the records of the detached execs in a sandbox. If there never was one, the
// directory is empty, as with [Look].
func (e *Entry) Execs() (*Dir, error) {
	d := &Dir{root: safeopen.Folder{FD: -1, Path: filepath.Join(e.dir.root.Path, e.ID, execsName)}, clock: e.dir.clock, sandbox: e}
	err := e.in(func(f safeopen.Folder) error {
		root, err := f.Sub(execsName)
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

// keptExecs is the number of ended execs whose records and logs a sandbox keeps.
const keptExecs = 32

// MakeExecs is like Execs but creates the directory, for a new exec.
func (e *Entry) MakeExecs() (*Dir, error) {
	err := e.in(func(f safeopen.Folder) error {
		execs, err := f.Make(execsName)
		execs.Close()
		return err
	})
	if err != nil {
		return nil, err
	}
	return e.Execs()
}

// Forget removes the oldest ended execs and keeps the newest keptExecs of them.
func (d *Dir) Forget() (err error) {
	entries, _ := d.List()
	ended := slices.DeleteFunc(entries, func(e *Entry) bool { return e.Alive })
	for _, old := range ended[:max(0, len(ended)-keptExecs)] {
		err = result.All(err, old.Remove())
	}
	return err
}

// awaitExecs waits a moment for the supervisors of execs in a sandbox that has ended to record that end.
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
