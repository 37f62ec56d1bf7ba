// Package tree reads and removes directories that a hostile command may be changing at the same time.
//
// One rule covers everything: a name is opened beneath the descriptor of the directory in which it was found, in one
// step that follows no link (openat2(2)), and fstat(2) of the opened file gives its type. Whatever is renamed or
// replaced in between, a walk therefore reads only files of the tree. It never blocks: a FIFO is opened with
// O_NONBLOCK, and opening a file with a lease (fcntl(2), F_SETLEASE) fails with EAGAIN.
//
// Everything that the command can multiply is bounded: entries, levels, the length of a path,
// and the length of all paths together.
package tree

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/safeopen"
)

// Open opens a path beneath a directory: not outside it, on another mount or behind a link.
func Open(dir int, name string, flags int) (int, error) { return Create(dir, name, flags, 0) }

// Create is [Open] for O_CREAT, which needs a mode.
func Create(dir int, name string, flags int, mode uint32) (int, error) {
	return safeopen.Beneath(dir, name, flags, mode, unix.RESOLVE_NO_XDEV)
}

// OpenFile opens a regular file for reading. The error is [unix.ENOENT] if it is not a regular file.
func OpenFile(dir int, name string) (fd int, st unix.Stat_t, err error) {
	if fd, err = Open(dir, name, unix.O_RDONLY); err != nil {
		return -1, st, err
	}
	if err = unix.Fstat(fd, &st); err == nil && Type(&st) != unix.S_IFREG {
		err = unix.ENOENT
	}
	if err != nil {
		unix.Close(fd)
		return -1, st, err
	}
	return fd, st, nil
}

// Readlink returns the target of a link beneath a directory.
func Readlink(dir int, name string) (string, error) {
	fd, err := Open(dir, name, unix.O_PATH)
	if err != nil {
		return "", err
	}
	defer unix.Close(fd)
	return readlink(fd, "")
}

func readlink(dir int, name string) (string, error) {
	b := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(dir, name, b)
	if err != nil {
		return "", err
	}
	return string(b[:n]), nil
}

// Gone reports whether an error means that a name was removed or changed its type since it was found.
func Gone(err error) bool {
	for _, e := range []error{unix.ENOENT, unix.ELOOP, unix.ENXIO, unix.ENOTDIR, unix.EINVAL} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// Inode identifies a file while it is open or otherwise exists.
type Inode struct{ Dev, Ino uint64 }

// InodeOf returns the Inode of a stat(2) result.
func InodeOf(st *unix.Stat_t) Inode { return Inode{uint64(st.Dev), st.Ino} }

// Identity returns the inode number and the birth time of a file, because the numbers of removed files
// are reused. On file systems without birth times it returns only the number.
func Identity(fd int) (string, error) {
	var st unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_INO|unix.STATX_BTIME, &st); err != nil {
		return "", err
	}
	if st.Mask&unix.STATX_BTIME == 0 {
		return fmt.Sprint(st.Ino), nil
	}
	return fmt.Sprintf("%d %d.%09d", st.Ino, st.Btime.Sec, st.Btime.Nsec), nil
}

// Born returns the birth time of a file, or false if the file system has none.
func Born(fd int) (time.Time, bool) {
	var st unix.Statx_t
	err := unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_BTIME, &st)
	return time.Unix(st.Btime.Sec, int64(st.Btime.Nsec)), err == nil && st.Mask&unix.STATX_BTIME != 0
}

// Type returns the file type bits of the mode: S_IFREG, S_IFDIR and so on.
func Type(st *unix.Stat_t) uint32 { return st.Mode & unix.S_IFMT }

// ModTime returns the modification time. A command can set it to any 64-bit number (utimensat(2)), but
// JSON has only the years 0 to 9999 (RFC 3339), so other times are clamped.
func ModTime(st *unix.Stat_t) time.Time {
	const first, last = -62167219200, 253402300799 // 0000-01-01T00:00:00Z and 9999-12-31T23:59:59Z
	sec, nsec := st.Mtim.Unix()
	if sec < first || sec > last {
		sec, nsec = min(max(sec, first), last), 0
	}
	return time.Unix(sec, nsec).UTC()
}

// LeadsOut reports whether a link may lead out of a tree in which its path has depth directories above it.
// A ".." after a name counts as leading out, because that name may be a link itself.
func LeadsOut(depth int, target string) bool {
	if path.IsAbs(target) {
		return true
	}
	named := false
	for part := range strings.SplitSeq(target, "/") {
		switch {
		case part == "" || part == ".":
		case part != "..":
			named = true
		case named || depth == 0:
			return true
		default:
			depth--
		}
	}
	return false
}

// Hidden returns a random name for a temporary file.
func Hidden() string { return ".sbxrun-" + safeopen.RandomName() }

// names returns the sorted names in a directory, or nil if there are more than most.
func names(dir, most int) ([]string, error) {
	list := []string{}
	for name, err := range safeopen.ReadNames(dir) {
		if err != nil {
			return nil, err
		}
		if list = append(list, name); len(list) > most {
			return nil, nil
		}
	}
	slices.Sort(list)
	return list, nil
}

// TooLarge returns an error about an exceeded bound.
func TooLarge(format string, args ...any) error {
	return &result.Error{Code: "too-large", Message: fmt.Sprintf(format, args...)}
}
