package main

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/safeopen"
	"github.com/sbxrun/sbxrun/internal/stream"
	"github.com/sbxrun/sbxrun/internal/tree"
)

// reportFile is the destination of --report, which was writable before the command started.
type reportFile struct {
	place string
	file  *os.File // a descriptor, device or pipe, which cannot be replaced
	// Otherwise the report is a new file in dir that replaces an old one, so that readers never see a part of it. It is
	// created after the end of the sandbox, so that a command with access to the directory never sees it.
	dir *os.File
}

// openReport opens PATH or fd:N. It returns nil for "". flags is the struct of the command.
func openReport(flags any, place string) (*reportFile, error) {
	switch place {
	case "":
		return nil, nil
	case "-":
		return nil, &result.Error{Code: "usage", Message: `--report "-": want a path or fd:N`, Hint: "use --report /dev/stdout for stdout, or ./- for a file of that name"}
	}
	if number, ok := descriptorIn(place); ok {
		file, err := openFD(flags, "--report", number)
		if err != nil {
			return nil, err
		}
		return &reportFile{place: file.Name(), file: file}, nil
	}
	// Use a descriptor of the directory from here on, because its path may change.
	fd, err := safeopen.Dir(filepath.Dir(place))
	if err != nil {
		return nil, writeError("report", place, err)
	}
	dir := os.NewFile(uintptr(fd), filepath.Dir(place))
	var file *os.File
	var st unix.Stat_t
	if unix.Fstat(fd, &st) == nil && st.Nlink == 0 { // tmpfs would still create a file without a name there
		err = errors.New("its directory was removed")
	} else if file, err = openSpecial(fd, place); err == nil && file == nil {
		if err = tryOut(fd, filepath.Base(place)); err == nil {
			return &reportFile{place: place, dir: dir}, nil
		}
	}
	dir.Close()
	if err != nil {
		return nil, writeError("report", place, err)
	}
	return &reportFile{place: place, file: file}, nil
}

// errPlanted is the error for a device or a pipe in a directory that others can write to.
var errPlanted = errors.New("it is not a regular file, and others could have put it there")

// errTheirs is the error for a file that only its owner and root can replace.
var errTheirs = errors.New("it is another user's, in a directory with the sticky bit")

// openSpecial opens a device, a terminal or a named pipe. It returns nil for a regular file, an unused name and a
// symbolic link, which the report replaces: a sandboxed command with access to the directory could have created the
// link. It follows a link only in a directory that only root can change, such as /dev.
func openSpecial(dir int, place string) (*os.File, error) {
	name := filepath.Base(place)
	if strings.HasSuffix(place, "/") || name == "." || name == ".." || name == "/" {
		return nil, unix.EISDIR
	}
	fd, err := unix.Openat(dir, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err == unix.ENOENT || err == unix.ENAMETOOLONG {
		return nil, nil // tryOut reports it
	}
	if err != nil {
		return nil, err
	}
	defer func() { unix.Close(fd) }()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	placed := safeopen.Placed(dir, &st)
	if st.Mode&unix.S_IFMT == unix.S_IFLNK {
		if !rootsAlone(dir) {
			return nil, nil
		}
		target, err := safeopen.Open(place)
		if errors.Is(err, unix.ENOENT) {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		unix.Close(fd)
		fd = target
		if err := unix.Fstat(fd, &st); err != nil {
			return nil, err
		}
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		return nil, nil
	case unix.S_IFDIR:
		return nil, unix.EISDIR
	}
	if !placed {
		return nil, errPlanted
	}
	// Reopen the file that was checked. A named pipe without a reader is ENXIO.
	out, err := safeopen.Reopen(fd, unix.O_WRONLY)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(out), place), nil
}

// rootsAlone reports whether only root can change the names in a directory.
func rootsAlone(dir int) bool {
	var st unix.Stat_t
	return unix.Fstatat(dir, "", &st, unix.AT_EMPTY_PATH) == nil && st.Uid == 0 && st.Mode&0o022 == 0
}

// descriptor returns the number of the open descriptor that place names, or "". It does not follow links, which a
// sandboxed command could have created.
func descriptor(place string) (number string) {
	switch place {
	case "/dev/stdin":
		return "0"
	case "/dev/stdout":
		return "1"
	case "/dev/stderr":
		return "2"
	}
	for _, dir := range []string{"/dev/fd/", "/proc/self/fd/"} {
		if n, ok := strings.CutPrefix(place, dir); ok {
			return n
		}
	}
	return ""
}

// descriptorIn returns the number in fd:N, or of the open descriptor that place names.
func descriptorIn(place string) (number string, ok bool) {
	if number, ok = strings.CutPrefix(place, "fd:"); !ok {
		number = descriptor(place)
		ok = number != ""
	}
	return number, ok
}

// tryOut checks that a report with this name can be created in dir.
func tryOut(dir int, name string) error {
	fd, temporary, err := tree.Begin(dir, 0o666)
	if err != nil {
		return err
	}
	unix.Close(fd)
	if temporary != "" {
		if err := unix.Unlinkat(dir, temporary, 0); err != nil {
			return err
		}
	}
	if len(name) > unix.NAME_MAX {
		return unix.ENAMETOOLONG
	}
	return replaceable(dir, name)
}

// replaceable returns errTheirs if the sticky bit of dir prevents an ordinary user from replacing the file with this
// name (unlink(2)).
func replaceable(dir int, name string) error {
	var d, st unix.Stat_t
	if unix.Fstatat(dir, "", &d, unix.AT_EMPTY_PATH) != nil || unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW) != nil {
		return nil // the name is unused
	}
	uid := uint32(os.Geteuid())
	if uid != 0 && d.Mode&unix.S_ISVTX != 0 && d.Uid != uid && st.Uid != uid {
		return errTheirs
	}
	return nil
}

