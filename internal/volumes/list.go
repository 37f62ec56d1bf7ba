package volumes

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/random"
	"github.com/sbxrun/sbxrun/internal/tree"
)

// Info is what is known of a volume.
type Info struct {
	Name    string    `json:"name"`
	Path    string    `json:"path"`   // of its data
	Status  string    `json:"status"` // free, read or written
	PIDs    []int     `json:"pids"`   // of those that use it, as far as that can be told
	ModTime time.Time `json:"modified_at"`
}

// List returns all volumes by name.
func (s *Store) List() (list []Info, err error) {
	names, err := s.names()
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		if CheckName(name) != nil {
			continue
		}
		var st unix.Stat_t
		if unix.Fstatat(s.fd, name+"/"+dataName, &st, unix.AT_SYMLINK_NOFOLLOW) != nil {
			continue // removed meanwhile, or none
		}
		i := Info{Name: name, Path: filepath.Join(s.path, name, dataName), Status: "free", PIDs: []int{}, ModTime: tree.ModTime(&st)}
		if pids, busy := s.look(name, false); busy {
			i.Status, i.PIDs = "written", append(i.PIDs, pids...)
		} else if pids, busy = s.look(name, true); busy {
			i.Status, i.PIDs = "read", append(i.PIDs, pids...)
		}
		list = append(list, i)
	}
	return list, nil
}

// look reports who keeps others from a volume. It has the lock for an instant, which those who want
// it wait for.
func (s *Store) look(name string, write bool) (pids []int, busy bool) {
	if dir, err := s.marked(name, unix.LOCK_SH); err == nil {
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

// marked locks the directory of a volume, which those do who have the lock itself only to look.
func (s *Store) marked(name string, how int) (*os.File, error) {
	fd, err := unix.Openat2(s.fd, name, beneath(unix.O_RDONLY|unix.O_DIRECTORY))
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), name)
	if err := unix.Flock(fd, how|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// listed reports whether somebody looks at a volume, and so may have its lock for no longer than that.
func (s *Store) listed(name string) bool {
	dir, err := s.marked(name, unix.LOCK_EX)
	if err == nil {
		dir.Close()
	}
	return err == unix.EWOULDBLOCK
}

// Names lists all volumes, and locks none.
func (s *Store) Names() ([]string, error) {
	names, err := s.names()
	return slices.DeleteFunc(names, func(name string) bool { return CheckName(name) != nil }), err
}

func (s *Store) names() ([]string, error) {
	if s.fd < 0 {
		return nil, nil
	}
	fd, err := unix.Openat(s.fd, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	dir := os.NewFile(uintptr(fd), s.path)
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	slices.Sort(names)
	return names, err
}

// Lock locks a volume that there is, to look at it: see [Store.Use].
func (s *Store) Lock(name string) (*Volume, error) {
	if err := CheckName(name); err != nil {
		return nil, err
	}
	v, err := s.lock(name, false, patience)
	if err != nil {
		return nil, explain(name, err)
	}
	return v, nil
}

// Remove removes a volume that nobody uses. It is gone at once; what a crash leaves of it
// [Store.Leftovers] finds.
func (s *Store) Remove(name string) error {
	if err := CheckName(name); err != nil {
		return err
	}
	v, err := s.lock(name, true, patience)
	if err != nil {
		return explain(name, err)
	}
	defer v.Close()
	hidden := removePrefix + random.Name()
	if err := unix.Renameat(s.fd, name, s.fd, hidden); err != nil {
		return explain(name, err)
	}
	if err := tree.Remove(s.fd, hidden); err != nil {
		return wrong("the volume %q is removed, but not all that was in it: %v", name, err)
	}
	return nil
}

// Leftovers returns what crashes have left, for [Store.Discard]. What is being made is not among it: then somebody has the
// lock on the store.
func (s *Store) Leftovers() (list []string, err error) {
	if s.fd < 0 {
		return nil, nil
	}
	lock, busy := s.own(unix.LOCK_EX, glance)
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

// own locks the store, for those who make a volume together, or for one who looks for what those who
// were killed have left.
func (s *Store) own(how int, patience time.Duration) (*os.File, error) {
	fd, err := unix.Openat(s.fd, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), s.path)
	if err := flock(fd, how, patience); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// Discard removes a leftover.
func (s *Store) Discard(leftover string) error { return tree.Remove(s.fd, leftover) }
