// Package safeopen opens paths on the host without following symbolic links that other users could have made.
//
// A command with a writable bind can leave a link there: to a file that only root may read or write, to a device, or
// to a descriptor of the process that follows the link. If the caller later names a path in that directory, the
// kernel would follow the link with the caller's rights. This package checks each link on the way: who owns it, and
// who could replace it.
//
//   - For root, a link counts only if root owns it and no other user can change its directory.
//     Files that root's sandboxes leave in a writable bind belong to the bind's owner, so in
//     directories of root itself their links count as root's.
//   - For an ordinary user, a link counts if the user or root owns it. Sandboxes of the user
//     run with the same uid, so their files cannot be distinguished from the user's.
//
// Paths are opened component by component, relative to descriptors, so that nothing changes between the check and the
// use.
//
// [Beneath], [InRoot] and [Folder] open paths below a directory that other processes may be changing. The package also
// checks who can change a program before it is executed.
package safeopen

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	gopath "path"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

// Error reports a link that was not followed.
type Error struct {
	Link  string
	plain bool // no link is followed there, whoever owns it
}

func (e *Error) Error() string {
	if e.plain {
		return fmt.Sprintf("%q is a symbolic link", e.Link)
	}
	return fmt.Sprintf("%q is a symbolic link that others could have put there", e.Link)
}

// Hint is the hint for an [Error].
const Hint = "name the path that the link leads to"

// maxLinks is the maximum number of links followed for one path, as in path_resolution(7).
const maxLinks = 40

// Open returns an O_PATH descriptor of path, so that a device or named pipe is not really
// opened yet. The last component is followed like the others. The caller closes the descriptor.
func Open(path string) (int, error) {
	// Most paths have no link: one openat2(2) (Linux 5.6) is enough. After any error, such as
	// EPERM from a system call filter, walk finds the details.
	fd, err := unix.Openat2(unix.AT_FDCWD, path, &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS})
	if err == nil {
		return fd, nil
	}
	return walk(path, func(dir int, _ string, st *unix.Stat_t) error {
		if trusted(dir, st) {
			return nil
		}
		return new(Error)
	})
}

// Dir is [Open] for a directory.
func Dir(path string) (int, error) {
	fd, err := Open(path)
	if err != nil {
		return -1, err
	}
	var st unix.Stat_t
	if err = unix.Fstat(fd, &st); err == nil && st.Mode&unix.S_IFMT != unix.S_IFDIR {
		err = unix.ENOTDIR
	}
	if err != nil {
		_ = unix.Close(fd) // O_PATH: nothing was written
		return -1, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return fd, nil
}

// Reopen opens the file that the O_PATH descriptor fd refers to with the given flags, whatever its path refers to by
// now. It does not wait for the other end of a named pipe and does not acquire a controlling terminal.
func Reopen(fd, flags int) (int, error) {
	return unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd), flags|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
}

