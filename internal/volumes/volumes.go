// Package volumes keeps named directories that outlive sandboxes.
//
// A volume is a directory of the store with a file "lock" and a directory "data", which is what
// sandboxes are shown. Whoever shows it holds a lock on the file: a shared one to read, an
// exclusive one to write (flock(2)). The lock belongs to the open file, which sbxrun and the
// sandbox's keeper both have: it is free when the last of the two is gone, and the keeper goes
// only when it has reaped everything in the sandbox. Nothing is left to be removed after a crash.
//
// What is in the data directory was made by commands. It is never reached by a path, and no
// link in it is followed.
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

// Names in a volume, and how those begin that are being made or removed.
const (
	lockName, dataName = "lock", "data"
	newPrefix          = ".new-"
	removePrefix       = ".rm-"
)

// Store is a directory with volumes.
type Store struct {
	fd     int // -1 if there is none
	path   string
	create bool     // whether Use makes volumes
	made   []string // directories made for the store, the lowest first
}

func wrong(format string, args ...any) *result.Error {
	return &result.Error{Code: "volume", Message: fmt.Sprintf(format, args...)}
}

// Open opens the caller's store, below its directory for data, see [OpenAt].
func Open(create bool) (*Store, error) {
	data, err := state.DataDir()
	if err != nil {
		return nil, err
	}
	return OpenAt(filepath.Join(data, "volumes"), create)
}

