package state

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
)

// Claim is a supervisor's hold on the record of its sandbox: the sandbox counts as alive
// until Close or Remove, or until the supervisor dies.
type Claim struct {
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
func (d *Dir) Create(id, name string) (*Claim, error) {
	if !ValidID(id) {
		return nil, failed(damage("id of a sandbox: " + strconv.Quote(id)))
	}
	if name != "" {
		if err := ValidName(name); err != nil {
			return nil, err
		}
	}
	o := &Claim{ID: id, Name: name, dir: d, folder: folder{fd: -1}, lock: -1, activity: -1}
	if err := d.alone(o.create); err != nil {
		return nil, failed(err)
	}
	return o, nil
}

func (o *Claim) create() (err error) {
	root, hidden := o.dir.root, "."+o.ID
	if err := unix.Mkdirat(root.fd, hidden, 0o700); err != nil {
		return root.fail("mkdir", hidden, err)
	}
	defer func() {
		if err != nil {
			err = result.All(err, o.dir.release(o.Name, o.ID), root.rmdir(hidden, o.folder)) // see also Sweep
			o.giveUp()
		}
	}()
	if o.folder, err = root.sub(hidden); err != nil {
		return err
	}
	const flags = unix.O_RDWR | unix.O_CREAT | unix.O_EXCL
	if o.lock, err = o.folder.lock(lockName, flags, unix.F_WRLCK, 0); err != nil {
		return err
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

// giveUp closes what is open, the lock last.
func (o *Claim) giveUp() {
	for _, fd := range []*int{&o.activity, &o.folder.fd, &o.lock} {
		if *fd >= 0 {
			_ = unix.Close(*fd) // nothing was written through it
		}
		*fd = -1
	}
}

// Write publishes the record, whose Version, ID, Sandbox and Name are set here.
func (o *Claim) Write(r Record) error {
	r = o.complete(r)
	return failed(o.folder.writeJSON(recordName, &r))
}

func (o *Claim) complete(r Record) Record {
	r.Version, r.ID, r.Name = recordVersion, o.ID, o.Name
	if o.dir.box != nil {
		r.Sandbox = o.dir.box.ID
	}
	return r
}

// OpenFile opens a private file of the sandbox, such as a log; flags are those of
// [os.OpenFile]. The caller closes it.
func (o *Claim) OpenFile(name string, flags int) (*os.File, error) {
	file, err := o.folder.openFile(name, flags)
	return file, failed(err)
}

// ReadKill reads the request that [Entry.WriteKill] has left; nil if there is none.
func (o *Claim) ReadKill() (*Kill, error) {
	k := new(Kill)
	err := o.folder.readJSON(killName, k)
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, failed(err)
	}
	return k, nil
}

// WriteAccess writes down how the sandbox can be entered, for [Claim.GrantAccess]: so
// what a full disk refuses is refused before the payload runs.
func (o *Claim) WriteAccess(a Access) error {
	return failed(o.folder.write(heldAccessName, []byte(a.text())))
}

// GrantAccess makes the sandbox one that can be entered. It takes no space.
func (o *Claim) GrantAccess() error { return failed(o.folder.rename(heldAccessName, accessName)) }

// DropAccess ends that, and with it what the variables hold, granted or not yet.
func (o *Claim) DropAccess() error {
	return failed(result.All(o.folder.unlink(heldAccessName), o.folder.unlink(accessName)))
}

// MarkEnding tells that the sandbox is about to end, before anything in it is
// signalled: an exec that dies of that signal has ended with its sandbox.
func (o *Claim) MarkEnding() error { return failed(o.folder.write(endingName, nil)) }

// Close frees the name and gives up the lock: to others the sandbox has ended now.
// The record stays.
func (o *Claim) Close() error { return o.end(func() error { return nil }) }

// Leave is Remove for a record that nobody is to clean up. Its last state is for those who
// wait ([Entry.Hold]): it is in the file of the lock, which they have open, and which has no
// use for its bytes.
func (o *Claim) Leave(last Record) error {
	data, err := json.Marshal(o.complete(last))
	if err == nil {
		_, err = unix.Pwrite(o.lock, data, 0)
	}
	return result.All(failed(err), o.Remove())
}

// Remove is Close that leaves nothing, for a start that has failed. Before there are execs
// it opens no more descriptors than it has closed before.
func (o *Claim) Remove() error {
	(&Entry{ID: o.ID, dir: o.dir}).awaitExecs()
	return o.end(func() error { return o.dir.remove(o.ID, o.folder) })
}

func (o *Claim) end(remove func() error) error {
	if o.lock < 0 {
		return nil // already
	}
	_ = unix.Close(o.activity) // makes room for the directory of names
	o.activity = -1
	err := result.All(o.dir.release(o.Name, o.ID), remove())
	o.giveUp()
	return failed(err)
}

// claim gives the name to the sandbox id, unless it belongs to one that lives.
// The caller is alone.
func (d *Dir) claim(name, id string) error {
	if err := unix.Mkdirat(d.root.fd, namesName, 0o700); err != nil && err != unix.EEXIST {
		return d.root.fail("mkdir", namesName, err)
	}
	names, err := d.names()
	if err != nil {
		return err
	}
	defer names.close()
	// Once more after what was in the way is gone. Nobody else puts anything there.
	for range 2 {
		if err = unix.Symlinkat(id, names.fd, name); err != unix.EEXIST {
			break
		}
		other, err := owner(names, name)
		if errors.Is(err, unix.ENOENT) {
			continue // just freed by its owner, who need not be alone for that
		}
		if err != nil {
			return err
		}
		alive, err := d.alive(other)
		if err != nil {
			return err
		}
		if alive {
			return &result.Error{Code: "name-in-use", Message: fmt.Sprintf("the name %q belongs to the sandbox %s, which is alive", name, other),
				Hint: "choose another one, or end that sandbox first"}
		}
		if err := names.unlink(name); err != nil {
			return err
		}
	}
	if err != nil {
		return names.fail("symlink", name, err)
	}
	return nil
}

// release frees the name if it still is id's. The caller is the living id, from
// whom nobody takes it, or alone.
func (d *Dir) release(name, id string) error {
	if name == "" {
		return nil
	}
	names, err := d.names()
	if err == nil {
		defer names.close()
		var other string
		if other, err = owner(names, name); err == nil && other == id {
			err = names.unlink(name)
		}
	}
	if errors.Is(err, unix.ENOENT) {
		return nil // there is no such name
	}
	return err
}

// EndIfIdle returns how long to wait before asking again: not before then can the
// sandbox have been out of use for the timeout, which counts from when it was made
// and from the end of each use. 0 means that the sandbox is idle and that no use can
// begin any more: [Entry.HoldActivity] fails from now on.
func (o *Claim) EndIfIdle(timeout time.Duration) (wait time.Duration, err error) {
	now := o.dir.clock()
	// For the moment until it is given up again, HoldActivity has patience.
	switch err := proc.TryLock(o.activity, unix.F_WRLCK); {
	case errors.Is(err, unix.EAGAIN):
		// In use. Whenever that ends, the time is not up before it has passed from now.
		o.busy, o.busyAt = true, now
		return timeout, nil
	case err != nil:
		return 0, failed(o.folder.fail("lock", activityName, err))
	}
	last, err := touched(o.activity)
	if err == nil && o.busy && last <= o.busyAt {
		// The user that was seen at busyAt has not set the time of its end: it was
		// killed, perhaps just now.
		last, o.busy = now, false
		err = touch(o.activity, now)
	}
	wait = last + timeout - now
	if err == nil && wait <= 0 {
		return 0, nil // the lock is kept
	}
	if err := result.All(err, proc.TryLock(o.activity, unix.F_UNLCK)); err != nil {
		return 0, failed(o.folder.fail("ask", activityName, err))
	}
	return wait, nil
}

// EndUse lets no use begin any more, if there is none: [Entry.HoldActivity] fails from
// now on.
func (o *Claim) EndUse() bool { return proc.TryLock(o.activity, unix.F_WRLCK) == nil }

// touch sets the file's modification time to now, a time of the directory's clock.
// (utimensat(2) takes AT_EMPTY_PATH since Linux 5.8.)
func touch(fd int, now time.Duration) error {
	t := unix.NsecToTimespec(int64(now))
	return unix.UtimesNanoAt(fd, "", []unix.Timespec{t, t}, unix.AT_EMPTY_PATH)
}

// touched returns the time that touch has set.
func touched(fd int) (time.Duration, error) {
	var st unix.Stat_t
	err := unix.Fstat(fd, &st)
	return time.Duration(st.Mtim.Nano()), err
}

// monotonic returns CLOCK_MONOTONIC, the clock of every [Dir] but in tests: an
// administrator or NTP may set the wall clock, and no sandbox may end for that. It
// begins with the machine's boot, so it may be 0 or close to it.
func monotonic() time.Duration {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &t) // cannot fail: the clock exists
	return time.Duration(t.Nano())
}
