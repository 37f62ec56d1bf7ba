package overlay

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/tree"
)

// errBusy says that another apply is at work.
var errBusy = &result.Error{Code: "busy", Message: "another sbxrun apply is at work on the same directory", Hint: "try again when it has ended"}

// stage opens the staging directory of a source, empty, and locks it (flock(2)); it makes one if
// that is wanted. The lock ends with the process.
func stage(source int, create bool) (*os.File, error) {
	for range maxExchanges {
		if create {
			if err := unix.Mkdirat(source, stagingName, 0o700); err != nil && err != unix.EEXIST {
				return nil, fmt.Errorf("mkdir %s: %w", stagingName, err)
			}
		}
		fd, err := tree.Open(source, stagingName, unix.O_RDONLY|unix.O_DIRECTORY)
		if create && err == unix.ENOENT {
			continue // the apply before us has just removed its own
		}
		if err != nil {
			return nil, err
		}
		dir := os.NewFile(uintptr(fd), stagingName)
		named, err := lock(source, fd)
		if err == nil && named {
			err = empty(dir)
		}
		if err == nil && named {
			return dir, nil
		}
		dir.Close()
		if err != nil {
			return nil, err
		}
	}
	return nil, errBusy
}

// lock locks a staging directory, and reports whether it still has its name: whoever had the lock
// may have removed it meanwhile, and another may have made one.
func lock(source, dir int) (named bool, err error) {
	var st, now unix.Stat_t
	if err := unix.Fstat(dir, &st); err != nil {
		return false, err
	}
	if int(st.Uid) != unix.Geteuid() || st.Mode&0o077 != 0 {
		return false, &result.Error{Code: "apply", Message: fmt.Sprintf("%s in the directory is not sbxrun's own", stagingName), Hint: "remove it"}
	}
	if unix.Flock(dir, unix.LOCK_EX|unix.LOCK_NB) != nil {
		return false, errBusy
	}
	err = unix.Fstatat(source, stagingName, &now, unix.AT_SYMLINK_NOFOLLOW)
	if err != nil && err != unix.ENOENT {
		return false, err
	}
	return err == nil && tree.InodeOf(&now) == tree.InodeOf(&st), nil
}

// unstage removes it.
func unstage(source int, dir *os.File) error {
	defer dir.Close()
	if err := empty(dir); err != nil {
		return err
	}
	if err := unix.Unlinkat(source, stagingName, unix.AT_REMOVEDIR); err != nil && err != unix.ENOENT {
		return fmt.Errorf("rmdir %s: %w", stagingName, err)
	}
	return nil
}

// Sweep removes what an apply that was killed has left in a source.
func Sweep(source *os.File) error {
	dir, err := stage(int(source.Fd()), false)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	return unstage(int(source.Fd()), dir)
}

// empty removes all that is in a directory of ours.
func empty(dir *os.File) error {
	if _, err := dir.Seek(0, 0); err != nil {
		return err
	}
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return err
	}
	for _, name := range names {
		if err := tree.Remove(int(dir.Fd()), name); err != nil {
			return err
		}
	}
	return nil
}
