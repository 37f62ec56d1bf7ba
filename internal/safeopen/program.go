package safeopen

import (
	"fmt"
	"os"
	gopath "path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Program returns the real path of a program that only root, or, if own is set, only root
// and the caller can change: they own the file and every directory on the way, and none is
// writable by other users. No other user can therefore replace it before it is executed.
//
// If others could have changed the program, the error is an [UntrustedError].
func Program(path string, own bool) (real string, err error) {
	if real, err = File(path, own); err == nil && unix.Access(real, unix.X_OK) != nil {
		return "", &os.PathError{Op: "execute", Path: path, Err: unix.EACCES}
	}
	return real, err
}

// File is [Program] for a regular file that need not be executable.
func File(path string, own bool) (real string, err error) {
	real, todo := "/", strings.Split(path, "/")
	if path == "" || path[0] != '/' {
		return "", &os.PathError{Op: "stat", Path: path, Err: unix.EINVAL}
	}
	var dir unix.Stat_t
	if err := unix.Lstat("/", &dir); err != nil {
		return "", &os.PathError{Op: "stat", Path: "/", Err: err}
	}
	for links := 0; ; {
		if !ownedBy(real, &dir, own) {
			return "", &UntrustedError{Path: real, Reason: fmt.Sprintf("belongs to uid %d", dir.Uid)}
		}
		if len(todo) == 0 {
			break
		}
		name := todo[0]
		todo = todo[1:]
		if name == "" || name == "." {
			continue
		}
		if dir.Mode&unix.S_IFMT != unix.S_IFDIR {
			return "", &os.PathError{Op: "stat", Path: path, Err: unix.ENOTDIR}
		}
		next := gopath.Join(real, name)
		var st unix.Stat_t
		if err := unix.Lstat(next, &st); err != nil {
			return "", &os.PathError{Op: "stat", Path: next, Err: err}
		}
		if dir.Mode&0o022 != 0 && (dir.Mode&unix.S_ISVTX == 0 || !ownedBy(next, &st, own)) {
			return "", &UntrustedError{Path: real, Reason: fmt.Sprintf("is writable by others (mode %04o)", dir.Mode&0o7777)}
		}
		if st.Mode&unix.S_IFMT == unix.S_IFLNK {
			if links++; links > maxLinks {
				return "", &os.PathError{Op: "stat", Path: path, Err: unix.ELOOP}
			}
			target, err := os.Readlink(next)
			if err != nil {
				return "", err
			}
			todo = append(strings.Split(target, "/"), todo...)
			if target[0] == '/' {
				real = "/"
			}
			next = real
			if err := unix.Lstat(next, &st); err != nil {
				return "", &os.PathError{Op: "stat", Path: next, Err: err}
			}
		}
		real, dir = next, st
	}
	if dir.Mode&unix.S_IFMT != unix.S_IFREG {
		return "", &os.PathError{Op: "open", Path: path, Err: unix.EACCES}
	}
	if dir.Mode&0o022 != 0 {
		return "", &UntrustedError{Path: real, Reason: fmt.Sprintf("is writable by others (mode %04o)", dir.Mode&0o7777)}
	}
	return real, nil
}

// UntrustedError is a file or directory that others could have changed.
type UntrustedError struct{ Path, Reason string }

func (e *UntrustedError) Error() string { return e.Path + " " + e.Reason }

// ownedBy reports whether a file belongs to root or, if own is set, to the caller. In a
// user namespace that does not map the host's root, its files have the overflow uid.
func ownedBy(path string, st *unix.Stat_t, own bool) bool {
	const overflow = 65534
	switch {
	case st.Uid == 0, own && st.Uid == uint32(os.Geteuid()):
		return true
	case st.Uid == overflow && !mapped(overflow):
		// If the namespace does not map the caller either, no sandbox can be made there. A later check reports that.
		return os.Geteuid() == overflow || st.Mode&unix.S_IFMT == unix.S_IFLNK || unix.Access(path, unix.W_OK) != nil
	}
	return false
}

// mapped reports whether the caller's user namespace maps a uid.
func mapped(uid uint64) bool {
	text, err := os.ReadFile("/proc/self/uid_map")
	if err != nil {
		return false // /proc is not usable, and so nothing will be executed
	}
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line)
		if len(f) != 3 {
			return true
		}
		first, err1 := strconv.ParseUint(f[0], 10, 32)
		count, err2 := strconv.ParseUint(f[2], 10, 32)
		if err1 != nil || err2 != nil || uid >= first && uid-first < count {
			return true
		}
	}
	return false
}
