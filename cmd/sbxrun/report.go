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

// reportFile is where --report goes. It is opened before anything starts: a
// place that cannot be written to is an error then and not after the run.
type reportFile struct {
	file *os.File
	// A regular file is written beside its place and renamed, so that a reader
	// finds the old one, or none, or the whole new one.
	dir       *os.File
	name, tmp string
}

// openReport opens PATH or fd:N; "" is no report, and a nil reportFile.
func openReport(place string) (*reportFile, error) {
	if place == "" {
		return nil, nil
	}
	if number, ok := strings.CutPrefix(place, "fd:"); ok {
		return openReportFD(number)
	}
	if st, err := os.Stat(place); err == nil && !st.Mode().IsRegular() {
		if st.IsDir() {
			return nil, reportError(place, unix.EISDIR)
		}
		// /dev/stderr, a named pipe: there is nothing to rename.
		f, err := os.OpenFile(place, os.O_WRONLY, 0)
		if err != nil {
			return nil, reportError(place, err)
		}
		return &reportFile{file: f}, nil
	}
	// By a descriptor of the directory from here on, whatever is done to its
	// path meanwhile; O_EXCL never follows a link that the payload may plant.
	dir, err := os.OpenFile(filepath.Dir(place), unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, reportError(place, err)
	}
	r := &reportFile{dir: dir, name: filepath.Base(place)}
	r.tmp = "." + r.name + "." + newID()
	fd, err := unix.Openat(int(dir.Fd()), r.tmp, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o666)
	if err != nil {
		dir.Close()
		return nil, reportError(place, err)
	}
	r.file = os.NewFile(uintptr(fd), place)
	return r, nil
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
	return &reportFile{file: os.NewFile(uintptr(n), "fd:"+number)}, nil
}

func reportError(place string, err error) error {
	return &result.Error{Code: "report", Message: fmt.Sprintf("cannot write the report to %q: %v", place, err), Err: err}
}

// discard leaves no trace.
func (r *reportFile) discard() {
	if r != nil && r.dir != nil {
		_ = unix.Unlinkat(int(r.dir.Fd()), r.tmp, 0) // already gone is fine
	}
}

// write writes the report at once and whole.
func (r *reportFile) write(rep result.Report) error {
	if r == nil {
		return nil
	}
	b, err := rep.JSON()
	if err == nil {
		_, err = r.file.Write(b)
	}
	if r.dir != nil {
		if err == nil {
			err = unix.Renameat(int(r.dir.Fd()), r.tmp, int(r.dir.Fd()), r.name)
		}
		if err != nil {
			r.discard()
		}
	}
	if err != nil {
		return reportError(r.file.Name(), err)
	}
	return nil
}
