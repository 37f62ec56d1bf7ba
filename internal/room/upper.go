package room

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/enter"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/safeopen"
	"github.com/sbxrun/sbxrun/internal/tree"
	"github.com/sbxrun/sbxrun/internal/values"
)

// upperFile records the overlays that use a directory for layers on disk. It is locked while the directory is in use.
const upperFile = "overlays.json"

var errFileSystem = errors.New("its file system cannot have a layer")

// openUpper opens or creates a directory for the layers of these overlays. It contains a directory for each layer, named
// by its number.
func (p *Plan) openUpper(name string, list []*Overlay) (err error) {
	defer func() {
		if e := (*result.Error)(nil); err != nil && !errors.As(err, &e) {
			e = &result.Error{Code: "upper", Message: fmt.Sprintf("--upper %q: %v", name, err), Err: err, Hint: "name a directory of your own, empty or used for the same, that the sandbox does not show"}
			switch {
			case errors.As(err, new(*safeopen.Error)):
				e.Hint = safeopen.Hint
			case errors.Is(err, errFileSystem):
				e.Hint = "name a directory on another file system, such as ext4, XFS or tmpfs"
			case errors.Is(err, unix.ENOENT): // a parent is missing; name itself would have been created
				e.Hint = fmt.Sprintf("make %q first", path.Dir(name))
			}
			err = e
		}
	}()
	dir, real, err := p.ownDirectory(name)
	if err != nil {
		return err
	}
	defer unix.Close(dir)
	for _, o := range p.ops {
		if !o.host() && o.kind != opRoot {
			continue
		}
		src, err := filepath.EvalSymlinks(o.src)
		if o.from != nil {
			src, err = realPath(o.from)
		}
		if err == nil && (values.Within(real, src) || values.Within(src, real)) {
			return fmt.Errorf("the sandbox shows %s: the layer must lie elsewhere", o.src)
		}
	}
	known, lock, err := lockUpper(dir, list)
	if err != nil {
		return err
	}
	list[0].lock = lock           // one lock for all overlays of the directory
	p.hold = append(p.hold, lock) // the keeper's copy lasts as long as any process can write
	for i, o := range list {
		o.Since, o.Base, o.Index, o.Upper = known[i].Since, known[i].Base, known[i].Index, path.Join(real, strconv.Itoa(i))
		if err := p.makeUpper(dir, i, o); err != nil {
			return err
		}
	}
	return nil
}

// ownDirectory opens a directory that only the caller can write to. It creates a missing one. real is its path without
// links.
func (p *Plan) ownDirectory(name string) (dir int, real string, err error) {
	parent, err := safeopen.Dir(path.Dir(name))
	if err != nil {
		return -1, "", err
	}
	defer unix.Close(parent)
	if err := unix.Mkdirat(parent, path.Base(name), 0o700); err != nil && err != unix.EEXIST {
		return -1, "", err
	}
	if dir, err = safeopen.Dir(name); err != nil {
		return -1, "", err
	}
	var st unix.Stat_t
	var fs unix.Statfs_t
	if real, err = os.Readlink("/proc/self/fd/" + strconv.Itoa(dir)); err == nil {
		err = unix.Fstat(dir, &st)
	}
	if err == nil {
		err = unix.Fstatfs(dir, &fs)
	}
	switch {
	case err != nil:
	case int(st.Uid) != os.Geteuid() || st.Mode&0o022 != 0:
		err = errors.New("it must belong to the caller, and others must not be able to write to it")
	case fs.Type == unix.OVERLAYFS_SUPER_MAGIC || fs.Type == unix.NFS_SUPER_MAGIC || fs.Type == unix.FUSE_SUPER_MAGIC:
		err = fmt.Errorf("%w%s", errFileSystem, fileSystem(dir))
	}
	if err != nil {
		unix.Close(dir)
		return -1, "", err
	}
	return dir, real, nil
}

// lockUpper locks the directory for these overlays and returns the overlays as recorded there, with their original
// Since.
func lockUpper(dir int, list []*Overlay) (known []*Overlay, lock *os.File, err error) {
	fd, err := unix.Openat(dir, upperFile, unix.O_RDWR|unix.O_CREAT|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, nil, err
	}
	lock = os.NewFile(uintptr(fd), upperFile)
	defer func() {
		if err != nil {
			lock.Close()
		}
	}()
	// The lock belongs to the open file description. The kernel releases it with the last descriptor.
	if err := proc.TryLock(fd, unix.F_WRLCK); err != nil {
		return nil, nil, errors.New("another sandbox uses it")
	}
	known, damage := readUpper(lock)
	if damage != nil && damage != errCut {
		return nil, nil, damage
	}
	if known == nil {
		// Without layers, the record is new, or a start was killed or had no space while it wrote it.
		empty := onlyEntry(dir)
		if empty != nil && damage == nil {
			_ = unix.Unlinkat(dir, upperFile, 0)
		}
		if err := cmp.Or(empty, unix.Ftruncate(fd, 0)); err != nil {
			return nil, nil, cmp.Or(damage, err)
		}
		text, err := result.JSON(list)
		if err == nil {
			_, err = lock.WriteAt(text, 0)
		}
		return list, lock, err
	}
	if len(known) != len(list) {
		return nil, nil, fmt.Errorf("it belongs to %d overlays, not %d", len(known), len(list))
	}
	for i, o := range list {
		if known[i].Source != o.Source {
			return nil, nil, fmt.Errorf("its layer belongs to %s, not %s", known[i].Source, o.Source)
		}
	}
	return known, lock, nil
}

