package state

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/safeopen"
)

// maxFile is the maximum size of a file, for reading and writing.
const maxFile = 4 << 20

// damage is an error for a file that this package cannot have written, or only in part.
// Retrying does not help.
type damage string

func (d damage) Error() string { return "damaged: " + string(d) }

const (
	errNotRegular   damage = "not a regular file"
	errNotDirectory damage = "not a directory"
	errTooLarge     damage = "more than 4 MiB"
)

func damaged(format string, args ...any) error { return damage(fmt.Sprintf(format, args...)) }

func isDamaged(err error) bool { return errors.As(err, new(damage)) }

// folder is an open directory in which no symbolic links are followed. It has a bare
// descriptor because the garbage collector could close an *os.File, and the supervisor's
// locks must last.
type folder struct {
	fd   int
	path string // for messages
}

func (f folder) close() { _ = unix.Close(f.fd) } // no writes to lose

func (f folder) fail(op, name string, err error) error {
	return &fs.PathError{Op: op, Path: filepath.Join(f.path, name), Err: err}
}

// sub opens a directory in f.
func (f folder) sub(name string) (folder, error) {
	fd, err := unix.Openat(f.fd, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err == unix.ENOTDIR || err == unix.ELOOP {
		err = errNotDirectory
	}
	if err != nil {
		return folder{fd: -1}, f.fail("open", name, err)
	}
	return folder{fd, filepath.Join(f.path, name)}, nil
}

// open opens a regular file in f. It rejects other kinds before they are read or written,
// and does not wait for the other end of a pipe (O_NONBLOCK). The descriptor it returns is
// blocking, so that [os.NewFile] does not add it to Go's poller, whose initialisation is
// fatal if there are no descriptors left.
func (f folder) open(name string, flags int) (fd int, err error) {
	if name == "" || name == "." || name == ".." || strings.ContainsRune(name, '/') {
		return -1, f.fail("open", name, unix.EINVAL)
	}
	fd, err = unix.Openat(f.fd, name, flags|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_NOCTTY, 0o600)
	if err == unix.ELOOP || err == unix.ENXIO || err == unix.EISDIR { // link, socket or pipe, directory
		err = errNotRegular
	}
	if err != nil {
		return -1, f.fail("open", name, err)
	}
	var st unix.Stat_t
	if err = unix.Fstat(fd, &st); err == nil && st.Mode&unix.S_IFMT != unix.S_IFREG {
		err = errNotRegular
	}
	if err == nil {
		err = unix.SetNonblock(fd, false)
	}
	if err != nil {
		_ = unix.Close(fd) // no writes to lose
		return -1, f.fail("open", name, err)
	}
	return fd, nil
}

func (f folder) openFile(name string, flags int) (*os.File, error) {
	fd, err := f.open(name, flags)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), filepath.Join(f.path, name)), nil
}

