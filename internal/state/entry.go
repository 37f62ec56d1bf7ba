package state

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// Entry is a sandbox as others than its supervisor see it, when they last looked.
// It holds no descriptor, but needs that of its [Dir].
type Entry struct {
	ID     string
	Record Record
	// Alive says that the supervisor lives. Once it does not, nothing of the entry
	// changes any more.
	Alive bool

	dir *Dir
}

// errUnrecorded says that there is no such sandbox, or no record of it: not yet,
// or no more, or its supervisor was killed before the first.
var errUnrecorded = errors.New("no record")

// load reads one sandbox.
func (d *Dir) load(id string) (e *Entry, err error) {
	defer func() {
		if errors.Is(err, unix.ENOENT) {
			err = errUnrecorded
		}
	}()
	f, err := d.root.sub(id)
	if err != nil {
		return nil, err
	}
	defer f.close()
	// First who lives, then the record: the last record is written before the lock
	// is given up, so that of the dead is the final one.
	alive, err := f.alive()
	if err != nil {
		return nil, err
	}
	data, err := f.read(recordName)
	if err != nil {
		return nil, err
	}
	r, err := ParseRecord(data)
	if err == nil && r.ID != id {
		err = damage("id " + r.ID)
	}
	if err != nil {
		return nil, f.fail("read", recordName, err)
	}
	return &Entry{ID: id, Record: r, Alive: alive, dir: d}, nil
}

// alive asks whether the supervisor holds the lock. An error is neither yes nor no.
func (f folder) alive() (bool, error) {
	fd, err := f.open(lockName, unix.O_RDONLY)
	if errors.Is(err, unix.ENOENT) || isDamaged(err) {
		return false, nil // nobody can hold what is not there
	}
	if err != nil {
		return false, err
	}
	defer unix.Close(fd)
	held, err := locked(fd)
	if err != nil {
		return false, f.fail("lock", lockName, err)
	}
	return held, nil
}

func (d *Dir) alive(id string) (bool, error) {
	f, err := d.root.sub(id)
	if errors.Is(err, unix.ENOENT) || isDamaged(err) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer f.close()
	return f.alive()
}

// Status is one word for lists: starting, running, how it ended
// ([result.Status]), or "lost" if the supervisor died before it could tell.
func (e *Entry) Status() string {
	switch {
	case e.Record.Report != nil:
		return string(e.Record.Report.Status)
	case e.Alive:
		return string(e.Record.Phase)
	}
	return "lost"
}

// Refresh looks again. On an error the entry stays as it was.
func (e *Entry) Refresh() error {
	now, err := e.dir.load(e.ID)
	if err == errUnrecorded {
		return unknown(e.ID)
	}
	if err != nil {
		return failed(err)
	}
	*e = *now
	return nil
}

// in runs f with the sandbox's directory.
func (e *Entry) in(f func(folder) error) error {
	sub, err := e.dir.root.sub(e.ID)
	if errors.Is(err, unix.ENOENT) {
		return unknown(e.ID)
	}
	if err != nil {
		return failed(err)
	}
	defer sub.close()
	return failed(f(sub))
}

// OpenFile opens one of the sandbox's files for reading. The caller closes it.
func (e *Entry) OpenFile(name string) (file *os.File, err error) {
	err = e.in(func(f folder) (err error) {
		file, err = f.openFile(name, os.O_RDONLY)
		return err
	})
	return file, err
}

// ReadFile reads one of the sandbox's files, of up to 4 MiB.
func (e *Entry) ReadFile(name string) (data []byte, err error) {
	err = e.in(func(f folder) (err error) {
		data, err = f.read(name)
		return err
	})
	return data, err
}

// Ending says whether the supervisor has begun to end the sandbox, with all that is
// in it. No if that cannot be told.
func (e *Entry) Ending() bool {
	err := e.in(func(f folder) error {
		fd, err := f.open(endingName, unix.O_RDONLY)
		if err == nil {
			_ = unix.Close(fd)
		}
		return err
	})
	return err == nil
}

// WriteKill leaves a request to the supervisor, in place of an earlier one.
func (e *Entry) WriteKill(k Kill) error {
	if err := k.check(); err != nil {
		return failed(err)
	}
	data, err := marshal(&k)
	if err != nil {
		return failed(err)
	}
	return e.in(func(f folder) error { return f.write(killName, data) })
}
