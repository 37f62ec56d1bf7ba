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
func stage(source int, create bool) (dir int, err error) {
	for range maxExchanges {
		if create {
			if err := unix.Mkdirat(source, stagingName, 0o700); err != nil && err != unix.EEXIST {
				return -1, fmt.Errorf("mkdir %s: %w", stagingName, err)
			}
		}
		dir, err := tree.Open(source, stagingName, unix.O_RDONLY|unix.O_DIRECTORY)
		if create && err == unix.ENOENT {
			continue // the apply before us has just removed its own
		}
		if err != nil {
			return -1, err
		}
		named, err := lock(source, dir)
		if err == nil && named {
			err = tree.Empty(dir)
		}
		if err == nil && named {
			return dir, nil
		}
		unix.Close(dir)
		if err != nil {
			return -1, err
		}
	}
	return -1, errBusy
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
func unstage(source, dir int) error {
	defer unix.Close(dir)
	if err := tree.Empty(dir); err != nil {
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
