// Package volumes keeps named directories that outlive sandboxes.
//
// A volume is a directory of the store with a file "lock" and a directory "data", which sandboxes mount. A sandbox
// holds a lock on the file: a shared one to read, an exclusive one to write (flock(2)). The lock belongs to the open
// file description, which sbxrun and the sandbox's keeper share. It is released when both have ended, and the keeper
// ends only after it has reaped everything in the sandbox. A crash therefore leaves no stale lock.
//
// Commands have written the data directory. No path through it is resolved, and no link in it is followed.
package volumes

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/safeopen"
	"github.com/sbxrun/sbxrun/internal/state"
	"github.com/sbxrun/sbxrun/internal/tree"
)

// Names in a volume, and prefixes of volumes that are being created or removed.
const (
	lockName, dataName = "lock", "data"
	newPrefix          = ".new-"
	removePrefix       = ".rm-"
)

// Store is a directory with volumes.
type Store struct {
	dir    safeopen.Folder
	create bool     // whether Use creates volumes
	made   []string // directories created for the store, the innermost first
}

func wrong(format string, args ...any) *result.Error {
	return &result.Error{Code: "volume", Message: fmt.Sprintf(format, args...)}
}

// Open opens the caller's store, see [OpenAt].
func Open(create bool) (*Store, error) {
	data, err := state.DataDir()
	if err != nil {
		return nil, err
	}
	return OpenAt(filepath.Join(data, "volumes"), create)
}

// OpenAt opens a store. With create it creates a missing one; otherwise a missing one is empty. The caller closes it.
func OpenAt(path string, create bool) (*Store, error) {
	const flags = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC
	fd, err := unix.Open(path, flags, 0)
	if err == unix.ENOENT && !create {
		return &Store{dir: safeopen.Folder{FD: -1, Path: path}}, nil
	}
	var made []string
	if err == unix.ENOENT {
		for _, dir := range []string{path, filepath.Dir(path)} {
			if _, err := os.Lstat(dir); errors.Is(err, unix.ENOENT) {
				made = append(made, dir)
			}
		}
		if err := os.MkdirAll(path, 0o700); err != nil {
			return nil, &result.Error{Code: "volume", Message: fmt.Sprintf("cannot create a directory for volumes: %v", err), Hint: state.DataHint, Err: err}
		}
		fd, err = unix.Open(path, flags, 0)
	}
	if err != nil {
		return nil, &result.Error{Code: "volume", Message: fmt.Sprintf("cannot open the volume directory %q: %v", path, err), Hint: state.DataHint, Err: err}
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || int(st.Uid) != os.Geteuid() || st.Mode&0o077 != 0 {
		unix.Close(fd)
		return nil, &result.Error{Code: "volume", Message: fmt.Sprintf("the volume directory %q must be private to you (mode 0700)", path),
			Hint: fmt.Sprintf("chmod 700 %q, or ", path) + state.DataHint}
	}
	return &Store{dir: safeopen.Folder{FD: fd, Path: path}, create: create, made: made}, nil
}

func (s *Store) Close() { s.dir.Close() }

// Volume is a locked volume.
type Volume struct {
	Name string
	Path string   // path of its data
	Lock *os.File // the lock is released when all copies of this are closed
	data int
	rw   bool
	made bool     // created by Use
	dirs []string // directories created for the store
}

// Use locks a volume for reading or writing. It creates a missing volume if the store was opened with
// create; a new volume belongs to owner, or to the caller if that is nil. The caller closes the volume.
func (s *Store) Use(name string, write bool, owner *proc.Cred) (*Volume, error) {
	made := false
	v, err := s.hold(name, write)
	if errors.Is(err, unix.ENOENT) && s.create {
		if made, err = s.add(name, owner); err != nil {
			return nil, wrong("cannot create the volume %q: %v", name, err)
		}
		v, err = s.hold(name, write)
	}
	if err != nil {
		return nil, err
	}
	v.made, v.dirs = made, s.made
	var st unix.Stat_t
	if err := unix.Fstat(v.data, &st); err == nil && owner != nil && st.Uid != owner.UID {
		v.Close()
		return nil, &result.Error{Code: "volume", Message: fmt.Sprintf("the volume %q belongs to uid %d, but the sandbox runs as uid %d", name, st.Uid, owner.UID),
			Hint: fmt.Sprintf("use --user %d:%d", st.Uid, st.Gid)}
	}
	return v, nil
}

func CheckName(name string) error {
	if strings.Contains(name, "/") { // docker accepts paths
		return &result.Error{Code: "usage", Message: fmt.Sprintf("invalid volume name %.80q: a path", name), Hint: "to mount a directory of the host, use --bind"}
	}
	if state.ValidName(name) != nil {
		return &result.Error{Code: "usage", Message: fmt.Sprintf("invalid volume name %.80q", name),
			Hint: "use 1 to 63 letters, digits, dots, underscores and hyphens, not beginning with a dot or hyphen"}
	}
	return nil
}

// Timeouts for locks: patience is longer than [Store.List] holds one, but short, because a volume in use is an
// error; longer is for a volume that a process is looking at, which may get little CPU time; glance is List's own.
const (
	patience = 200 * time.Millisecond
	longer   = 2 * time.Second
	glance   = 2 * time.Millisecond
)

// flock is flock(2) with a timeout.
func flock(fd, how int, patience time.Duration) (err error) {
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Millisecond / 2) {
		if err = unix.Flock(fd, how|unix.LOCK_NB); err != unix.EWOULDBLOCK || time.Now().After(deadline) {
			return err
		}
	}
}

