// Package state keeps what is known of sandboxes in files, so that commands find
// those that other processes supervise, without a daemon.
//
//	STATE/lock            held while a sandbox is made or removed, or a name taken over
//	STATE/names/NAME      a symbolic link whose text is the id; it is read, never followed
//	STATE/ID/lock         held by the supervisor as long as it lives
//	STATE/ID/activity     held, shared, by every exec in the sandbox; see [Claim.EndIfIdle]
//	STATE/ID/record.json  [Record]
//	STATE/ID/kill.json    [Kill], a request to the supervisor
//	STATE/ID/ending       is there from when the supervisor has begun to end the sandbox
//	STATE/ID/access       [Access], as long as the sandbox can be entered
//	STATE/ID/...          what the supervisor adds: the logs
//	STATE/ID/execs/       the detached execs in the sandbox, each as a STATE/ID; see [Entry.Execs]
//	STATE/queue           waited for by who wants a slot; see [Dir.WaitSlot]
//	STATE/slot-N          held by a command of --max-parallel as long as it runs
//	STATE/admission       held while a command starts that may be too much; see [Dir.TryAdmission]
//	STATE/.ID             a sandbox's directory that is being made or removed
//
// The state directory is its owner's alone (0700), so whatever lies in it was put
// there by the same user or by root. All the same nothing in it is trusted: no
// symbolic link is followed, only regular files are opened, reads are bounded,
// and a record names processes by [proc.Identity], which is compared before
// anything is signalled. Paths are looked up once; all else is relative to
// descriptors, so what becomes of the path afterwards does not matter.
//
// Who lives. The supervisor holds ID/lock, and the kernel gives it up when the
// supervisor dies. The lock is taken before the directory gets its name, and never
// again: the id is not used twice. So whoever sees ID and finds the lock free has
// seen the sandbox's end, for good, and needs no lock of his own to act on it. The
// locks are those of open file descriptions (fcntl_locking(2), F_OFD_SETLK,
// Linux 3.15) because these can be asked after without being taken: a ps that
// looks is never mistaken for a supervisor, nor a sandbox for a living one
// because somebody looks.
//
// Half-made directories. A process can be killed between mkdir(2) and taking the
// lock, and who cleans up must not take one who is about to lock for one who was
// killed. So a directory is made as .ID under STATE/lock and renamed when it is
// complete: whoever has STATE/lock and sees a .ID sees something that was left.
//
// Names. symlink(2) is atomic and decides who gets a name. A link to a sandbox that
// does not live any more is replaced, under STATE/lock, since two who both find it
// dead must not both remove what the other has put there.
//
// Nothing is synced to disk: a crash of the machine ends the sandboxes too, and a
// record of another boot is never acted upon.
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
)

// Results of [CheckProc] and [CheckVisible]: /proc is ours, and shows the processes of sandboxes.
var procChecked, procVisible atomic.Bool

// The files of the package itself; see above.
const (
	lockName      = "lock"
	namesName     = "names"
	activityName  = "activity"
	recordName    = "record.json"
	killName      = "kill.json"
	accessName    = "access"
	endingName    = "ending"
	execsName     = "execs"
	queueName     = "queue"
	slotPrefix    = "slot-"
	admissionName = "admission"
)

const ownDirHint = "set SBXRUN_STATE_DIR, or --state-dir, to a directory of your own"

// Caller is whose sandboxes are meant.
type Caller struct {
	StateDir   string // $SBXRUN_STATE_DIR
	RuntimeDir string // $XDG_RUNTIME_DIR
	Home       string // $HOME
	UID        int    // effective user id
}

// Mine is the caller that this process is, by its environment.
func Mine() Caller {
	return Caller{StateDir: os.Getenv("SBXRUN_STATE_DIR"), RuntimeDir: os.Getenv("XDG_RUNTIME_DIR"), Home: os.Getenv("HOME"), UID: os.Geteuid()}
}

// Path is where the caller's state directory is, or is to be.
func (c Caller) Path() (string, error) {
	if c.StateDir != "" {
		if !filepath.IsAbs(c.StateDir) {
			return "", &result.Error{Code: "state", Message: fmt.Sprintf("SBXRUN_STATE_DIR is %q, which is not an absolute path", c.StateDir), Hint: ownDirHint}
		}
		return filepath.Clean(c.StateDir), nil
	}
	return c.volatile("sbxrun", sharedDir), nil
}

// sharedDir is writable by everybody; tests use another.
var sharedDir = "/tmp"

