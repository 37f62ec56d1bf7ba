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
	"github.com/sbxrun/sbxrun/internal/safeopen"
)

// Claim is a supervisor's hold on the record of its sandbox: the sandbox is alive until
// Close or Remove, or until the supervisor dies.
type Claim struct {
	ID, Name string

	dir      *Dir
	folder   safeopen.Folder
	lock     int // descriptor; locked
	activity int // descriptor

	// EndIfIdle found the sandbox in use, last at busyAt, and has not seen the end of the use.
	busy   bool
	busyAt time.Duration
}

// Create makes the directory of a new sandbox, which is alive from now on. The name may be
// empty. If a living sandbox has the name, the error's code is "name-in-use". After an
// error nothing is left behind. Others see the sandbox once its first record is written.
func (d *Dir) Create(id, name string) (*Claim, error) {
	if !ValidID(id) {
		return nil, Failed(safeopen.Damage("sandbox ID " + strconv.Quote(id)))
	}
	if name != "" {
		if err := ValidName(name); err != nil {
			return nil, err
		}
	}
	o := &Claim{ID: id, Name: name, dir: d, folder: safeopen.Folder{FD: -1}, lock: -1, activity: -1}
	if err := d.Alone(o.create); err != nil {
		return nil, err
	}
	return o, nil
}

func (o *Claim) create() (err error) {
	root, hidden := o.dir.root, "."+o.ID
	if err := root.Mkdir(hidden); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = result.All(err, o.dir.release(o.Name, o.ID), rmdir(root, hidden, o.folder)) // see also Sweep
			o.giveUp()
		}
	}()
	if o.folder, err = root.Sub(hidden); err != nil {
		return err
	}
	const flags = unix.O_RDWR | unix.O_CREAT | unix.O_EXCL
	if o.lock, err = o.folder.Lock(lockName, flags, unix.F_WRLCK, 0); err != nil {
		return err
	}
	if o.activity, err = o.folder.Open(activityName, flags); err != nil {
		return err
	}
	if err := touch(o.activity, o.dir.clock()); err != nil {
		return o.folder.Fail("touch", activityName, err)
	}
	if o.Name != "" {
		if err := o.dir.claim(o.Name, o.ID); err != nil {
			return err
		}
	}
	if err := root.Rename(hidden, o.ID); err != nil {
		return err
	}
	o.folder.Path = root.Path + "/" + o.ID
	return nil
}

// giveUp closes all descriptors, the lock last.
func (o *Claim) giveUp() {
	for _, fd := range []*int{&o.activity, &o.folder.FD, &o.lock} {
		if *fd >= 0 {
			_ = unix.Close(*fd) // no writes to lose
		}
		*fd = -1
	}
}

// Write publishes the record. It sets Version, ID, Sandbox and Name.
func (o *Claim) Write(r Record) error {
	r = o.complete(r)
	return Failed(writeJSON(o.folder, recordName, &r))
}

func (o *Claim) complete(r Record) Record {
	r.Version, r.ID, r.Name = recordVersion, o.ID, o.Name
	if o.dir.sandbox != nil {
		r.Sandbox = o.dir.sandbox.ID
	}
	return r
}

// OpenFile opens a private file of the sandbox, such as a log; flags are as in [os.OpenFile]. The caller closes it.
func (o *Claim) OpenFile(name string, flags int) (*os.File, error) {
	file, err := o.folder.OpenFile(name, flags)
	return file, Failed(err)
}

// ReadKill reads the request of [Entry.WriteKill]; nil without one.
func (o *Claim) ReadKill() (*Kill, error) {
	k := new(Kill)
	err := readJSON(o.folder, killName, k)
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, Failed(err)
	}
	return k, nil
}

// WriteAccess writes the access file for [Claim.GrantAccess], so that a full disk is
// reported before the command runs.
func (o *Claim) WriteAccess(init proc.Identity, room Room) error {
	return Failed(writeJSON(o.folder, heldAccessName, &Access{accessVersion, init, room}))
}

// GrantAccess lets other processes enter the sandbox. It needs no disk space.
func (o *Claim) GrantAccess() error { return Failed(o.folder.Rename(heldAccessName, accessName)) }

// DropAccess revokes the access, granted or not, and removes the variables in it.
func (o *Claim) DropAccess() error {
	return Failed(result.All(o.folder.Unlink(heldAccessName), o.folder.Unlink(accessName)))
}

// MarkEnding records that the sandbox is about to end, before anything in it is signalled.
// An exec killed by that signal then knows that it ended with its sandbox.
func (o *Claim) MarkEnding() error { return Failed(o.folder.Write(endingName, nil)) }

// Close frees the name and releases the lock: for others the sandbox has now ended. The record stays.
func (o *Claim) Close() error { return o.end(func() error { return nil }) }

