package state

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
)

const ownDirHint = "set SBXRUN_STATE_DIR to a directory of your own"

// Caller is whose sandboxes are meant.
type Caller struct {
	StateDir   string // $SBXRUN_STATE_DIR
	RuntimeDir string // $XDG_RUNTIME_DIR
	UID        int    // effective user id
}

// Mine is the caller that this process is, by its environment.
func Mine() Caller {
	return Caller{StateDir: os.Getenv("SBXRUN_STATE_DIR"), RuntimeDir: os.Getenv("XDG_RUNTIME_DIR"), UID: os.Geteuid()}
}

// path is where the caller's state directory is, or is to be.
func (c Caller) path() (string, error) {
	if c.StateDir != "" {
		if !filepath.IsAbs(c.StateDir) {
			return "", &result.Error{Code: "state", Message: fmt.Sprintf("SBXRUN_STATE_DIR is %q, which is not an absolute path", c.StateDir), Hint: ownDirHint}
		}
		return filepath.Clean(c.StateDir), nil
	}
	// After sudo and su the variable may still name somebody else's. A relative
	// one is to be ignored (XDG Base Directory Specification).
	var st unix.Stat_t
	if filepath.IsAbs(c.RuntimeDir) && unix.Stat(c.RuntimeDir, &st) == nil && int(st.Uid) == c.UID && st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return filepath.Join(c.RuntimeDir, "sbxrun"), nil
	}
	if c.UID == 0 {
		return "/run/sbxrun", nil
	}
	return "/tmp/sbxrun-" + strconv.Itoa(c.UID), nil
}

// Dir is a state directory. Its methods may be called by several goroutines.
type Dir struct {
	root  folder
	clock func() time.Duration // what activity is measured with: monotonic
}

// Open opens the caller's state directory and makes it if there is none. Every
// error of this package is a [*result.Error].
func Open(c Caller) (*Dir, error) { return open(c, true) }

// Look is Open for who only looks: it makes nothing, and where there is no state
// directory there are no sandboxes.
func Look(c Caller) (*Dir, error) { return open(c, false) }

// CheckProc returns the error of a /proc whose numbers are not ours: what is on record
// would be compared with strangers, and these be signalled. Whoever uses a number of a
// process without having opened a state directory calls it before.
func CheckProc() error {
	err := proc.CheckMount()
	var mount *proc.MountError
	if errors.As(err, &mount) {
		return &result.Error{Code: "proc", Message: mount.Cause, Hint: mount.Remedy, Err: err}
	}
	return err
}

func open(c Caller, create bool) (*Dir, error) {
	if err := CheckProc(); err != nil {
		return nil, err
	}
	path, err := c.path()
	if err != nil {
		return nil, err
	}
	const flags = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC
	fd, err := unix.Open(path, flags, 0)
	if err == unix.ENOENT {
		if !create {
			return &Dir{folder{-1, path}, monotonic}, nil
		}
		// Somebody else may make it at the same time; whether that was us is checked below.
		if err = unix.Mkdir(path, 0o700); err == nil || err == unix.EEXIST {
			fd, err = unix.Open(path, flags, 0)
		}
	}
	if err == unix.ENOTDIR || err == unix.ELOOP {
		err = errors.New("not a directory; a symbolic link is not followed")
	}
	if err == unix.ENOENT {
		return nil, &result.Error{Code: "state", Message: fmt.Sprintf("cannot make the state directory %q: %v", path, err), Hint: fmt.Sprintf("make %q first", filepath.Dir(path)), Err: err}
	}
	if err != nil {
		return nil, failed(&fs.PathError{Op: "open state directory", Path: path, Err: err})
	}
	if err := private(fd, path, c.UID); err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	return &Dir{folder{fd, path}, monotonic}, nil
}

// private checks that nobody but the caller gets into the directory.
func private(fd int, path string, uid int) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return failed(&fs.PathError{Op: "stat", Path: path, Err: err})
	}
	if int(st.Uid) != uid {
		return &result.Error{Code: "state", Message: fmt.Sprintf("state directory %q belongs to user %d, not to user %d", path, st.Uid, uid), Hint: ownDirHint}
	}
	if st.Mode&0o077 != 0 {
		// Not put right silently: others may have files in it already, or it may be
		// a directory that is for something else too.
		return &result.Error{Code: "state", Message: fmt.Sprintf("state directory %q is open to others (mode %04o)", path, st.Mode&0o7777),
			Hint: fmt.Sprintf("if only sbxrun uses it: chmod 700 %q; if not, %s", path, ownDirHint)}
	}
	return nil
}

// Path is where the directory was when it was opened, for people.
func (d *Dir) Path() string { return d.root.path }

// Close gives up the directory; what [Dir.Create] and the like made of it must
// not be used any more.
func (d *Dir) Close() error {
	if d.root.fd < 0 {
		return nil
	}
	return unix.Close(d.root.fd)
}

// stoppedAfter is how long STATE/lock is waited for: it is held for some ten
// system calls.
const stoppedAfter = 10 * time.Second

// alone runs f while nobody else makes or removes a sandbox, or takes a name over.
func (d *Dir) alone(f func() error) error {
	fd, err := d.root.open(lockName, unix.O_RDWR|unix.O_CREAT)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := lock(fd, unix.F_WRLCK, stoppedAfter); err != nil {
		return d.root.fail("lock", lockName, err)
	}
	return f()
}

// failed makes an error of this package of any other.
func failed(err error) error {
	if err == nil {
		return nil
	}
	if errors.As(err, new(*result.Error)) {
		return err
	}
	e := &result.Error{Code: "state", Message: "state of sandboxes: " + err.Error(), Err: err}
	switch {
	case errors.Is(err, unix.EMFILE):
		e.Hint = "raise the limit of open files (ulimit -n)"
	case errors.Is(err, unix.ENFILE):
		e.Hint = "the machine has no more open files (sysctl fs.file-max)"
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		e.Hint = "free space or inodes there (df, df -i), or " + ownDirHint
	case errors.Is(err, unix.EAGAIN):
		e.Hint = "another sbxrun holds it; is one stopped?"
	case isDamaged(err):
		e.Hint = "sbxrun cleanup removes what does not live"
	default:
		e.Hint = ownDirHint
	}
	return e
}
