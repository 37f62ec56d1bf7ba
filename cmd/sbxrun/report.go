package main

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/safeopen"
	"github.com/sbxrun/sbxrun/internal/stream"
	"github.com/sbxrun/sbxrun/internal/tree"
)

// destination is where a report or a filter goes. It is checked to be writable before the command starts.
type destination struct {
	what  string // such as "report", for errors
	place string
	file  *os.File // a descriptor, device or pipe, which cannot be replaced
	// Otherwise a new file in dir replaces an old one, so that readers never see a partial one. It is created after
	// the end of the sandbox, so that a command with access to the directory never sees it.
	dir *os.File
}

// openReport opens PATH or fd:N for --report. It returns nil for "". flags is the struct of the command.
func openReport(flags any, place string) (*destination, error) {
	switch place {
	case "":
		return nil, nil
	case "-":
		return nil, &result.Error{Code: "usage", Message: `--report "-": want a path or fd:N`, Hint: "use --report /dev/stdout for stdout, or ./- for a file of that name"}
	}
	return openDestination(flags, "--report", "report", place)
}

func openDestination(flags any, flag, what, place string) (*destination, error) {
	d := &destination{what: what, place: place}
	if number, ok := descriptorIn(place); ok {
		var err error
		if d.file, err = openFD(flags, flag, number); err != nil {
			return nil, err
		}
		d.place = d.file.Name()
		return d, nil
	}
	// Use a descriptor of the directory from here on, because its path may change.
	fd, err := safeopen.Dir(filepath.Dir(place))
	if err != nil {
		return nil, d.error(err)
	}
	dir := os.NewFile(uintptr(fd), filepath.Dir(place))
	var st unix.Stat_t
	if unix.Fstat(fd, &st) == nil && st.Nlink == 0 { // tmpfs would still create a file without a name there
		err = errors.New("its directory was removed")
	} else if d.file, err = openSpecial(fd, place); err == nil && d.file == nil {
		if err = tryOut(fd, filepath.Base(place)); err == nil {
			d.dir = dir
			return d, nil
		}
	}
	dir.Close()
	if err != nil {
		return nil, d.error(err)
	}
	return d, nil
}

// errPlanted is the error for a device or a pipe in a directory that others can write to.
var errPlanted = errors.New("it is not a regular file, and others could have put it there")

// errTheirs is the error for a file that only its owner and root can replace.
var errTheirs = errors.New("it belongs to another user, in a directory with the sticky bit")

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

func (d *destination) error(err error) error {
	e := &result.Error{Code: "report", Message: fmt.Sprintf("cannot write the %s to %q: %v", d.what, d.place, err), Err: err}
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

// report writes a report, unless d is nil.
func (d *destination) report(rep result.Report) error {
	if d == nil {
		return nil
	}
	b, err := rep.JSON()
	if err != nil {
		return d.error(err)
	}
	return d.write(b)
}

func (d *destination) write(b []byte) (err error) {
	if d.dir != nil {
		err = replace(int(d.dir.Fd()), filepath.Base(d.place), b)
	} else {
		err = writeUnlessStalled(d.file, b, nil)
	}
	if err != nil {
		return d.error(err)
	}
	return nil
}

// writeUnlessStalled writes to a file until its reader stops reading, and only briefly after hurry is closed. The file
// may be a pipe that does not support deadlines.
func writeUnlessStalled(f *os.File, b []byte, hurry <-chan struct{}) error {
	var err error
	written, passed := make(chan struct{}), make(chan struct{}, 1)
	go func() {
		defer close(written)
		for part := range slices.Chunk(b, stream.PieceSize) {
			if _, err = stream.WriteBlocking(f, part); err != nil {
				return
			}
			stream.Progress(passed)
		}
	}()
	if !stream.Await(written, passed, hurry) {
		return os.ErrDeadlineExceeded
	}
	return err
}

// writeFilter writes a seccomp filter to PATH or fd:N, and returns the bash redirection that reads it.
func writeFilter(flags any, place string, filter []byte) (from string, err error) {
	number, ok := descriptorIn(place)
	if from = "&" + number; !ok {
		if from, err = filepath.Abs(place); err != nil {
			return "", err
		}
	}
	d, err := openDestination(flags, "--print-filter", "filter", place)
	if err == nil {
		err = d.write(filter)
	}
	return from, err
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