// lock opens and locks a volume. The error is ENOENT if it does not exist.
func (s *Store) lock(name string, write bool, patience time.Duration) (_ *Volume, err error) {
	how := unix.LOCK_SH
	if write {
		how = unix.LOCK_EX
	}
	for {
		v := &Volume{Name: name, Path: filepath.Join(s.dir.Path, name, dataName), data: -1, rw: write}
		if v.Lock, err = s.dir.OpenFile(name+"/"+lockName, unix.O_RDONLY); err != nil {
			return nil, err
		}
		again, err := s.fill(v, how, patience)
		if err == nil && !again {
			return v, nil
		}
		v.Close()
		if err != nil {
			return nil, err
		}
	}
}

// fill locks a volume and opens its data. again is true if the volume was removed in the meantime; another one may have its
// name now.
func (s *Store) fill(v *Volume, how int, patience time.Duration) (again bool, err error) {
	fd := proc.Descriptor(v.Lock)
	err = flock(fd, how, patience)
	if err == unix.EWOULDBLOCK && patience > glance {
		more := time.Duration(0) // one that was looking may just have finished
		if s.listed(v.Name) {
			more = longer
		}
		err = flock(fd, how, more)
	}
	var mine, now unix.Stat_t
	switch {
	case err == unix.EWOULDBLOCK:
		return false, &BusyError{Name: v.Name, PIDs: holders(fd)}
	case err == nil:
		err = unix.Fstat(fd, &mine)
	}
	if err != nil {
		return false, err
	}
	if unix.Fstatat(s.dir.FD, v.Name+"/"+lockName, &now, unix.AT_SYMLINK_NOFOLLOW) != nil || now.Ino != mine.Ino {
		return true, nil
	}
	data := v.Name + "/" + dataName
	v.data, err = safeopen.Beneath(s.dir.FD, data, unix.O_RDONLY|unix.O_DIRECTORY, 0, 0)
	if err == unix.EACCES { // a sandbox may have closed it to its owner
		v.data, err = tree.OpenOwn(s.dir.FD, data)
	}
	return false, err
}

// Discard removes a volume created by Use, and the directories created for it, unless another process uses
// the volume or has left files in it. It is for sandboxes that never started.
func (v *Volume) Discard() error {
	if !v.made {
		return nil
	}
	s, err := OpenAt(filepath.Dir(filepath.Dir(v.Path)), false)
	if err != nil {
		return err
	}
	defer s.Close()
	// Processes waiting for this lock look up the volume again when they get it.
	if err := unix.Flock(proc.Descriptor(v.Lock), unix.LOCK_EX|unix.LOCK_NB); err != nil || !v.empty() {
		return nil
	}
	v.made = false
	err = s.remove(v.Name)
	for _, dir := range v.dirs {
		_ = unix.Rmdir(dir) // fails if it is in use by now
	}
	return err
}

// empty reports whether a volume is empty.
func (v *Volume) empty() bool {
	fd, err := unix.Openat(v.data, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	dir := os.NewFile(uintptr(fd), v.Path)
	defer dir.Close()
	_, err = dir.Readdirnames(1)
	return err == io.EOF
}

// add creates a volume atomically. made is false if another process was first.
func (s *Store) add(name string, owner *proc.Cred) (made bool, err error) {
	lock, err := s.marked(".", unix.LOCK_SH, time.Second)
	if err != nil {
		return false, err
	}
	defer lock.Close()
	hidden := newPrefix + safeopen.RandomName()
	if err := s.dir.Mkdir(hidden); err != nil {
		return false, err
	}
	err = s.dir.Mkdir(hidden + "/" + dataName)
	if err == nil && owner != nil {
		err = unix.Fchownat(s.dir.FD, hidden+"/"+dataName, int(owner.UID), int(owner.GID), unix.AT_SYMLINK_NOFOLLOW)
	}
	if err == nil {
		err = unix.Mknodat(s.dir.FD, hidden+"/"+lockName, unix.S_IFREG|0o600, 0)
	}
	if err == nil {
		err = unix.Renameat2(s.dir.FD, hidden, s.dir.FD, name, unix.RENAME_NOREPLACE)
	}
	if err != nil {
		_ = tree.Remove(s.dir.FD, hidden) // otherwise cleanup does
	}
	if errors.Is(err, unix.EEXIST) {
		return false, nil
	}
	return err == nil, err
}

// BusyError means that a volume is in use, by these processes according to /proc/locks.
type BusyError struct {
	Name string
	PIDs []int
}

func (e *BusyError) Error() string { return fmt.Sprintf("volume %q is in use", e.Name) }

func explain(name string, err error) error {
	if busy := (*BusyError)(nil); errors.As(err, &busy) {
		return busy
	}
	if errors.Is(err, unix.ENOENT) {
		return &result.Error{Code: "volume", Message: fmt.Sprintf("no volume named %q", name), Hint: "list them: sbxrun volume ls", Err: err}
	}
	return &result.Error{Code: "volume", Message: fmt.Sprintf("cannot use the volume %q: %v", name, err), Err: err}
}

// Data returns a descriptor of the volume's directory, which the caller closes.
func (v *Volume) Data() (int, error) { return unix.FcntlInt(uintptr(v.data), unix.F_DUPFD_CLOEXEC, 0) }

// Sync syncs the volume to the disk (syncfs(2)) if it is writable.
func (v *Volume) Sync() *result.Error {
	if !v.rw {
		return nil
	}
	if err := unix.Syncfs(v.data); err != nil {
		e := wrong("cannot sync the volume %q: %v", v.Name, err)
		e.ExitCode, e.Err = result.ExitOutput, err
		return e
	}
	return nil
}

// Close closes the volume and releases the lock, unless the keeper still holds it.
func (v *Volume) Close() {
	v.Lock.Close()
	unix.Close(v.data)
}
