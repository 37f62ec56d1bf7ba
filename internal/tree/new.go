package tree

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/safeopen"
)

// Begin creates a file without a name, so that a killed process leaves nothing behind (open(2),
// O_TMPFILE, Linux 3.11). If the file system does not support that, the file has a temporary name.
func Begin(dir int, mode uint32) (fd int, temporary string, err error) {
	fd, err = unix.Openat(dir, ".", unix.O_TMPFILE|unix.O_WRONLY|unix.O_CLOEXEC, mode)
	if err == unix.EOPNOTSUPP || err == unix.EISDIR || err == unix.ENOENT {
		temporary = Hidden()
		fd, err = unix.Openat(dir, temporary, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, mode)
	}
	return fd, temporary, err
}

// WriteNew writes a new file of the caller. The file gets its name when it is complete and synced. An
// existing file is an error.
func WriteNew(name string, write func(*os.File) error) (err error) {
	defer func() {
		switch errno, ok := err.(unix.Errno); {
		case errno == unix.EEXIST:
			err = &result.Error{Code: "exists", Message: fmt.Sprintf("%q already exists", name), Hint: "name another file or remove it first", Err: errno}
		case ok:
			err = &fs.PathError{Op: "write", Path: name, Err: errno}
		}
	}()
	parent, base := filepath.Split(name)
	if base == "" || base == "." || base == ".." {
		return unix.EISDIR
	}
	dir, err := safeopen.Dir(filepath.Clean(parent))
	if err != nil {
		return err
	}
	defer unix.Close(dir)
	var st unix.Stat_t
	if unix.Fstatat(dir, base, &st, unix.AT_SYMLINK_NOFOLLOW) == nil {
		return unix.EEXIST // fail before any work
	}
	fd, temporary, err := Begin(dir, 0o600)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	if err = write(f); err == nil {
		err = f.Sync()
	}
	if temporary == "" {
		if err == nil {
			err = Link(fd, dir, base)
		}
		return err
	}
	if err == nil {
		err = unix.Renameat2(dir, temporary, dir, base, unix.RENAME_NOREPLACE)
		if err == unix.EINVAL { // not supported by NFS
			err = unix.Linkat(dir, temporary, dir, base, 0)
		}
	}
	_ = unix.Unlinkat(dir, temporary, 0) // fails if it was renamed
	return err
}
