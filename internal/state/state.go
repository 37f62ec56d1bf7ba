// Package state keeps the records of sandboxes in files, so that commands find sandboxes
// supervised by other processes, without a daemon.
//
//	STATE/lock            held while a sandbox is made or removed, or a name is taken over
//	STATE/names/NAME      a symbolic link whose text is the ID; it is read, never followed
//	STATE/ID/lock         held by the supervisor while it is alive
//	STATE/ID/activity     held, shared, by every exec in the sandbox; see [Claim.EndIfIdle]
//	STATE/ID/record.json  [Record]
//	STATE/ID/kill.json    [Kill], a request to the supervisor
//	STATE/ID/ending       exists once the supervisor has begun to end the sandbox
//	STATE/ID/access.json  [Access], while the sandbox can be entered
//	STATE/ID/...          files of the supervisor: the logs
//	STATE/ID/execs/       the detached execs in the sandbox, each like a STATE/ID; see [Entry.Execs]
//	STATE/.ID             the directory of a sandbox that is being made or removed
//
// The state directory is private to its owner (0700), so only the same user or root can have put files there. Even
// so, nothing in it is trusted: symbolic links are not followed, only regular files are opened, reads are bounded,
// and a record names processes by [proc.Identity], which is compared before a signal is sent. Paths are looked up
// once; everything else is relative to descriptors, so later changes of the path have no effect.
//
// Liveness. The supervisor holds ID/lock, which the kernel releases when the supervisor dies. The lock is taken
// before the directory gets its name and never again, because IDs are not reused. A process that sees ID with a free
// lock therefore knows that the sandbox has ended for good, and needs no lock to act on that. The locks belong to
// open file descriptions (fcntl_locking(2), F_OFD_SETLK, Linux 3.15) because these can be queried without being
// taken: ps is never mistaken for a supervisor, and its query does not make a dead sandbox look alive.
//
// Incomplete directories. A process can be killed between mkdir(2) and taking the lock, and cleanup must tell it from
// one that is about to take the lock. A directory is therefore made as .ID under STATE/lock and renamed when it is
// complete. A process that holds STATE/lock and sees a .ID has found a leftover.
//
// Names. A link is made under STATE/lock, replacing the link of a dead sandbox: of two processes that find a sandbox
// dead, neither may replace the link of the other. A supervisor removes its own link without the lock.
//
// Nothing is synced to disk: a crash of the machine ends the sandboxes too, and records of another boot are ignored.
package state

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/safeopen"
)

// Whether the checks of [CheckProc] and [CheckVisible] have succeeded.
var procChecked, procVisible atomic.Bool

// The package's own files; see above.
const (
	lockName     = "lock"
	namesName    = "names"
	activityName = "activity"
	recordName   = "record.json"
	killName     = "kill.json"
	accessName   = "access.json"
	endingName   = "ending"
	execsName    = "execs"
)

const ownDirHint = "set SBXRUN_STATE_DIR or --state-dir to a directory of your own"

// Caller identifies the user whose sandboxes are managed.
type Caller struct {
	StateDir   string // $SBXRUN_STATE_DIR
	RuntimeDir string // $XDG_RUNTIME_DIR
	Home       string // $HOME
	UID        int    // effective user id
}

// Mine returns the caller described by this process's environment.
func Mine() Caller {
	return Caller{StateDir: os.Getenv("SBXRUN_STATE_DIR"), RuntimeDir: os.Getenv("XDG_RUNTIME_DIR"), Home: os.Getenv("HOME"), UID: os.Geteuid()}
}

// Path returns the path of the caller's state directory, which need not exist.
func (c Caller) Path() (string, error) {
	if c.StateDir != "" {
		if !filepath.IsAbs(c.StateDir) {
			return "", &result.Error{Code: "state", Message: fmt.Sprintf("SBXRUN_STATE_DIR is %q, which is not an absolute path", c.StateDir), Hint: ownDirHint}
		}
		return filepath.Clean(c.StateDir), nil
	}
	return c.volatile("sbxrun", sharedDir), nil
}

// sharedDir is a world-writable directory; tests change it.
var sharedDir = "/tmp"

