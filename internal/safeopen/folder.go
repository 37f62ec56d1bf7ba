package safeopen

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
)

// Folder is an open directory in which symbolic links are not followed and only regular files are opened. It has a
// bare descriptor because the garbage collector could close an [os.File], and locks must last. Its errors are
// [*fs.PathError].
type Folder struct {
	FD   int    // -1 if it does not exist
	Path string // for messages
}

// Damage is the cause of an error about a file that is incomplete, or that its package cannot have written. Retrying
// does not help.
type Damage string

func (d Damage) Error() string { return "damaged: " + string(d) }

// Damaged returns a [Damage].
func Damaged(format string, args ...any) error { return Damage(fmt.Sprintf(format, args...)) }

// IsDamaged reports whether an error is a [Damage].
func IsDamaged(err error) bool { return errors.As(err, new(Damage)) }

const (
	errNotRegular   Damage = "not a regular file"
	errNotDirectory Damage = "not a directory"
	errTooLarge     Damage = "more than 4 MiB"
)

// MaxFile is the maximum size of a file that [Folder.Read] and [Folder.Write] accept.
const MaxFile = 4 << 20

func (f Folder) Close() { _ = unix.Close(f.FD) } // no writes to lose

// Fail returns an error about a name in f, or nil if err is nil.
func (f Folder) Fail(op, name string, err error) error {
	if err == nil {
		return nil
	}
	return &fs.PathError{Op: op, Path: filepath.Join(f.Path, name), Err: err}
}

// Sub opens a directory in f.
func (f Folder) Sub(name string) (Folder, error) {
	fd, err := Beneath(f.FD, name, unix.O_RDONLY|unix.O_DIRECTORY, 0, 0)
	if err == unix.ENOTDIR || err == unix.ELOOP {
		err = errNotDirectory
	}
	return Folder{fd, filepath.Join(f.Path, name)}, f.Fail("open", name, err)
}

// Mkdir creates a directory.
func (f Folder) Mkdir(name string) error {
	return f.Fail("mkdir", name, unix.Mkdirat(f.FD, name, 0o700))
}

// Make opens a directory in f, and creates it if it does not exist.
func (f Folder) Make(name string) (Folder, error) {
	if err := f.Mkdir(name); err != nil && !errors.Is(err, unix.EEXIST) {
		return Folder{FD: -1}, err
	}
	return f.Sub(name)
}

// Open opens a regular file in f. It rejects other kinds before they are read or written. The descriptor is
// blocking, so that [os.NewFile] does not add it to Go's poller, whose initialisation is fatal if there are no
// descriptors left.
func (f Folder) Open(name string, flags int) (fd int, err error) {
	mode := uint32(0)
	if flags&unix.O_CREAT != 0 {
		mode = 0o600
	}
	if fd, err = Beneath(f.FD, name, flags, mode, 0); err != nil {
		if err == unix.ELOOP || err == unix.ENXIO || err == unix.EISDIR { // link, socket or pipe, directory
			err = errNotRegular
		}
		return -1, f.Fail("open", name, err)
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
		return -1, f.Fail("open", name, err)
	}
	return fd, nil
}

// OpenFile is [Folder.Open] for an [os.File].
func (f Folder) OpenFile(name string, flags int) (*os.File, error) {
	fd, err := f.Open(name, flags)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), filepath.Join(f.Path, name)), nil
}

// Read reads a file of at most 4 MiB.
func (f Folder) Read(name string) ([]byte, error) {
	file, err := f.OpenFile(name, unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	return ReadAll(file)
}

// ReadAll reads a file of at most 4 MiB from its beginning.
func ReadAll(file *os.File) ([]byte, error) {
	data, err := io.ReadAll(io.NewSectionReader(file, 0, MaxFile+1))
	if err == nil && len(data) > MaxFile {
		err = &fs.PathError{Op: "read", Path: file.Name(), Err: errTooLarge}
	}
	return data, err
}

// Write creates or replaces a file atomically: a reader sees the complete old content or the complete new
// content, and after an error the old content is still there.
func (f Folder) Write(name string, data []byte) error {
	if len(data) > MaxFile {
		return f.Fail("write", name, errTooLarge)
	}
	tmp := "." + name + "." + RandomName()
	file, err := f.OpenFile(tmp, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL)
	if err != nil {
		return err
	}
	_, err = file.Write(data)
	if err = result.All(err, file.Close()); err == nil {
		err = f.Rename(tmp, name)
	}
	if err != nil {
		err = result.All(err, f.Unlink(tmp))
	}
	return err
}

// Names lists the names in f. It moves the descriptor's offset, so f must not be shared.
func (f Folder) Names() (names []string, err error) {
	for name, err := range ReadNames(f.FD) {
		if err != nil {
			return nil, f.Fail("read", "", err)
		}
		names = append(names, name)
	}
	return names, nil
}

// Unlink removes a file, but not a directory. A missing file is not an error.
func (f Folder) Unlink(name string) error { return f.remove(name, 0) }

// Rmdir removes an empty directory. A missing one is not an error.
func (f Folder) Rmdir(name string) error { return f.remove(name, unix.AT_REMOVEDIR) }

func (f Folder) remove(name string, flags int) error {
	err := unix.Unlinkat(f.FD, name, flags)
	if err == unix.ENOENT {
		return nil
	}
	return f.Fail("remove", name, err)
}

// Rename renames a file in f. A directory replaces at most an empty one.
func (f Folder) Rename(from, to string) error {
	return f.Fail("rename", to, unix.Renameat(f.FD, from, f.FD, to))
}

// Lock opens a file and takes its lock ([proc.Lock]).
func (f Folder) Lock(name string, flags int, kind int16, patience time.Duration) (fd int, err error) {
	if fd, err = f.Open(name, flags); err != nil {
		return -1, err
	}
	if err := proc.Lock(fd, kind, patience); err != nil {
		_ = unix.Close(fd) // no writes to lose
		return -1, f.Fail("lock", name, err)
	}
	return fd, nil
}

// Locked reports whether a file is locked, without locking it. A missing file is not locked.
func (f Folder) Locked(name string) (bool, error) {
	fd, err := f.Open(name, unix.O_RDONLY)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer unix.Close(fd)
	l := unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart}
	err = unix.FcntlFlock(uintptr(fd), unix.F_OFD_GETLK, &l)
	return l.Type != unix.F_UNLCK, f.Fail("lock", name, err)
}