// errCut is the error of readUpper for the beginning of a record.
var errCut = fmt.Errorf("%s in it is damaged", upperFile)

// readUpper reads the overlays recorded in a directory of layers; nil if the directory is new.
func readUpper(file *os.File) (known []*Overlay, err error) {
	const most = 1 << 20
	text, err := io.ReadAll(io.NewSectionReader(file, 0, most))
	if err != nil || len(text) == 0 {
		return nil, err
	}
	if json.Unmarshal(text, &known) == nil && len(known) > 0 && !slices.Contains(known, nil) {
		return known, nil
	}
	const begin = `[{"source":"`
	if string(text[:min(len(text), len(begin))]) == begin[:min(len(text), len(begin))] {
		return nil, errCut
	}
	return nil, fmt.Errorf("%s in it is not a record of sbxrun", upperFile)
}

// onlyEntry returns an error if a directory contains anything but upperFile.
func onlyEntry(dir int) error {
	fd, err := unix.Openat(dir, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), "upper")
	defer f.Close()
	names, err := f.Readdirnames(2)
	if err == nil && len(names) == 2 || len(names) == 1 && names[0] != upperFile {
		return errors.New("it is not empty, and contains no layers of sbxrun")
	}
	return nil
}

// UpperDir opens an overlay's layer in its directory below --upper.
func UpperDir(upper string) (*os.File, error) {
	dir, err := safeopen.Dir(upper)
	if err != nil {
		return nil, err
	}
	defer unix.Close(dir)
	fd, err := unix.Openat(dir, enter.UpperName, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path.Join(upper, enter.UpperName), Err: err}
	}
	return os.NewFile(uintptr(fd), upper), nil
}

// Still reports whether no sandbox can write to a layer on disk. If so, no sandbox can use it until the overlay is
// closed.
func (o *Overlay) Still() bool {
	dir, err := safeopen.Dir(path.Dir(o.Upper))
	if err != nil {
		return false
	}
	defer unix.Close(dir)
	fd, err := unix.Openat(dir, upperFile, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	o.lock = os.NewFile(uintptr(fd), upperFile)
	return proc.TryLock(fd, unix.F_RDLCK) == nil
}

// makeUpper creates the directories that the kernel needs for a layer on disk. They belong to the sandbox's identity,
// whose earlier processes may still change them. So root resolves no path twice: it opens each directory below top
// without following links, and changes its owner by its descriptor.
func (p *Plan) makeUpper(dir, n int, o *Overlay) error {
	top, err := p.makeOwn(dir, strconv.Itoa(n), 0o700)
	if err != nil {
		return err
	}
	o.disk = os.NewFile(uintptr(top), o.Upper)
	work, err := p.makeOwn(top, enter.WorkName, 0o700)
	if err != nil {
		return err
	}
	unix.Close(work)
	upper, err := p.makeOwn(top, enter.UpperName, o.mount.Mode)
	if err != nil {
		return err
	}
	defer unix.Close(upper)
	return unix.Fstat(upper, &o.upper)
}

// makeOwn opens a directory in dir and creates a missing one. The new directory gets its name when it is complete, so
// later starts do not find an incomplete one after a kill.
func (p *Plan) makeOwn(dir int, name string, mode uint32) (fd int, err error) {
	fd, err = tree.Open(dir, name, unix.O_PATH|unix.O_DIRECTORY)
	if !errors.Is(err, unix.ENOENT) {
		return fd, err
	}
	unfinished := name + ".new"
	if err := unix.Mkdirat(dir, unfinished, 0o700); err != nil && err != unix.EEXIST {
		return -1, err
	}
	if fd, err = tree.Open(dir, unfinished, unix.O_PATH|unix.O_DIRECTORY); err != nil {
		return -1, err
	}
	if p.cred != nil {
		err = unix.Fchownat(fd, "", int(p.cred.UID), int(p.cred.GID), unix.AT_EMPTY_PATH)
	}
	if err == nil {
		err = tree.Chmod(fd, mode)
	}
	if err == nil {
		err = unix.Renameat(dir, unfinished, dir, name)
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}
