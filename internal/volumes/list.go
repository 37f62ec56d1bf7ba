package volumes

import (
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/safeopen"
	"github.com/sbxrun/sbxrun/internal/tree"
)

// Info describes a volume.
type Info struct {
	Name    string    `json:"name"`
	Path    string    `json:"path"`   // path of its data
	Status  string    `json:"status"` // free, read or written
	PIDs    []int     `json:"pids"`   // processes that use it, as far as known
	ModTime time.Time `json:"modified_at"`
}

// List returns all volumes, sorted by name.
func (s *Store) List() (list []Info, err error) {
	names, err := s.Names()
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		var st unix.Stat_t
		if unix.Fstatat(s.dir.FD, name+"/"+dataName, &st, unix.AT_SYMLINK_NOFOLLOW) != nil {
			continue // removed since, or not a volume
		}
		i := Info{Name: name, Path: filepath.Join(s.dir.Path, name, dataName), Status: "free", PIDs: []int{}, ModTime: tree.ModTime(&st)}
		if pids, busy := s.look(name, false); busy {
			i.Status, i.PIDs = "written", append(i.PIDs, pids...)
		} else if pids, busy = s.look(name, true); busy {
			i.Status, i.PIDs = "read", append(i.PIDs, pids...)
		}
		list = append(list, i)
	}
	return list, nil
}

// look reports whether a volume is in use, and by which processes. It holds the lock for an instant, for
// which other users wait.
func (s *Store) look(name string, write bool) (pids []int, busy bool) {
	if dir, err := s.marked(name, unix.LOCK_SH, 0); err == nil {
		defer dir.Close()
	}
	v, err := s.lock(name, write, glance)
	if err == nil {
		v.Close()
	}
	e := (*BusyError)(nil)
	if busy = errors.As(err, &e); busy {
		pids = e.PIDs
	}
	return pids, busy
}

// marked locks a directory: a volume's, for processes that hold its lock only for a moment; or the store's own, ".",
// shared by processes that create volumes and exclusive for one that looks for leftovers of killed ones.
func (s *Store) marked(name string, how int, patience time.Duration) (safeopen.Folder, error) {
	dir, err := s.dir.Sub(name)
	if err != nil {
		return dir, err
	}
	if err = flock(dir.FD, how, patience); err != nil {
		dir.Close()
	}
	return dir, err
}

// listed reports whether a process is looking at a volume, and so may hold its lock for a moment.
func (s *Store) listed(name string) bool {
	dir, err := s.marked(name, unix.LOCK_EX, 0)
	if err == nil {
		dir.Close()
	}
	return err == unix.EWOULDBLOCK
}

// Names returns the names of all volumes without locking them.
func (s *Store) Names() ([]string, error) {
	names, err := s.names()
	return slices.DeleteFunc(names, func(name string) bool { return CheckName(name) != nil }), err
}

func (s *Store) names() ([]string, error) {
	dir, err := s.dir.Sub(".") // with its own offset
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	names, err := dir.Names()
	slices.Sort(names)
	return names, err
}

// Lock locks an existing volume for reading; see [Store.Use].
func (s *Store) Lock(name string) (*Volume, error) { return s.hold(name, false) }

// hold locks a volume.
func (s *Store) hold(name string, write bool) (*Volume, error) {
	if err := CheckName(name); err != nil {
		return nil, err
	}
	v, err := s.lock(name, write, patience)
	if err != nil {
		return nil, explain(name, err)
	}
	return v, nil
}

// Remove removes a volume that is not in use. It disappears at once; [Store.Leftovers] finds the
// remains after a crash.
func (s *Store) Remove(name string) error {
	v, err := s.hold(name, true)
	if err != nil {
		return err
	}
	defer v.Close()
	return s.remove(name)
}

// remove removes a volume that the caller has locked.
func (s *Store) remove(name string) error {
	hidden := removePrefix + safeopen.RandomName()
	if err := s.dir.Rename(name, hidden); err != nil {
		return explain(name, err)
	}
	if err := tree.Remove(s.dir.FD, hidden); err != nil {
		return wrong("the volume %q is removed, but not all of its files: %v", name, err)
	}
	return nil
}

// Leftovers returns the leftovers of crashes, for [Store.Discard]. It leaves out volumes being created, whose
// process holds the store's lock.
func (s *Store) Leftovers() (list []string, err error) {
	lock, busy := s.marked(".", unix.LOCK_EX, glance)
	if busy == nil {
		defer lock.Close()
	}
	names, err := s.names()
	for _, name := range names {
		if strings.HasPrefix(name, removePrefix) || busy == nil && strings.HasPrefix(name, newPrefix) {
			list = append(list, name)
		}
	}
	return list, err
}

func (s *Store) Discard(leftover string) error { return tree.Remove(s.dir.FD, leftover) }
