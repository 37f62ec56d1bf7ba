package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/result"
)

// reportFile is where --report goes. That it can be written to is seen to before
// anything starts.
type reportFile struct {
	place string
	file  *os.File // what has no place to be renamed to: a descriptor, a device, a pipe
	// Otherwise a file is made beside its place and renamed, so that a reader
	// finds the old one, or none, or the whole new one. It is made when the
	// sandbox is gone: a payload that can write there never sees it.
	dir *os.File
}

// openReport opens PATH or fd:N; "" is no report, and a nil reportFile.
func openReport(place string) (*reportFile, error) {
	if place == "" {
		return nil, nil
	}
	if number, ok := strings.CutPrefix(place, "fd:"); ok {
		return openReportFD(number)
	}
	if number := descriptor(place); number != "" {
		return openReportFD(number)
	}
	if st, err := os.Stat(place); err == nil && !st.Mode().IsRegular() {
		if st.IsDir() {
			return nil, reportError(place, unix.EISDIR)
		}
		// Not to wait for a reader of a named pipe, which need not ever come.
		f, err := os.OpenFile(place, os.O_WRONLY|unix.O_NONBLOCK, 0)
		if err != nil {
			return nil, reportError(place, err)
		}
		return &reportFile{place: place, file: f}, nil
	}
	// By a descriptor of the directory from here on, whatever becomes of its path.
	dir, err := os.OpenFile(filepath.Dir(place), unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, reportError(place, err)
	}
	if err := tryOut(int(dir.Fd()), filepath.Base(place)); err != nil {
		dir.Close()
		return nil, reportError(place, err)
	}
	return &reportFile{place: place, dir: dir}, nil
}

// descriptor is the number of the open descriptor that place, such as
// /dev/stderr, is a link to. Other links are not followed, but replaced: they
// could be a payload's.
func descriptor(place string) (number string) {
	for range 10 {
		for _, dir := range []string{"/dev/fd/", "/proc/self/fd/"} {
			if n, ok := strings.CutPrefix(place, dir); ok {
				return n
			}
		}
		target, err := os.Readlink(place)
		if err != nil {
			break // no link
		}
		if !filepath.IsAbs(target) {
			target = filepath.Join(filepath.Dir(place), target)
		}
		place = target
	}
	return ""
}

// tryOut makes sure that a report can be made in dir under this name, before
// there is one.
func tryOut(dir int, name string) error {
	// Without a name, where the file system can do that: nothing is ever left.
	fd, err := unix.Openat(dir, ".", unix.O_TMPFILE|unix.O_WRONLY|unix.O_CLOEXEC, 0o666)
	if err == unix.EOPNOTSUPP || err == unix.EISDIR {
		tmp := ".sbxrun." + newID()
		if fd, err = unix.Openat(dir, tmp, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o666); err == nil {
			err = unix.Unlinkat(dir, tmp, 0)
		}
	}
	if err != nil {
		return err
	}
	unix.Close(fd)
	if len(name) > unix.NAME_MAX {
		return unix.ENAMETOOLONG
	}
	return nil
}

func openReportFD(number string) (*reportFile, error) {
	n, err := strconv.ParseUint(number, 10, 31)
	if err != nil {
		return nil, usageError(fmt.Errorf("--report fd:%s: want the number of an open descriptor", number))
	}
	flags, err := unix.FcntlInt(uintptr(n), unix.F_GETFL, 0)
	if err != nil {
		return nil, usageError(fmt.Errorf("--report fd:%d: no such descriptor is open", n))
	}
	if flags&unix.O_ACCMODE == unix.O_RDONLY {
		return nil, usageError(fmt.Errorf("--report fd:%d: it is open for reading only", n))
	}
	return &reportFile{place: "fd:" + number, file: os.NewFile(uintptr(n), "fd:"+number)}, nil
}

func reportError(place string, err error) error {
	return &result.Error{Code: "report", Message: fmt.Sprintf("cannot write the report to %q: %v", place, err), Err: err}
}

// write writes the report at once and whole.
func (r *reportFile) write(rep result.Report) error {
	if r == nil {
		return nil
	}
	b, err := rep.JSON()
	switch {
	case err != nil:
	case r.dir != nil:
		err = replace(int(r.dir.Fd()), filepath.Base(r.place), b)
	default:
		// A pipe that nobody empties shall not keep us. It need not be one that takes
		// deadlines.
		var failure error
		written := make(chan struct{})
		go func() {
			_, failure = r.file.Write(b)
			close(written)
		}()
		if err = os.ErrDeadlineExceeded; await(written, nil, nil) {
			err = failure
		}
	}
	if err != nil {
		return reportError(r.place, err)
	}
	return nil
}

// replace puts a new file in the place of name, in one step.
func replace(dir int, name string, data []byte) error {
	tmp := ".sbxrun." + newID()
	fd, err := unix.Openat(dir, tmp, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o666)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), tmp)
	_, err = f.Write(data)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = unix.Renameat(dir, tmp, dir, name)
	}
	if err != nil {
		_ = unix.Unlinkat(dir, tmp, 0) // the error that counts is the first one
	}
	return err
}