// Leave is Remove for a sandbox whose record no process would clean up. It leaves the last record
// to processes that wait ([Entry.Hold]), in the lock file, which they have open.
func (o *Claim) Leave(last Record) error {
	data, err := json.Marshal(o.complete(last))
	if err == nil {
		_, err = unix.Pwrite(o.lock, data, 0)
	}
	return result.All(Failed(err), o.Remove())
}

// Remove is like Close, but also removes the directory, for a failed start. It opens no more descriptors than it has
// closed, unless there are execs.
func (o *Claim) Remove() error {
	(&Entry{ID: o.ID, dir: o.dir}).awaitExecs()
	return o.end(func() error { return o.dir.remove(o.ID, o.folder) })
}

func (o *Claim) end(remove func() error) error {
	if o.lock < 0 {
		return nil // already
	}
	_ = unix.Close(o.activity) // frees a descriptor for the directory of names
	o.activity = -1
	err := result.All(o.dir.release(o.Name, o.ID), remove())
	o.giveUp()
	return Failed(err)
}

// claim gives the name to the sandbox id, unless a living sandbox has it. The caller holds
// STATE/lock, so no one else gives the name to a sandbox in the meantime.
func (d *Dir) claim(name, id string) error {
	names, err := d.root.Make(namesName)
	if err != nil {
		return err
	}
	defer names.Close()
	other, err := owner(names, name)
	if err != nil {
		return err
	}
	alive, err := d.alive(other)
	if err != nil {
		return err
	}
	if alive {
		return &result.Error{Code: "name-in-use", Message: fmt.Sprintf("the name %q is in use by sandbox %s", name, other),
			Hint: "choose another name, or end that sandbox first"}
	}
	if err := names.Unlink(name); err != nil {
		return err
	}
	return names.Fail("symlink", name, unix.Symlinkat(id, names.FD, name))
}

// release frees the name if it still belongs to id. The caller is the supervisor of id, or holds STATE/lock.
func (d *Dir) release(name, id string) error {
	if name == "" {
		return nil
	}
	return d.inNames(func(names safeopen.Folder) error {
		if other, err := owner(names, name); err != nil || other != id {
			return err
		}
		return names.Unlink(name)
	})
}

// EndIfIdle returns how long to wait before the next call: the sandbox cannot have been idle for the timeout before
// then. Idle time counts from the creation and from the end of each use. 0 means that the sandbox is idle and that no
// further use can begin: from now on [Entry.HoldActivity] fails.
func (o *Claim) EndIfIdle(timeout time.Duration) (wait time.Duration, err error) {
	now := o.dir.clock()
	// HoldActivity waits for the moment in which this lock is held.
	switch err := proc.TryLock(o.activity, unix.F_WRLCK); {
	case errors.Is(err, unix.EAGAIN):
		// In use. The timeout begins no earlier than now.
		o.busy, o.busyAt = true, now
		return timeout, nil
	case err != nil:
		return 0, Failed(o.folder.Fail("lock", activityName, err))
	}
	last, err := touched(o.activity)
	if err == nil && o.busy && last <= o.busyAt {
		// The user seen at busyAt has not recorded the end of its use: it was killed, perhaps just now.
		last, o.busy = now, false
		err = touch(o.activity, now)
	}
	wait = last + timeout - now
	if err == nil && wait <= 0 {
		return 0, nil // the lock is kept
	}
	if err := result.All(err, proc.TryLock(o.activity, unix.F_UNLCK)); err != nil {
		return 0, Failed(o.folder.Fail("ask", activityName, err))
	}
	return wait, nil
}

// EndUse prevents further uses if nothing uses the sandbox now: from then on [Entry.HoldActivity] fails.
func (o *Claim) EndUse() bool { return proc.TryLock(o.activity, unix.F_WRLCK) == nil }

// touch sets the file's modification time to now, a time of the directory's clock.
// (utimensat(2) takes AT_EMPTY_PATH since Linux 5.8.)
func touch(fd int, now time.Duration) error {
	t := unix.NsecToTimespec(int64(now))
	return unix.UtimesNanoAt(fd, "", []unix.Timespec{t, t}, unix.AT_EMPTY_PATH)
}

// touched returns the time set by touch.
func touched(fd int) (time.Duration, error) {
	var st unix.Stat_t
	err := unix.Fstat(fd, &st)
	return time.Duration(st.Mtim.Nano()), err
}

// monotonic returns CLOCK_MONOTONIC, the clock of every [Dir] outside of tests. The wall clock may be set by an
// administrator or NTP, which must not end a sandbox. It starts at boot, so it may be close to 0.
func monotonic() time.Duration {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &t) // the clock always exists
	return time.Duration(t.Nano())
}