// OpenAt opens a store. With create it makes one if there is none; else that is an empty one. The
// caller closes it.
func OpenAt(path string, create bool) (*Store, error) {
	const flags = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC
	fd, err := unix.Open(path, flags, 0)
	if err == unix.ENOENT && !create {
		return &Store{fd: -1, path: path}, nil
	}
	var made []string
	if err == unix.ENOENT {
		for _, dir := range []string{path, filepath.Dir(path)} {
			if _, err := os.Lstat(dir); errors.Is(err, unix.ENOENT) {
				made = append(made, dir)
			}
		}
		if err := os.MkdirAll(path, 0o700); err != nil {
			return nil, &result.Error{Code: "volume", Message: fmt.Sprintf("cannot make a directory for volumes: %v", err), Hint: state.DataHint, Err: err}
		}
		fd, err = unix.Open(path, flags, 0)
	}
	if err != nil {
		return nil, &result.Error{Code: "volume", Message: fmt.Sprintf("cannot open the directory of volumes %q: %v", path, err), Hint: state.DataHint, Err: err}
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || int(st.Uid) != os.Geteuid() || st.Mode&0o077 != 0 {
		unix.Close(fd)
		return nil, &result.Error{Code: "volume", Message: fmt.Sprintf("the directory of volumes %q is open to others, or not yours", path),
			Hint: fmt.Sprintf("chmod 700 %q; or ", path) + state.DataHint}
	}
	return &Store{fd: fd, path: path, create: create, made: made}, nil
}

func (s *Store) Close() {
	if s.fd >= 0 {
		unix.Close(s.fd)
	}
}

// Volume is a volume that is locked.
type Volume struct {
	Name string
	Path string   // of its data
	Lock *os.File // the lock is free when all copies of this are closed
	data int
	rw   bool
	made bool     // by Use
	dirs []string // that the store has made for it
}

// Use locks a volume, to be read or written. It makes a missing volume if the store was opened
// with create; owner is whom that belongs to, nil for the caller. The caller closes the volume.
func (s *Store) Use(name string, write bool, owner *proc.Cred) (*Volume, error) {
	made := false
	v, err := s.hold(name, write)
	if errors.Is(err, unix.ENOENT) && s.create {
		if made, err = s.add(name, owner); err != nil {
			return nil, wrong("cannot make the volume %q: %v", name, err)
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
		return nil, &result.Error{Code: "volume", Message: fmt.Sprintf("the volume %q belongs to uid %d, and the sandbox runs as uid %d", name, st.Uid, owner.UID),
			Hint: fmt.Sprintf("--user %d:%d", st.Uid, st.Gid)}
	}
	return v, nil
}

func CheckName(name string) error {
	if strings.Contains(name, "/") { // as docker takes one
		return &result.Error{Code: "usage", Message: fmt.Sprintf("%.80q is a path, and a volume has a name", name), Hint: "--bind shows a directory of the host"}
	}
	if state.ValidName(name) != nil {
		return &result.Error{Code: "usage", Message: fmt.Sprintf("%.80q cannot be the name of a volume", name),
			Hint: "a name has 1 to 63 letters, digits, dots, underscores and hyphens, and begins with neither dot nor hyphen"}
	}
	return nil
}

// How long a lock is waited for: longer than a [Store.List] has it, but not long, as one in use is refused;
// longer where one looks that gets little of the processor; and by a List for another one.
const (
	patience = 200 * time.Millisecond
	longer   = 2 * time.Second
	glance   = 2 * time.Millisecond
)

// flock is flock(2), which has no bound of its own.
func flock(fd, how int, patience time.Duration) (err error) {
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Millisecond / 2) {
		if err = unix.Flock(fd, how|unix.LOCK_NB); err != unix.EWOULDBLOCK || time.Now().After(deadline) {
			return err
		}
	}
}

// lock opens a volume and locks it. It is ENOENT if there is none.
func (s *Store) lock(name string, write bool, patience time.Duration) (*Volume, error) {
	how := unix.LOCK_SH
	if write {
		how = unix.LOCK_EX
	}
	for {
		if s.fd < 0 {
			return nil, unix.ENOENT
		}
		fd, err := unix.Openat2(s.fd, name+"/"+lockName, beneath(unix.O_RDONLY))
		if err != nil {
			return nil, err
		}
		file := os.NewFile(uintptr(fd), name)
		err = flock(fd, how, patience)
		if err == unix.EWOULDBLOCK && patience > glance && s.listed(name) {
			err = flock(fd, how, longer)
		}
		if err != nil {
			if err == unix.EWOULDBLOCK {
				err = &BusyError{Name: name, PIDs: holders(fd)}
			}
			file.Close()
			return nil, err
		}
		// It may have been removed in the meantime, and another made.
		var mine, now unix.Stat_t
		err = unix.Fstat(fd, &mine)
		if err == nil && unix.Fstatat(s.fd, name+"/"+lockName, &now, unix.AT_SYMLINK_NOFOLLOW) == nil && now.Ino == mine.Ino {
			data, err := unix.Openat2(s.fd, name+"/"+dataName, beneath(unix.O_RDONLY|unix.O_DIRECTORY))
			if err == unix.EACCES { // a sandbox may have closed it to its owner
				data, err = tree.OpenOwn(s.fd, name+"/"+dataName)
			}
			if err == nil {
				return &Volume{Name: name, Path: filepath.Join(s.path, name, dataName), Lock: file, data: data, rw: write}, nil
			}
			file.Close()
			return nil, err
		}
		file.Close()
	}
}

// beneath is how what is in the store is opened: the store's own names, and no links.
func beneath(flags uint64) *unix.OpenHow {
	return &unix.OpenHow{Flags: flags | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS}
}

// Discard removes a volume that Use has made, together with the directories made for it, unless
// another process uses the volume or has left files there. It is for sandboxes that never started.
func (v *Volume) Discard() error {
	if !v.made {
		return nil
	}
	s, err := OpenAt(filepath.Dir(filepath.Dir(v.Path)), false)
	if err != nil {
		return err
	}
	defer s.Close()
	// The others that wait for this lock look again for the volume when they get it.
	if err := unix.Flock(proc.Descriptor(v.Lock), unix.LOCK_EX|unix.LOCK_NB); err != nil || s.fd < 0 || !v.empty() {
		return nil
	}
	v.made = false
	hidden := removePrefix + safeopen.RandomName()
	if err := unix.Renameat(s.fd, v.Name, s.fd, hidden); err != nil {
		return explain(v.Name, err)
	}
	err = tree.Remove(s.fd, hidden)
	for _, dir := range v.dirs {
		_ = unix.Rmdir(dir) // not if it is in use by now
	}
	return err
}

// empty reports whether there is nothing in a volume.
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

// add makes a volume, complete or not at all. made is false if another process was quicker.
func (s *Store) add(name string, owner *proc.Cred) (made bool, err error) {
	lock, err := s.marked(".", unix.LOCK_SH, time.Second)
	if err != nil {
		return false, err
	}
	defer lock.Close()
	hidden := newPrefix + safeopen.RandomName()
	if err := unix.Mkdirat(s.fd, hidden, 0o700); err != nil {
		return false, err
	}
	err = unix.Mkdirat(s.fd, hidden+"/"+dataName, 0o700)
	if err == nil && owner != nil {
		err = unix.Fchownat(s.fd, hidden+"/"+dataName, int(owner.UID), int(owner.GID), unix.AT_SYMLINK_NOFOLLOW)
	}
	if err == nil {
		err = unix.Mknodat(s.fd, hidden+"/"+lockName, unix.S_IFREG|0o600, 0)
	}
	if err == nil {
		err = unix.Renameat2(s.fd, hidden, s.fd, name, unix.RENAME_NOREPLACE)
	}
	if err != nil {
		err = errors.Join(err, tree.Remove(s.fd, hidden))
	}
	if errors.Is(err, unix.EEXIST) {
		return false, nil
	}
	return err == nil, err
}

// BusyError says that a volume is in use, by these processes as far as /proc/locks tells.
type BusyError struct {
	Name string
	PIDs []int
}

func (e *BusyError) Error() string { return "the volume " + e.Name + " is in use" }

func explain(name string, err error) error {
	if busy := (*BusyError)(nil); errors.As(err, &busy) {
		return busy
	}
	if errors.Is(err, unix.ENOENT) {
		return &result.Error{Code: "volume", Message: fmt.Sprintf("there is no volume %q", name), Hint: "sbxrun volume ls lists those there are", Err: err}
	}
	return &result.Error{Code: "volume", Message: fmt.Sprintf("cannot use the volume %q: %v", name, err), Err: err}
}

// Data returns a descriptor of the volume's directory, which the caller closes.
func (v *Volume) Data() (int, error) { return unix.FcntlInt(uintptr(v.data), unix.F_DUPFD_CLOEXEC, 0) }

// Sync writes what is in the volume to the disk (syncfs(2)), if it could be written to.
func (v *Volume) Sync() *result.Error {
	if !v.rw {
		return nil
	}
	if err := unix.Syncfs(v.data); err != nil {
		e := wrong("the volume %q may not be on the disk: %v", v.Name, err)
		e.ExitCode, e.Err = result.ExitOutput, err
		return e
	}
	return nil
}

// Close gives the volume up, and the lock unless the keeper still has it.
func (v *Volume) Close() {
	v.Lock.Close()
	unix.Close(v.data)
}