// volatile returns the default path of a directory for files that need not survive a reboot. Without a runtime
// directory of the user it is in a shared directory. If another user has taken the name there, it is in the home
// directory, and stays there while that directory exists, so that later commands find the sandboxes of earlier ones.
func (c Caller) volatile(name, shared string) string {
	// After sudo and su the variable may still name another user's directory. Relative paths
	// must be ignored (XDG Base Directory Specification).
	if filepath.IsAbs(c.RuntimeDir) && c.owns(c.RuntimeDir) {
		return filepath.Join(c.RuntimeDir, name)
	}
	if c.UID == 0 {
		return filepath.Join("/run", name)
	}
	usual := filepath.Join(shared, name+"-"+strconv.Itoa(c.UID))
	fd, err := unix.Open(usual, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	free := err == unix.ENOENT
	if err == nil {
		err = private(fd, usual, c.UID)
		_ = unix.Close(fd)
	}
	if err == nil || !filepath.IsAbs(c.Home) || !c.owns(c.Home) {
		return usual
	}
	home := filepath.Join(c.Home, ".local/state", name)
	if free && unix.Access(home, unix.F_OK) != nil {
		return usual
	}
	return home
}

// owns reports whether a directory belongs to the caller and only the caller can write to it.
func (c Caller) owns(dir string) bool {
	var st unix.Stat_t
	return unix.Stat(dir, &st) == nil && int(st.Uid) == c.UID && st.Mode&unix.S_IFMT == unix.S_IFDIR && st.Mode&0o022 == 0
}

// ServerDir returns the default directory for a server's files.
func ServerDir() string {
	c := Mine()
	if c.UID == 0 {
		c.RuntimeDir = ""
	}
	return c.volatile("sbxrund", os.TempDir())
}

// Dir is a state directory, or the directory of the detached execs in a sandbox, which has
// the same layout. Its methods are safe for concurrent use.
type Dir struct {
	root    safeopen.Folder
	clock   func() time.Duration // monotonic; measures activity
	sandbox *Entry               // the sandbox of the execs; nil for a directory of sandboxes

	mu    sync.Mutex
	execs []*Dir // directories opened by Find
}

// Open opens the caller's state directory and creates it if necessary. Every error of
// this package is a [*result.Error].
func Open(c Caller) (*Dir, error) { return open(c, true) }

// Look is like Open for readers: it creates nothing, and a missing state directory has no sandboxes.
func Look(c Caller) (*Dir, error) { return open(c, false) }

// CheckProc returns an error if /proc shows another PID namespace. Recorded processes would then be compared with
// unrelated ones, which would be signalled. Callers that use PIDs without opening a state directory call it first.
func CheckProc() error { return checkOnce(&procChecked, proc.CheckMount) }

// CheckVisible is [CheckProc] for commands that use the processes of sandboxes: it also rejects a /proc that hides
// them.
func CheckVisible() error {
	if err := CheckProc(); err != nil {
		return err
	}
	return checkOnce(&procVisible, proc.CheckHidden)
}

// checkOnce runs a check of /proc unless it has succeeded before.
func checkOnce(succeeded *atomic.Bool, check func() error) error {
	if succeeded.Load() {
		return nil
	}
	err := check()
	succeeded.Store(err == nil)
	if mount := (*proc.MountError)(nil); errors.As(err, &mount) {
		return &result.Error{Code: "proc", Message: mount.Cause, Hint: mount.Remedy, Err: err}
	}
	return err
}

// CheckUsable returns the error that Open would probably return. It creates nothing.
func CheckUsable(c Caller) error {
	d, err := Look(c)
	if err != nil {
		return err
	}
	defer d.Close()
	dir := d.root.Path
	if d.root.FD < 0 {
		for dir = filepath.Dir(dir); c.StateDir == "" && dir != "/" && unix.Access(dir, unix.F_OK) == unix.ENOENT; {
			dir = filepath.Dir(dir) // Open creates the parents
		}
	}
	if err := unix.Faccessat(unix.AT_FDCWD, dir, unix.W_OK|unix.X_OK, unix.AT_EACCESS); err != nil {
		return Failed(&fs.PathError{Op: "write to", Path: dir, Err: err})
	}
	return nil
}

func open(c Caller, create bool) (*Dir, error) {
	if err := CheckProc(); err != nil {
		return nil, err
	}
	path, err := c.Path()
	if err != nil {
		return nil, err
	}
	d, err := openAt(path, c, create)
	if err != nil && c.StateDir == "" {
		// Another user may have taken the name after Path found it free.
		if again, _ := c.Path(); again != path {
			return openAt(again, c, create)
		}
	}
	return d, err
}

func openAt(path string, c Caller, create bool) (*Dir, error) {
	const flags = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC
	fd, err := unix.Open(path, flags, 0)
	if err == unix.ENOENT {
		if !create {
			return &Dir{root: safeopen.Folder{FD: -1, Path: path}, clock: monotonic}, nil
		}
		if c.StateDir == "" {
			_ = os.MkdirAll(filepath.Dir(path), 0o700) // Mkdir returns the error
		}
		// Another process may create it at the same time; its owner is checked below.
		if err = unix.Mkdir(path, 0o700); err == nil || err == unix.EEXIST {
			fd, err = unix.Open(path, flags, 0)
		}
	}
	if err == unix.ENOTDIR || err == unix.ELOOP {
		err = errors.New("not a directory; a symbolic link is not followed")
	}
	if err == unix.ENOENT {
		return nil, &result.Error{Code: "state", Message: fmt.Sprintf("cannot create the state directory %q: %v", path, err), Hint: fmt.Sprintf("create %q first", filepath.Dir(path)), Err: err}
	}
	if err != nil {
		return nil, Failed(&fs.PathError{Op: "open state directory", Path: path, Err: err})
	}
	if err := private(fd, path, c.UID); err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	return &Dir{root: safeopen.Folder{FD: fd, Path: path}, clock: monotonic}, nil
}

// private checks that only the caller can use the directory.
func private(fd int, path string, uid int) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return Failed(&fs.PathError{Op: "stat", Path: path, Err: err})
	}
	if int(st.Uid) != uid {
		return &result.Error{Code: "state", Message: fmt.Sprintf("state directory %q belongs to uid %d, not to uid %d", path, st.Uid, uid), Hint: ownDirHint}
	}
	if st.Mode&0o077 != 0 {
		// Do not fix the mode silently: others may already have files in it, or it may have another purpose.
		return &result.Error{Code: "state", Message: fmt.Sprintf("state directory %q is accessible to other users (mode %04o)", path, st.Mode&0o7777),
			Hint: fmt.Sprintf("if only sbxrun uses it: chmod 700 %q; otherwise %s", path, ownDirHint)}
	}
	return nil
}