// walk opens path. It follows a link if follow, called with the link's directory, that directory's path
// and the link's status, returns nil; it fills in an [Error] of follow.
func walk(path string, follow func(dir int, where string, st *unix.Stat_t) error) (fd int, err error) {
	at, where, todo := ".", "", strings.Split(path, "/")
	if todo[0] == "" {
		at, where = "/", "/"
	}
	fail := func(err error) (int, error) {
		return -1, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	if path == "" {
		return fail(unix.ENOENT)
	}
	const flags = unix.O_PATH | unix.O_CLOEXEC | unix.O_NOFOLLOW
	dir, err := unix.Open(at, flags|unix.O_DIRECTORY, 0)
	if err != nil {
		return fail(err)
	}
	defer func() { _ = unix.Close(dir) }() // O_PATH: nothing was written
	links := 0
	for i := 0; i < len(todo); i++ {
		name := todo[i]
		if name == "" {
			name = "." // also at the end: "file/" is ENOTDIR
		}
		next, err := unix.Openat(dir, name, flags, 0)
		if err != nil {
			return fail(err)
		}
		var st unix.Stat_t
		if err := unix.Fstat(next, &st); err != nil {
			_ = unix.Close(next)
			return fail(err)
		}
		if st.Mode&unix.S_IFMT == unix.S_IFLNK {
			if links++; links > maxLinks {
				_ = unix.Close(next)
				return fail(unix.ELOOP)
			}
			if err := follow(dir, where, &st); err != nil {
				_ = unix.Close(next)
				if e := (*Error)(nil); errors.As(err, &e) {
					e.Link = gopath.Join(where, name)
				}
				return -1, err
			}
			target, magic, err := read(next, dir, name)
			_ = unix.Close(next)
			if err != nil {
				return fail(err)
			}
			if magic < 0 {
				rest := append(strings.Split(target, "/"), todo[i+1:]...)
				if target[0] == '/' {
					root, err := unix.Open("/", flags|unix.O_DIRECTORY, 0)
					if err != nil {
						return fail(err)
					}
					_ = unix.Close(dir)
					dir, where = root, "/"
				}
				todo, i = rest, -1
				continue
			}
			next = magic
		}
		_ = unix.Close(dir)
		dir, where = next, gopath.Join(where, name)
	}
	fd, dir = dir, -1
	return fd, nil
}

// read returns a link's target or, for a magic link of /proc, whose text only describes its
// target, a descriptor of that target. magic is -1 for other links.
func read(link, dir int, name string) (target string, magic int, err error) {
	var st unix.Statfs_t
	if unix.Fstatfs(dir, &st) == nil && st.Type == unix.PROC_SUPER_MAGIC {
		magic, err = unix.Openat(dir, name, unix.O_PATH|unix.O_CLOEXEC, 0)
		return "", magic, err
	}
	buf := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(link, "", buf)
	if err == nil && n == 0 {
		err = unix.ENOENT
	}
	return string(buf[:n]), -1, err
}

// trusted reports whether the caller may follow a link in dir: it belongs to the caller or
// root and, if the caller is root, no other user could have put it there. The directory of an
// ordinary user may be writable for a group, as with umask 002.
func trusted(dir int, st *unix.Stat_t) bool {
	uid := uint32(os.Geteuid())
	return ours(st) && (uid != 0 || Placed(dir, st))
}

// Placed reports whether only the caller and root could have put the file with status st into dir. The owner of the
// file itself does not matter, because a container engine may bind a device of another user, except in a sticky
// directory, where everyone can put files of their own (unlink(2)).
func Placed(dir int, st *unix.Stat_t) bool {
	var d unix.Stat_t
	if err := unix.Fstatat(dir, "", &d, unix.AT_EMPTY_PATH); err != nil || !ours(&d) {
		return false
	}
	return d.Mode&0o022 == 0 || d.Mode&unix.S_ISVTX != 0 && ours(st)
}

func ours(st *unix.Stat_t) bool { return st.Uid == 0 || st.Uid == uint32(os.Geteuid()) }

// Source returns a function that opens a file on the host for copying. If follow is false, it fails
// for a symbolic link, because an earlier command may have left it there. It still follows links in /proc
// and links that only the system can have made, such as /home to /var/home. For root those must be in /
// or /dev, because root may have copied a command's links to its own directories.
func Source(follow bool) func(name string, flags int) (int, error) {
	if follow {
		return func(name string, flags int) (int, error) {
			fd, err := For(name, flags)
			if e := (*Error)(nil); errors.As(err, &e) {
				err = &result.Error{Code: "usage", Message: e.Error(), Err: e, Hint: Hint}
			}
			return fd, err
		}
	}
	return func(name string, flags int) (int, error) {
		fd, err := walk(name, func(dir int, where string, st *unix.Stat_t) error {
			var fs unix.Statfs_t
			system := st.Uid == 0 && Placed(dir, st) && (os.Geteuid() != 0 || where == "/" || where == "/dev")
			if system || unix.Fstatfs(dir, &fs) == nil && fs.Type == unix.PROC_SUPER_MAGIC {
				return nil
			}
			return &Error{plain: true}
		})
		if e := (*Error)(nil); errors.As(err, &e) {
			r := &result.Error{Code: "usage", Message: e.Error(), Err: e, Hint: "name the file that it leads to"}
			if fd, err := Open(name); err == nil { // --follow-links would follow it
				unix.Close(fd)
				r.Hint += ", or use --follow-links"
			}
			return -1, r
		}
		if err != nil {
			return -1, err
		}
		defer unix.Close(fd)
		return Reopen(fd, flags)
	}
}

// For opens a file on the host for copying or, with O_DIRECTORY, a directory to copy to, by the rules of [Open].
func For(name string, flags int) (int, error) {
	if flags&unix.O_DIRECTORY != 0 {
		return Dir(name)
	}
	fd, err := Open(name)
	if err != nil {
		return -1, err
	}
	defer unix.Close(fd)
	return Reopen(fd, flags)
}
