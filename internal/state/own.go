package state

import (
	"errors"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

// The files of the package itself; see the package comment.
const (
	lockName     = "lock"
	namesName    = "names"
	activityName = "activity"
	recordName   = "record.json"
	killName     = "kill.json"
	accessName   = "access"
	endingName   = "ending"
)

// Own is a sandbox as its supervisor has it: alive until Close or Remove, or
// until the supervisor dies.
type Own struct {
	ID, Name string

	dir      *Dir
	folder   folder
	lock     int // held
	activity int // open

	// EndIfIdle has seen the sandbox in use, last at busyAt, and not its end.
	busy   bool
	busyAt time.Duration
}

// Create makes the directory of a sandbox that lives from now on. The name may be
// empty; if a living sandbox has it, the error's code is "name-in-use". After an
// error nothing is left. Others see the sandbox once its first record is written.
func (d *Dir) Create(id, name string) (*Own, error) {
	if !validID(id) {
		return nil, failed(damage("id of a sandbox: " + strconv.Quote(id)))
	}
	if name != "" && !validName(name) {
		return nil, ValidName(name)
	}
	o := &Own{ID: id, Name: name, dir: d, folder: folder{fd: -1}, lock: -1, activity: -1}
	if err := d.alone(o.create); err != nil {
		return nil, failed(err)
	}
	return o, nil
}

func (o *Own) create() (err error) {
	root, hidden := o.dir.root, "."+o.ID
	if err := unix.Mkdirat(root.fd, hidden, 0o700); err != nil {
		return root.fail("mkdir", hidden, err)
	}
	defer func() {
		if err != nil {
			err = result.All(err, o.dir.release(o.Name, o.ID), o.unmake(hidden)) // see also Sweep
			o.giveUp()
		}
	}()
	if o.folder, err = root.sub(hidden); err != nil {
		return err
	}
	const flags = unix.O_RDWR | unix.O_CREAT | unix.O_EXCL
	if o.lock, err = o.folder.open(lockName, flags); err != nil {
		return err
	}
	if err := tryLock(o.lock, unix.F_WRLCK); err != nil {
		return o.folder.fail("lock", lockName, err)
	}
	if o.activity, err = o.folder.open(activityName, flags); err != nil {
		return err
	}
	if err := touch(o.activity, o.dir.clock()); err != nil {
		return o.folder.fail("touch", activityName, err)
	}
	if o.Name != "" {
		if err := o.dir.claim(o.Name, o.ID); err != nil {
			return err
		}
	}
	if err := root.rename(hidden, o.ID); err != nil {
		return err
	}
	o.folder.path = root.path + "/" + o.ID
	return nil
}

// unmake removes a directory that was just made.
func (o *Own) unmake(hidden string) error {
	if o.folder.fd >= 0 {
		if err := o.folder.clear(); err != nil {
			return err // so it is not empty
		}
	}
	return o.dir.root.rmdir(hidden)
}

// giveUp closes what is open, the lock last.
func (o *Own) giveUp() {
	for _, fd := range []*int{&o.activity, &o.folder.fd, &o.lock} {
		if *fd >= 0 {
			_ = unix.Close(*fd) // nothing was written through it
		}
		*fd = -1
	}
}

// Write publishes the record, whose Version, ID and Name are set here.
func (o *Own) Write(r Record) error {
	r.Version, r.ID, r.Name = RecordVersion, o.ID, o.Name
	if err := r.check(); err != nil {
		return failed(err) // it could not be read either
	}
	data, err := marshal(&r)
	if err == nil {
		err = o.folder.write(recordName, data)
	}
	return failed(err)
}

// WriteFile makes or replaces a private file of the sandbox, at once.
func (o *Own) WriteFile(name string, data []byte) error { return failed(o.folder.write(name, data)) }

// OpenFile opens a private file of the sandbox, such as a log; flags are those of
// [os.OpenFile]. The caller closes it.
func (o *Own) OpenFile(name string, flags int) (*os.File, error) {
	file, err := o.folder.openFile(name, flags)
	return file, failed(err)
}

// ReadKill reads the request that [Entry.WriteKill] has left; nil if there is none.
func (o *Own) ReadKill() (*Kill, error) {
	data, err := o.folder.read(killName)
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, failed(err)
	}
	k, err := parseKill(data)
	if err != nil {
		return nil, failed(o.folder.fail("read", killName, err))
	}
	return &k, nil
}

// MarkEnding tells that the sandbox is about to end, before anything in it is
// signalled: an exec that dies of that signal has ended with its sandbox.
func (o *Own) MarkEnding() error { return o.WriteFile(endingName, nil) }

// Close frees the name and gives up the lock: to others the sandbox has ended now.
// The record stays.
func (o *Own) Close() error { return o.end(func() error { return nil }) }

// Remove is Close that leaves nothing, for a start that has failed. It opens no
// more descriptors than it has closed before.
func (o *Own) Remove() error {
	return o.end(func() error { return o.dir.remove(o.ID, o.folder) })
}

func (o *Own) end(remove func() error) error {
	if o.lock < 0 {
		return nil // already
	}
	_ = unix.Close(o.activity) // makes room for the directory of names
	o.activity = -1
	err := result.All(o.dir.release(o.Name, o.ID), remove())
	o.giveUp()
	return failed(err)
}
