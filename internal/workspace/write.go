package workspace

import (
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/tree"
)

// directory is one that is copied to.
type directory struct {
	side  *Dir // whose user copies
	fd    int
	owned bool
}

func (t *directory) close() {
	if t.owned {
		unix.Close(t.fd)
	}
}

// file makes a file without a name, and gives it that when it is complete: whoever is killed
// meanwhile leaves nothing (open(2), O_TMPFILE, Linux 3.11; not all file systems have it).
func (t *directory) file(in int, st *unix.Stat_t, name string, moved *atomic.Int64) error {
	return t.side.as(func() error {
		mode, temporary := st.Mode&0o777, ""
		out, err := unix.Openat(t.fd, ".", unix.O_TMPFILE|unix.O_WRONLY|unix.O_CLOEXEC, mode)
		if err == unix.EOPNOTSUPP || err == unix.EISDIR || err == unix.ENOENT {
			temporary = tree.Hidden()
			out, err = unix.Openat(t.fd, temporary, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, mode)
		}
		if err != nil {
			return err
		}
		defer unix.Close(out)
		err = tree.Fill(out, in, st, moved)
		if err == nil && temporary == "" {
			err = tree.Link(out, t.fd, name)
			if err != unix.EEXIST {
				return err
			}
			temporary = tree.Hidden()
			err = tree.Link(out, t.fd, temporary)
		}
		return t.rename(temporary, name, err)
	})
}

// rename gives what is complete its name, in place of a file or link that has it; after an error
// it removes it.
func (t *directory) rename(temporary, name string, err error) error {
	if err == nil {
		err = unix.Renameat(t.fd, temporary, t.fd, name)
	}
	if err != nil {
		_ = unix.Unlinkat(t.fd, temporary, 0) // it may not be there
	}
	return err
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

// makeDir makes a directory, which its owner may always write to, or takes one that is there.
func (t *directory) makeDir(st *unix.Stat_t, name string) (fd int, err error) {
	err = t.side.as(func() error {
		// "." is the directory itself.
		if err := unix.Mkdirat(t.fd, name, st.Mode&0o777|0o700); err != nil && err != unix.EEXIST {
			return err
		}
		fd, err = unix.Openat(t.fd, name, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err == unix.ENOTDIR || err == unix.ELOOP {
			err = usage("%q is there, and is not a directory", name)
		}
		return err
	})
	return fd, err
}

func (t *directory) dir(st *unix.Stat_t, name string) (sink, error) {
	fd, err := t.makeDir(st, name)
	if err != nil {
		return nil, err
	}
	return &directory{side: t.side, fd: fd, owned: true}, nil
}
