package tree

import (
	"context"
	"io"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

const (
	small  = 64 << 10 // below this size, read and write are as fast
	step   = 32 << 20
	window = 512 << 10
)

// Fill copies a file, whose status is st, to a new file. It copies at most st.Size bytes, keeps holes, and copies
// less if the file was truncated. It adds to moved as it progresses, and returns the cause of ctx when that is done.
func Fill(ctx context.Context, out, in int, st *unix.Stat_t, moved *atomic.Int64) error {
	size := st.Size
	if st.Blocks*512 >= size {
		_, err := span(ctx, out, in, 0, size, moved)
		return err
	}
	// The file is sparse.
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
			at = data // the data has just become a hole (fallocate(2))
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

// Ways to copy bytes, the fastest first: within a file system, possibly by sharing blocks
// (copy_file_range(2)); between file systems, in the kernel (sendfile(2)); with read and write.
const (
	inFileSystem = iota
	inKernel
	byUs
)

// span copies the bytes from at to end, and returns the last way it used. It may move the offset of out.
func span(ctx context.Context, out, in int, at, end int64, moved *atomic.Int64) (way int, err error) {
	if end-at < small {
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
				return way, nil // the file was truncated
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