// openFD returns the open descriptor that a flag names, for writing.
func openFD(flags any, flag, number string) (*os.File, error) {
	n, err := strconv.ParseUint(number, 10, 31)
	if err != nil {
		return nil, cli.UsageError(flags, fmt.Errorf("%s fd:%s: want the number of an open descriptor, such as fd:3", flag, number))
	}
	open, err := unix.FcntlInt(uintptr(n), unix.F_GETFL, 0)
	if err != nil {
		return nil, cli.UsageError(flags, fmt.Errorf("%s fd:%d: no such descriptor is open", flag, n))
	}
	if open&unix.O_ACCMODE == unix.O_RDONLY {
		return nil, cli.UsageError(flags, fmt.Errorf("%s fd:%d: it is open for reading only", flag, n))
	}
	return os.NewFile(uintptr(n), "fd:"+number), nil
}

// writeError returns the error for a file, such as the report, that cannot be written.
func writeError(what, place string, err error) error {
	e := &result.Error{Code: "report", Message: fmt.Sprintf("cannot write the %s to %q: %v", what, place, err), Err: err}
	switch {
	case errors.As(err, new(*safeopen.Error)):
		e.Hint = safeopen.Hint
	case errors.Is(err, errPlanted):
		e.Hint = "remove it, or open it in the shell and use fd:N"
	case errors.Is(err, errTheirs):
		e.Hint = "choose another name"
	}
	return e
}

// write writes the whole report.
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
		// A full pipe must not block sbxrun, and may not support deadlines.
		var failure error
		written := make(chan struct{})
		go func() {
			_, failure = stream.WriteBlocking(r.file, b)
			close(written)
		}()
		if err = os.ErrDeadlineExceeded; stream.Await(written, nil, nil) {
			err = failure
		}
	}
	if err != nil {
		return writeError("report", r.place, err)
	}
	return nil
}

// writeFilter writes a seccomp filter to PATH or fd:N, and returns the source of bash's redirection that reads it.
func writeFilter(flags any, place string, filter []byte) (from string, err error) {
	if number, ok := descriptorIn(place); ok {
		file, err := openFD(flags, "--print-filter", number)
		if err == nil {
			_, err = stream.WriteBlocking(file, filter)
		}
		return "&" + number, err
	}
	path, err := filepath.Abs(place)
	if err != nil {
		return "", err
	}
	dir, err := safeopen.Dir(filepath.Dir(path))
	if err == nil {
		defer unix.Close(dir)
		var special *os.File
		if special, err = openSpecial(dir, path); special != nil {
			defer special.Close()
			_, err = stream.WriteBlocking(special, filter)
		} else if err == nil {
			err = replace(dir, filepath.Base(path), filter)
		}
	}
	if err != nil {
		return "", writeError("filter", place, err)
	}
	return path, nil
}

// replace atomically replaces the file with this name.
func replace(dir int, name string, data []byte) error {
	tmp := ".sbxrun." + safeopen.RandomName()
	fd, err := unix.Openat(dir, tmp, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o666)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), tmp)
	_, err = f.Write(data)
	err = cmp.Or(err, f.Close())
	if err == nil {
		err = unix.Renameat(dir, tmp, dir, name)
	}
	if err != nil {
		_ = unix.Unlinkat(dir, tmp, 0) // the first error counts
	}
	return err
}
