package state

import (
	"errors"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

// EndIfIdle returns how long to wait before asking again: not before then can the
// sandbox have been out of use for the timeout, which counts from when it was made
// and from the end of each use. 0 means that the sandbox is idle and that no use can
// begin any more: [Entry.HoldActivity] fails from now on.
func (o *Own) EndIfIdle(timeout time.Duration) (wait time.Duration, err error) {
	now := o.dir.clock()
	// For the moment until it is given up again, HoldActivity has patience.
	switch err := tryLock(o.activity, unix.F_WRLCK); {
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
	if err := result.All(err, tryLock(o.activity, unix.F_UNLCK)); err != nil {
		return 0, failed(o.folder.fail("ask", activityName, err))
	}
	return wait, nil
}

// EndUse lets no use begin any more, if there is none: [Entry.HoldActivity] fails from
// now on.
func (o *Own) EndUse() bool { return tryLock(o.activity, unix.F_WRLCK) == nil }

// lookPatience is for how long the supervisor may hold the activity while it looks
// whether the sandbox is idle; longer than that, and it is to end.
const lookPatience = 500 * time.Millisecond

// HoldActivity marks the sandbox as used, until release is called or the process
// ends. If its idle timeout has passed, the error's code is "ending".
func (e *Entry) HoldActivity() (release func(), err error) {
	fd := -1
	err = e.in(func(f folder) (err error) {
		if fd, err = f.open(activityName, unix.O_RDONLY); err != nil {
			return err
		}
		err = lock(fd, unix.F_RDLCK, lookPatience)
		if err == nil {
			err = touch(fd, e.dir.clock()) // one that is killed will not say when it ended
			if err == unix.EROFS {
				err = nil // by then nobody writes down anything
			}
		}
		if errors.Is(err, unix.EAGAIN) {
			err = &result.Error{Code: "ending", Message: "the sandbox " + e.ID + " is about to end", Hint: "start it anew"}
		} else if err != nil {
			err = f.fail("lock", activityName, err)
		}
		if err != nil {
			_ = unix.Close(fd)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return func() {
		if fd < 0 {
			return
		}
		_ = touch(fd, e.dir.clock()) // before the lock is free; should it fail, it counts as killed
		_ = unix.Close(fd)
		fd = -1
	}, nil
}

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
