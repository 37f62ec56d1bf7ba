// Package links opens a path without following symbolic links that others than the
// caller could have made.
//
// A command that was run with a writable bind can leave a link there: to a file that
// only root may read or write, to a device, to a descriptor of the process that follows
// it. The caller names a path in that directory afterwards, and the kernel would follow
// the link with the caller's rights. Here each link on the way is looked at first. Who
// made it, and who can put another one in its place, decides:
//
//   - for root, a link counts only if it is root's and its directory is one in which
//     nobody else can change it. Files that sandboxes of root leave in a writable bind
//     belong to the bind's owner, so in root's own directories their links count as root's;
//   - for an ordinary user, a link counts if it is the user's or root's. Sandboxes of that
//     user have the same uid: what they leave cannot be told from what the user made.
//
// Everything is opened component by component, by descriptors, so that nothing changes
// between the look and the use.
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

// Error is a link that was not followed.
type Error struct {
	Link  string
	plain bool // no link is followed there, whoever made it
}

func (e *Error) Error() string {
	if e.plain {
		return fmt.Sprintf("%q is a symbolic link", e.Link)
	}
	return fmt.Sprintf("%q is a symbolic link that others could have put there", e.Link)
}

// Hint is the remedy for an [Error].
const Hint = "name the path that is meant"

// maxLinks is how many links are followed on the way of one path, as in
// path_resolution(7).
const maxLinks = 40

// Open returns a descriptor of path, for O_PATH alone: nothing has been asked of a
// device or a named pipe yet. The last component is followed like the others. The
// caller closes the descriptor.
func Open(path string) (int, error) {
	// Most paths have no link: one call (openat2(2), Linux 5.6). Whatever else it says,
	// a system call filter's EPERM included, the long way says in detail.
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

// Reopen returns a descriptor of what fd, which is for O_PATH, refers to, with the
// access that flags ask for: it is the same file, whatever its path leads to by now.
// It never waits for the other end of a named pipe, and takes no controlling terminal.
func Reopen(fd, flags int) (int, error) {
	return unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd), flags|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
}

// walk opens path, and follows a link if follow returns nil for its directory, the path of that, and its
// state. It completes an [Error] of follow.
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

// read returns a link's target; or, of a link of /proc, which leads to what its text
// only describes, a descriptor of that; -1 otherwise.
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

// trusted reports whether the caller may follow a link in dir that has this state: it is
// the caller's or root's, and, if root asks, nobody else could have put it there. The
// directory of an ordinary user may be writable for a group, as umask 002 makes it.
func trusted(dir int, st *unix.Stat_t) bool {
	uid := uint32(os.Geteuid())
	return ours(st) && (uid != 0 || Placed(dir, st))
}

// Placed reports whether nobody but the caller and root could have put into dir what has
// this state. The owner of a device is left out of account: an engine that binds one into
// a container shows somebody else's. But in a sticky directory everybody can put what is
// their own (unlink(2)).
func Placed(dir int, st *unix.Stat_t) bool {
	var d unix.Stat_t
	if err := unix.Fstatat(dir, "", &d, unix.AT_EMPTY_PATH); err != nil || !ours(&d) {
		return false
	}
	return d.Mode&0o022 == 0 || d.Mode&unix.S_ISVTX != 0 && ours(st)
}

func ours(st *unix.Stat_t) bool { return st.Uid == 0 || st.Uid == uint32(os.Geteuid()) }

// Source returns a function that opens a file to be copied from the host. If follow is false, it returns an
// error for a symbolic link, because a command may have left it there for a later one. Exceptions are links
// that only the system can have made, such as /home to /var/home, and those in /proc. Whoever runs as root
// may have copied links of a command to other directories of root's.
func Source(follow bool) func(name string, flags int) (int, error) {
	if follow {
		return For
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
			return -1, &result.Error{Code: "usage", Message: e.Error(), Err: e, Hint: "name the file that it leads to, or follow it with --follow-links"}
		}
		if err != nil {
			return -1, err
		}
		defer unix.Close(fd)
		return Reopen(fd, flags)
	}
}

// For opens what is to be copied from the host, or with O_DIRECTORY a directory to copy to, by
// the rules of [Open].
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
