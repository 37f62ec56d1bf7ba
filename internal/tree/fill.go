package tree

import (
	"context"
	"io"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

const (
	cloneFrom = 64 << 10 // smaller files are read and written as quickly
	step      = 32 << 20
	window    = 512 << 10
)

// Fill copies what a file has, of which fstat(2) says st, into a new one, and no more: holes stay
// holes, and what has become shorter meanwhile is copied as it is. It adds to moved as it goes, and
// ends with the cause of ctx when that is done.
func Fill(ctx context.Context, out, in int, st *unix.Stat_t, moved *atomic.Int64) error {
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
		_, err := span(ctx, out, in, 0, size, moved)
		return err
	}
	// It has holes, which are kept.
	for at := int64(0); at < size; {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		data, err := unix.Seek(in, at, unix.SEEK_DATA)
		if err == unix.ENXIO {
			data = size
		} else if err != nil {
			_, err = span(ctx, out, in, at, size, moved)
			return err
		}
		data = min(data, size)
		moved.Add(data - at)
		end, err := unix.Seek(in, data, unix.SEEK_HOLE)
		if err != nil || end > size {
			end = size
		}
		if end <= data && data < size {
			at = data // what was there has just become a hole (fallocate(2))
			continue
		}
		if _, err := span(ctx, out, in, data, end, moved); err != nil {
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

// Ways to copy bytes, the quickest first: within a file system, by what it shares
// (copy_file_range(2)); between two, from the pages of one (sendfile(2)), without a copy for us; any.
const (
	inFileSystem = iota
	inKernel
	byUs
)

// span copies the bytes from at to end, and returns the way that it took in the end. Out's own offset
// is nobody else's.
func span(ctx context.Context, out, in int, at, end int64, moved *atomic.Int64) (way int, err error) {
	if end-at < cloneFrom {
		way = byUs
	}
	var buf []byte
	for at < end {
		if ctx.Err() != nil {
			return way, context.Cause(ctx)
		}
		var n int
		here, there := at, at
		switch way {
		case inFileSystem:
			n, err = unix.CopyFileRange(in, &here, out, &there, int(min(step, end-at)), 0)
		case inKernel:
			if _, err = unix.Seek(out, at, io.SeekStart); err == nil {
				n, err = unix.Sendfile(out, in, &here, int(min(step, end-at)))
			}
		case byUs:
			if buf == nil {
				buf = make([]byte, min(window, end-at))
			}
			n, err = unix.Pread(in, buf[:min(int64(len(buf)), end-at)], at)
			if n == 0 && err == nil {
				return way, nil // it has become shorter
			}
			if err == nil {
				n, err = unix.Pwrite(out, buf[:n], at)
			}
		}
		switch {
		case err == unix.EINTR:
			continue
		case way != byUs && n <= 0 && err != unix.ENOSPC && err != unix.EDQUOT:
			way++
			continue
		case err != nil:
			return way, err
		}
		at += int64(n)
		moved.Add(int64(n))
	}
	return way, nil
}
