package tree

import (
	"errors"
	"strconv"

	"golang.org/x/sys/unix"
)

// Remove removes a name with all that is in it, which may be deeper than a path or the descriptors
// allow, and its directories closed to their owner. It follows no link, and leaves the file system
// nowhere. A directory in a directory is moved up, so three descriptors are enough for any depth.
// Several at once on the same name do no harm. What is not there is removed.
func Remove(dir int, name string) error {
	err := unix.Unlinkat(dir, name, 0)
	if err != unix.EISDIR && err != unix.EPERM { // EPERM: of POSIX, for a directory
		return unlessGone(err)
	}
	top, err := OpenOwn(dir, name)
	if err != nil {
		return unlessGone(err)
	}
	defer unix.Close(top)
	for {
		if err := Empty(top); err != nil {
			return err
		}
		if err := unix.Unlinkat(dir, name, unix.AT_REMOVEDIR); err != unix.ENOTEMPTY { // another Remove has moved some up
			return unlessGone(err)
		}
	}
}

// Empty is [Remove] of all that is in a directory.
func Empty(top int) error {
	for {
		left, err := empty(top, -1)
		if err != nil || len(left) == 0 {
			return err
		}
		for _, sub := range left {
			if err := dissolve(top, sub); err != nil {
				return err
			}
		}
	}
}

func unlessGone(err error) error {
	if err == unix.ENOENT {
		return nil
	}
	return err
}

// dissolve removes a directory in top, after it has moved the directories in it up.
func dissolve(top int, name string) error {
	dir, err := OpenOwn(top, name)
	if err != nil {
		return unlessGone(err)
	}
	defer unix.Close(dir)
	for {
		left, err := empty(dir, top)
		if err != nil {
			return err
		}
		if len(left) == 0 {
			if err := unix.Unlinkat(top, name, unix.AT_REMOVEDIR); err != unix.ENOTEMPTY {
				return unlessGone(err)
			}
		}
	}
}

// empty removes from a directory what is no directory, moves directories to top, unless that
// is -1, and returns those that it has found.
func empty(dir, top int) (dirs []string, err error) {
	for name, err := range readNames(dir) {
		if err != nil {
			return nil, err
		}
		err = unix.Unlinkat(dir, name, 0)
		if err == unix.EISDIR || err == unix.EPERM {
			dirs = append(dirs, name)
			err = nil
			if top >= 0 {
				err = moveUp(dir, name, top)
			}
			if err == unix.EXDEV { // overlayfs moves none of a lower layer: these take descriptors by level
				err = dissolve(dir, name)
			}
		}
		if unlessGone(err) != nil {
			return nil, err
		}
	}
	return dirs, nil
}

// moveUp moves a directory to top. To write its "..", it takes write permission on it
// (rename(2)).
func moveUp(dir int, name string, top int) error {
	fd, err := OpenOwn(dir, name)
	if err != nil {
		return err
	}
	unix.Close(fd)
	return unix.Renameat(dir, name, top, Hidden())
}

// OpenOwn opens a directory of this process's user, which it makes readable first if it is not.
func OpenOwn(dir int, name string) (int, error) {
	place, err := Open(dir, name, unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return -1, err
	}
	defer unix.Close(place)
	var st unix.Stat_t
	if err := unix.Fstat(place, &st); err != nil {
		return -1, err
	}
	if st.Mode&0o700 != 0o700 {
		if err := Chmod(place, 0o700); err != nil && !errors.Is(err, unix.EPERM) {
			return -1, err
		}
	}
	return Open(place, ".", unix.O_RDONLY|unix.O_DIRECTORY)
}

// Chmod sets the permissions of what a descriptor for O_PATH is of. By /proc, because fchmod(2)
// takes none: what that leads to is the file itself, whatever has its name by now.
func Chmod(place int, mode uint32) error {
	return unix.Chmod("/proc/self/fd/"+strconv.Itoa(place), mode)
}

// Link gives what a descriptor is of a name (linkat(2): by /proc, because AT_EMPTY_PATH takes a
// capability).
func Link(file, dir int, name string) error {
	return unix.Linkat(unix.AT_FDCWD, "/proc/self/fd/"+strconv.Itoa(file), dir, name, unix.AT_SYMLINK_FOLLOW)
}
