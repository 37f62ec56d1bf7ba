package workspace

import (
	"context"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/tree"
)

// directory is a destination directory.
type directory struct {
	side  *Dir // has the user
	fd    int
	owned bool
}

func (t *directory) close() {
	if t.owned {
		unix.Close(t.fd)
	}
}

func (t *directory) file(ctx context.Context, in int, st *unix.Stat_t, name string, moved *atomic.Int64) error {
	return t.side.as(func() error {
		out, temporary, err := tree.Begin(t.fd, st.Mode&0o777)
		if err != nil {
			return err
		}
		defer unix.Close(out)
		return t.finish(out, temporary, name, tree.Fill(ctx, out, in, st, moved))
	})
}

// finish gives a complete file its name, replacing a file or link of that name. After an error it leaves no file.
func (t *directory) finish(out int, temporary, name string, err error) error {
	if err == nil && temporary == "" {
		err = tree.Link(out, t.fd, name)
		if err != unix.EEXIST {
			return err
		}
		temporary = tree.Hidden()
		err = tree.Link(out, t.fd, temporary)
	}
	return t.rename(temporary, name, err)
}

// regular returns the status of the file to replace, or nil. It returns an error for links and other types.
func (t *directory) regular(name string) (*unix.Stat_t, error) {
	var st unix.Stat_t
	err := unix.Fstatat(t.fd, name, &st, unix.AT_SYMLINK_NOFOLLOW)
	switch {
	case err == unix.ENOENT:
		return nil, nil
	case err != nil:
		return nil, err
	case tree.Type(&st) == unix.S_IFLNK:
		return nil, unix.ELOOP
	case tree.Type(&st) != unix.S_IFREG:
		return nil, usage("%q is not a regular file", name)
	}
	return &st, nil
}

// rename gives a complete file its name, replacing a file or link of that name, and removes the temporary one.
// It does not replace devices, FIFOs and sockets: for root that could be /dev/null.
func (t *directory) rename(temporary, name string, err error) error {
	var st unix.Stat_t
	if err == nil && unix.Fstatat(t.fd, name, &st, unix.AT_SYMLINK_NOFOLLOW) == nil && special(&st) {
		err = taken(name)
	}
	if err == nil {
		err = noMount(t.fd, name)
	}
	if err == nil {
		err = unix.Renameat(t.fd, temporary, t.fd, name)
	}
	// It may be missing; but rename(2) keeps both names if they are the same file.
	_ = unix.Unlinkat(t.fd, temporary, 0)
	return err
}

// noMount returns an error if a name is a mount point in the sandbox. From outside a mount point can be replaced
// or removed, and the kernel then removes the mount, which may protect the path from the command.
func noMount(dir int, name string) error {
	var st unix.Statx_t
	err := unix.Statx(dir, name, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT, 0, &st)
	if err == nil && st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0 {
		return unix.EROFS
	}
	return nil // using the name reports other errors
}

// special reports whether a file is a device, a FIFO or a socket.
func special(st *unix.Stat_t) bool {
	switch tree.Type(st) {
	case unix.S_IFREG, unix.S_IFDIR, unix.S_IFLNK:
		return false
	}
	return true
}

func taken(name string) error {
	e := usage("%q exists and is neither a file nor a link to one", name).(*result.Error)
	e.Hint = "name another path"
	return e
}

func (t *directory) link(target string, _ *unix.Stat_t, name string) error {
	return t.side.as(func() error {
		err := unix.Symlinkat(target, t.fd, name)
		if err != unix.EEXIST {
			return err
		}
		temporary := tree.Hidden()
		return t.rename(temporary, name, unix.Symlinkat(target, t.fd, temporary))
	})
}

// dir creates a directory that its owner may write to, or opens an existing one.
func (t *directory) dir(st *unix.Stat_t, name string) (sink, error) {
	fd := -1
	err := t.side.as(func() (err error) {
		// "." is the directory itself.
		if err := unix.Mkdirat(t.fd, name, st.Mode&0o777|0o700); err != nil && err != unix.EEXIST {
			return err
		}
		fd, err = unix.Openat(t.fd, name, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err == unix.ENOTDIR || err == unix.ELOOP {
			err = usage("%q exists and is not a directory", name)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return &directory{side: t.side, fd: fd, owned: true}, nil
}