func (f folder) read(name string) ([]byte, error) {
	file, err := f.openFile(name, unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	data, err := readAll(file)
	if isDamaged(err) {
		err = f.fail("read", name, err)
	}
	return data, err
}

// readAll reads a file from its beginning.
func readAll(file *os.File) ([]byte, error) {
	data, err := io.ReadAll(io.NewSectionReader(file, 0, maxFile+1))
	if err == nil && len(data) > maxFile {
		err = errTooLarge
	}
	return data, err
}

// write creates or replaces the file atomically: a reader sees the complete old content or
// the complete new content, and after an error the old content is still there.
func (f folder) write(name string, data []byte) error {
	if len(data) > maxFile {
		return f.fail("write", name, errTooLarge)
	}
	tmp := "." + name + "." + safeopen.RandomName()
	file, err := f.openFile(tmp, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL)
	if err != nil {
		return err
	}
	_, err = file.Write(data)
	err = result.All(err, file.Close())
	if err == nil {
		err = f.rename(tmp, name)
	}
	if err != nil {
		err = result.All(err, f.unlink(tmp))
	}
	return err
}

// checked is the JSON content of a file. Dangerous values are checked strictly, before writing and
// after reading; texts are arbitrary and must be quoted when they are shown.
type checked interface{ check() error }

func (f folder) readJSON(name string, v checked) error {
	data, err := f.read(name)
	if err != nil {
		return err
	}
	if err := parse(data, v); err != nil {
		return f.fail("read", name, err)
	}
	return nil
}

// writeJSON writes v as one line.
func (f folder) writeJSON(name string, v checked) error {
	if err := v.check(); err != nil {
		return err // reading it would fail, too
	}
	data, err := result.JSON(v)
	if err != nil {
		return err
	}
	return f.write(name, data)
}

func parse(data []byte, v checked) error {
	err := json.Unmarshal(data, v)
	var kind *json.UnmarshalTypeError // its message names Go types
	switch {
	case err == nil:
		return v.check()
	case !errors.As(err, &kind):
		return damage(err.Error())
	case kind.Field == "":
		return damaged("a %s, not an object", kind.Value)
	}
	return damaged("%q is a %s", kind.Field, kind.Value)
}

// names lists the names in f. It moves the descriptor's offset, so f must not be shared.
func (f folder) names() (names []string, err error) {
	if _, err := unix.Seek(f.fd, 0, io.SeekStart); err != nil {
		return nil, f.fail("read", "", err)
	}
	for buf := make([]byte, 8<<10); ; {
		n, err := unix.ReadDirent(f.fd, buf)
		switch {
		case err == unix.EINTR:
			continue
		case err == nil && n == 0, err == unix.ENOENT: // the end, or f itself was removed
			return names, nil
		case err != nil:
			return nil, f.fail("read", "", err)
		}
		_, _, names = unix.ParseDirent(buf[:n], -1, names)
	}
}

// unlink removes a file that is not a directory; it does not follow a symbolic link. A
// missing file is no error.
func (f folder) unlink(name string) error {
	if err := unix.Unlinkat(f.fd, name, 0); err != nil && err != unix.ENOENT {
		return f.fail("remove", name, err)
	}
	return nil
}

// clear removes everything in f except the names to keep. A directory stays and is an
// error, except for the execs.
func (f folder) clear(keep ...string) error {
	names, err := f.names()
	for _, name := range names {
		switch {
		case slices.Contains(keep, name):
		case name == execsName:
			err = result.All(err, f.clearExecs())
		default:
			err = result.All(err, f.unlink(name))
		}
	}
	return err
}

// clearExecs removes the directory of the execs.
func (f folder) clearExecs() error {
	execs, err := f.sub(execsName)
	if isDamaged(err) {
		return f.unlink(execsName)
	}
	if err != nil {
		return err
	}
	defer execs.close()
	names, err := execs.names()
	for _, name := range names {
		err = result.All(err, execs.scrap(name))
	}
	if err != nil {
		return err
	}
	return f.rmdir(execsName, execs)
}

// scrap removes a directory in f with the files in it, or a file of that name. A missing
// name is no error.
func (f folder) scrap(name string) error {
	sub, err := f.sub(name)
	if isDamaged(err) || errors.Is(err, unix.ENOENT) {
		return f.unlink(name)
	}
	if err != nil {
		return err
	}
	defer sub.close()
	return f.rmdir(name, sub)
}

// rmdir removes a directory with the files in it. sub is that directory; if it is not open,
// the directory must be empty. A missing directory is no error.
func (f folder) rmdir(name string, sub folder) error {
	if sub.fd >= 0 {
		if err := sub.clear(); err != nil {
			return err // it is not empty
		}
	}
	if err := unix.Unlinkat(f.fd, name, unix.AT_REMOVEDIR); err != nil && err != unix.ENOENT {
		return f.fail("remove", name, err)
	}
	return nil
}

// rename renames a file in f. A directory replaces at most an empty one.
func (f folder) rename(from, to string) error {
	if err := unix.Renameat(f.fd, from, f.fd, to); err != nil {
		return f.fail("rename", to, err)
	}
	return nil
}

// lock opens a file and takes its lock ([proc.Lock]).
func (f folder) lock(name string, flags int, kind int16, patience time.Duration) (fd int, err error) {
	if fd, err = f.open(name, flags); err != nil {
		return -1, err
	}
	if err := proc.Lock(fd, kind, patience); err != nil {
		_ = unix.Close(fd) // no writes to lose
		return -1, f.fail("lock", name, err)
	}
	return fd, nil
}

// locked reports whether a file is locked, without locking it. A missing file is not locked.
func (f folder) locked(name string) (bool, error) {
	fd, err := f.open(name, unix.O_RDONLY)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer unix.Close(fd)
	l := unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart}
	if err := unix.FcntlFlock(uintptr(fd), unix.F_OFD_GETLK, &l); err != nil {
		return false, f.fail("lock", name, err)
	}
	return l.Type != unix.F_UNLCK, nil
}
