package workspace

import (
	"encoding/hex"
	"fmt"
	"strconv"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// tree is a directory that is copied to.
type tree struct {
	side  *Dir // whose user copies
	fd    int
	owned bool
}

func (t *tree) close() {
	if t.owned {
		unix.Close(t.fd)
	}
}

// file makes a file without a name, and gives it that when it is complete: whoever is killed
// meanwhile leaves nothing (open(2), O_TMPFILE, Linux 3.11; not all file systems have it).
func (t *tree) file(in int, st *unix.Stat_t, name string, moved *atomic.Int64) error {
	return t.side.as(func() error {
		mode, temporary := st.Mode&0o777, ""
		out, err := unix.Openat(t.fd, ".", unix.O_TMPFILE|unix.O_WRONLY|unix.O_CLOEXEC, mode)
		if err == unix.EOPNOTSUPP || err == unix.EISDIR || err == unix.ENOENT {
			temporary = hidden()
			out, err = unix.Openat(t.fd, temporary, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, mode)
		}
		if err != nil {
			return err
		}
		defer unix.Close(out)
		err = fill(out, in, st, moved)
		if err == nil && temporary == "" {
			err = linkAs(out, t.fd, name)
			if err != unix.EEXIST {
				return err
			}
			temporary = hidden()
			err = linkAs(out, t.fd, temporary)
		}
		return t.rename(temporary, name, err)
	})
}

// rename gives what is complete its name, in place of a file or link that has it; after an error
// it removes it.
func (t *tree) rename(temporary, name string, err error) error {
	if err == nil {
		err = unix.Renameat(t.fd, temporary, t.fd, name)
	}
	if err != nil {
		_ = unix.Unlinkat(t.fd, temporary, 0) // it may not be there
	}
	return err
}

// hidden is a name that nobody else has.
func hidden() string {
	var b [12]byte
	_, _ = unix.Getrandom(b[:], 0) // with so few bytes it does not fail (getrandom(2))
	return ".sbxrun-" + hex.EncodeToString(b[:])
}

// linkAs gives an open file a name (linkat(2): by /proc, because AT_EMPTY_PATH takes a
// capability).
func linkAs(file, dir int, name string) error {
	return unix.Linkat(unix.AT_FDCWD, "/proc/self/fd/"+strconv.Itoa(file), dir, name, unix.AT_SYMLINK_FOLLOW)
}

func (t *tree) link(target string, _ *unix.Stat_t, name string) error {
	return t.side.as(func() error {
		err := unix.Symlinkat(target, t.fd, name)
		if err != unix.EEXIST {
			return err
		}
		temporary := hidden()
		return t.rename(temporary, name, unix.Symlinkat(target, t.fd, temporary))
	})
}

// makeDir makes a directory, which its owner may always write to, or takes one that is there.
func (t *tree) makeDir(st *unix.Stat_t, name string) (fd int, err error) {
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

func (t *tree) dir(st *unix.Stat_t, name string) (sink, error) {
	fd, err := t.makeDir(st, name)
	if err != nil {
		return nil, err
	}
	return &tree{side: t.side, fd: fd, owned: true}, nil
}

const (
	cloneFrom = 64 << 10 // smaller files are read and written as quickly
	step      = 32 << 20
	window    = 512 << 10
)

// Fill copies the text of a file, of which st is what fstat(2) says, into a new one: its holes
// stay holes, and it takes no more than was there.
func Fill(out, in int, st *unix.Stat_t) error { return fill(out, in, st, new(atomic.Int64)) }

// fill copies what st says that there is in a file, and no more. What has become shorter
// meanwhile is copied as it is.
func fill(out, in int, st *unix.Stat_t, moved *atomic.Int64) error {
	size := st.Size
	if size >= cloneFrom && unix.IoctlFileClone(out, in) == nil {
		var now unix.Stat_t
		if err := unix.Fstat(out, &now); err != nil {
			return err
		}
		moved.Add(min(size, now.Size))
		if now.Size > size {
			return unix.Ftruncate(out, size)
		}
		return nil
	}
	if st.Blocks*512 >= size {
		return span(out, in, 0, size, moved)
	}
	// It has holes, which are kept.
	for at := int64(0); at < size; {
		data, err := unix.Seek(in, at, unix.SEEK_DATA)
		if err == unix.ENXIO {
			data = size
		} else if err != nil {
			return span(out, in, at, size, moved)
		}
		data = min(data, size)
		moved.Add(data - at)
		end, err := unix.Seek(in, data, unix.SEEK_HOLE)
		if err != nil || end > size {
			end = size
		}
		if end <= data && data < size {
			return fmt.Errorf("a hole at %d ends before it begins", data)
		}
		if err := span(out, in, data, end, moved); err != nil {
			return err
		}
		at = end
	}
	var now unix.Stat_t
	if err := unix.Fstat(in, &now); err != nil {
		return err
	}
	return unix.Ftruncate(out, min(size, now.Size))
}

// span copies the bytes from at to end, in the kernel where that can (copy_file_range(2): on one
// file system).
func span(out, in int, at, end int64, moved *atomic.Int64) error {
	here, there := at, at
	inKernel := end-at >= cloneFrom
	var buf []byte
	for at < end {
		var n int
		var err error
		if inKernel {
			n, err = unix.CopyFileRange(in, &here, out, &there, int(min(step, end-at)), 0)
			if err != nil && err != unix.EINTR && err != unix.ENOSPC && err != unix.EDQUOT || n == 0 && err == nil {
				inKernel = false
				continue
			}
		} else {
			if buf == nil {
				buf = make([]byte, min(window, end-at))
			}
			n, err = unix.Pread(in, buf[:min(int64(len(buf)), end-at)], at)
			if n == 0 && err == nil {
				return nil // it has become shorter
			}
			if err == nil {
				err = writeAll(out, buf[:n], at)
			}
		}
		if err != nil && err != unix.EINTR {
			return err
		}
		at += int64(max(n, 0))
		here, there = at, at
		moved.Add(int64(max(n, 0)))
	}
	return nil
}

func writeAll(out int, b []byte, at int64) error {
	for len(b) > 0 {
		n, err := unix.Pwrite(out, b, at)
		if err != nil && err != unix.EINTR {
			return err
		}
		n = max(n, 0)
		b, at = b[n:], at+int64(n)
	}
	return nil
}