// Path returns the path under which the directory was opened, for messages.
func (d *Dir) Path() string { return d.root.Path }

// Folder returns the open directory, for other packages that keep files in it. It is valid until Close.
func (d *Dir) Folder() safeopen.Folder { return d.root }

// Close closes the directory. Its claims and entries must no longer be used.
func (d *Dir) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, execs := range d.execs {
		execs.Close()
	}
	d.root.Close()
	return nil
}

// stoppedAfter is the timeout for STATE/lock, which is normally held for about ten system calls.
const stoppedAfter = 10 * time.Second

// Alone runs f with STATE/lock held.
func (d *Dir) Alone(f func() error) error {
	fd, err := d.root.Lock(lockName, unix.O_RDWR|unix.O_CREAT, unix.F_WRLCK, stoppedAfter)
	if err != nil {
		return Failed(err)
	}
	defer unix.Close(fd)
	return Failed(f())
}

// Sweep removes dead sandboxes without a usable record: those whose creation or removal was interrupted, and damaged
// ones. Then it removes the names of all dead sandboxes. It leaves unknown directories alone.
func (d *Dir) Sweep() (warnings []error) {
	if d.root.FD < 0 {
		return nil
	}
	warn := func(err error) {
		if err != nil {
			warnings = append(warnings, Failed(err))
		}
	}
	warn(d.Alone(func() error {
		left, err := d.Names()
		for _, name := range left {
			if d.removable(name) {
				warn(scrap(d.root, name))
			}
		}
		return result.All(err, d.sweepNames())
	}))
	return warnings
}

// removable reports whether a name in the state directory is a leftover. The caller holds STATE/lock.
func (d *Dir) removable(name string) bool {
	if hidden, found := strings.CutPrefix(name, "."); found {
		return ValidID(hidden)
	}
	if !ValidID(name) {
		return false
	}
	alive, err := d.alive(name)
	if err != nil || alive {
		return false
	}
	_, err = d.load(name)
	return errors.Is(err, unix.ENOENT) || safeopen.IsDamaged(err)
}

// sweepNames removes the names of dead sandboxes. The caller holds STATE/lock.
func (d *Dir) sweepNames() error {
	return d.inNames(func(names safeopen.Folder) error {
		all, err := names.Names()
		for _, name := range all {
			// An unreadable name can stay: it is taken over once it is readable.
			if id, err := owner(names, name); err == nil {
				if alive, err := d.alive(id); err == nil && !alive {
					_ = names.Unlink(name)
				}
			}
		}
		return err
	})
}

// Failed converts an error to a [*result.Error].
func Failed(err error) error {
	if err == nil {
		return nil
	}
	if errors.As(err, new(*result.Error)) {
		return err
	}
	e := &result.Error{Code: "state", Message: "sandbox state: " + err.Error(), Hint: proc.DescriptorsHint(err), Err: err}
	switch {
	case e.Hint != "":
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		e.Hint = "free disk space or inodes there (df, df -i), or " + ownDirHint
	case errors.Is(err, unix.EAGAIN):
		e.Hint = "another sbxrun holds it; check whether that is stopped (SIGSTOP)"
	case safeopen.IsDamaged(err):
		e.Hint = "remove ended sandboxes: sbxrun cleanup"
	default:
		e.Hint = ownDirHint
	}
	return e
}
