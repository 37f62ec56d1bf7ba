package tree

import (
	"errors"
	"strconv"

	"github.com/sbxrun/sbxrun/internal/safeopen"
	"golang.org/x/sys/unix"
)

// Remove removes a name with everything in it, whatever its depth, and including directories closed to their owner.
// It follows no link and does not leave the file system. It moves nested directories up, so that three descriptors
// suffice for any depth. Concurrent calls for the same name do no harm. A missing name is not an error.
func Remove(dir int, name string) error {
	err := unix.Unlinkat(dir, name, 0)
	if err != unix.EISDIR && err != unix.EPERM { // EPERM is POSIX's error for a directory
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
		if err := unix.Unlinkat(dir, name, unix.AT_REMOVEDIR); err != unix.ENOTEMPTY { // a concurrent Remove has moved directories up
			return unlessGone(err)
		}
	}
}

// Empty removes everything in a directory.
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

// dissolve removes a directory in top after moving its subdirectories up.
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

// empty removes everything but directories from a directory. It moves directories to top, unless that
// is -1, and returns their names.
func empty(dir, top int) (dirs []string, err error) {
	for name, err := range safeopen.ReadNames(dir) {
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
			if err == unix.EXDEV { // overlayfs cannot move directories of a lower layer: one descriptor per level
				err = dissolve(dir, name)
			}
		}
		if unlessGone(err) != nil {
			return nil, err
		}
	}
	return dirs, nil
}

// moveUp moves a directory to top. rename(2) needs write permission for the directory, to change its "..".
func moveUp(dir int, name string, top int) error {
	fd, err := OpenOwn(dir, name)
	if err != nil {
		return err
	}
	unix.Close(fd)
	return unix.Renameat(dir, name, top, Hidden())
}

// OpenOwn opens a directory of this process's user, and makes it accessible first if necessary.
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

// Chmod sets the permissions of the file that an O_PATH descriptor refers to. It uses /proc because
// fchmod(2) rejects such descriptors; the link there leads to the file itself, whatever its name is by now.
func Chmod(place int, mode uint32) error {
	return unix.Chmod("/proc/self/fd/"+strconv.Itoa(place), mode)
}

// Link creates a name for an open file. It uses /proc, because AT_EMPTY_PATH needs a capability (linkat(2)).
func Link(file, dir int, name string) error {
	return unix.Linkat(unix.AT_FDCWD, "/proc/self/fd/"+strconv.Itoa(file), dir, name, unix.AT_SYMLINK_FOLLOW)
}