// volatile returns the default path of a directory for files that a reboot may remove. Without a
// runtime directory of the user's own it is in a shared one, where others may have taken the name:
// then it is in the home directory, and stays there as long as that directory exists, so that later
// commands find what earlier ones have left.
func (c Caller) volatile(name, shared string) string {
	// After sudo and su the variable may still name another user's directory. Relative paths
	// are to be ignored (XDG Base Directory Specification).
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

// owns reports whether a directory belongs to the caller, and others cannot write to it.
func (c Caller) owns(dir string) bool {
	var st unix.Stat_t
	return unix.Stat(dir, &st) == nil && int(st.Uid) == c.UID && st.Mode&unix.S_IFMT == unix.S_IFDIR && st.Mode&0o022 == 0
}

// ServerDir is where a server keeps what it stores, unless its configuration names a directory.
func ServerDir() string {
	c := Mine()
	if c.UID == 0 {
		c.RuntimeDir = ""
	}
	return c.volatile("sbxrund", os.TempDir())
}

// Dir is a state directory, or that of the detached execs in a sandbox, which is kept in
// the same way. Its methods may be called by several goroutines.
type Dir struct {
	root  folder
	clock func() time.Duration // what activity is measured with: monotonic
	box   *Entry               // the sandbox that the execs are in; nil for a directory of sandboxes

	mu    sync.Mutex
	execs []*Dir // that Find has opened
}

// Open opens the caller's state directory and makes it if there is none. Every
// error of this package is a [*result.Error].
func Open(c Caller) (*Dir, error) { return open(c, true) }

// Look is Open for who only looks: it makes nothing, and where there is no state
// directory there are no sandboxes.
func Look(c Caller) (*Dir, error) { return open(c, false) }

// CheckProc returns the error of a /proc whose numbers are not ours: what is on record
// would be compared with strangers, and these be signalled. Whoever uses a number of a
// process without having opened a state directory calls it before. What is right stays so.
func CheckProc() error {
	if procChecked.Load() {
		return nil
	}
	err := proc.CheckMount()
	procChecked.Store(err == nil)
	return mountError(err)
}

// mountError adds the remedy to a [proc.MountError].
func mountError(err error) error {
	if mount := (*proc.MountError)(nil); errors.As(err, &mount) {
		return &result.Error{Code: "proc", Message: mount.Cause, Hint: mount.Remedy, Err: err}
	}
	return err
}

// CheckUsable returns the error that Open would probably return, and makes nothing.
func CheckUsable(c Caller) error {
	d, err := Look(c)
	if err != nil {
		return err
	}
	defer d.Close()
	dir := d.root.path
	if d.root.fd < 0 {
		for dir = filepath.Dir(dir); c.StateDir == "" && dir != "/" && unix.Access(dir, unix.F_OK) == unix.ENOENT; {
			dir = filepath.Dir(dir) // Open makes the parents
		}
	}
	if err := unix.Faccessat(unix.AT_FDCWD, dir, unix.W_OK|unix.X_OK, unix.AT_EACCESS); err != nil {
		return failed(&fs.PathError{Op: "write to", Path: dir, Err: err})
	}
	return nil
}

// CheckVisible is [CheckProc] for commands that work with the processes of sandboxes: it also refuses
// a /proc that hides them.
func CheckVisible() error {
	err := CheckProc()
	if err == nil && !procVisible.Load() {
		err = mountError(proc.CheckHidden())
		procVisible.Store(err == nil)
	}
	return err
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
			return &Dir{root: folder{-1, path}, clock: monotonic}, nil
		}
		if c.StateDir == "" {
			_ = os.MkdirAll(filepath.Dir(path), 0o700) // Mkdir returns the error
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
	return &Dir{root: folder{fd, path}, clock: monotonic}, nil
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
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, execs := range d.execs {
		execs.Close()
	}
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
	fd, err := d.root.lock(lockName, unix.O_RDWR|unix.O_CREAT, unix.F_WRLCK, stoppedAfter)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return f()
}

// Sweep removes what lives no more and has no usable record: whose making or
// removal was interrupted, or what is damaged; and then the names of all that does
// not live. It does not touch a directory in it that is none of ours.
func (d *Dir) Sweep() (warnings []error) {
	if d.root.fd < 0 {
		return nil
	}
	warn := func(err error) {
		if err != nil {
			warnings = append(warnings, failed(err))
		}
	}
	warn(d.alone(func() error {
		left, err := d.list()
		for _, name := range left {
			if d.removable(name) {
				warn(d.root.scrap(name))
			}
		}
		return result.All(err, d.sweepNames())
	}))
	return warnings
}

// removable reports whether what has this name in the state directory is of no use. The
// caller is alone.
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
	return errors.Is(err, unix.ENOENT) || isDamaged(err)
}

// sweepNames removes the names of all that does not live. The caller is alone.
func (d *Dir) sweepNames() error {
	names, err := d.names()
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	defer names.close()
	all, err := names.names()
	for _, name := range all {
		// One that cannot be told is in nobody's way: it is taken over when it can.
		if id, err := owner(names, name); err == nil {
			if alive, err := d.alive(id); err == nil && !alive {
				_ = names.unlink(name)
			}
		}
	}
	return err
}

// failed makes an error of this package of any other.
func failed(err error) error {
	if err == nil {
		return nil
	}
	if errors.As(err, new(*result.Error)) {
		return err
	}
	e := &result.Error{Code: "state", Message: "state of sandboxes: " + err.Error(), Hint: proc.DescriptorsHint(err), Err: err}
	switch {
	case e.Hint != "":
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		e.Hint = "free space or inodes there (df, df -i), or " + ownDirHint
	case errors.Is(err, unix.EAGAIN):
		e.Hint = "another sbxrun holds it, and may be stopped (SIGSTOP)"
	case isDamaged(err):
		e.Hint = "sbxrun cleanup removes what has ended"
	default:
		e.Hint = ownDirHint
	}
	return e
}
