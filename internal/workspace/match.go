package workspace

import (
	"errors"
	"io"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Mount is the root of a mount of a sandbox, or the directory nearest to that. It can be used
// when the sandbox is gone.
type Mount struct {
	dir  *Dir
	name string
}

// Close gives it up.
func (m *Mount) Close() { m.dir.Close() }

// Mount opens the mount that what a pattern can match lies in, as far as it is there, and
// returns the rest of the pattern.
func (r *Root) Mount(pattern string) (*Mount, string, error) {
	parts := strings.Split(strings.Trim(pattern, "/"), "/")
	n := 0 // parts that are names, and not the last
	for n < len(parts)-1 && !strings.ContainsAny(parts[n], `*?[\`) {
		n++
	}
	var found *Mount
	var on uint64
	at := 0
	for ; n >= 0; n-- {
		name := "/" + strings.Join(parts[:n], "/")
		dir, err := r.Dir(name)
		if err != nil && found == nil {
			continue // not there yet
		}
		if err != nil {
			return found, strings.Join(parts[at:], "/"), nil
		}
		var st unix.Statx_t
		err = unix.Statx(dir.fd(), "", unix.AT_EMPTY_PATH, unix.STATX_MNT_ID, &st)
		if err == nil && (found == nil || st.Mnt_id == on) {
			if found != nil {
				found.Close()
			}
			found, on, at = &Mount{dir, name}, st.Mnt_id, n
			continue
		}
		dir.Close()
		if err != nil && found == nil {
			return nil, "", err
		}
		break
	}
	if found == nil {
		return nil, "", unix.ENOENT
	}
	return found, strings.Join(parts[at:], "/"), nil
}

// Matches copies what a pattern matches below a mount to a directory, each under its own name.
// A name that begins with a dot is matched by a pattern that does. No link is followed.
func (t *Transfer) Matches(m *Mount, pattern string, to *Dir) error {
	fd := -1
	err := m.dir.as(func() (err error) {
		fd, err = unix.Openat(m.dir.fd(), ".", reading|unix.O_DIRECTORY, 0)
		return err
	})
	if err != nil {
		return explain(m.name, err)
	}
	defer unix.Close(fd)
	if t.Max.Entries == 0 {
		t.Max.Entries = maxEntries
	}
	return t.matches(m.dir, fd, strings.Split(pattern, "/"), m.name, &tree{side: to, fd: to.fd()})
}

func (t *Transfer) matches(from *Dir, parent int, pattern []string, shown string, to sink) error {
	names := []string{pattern[0]}
	if strings.ContainsAny(pattern[0], `*?[\`) {
		var err error
		if names, err = t.list(from, parent, pattern[0]); err != nil {
			return err
		}
	}
	for _, name := range names {
		below := path.Join(shown, name)
		if len(pattern) == 1 {
			if err := t.entry(from, parent, to, name, below, 1); err != nil {
				return err
			}
			continue
		}
		fd := -1
		err := from.as(func() (err error) {
			fd, err = unix.Openat(parent, name, reading|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
			return err
		})
		if err != nil {
			continue // it is no directory, is not there, or is closed
		}
		err = t.matches(from, fd, pattern[1:], below, to)
		unix.Close(fd)
		if err != nil {
			return err
		}
	}
	return nil
}

// list returns the names in a directory that a pattern matches, sorted.
func (t *Transfer) list(from *Dir, parent int, pattern string) (names []string, err error) {
	fd := -1
	err = from.as(func() (err error) {
		fd, err = unix.Openat(parent, ".", reading|unix.O_DIRECTORY, 0)
		return err
	})
	if err != nil {
		return nil, explain(pattern, err)
	}
	dir := os.NewFile(uintptr(fd), pattern)
	defer dir.Close()
	all, err := dir.Readdirnames(t.Max.Entries)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, explain(pattern, err)
	}
	for _, name := range all {
		if ok, _ := path.Match(pattern, name); ok && (name[0] != '.' || pattern[0] == '.') {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names, nil
}
