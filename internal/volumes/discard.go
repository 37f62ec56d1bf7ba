package volumes

import (
	"errors"
	"strconv"

	"golang.org/x/sys/unix"
)

// discard removes a directory of the store with all that is in it, which commands have made:
// it may be deeper than a path or the descriptors allow, and its directories closed. A
// directory in a directory is moved up, so that three descriptors are enough for any depth. No
// link is followed. Several at once on the same directory do no harm.
func (s *Store) discard(name string) error {
	top, err := openDir(s.fd, name)
	if err == unix.ENOENT {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(top)
	for {
		left, err := empty(top, -1)
		if err != nil {
			return err
		}
		if len(left) == 0 {
			break
		}
		for _, dir := range left {
			if err := dissolve(top, dir); err != nil {
				return err
			}
		}
	}
	if err := unix.Unlinkat(s.fd, name, unix.AT_REMOVEDIR); err != nil && err != unix.ENOENT {
		return err
	}
	return nil
}

// dissolve removes a directory in top, after it has moved the directories in it up.
func dissolve(top int, name string) error {
	dir, err := openDir(top, name)
	if err == unix.ENOENT {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(dir)
	for {
		left, err := empty(dir, top)
		if err != nil {
			return err
		}
		if len(left) == 0 {
			break
		}
	}
	if err := unix.Unlinkat(top, name, unix.AT_REMOVEDIR); err != nil && err != unix.ENOENT {
		return err
	}
	return nil
}

// empty removes from a directory what is no directory, moves directories to top, unless that
// is -1, and returns those that it has found.
func empty(dir, top int) (dirs []string, err error) {
	if _, err := unix.Seek(dir, 0, unix.SEEK_SET); err != nil {
		return nil, err
	}
	buf := make([]byte, 32<<10)
	for {
		n, err := unix.ReadDirent(dir, buf)
		if err == unix.EINTR {
			continue
		}
		if err != nil || n == 0 {
			return dirs, err
		}
		_, _, names := unix.ParseDirent(buf[:n], -1, nil)
		for _, name := range names {
			err := unix.Unlinkat(dir, name, 0)
			if err == unix.EISDIR || err == unix.EPERM { // EPERM: of POSIX, for a directory
				dirs = append(dirs, name)
				err = nil
				if top >= 0 {
					err = moveUp(dir, name, top)
				}
			}
			if err != nil && err != unix.ENOENT {
				return nil, err
			}
		}
	}
}

// moveUp moves a directory to top. To write its "..", it takes write permission on it
// (rename(2)).
func moveUp(dir int, name string, top int) error {
	fd, err := openDir(dir, name)
	if err != nil {
		return err
	}
	unix.Close(fd)
	return unix.Renameat(dir, name, top, random())
}

// openDir opens a directory, which it makes readable first if it is not.
func openDir(dir int, name string) (int, error) {
	const flags = unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC
	place, err := unix.Openat(dir, name, unix.O_PATH|flags, 0)
	if err != nil {
		return -1, err
	}
	defer unix.Close(place)
	var st unix.Stat_t
	if err := unix.Fstat(place, &st); err != nil {
		return -1, err
	}
	// By /proc, because fchmod(2) does not take a descriptor for O_PATH: what that leads to is
	// the directory itself, whatever has its name by now.
	own := "/proc/self/fd/" + strconv.Itoa(place)
	if st.Mode&0o700 != 0o700 {
		if err := unix.Chmod(own, 0o700); err != nil && !errors.Is(err, unix.EPERM) {
			return -1, err
		}
	}
	return unix.Open(own, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
}
