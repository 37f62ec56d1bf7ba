// Package snapshots keeps what sandboxes have written: the upper layers of their overlays, packed,
// with a manifest each, in a directory of the user's.
//
//	DIR/lock                   held while something gets a name or loses it
//	DIR/manifests/ID.json      [Manifest]
//	DIR/layers/SHA256.tar.zst  a layer, named by the hash of its tar
//	DIR/trees/KEY/root         a layer as it was unpacked; KEY has the user that it was unpacked for
//	DIR/trees/KEY/lock         held, shared, by every sandbox that shows it; says in which boot it was made
//	DIR/tmp/ID                 a file that is being written, locked; or a directory with root and lock
//
// A layer or a manifest is written below tmp, synced (fsync(2)), and renamed under DIR/lock; a
// layer before the manifest that names it. So a crash leaves all of a snapshot or nothing of it
// that has a name. What it leaves below tmp has no lock any more, and layers that no manifest
// names are nobody's: [Store.Sweep] removes both.
//
// Trees are a cache: they are not synced, and those of another boot are not used.
//
// The directory is its owner's alone (0700): no payload ever sees it but for the trees, which
// are shown read-only. This package neither packs nor unpacks (package layers): sbxrun, which links
// this one, initialises nothing of that.
package snapshots

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/safeopen"
	"github.com/sbxrun/sbxrun/internal/state"
	"github.com/sbxrun/sbxrun/internal/tree"
)

const (
	lockName     = "lock"
	manifestsDir = "manifests"
	layersDir    = "layers"
	treesDir     = "trees"
	tmpDir       = "tmp"
	rootName     = "root"

	manifestSuffix = ".json"
	layerSuffix    = ".tar.zst"
)

// Store is a directory of snapshots. Several processes may use it at once.
type Store struct {
	root *os.Root // nil if there is none, which is as an empty one
	path string
}

// Dir is where the caller's snapshots are: below its directory for data.
func Dir() (string, error) {
	data, err := state.DataDir()
	return filepath.Join(data, "snapshots"), err
}

// Open opens a store, and makes it if there is none.
func Open(path string) (*Store, error) {
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, Failed(err)
	}
	s, err := Look(path)
	if err != nil {
		return nil, err
	}
	for _, name := range []string{manifestsDir, layersDir, treesDir, tmpDir} {
		if err := s.root.Mkdir(name, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			s.Close()
			return nil, Failed(err)
		}
	}
	return s, nil
}

// Look is Open for those who only read: it makes nothing, and where there is no store there are no
// snapshots.
func Look(path string) (*Store, error) {
	root, err := os.OpenRoot(path)
	if errors.Is(err, fs.ErrNotExist) {
		return &Store{path: path}, nil
	}
	if err != nil {
		return nil, Failed(err)
	}
	s := &Store{root: root, path: path}
	if err := s.private(); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// private checks that nobody but the caller gets into the store.
func (s *Store) private() error {
	info, err := s.root.Stat(".")
	if err != nil {
		return Failed(err)
	}
	if uid := info.Sys().(*syscall.Stat_t).Uid; int(uid) != os.Geteuid() || info.Mode().Perm()&0o077 != 0 {
		return &result.Error{Code: "data", Message: fmt.Sprintf("the directory of snapshots %q is not the caller's alone (user %d, mode %04o)", s.path, uid, info.Mode().Perm()),
			Hint: state.DataHint}
	}
	return nil
}

// Path is where the store is, for people.
func (s *Store) Path() string { return s.path }

func (s *Store) Close() error {
	if s.root == nil {
		return nil
	}
	return s.root.Close()
}

// stoppedAfter is how long the lock is waited for: it is held for renames and a sync.
const stoppedAfter = 20 * time.Second

// alone runs f while nobody else gives names or takes them.
func (s *Store) alone(f func() error) error {
	if s.root == nil {
		return Failed(fs.ErrNotExist)
	}
	lock, err := s.root.OpenFile(lockName, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return Failed(err)
	}
	defer lock.Close()
	if err := proc.Lock(proc.Descriptor(lock), unix.F_WRLCK, stoppedAfter); err != nil {
		return Failed(err)
	}
	return f()
}

// Draft is a file, or a directory, that has no name yet. Nobody else removes it until it is closed,
// or this process has ended.
type Draft struct {
	File  *os.File // the file; of a directory its root
	lock  *os.File
	store *Store
	name  string // below tmp; "" once it has its own
}

// NewFile makes a file that is to be filled.
func (s *Store) NewFile() (*Draft, error) {
	return s.draft(func(d *Draft) (err error) {
		if d.File, err = s.root.OpenFile(d.path(), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600); err == nil {
			err = proc.TryLock(proc.Descriptor(d.File), unix.F_WRLCK)
		}
		return err
	})
}

// draft makes one while nobody sweeps, and removes those of processes that were killed.
func (s *Store) draft(create func(*Draft) error) (*Draft, error) {
	d := &Draft{store: s}
	var left []string
	err := s.alone(func() error {
		left, d.name = s.abandoned(), safeopen.RandomName()
		return create(d)
	})
	for _, name := range left {
		_ = s.scrap(filepath.Join(tmpDir, name)) // Sweep tells
	}
	if err != nil {
		return nil, result.All(Failed(err), d.Close())
	}
	return d, nil
}

// retire takes a directory's name away, so that it can be removed when others may use the store again:
// it may have millions of files. Until then it is abandoned. The caller is alone.
func (s *Store) retire(name string) (as string, err error) {
	as = filepath.Join(tmpDir, safeopen.RandomName())
	return as, s.root.Rename(name, as)
}

func (d *Draft) path() string { return filepath.Join(tmpDir, d.name) }

// Close removes what has got no name.
func (d *Draft) Close() error {
	var err error
	if d.name != "" {
		err = d.store.scrap(d.path())
	}
	for _, f := range []*os.File{d.File, d.lock} {
		if f != nil {
			f.Close()
		}
	}
	return err
}

// abandoned lists what lies below tmp and is nobody's. The caller is alone.
func (s *Store) abandoned() (names []string) {
	for _, name := range s.names(tmpDir) {
		if s.idle(filepath.Join(tmpDir, name)) {
			names = append(names, name)
		}
	}
	return names
}

// idle reports whether nobody has the lock of a file, or of a directory that has one.
func (s *Store) idle(name string) bool {
	for _, lock := range []string{filepath.Join(name, lockName), name} {
		f, err := s.root.OpenFile(lock, os.O_RDWR|unix.O_NOFOLLOW, 0)
		if errors.Is(err, unix.ENOTDIR) { // the file itself
			continue
		}
		if err != nil {
			return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.EISDIR)
		}
		defer f.Close()
		return proc.TryLock(proc.Descriptor(f), unix.F_WRLCK) == nil
	}
	return true
}

// names lists a directory of the store; nothing if there is none.
func (s *Store) names(dir string) []string {
	if s.root == nil {
		return nil
	}
	d, err := s.root.Open(dir)
	if err != nil {
		return nil
	}
	defer d.Close()
	names, _ := d.Readdirnames(-1) // what could be read is what is handled
	return names
}

// scrap removes a file, or a directory with all that is in it. What was unpacked there may be
// closed to its owner.
func (s *Store) scrap(name string) error {
	dir, err := s.root.Open(filepath.Dir(name))
	if err != nil {
		return err
	}
	defer dir.Close()
	return tree.Remove(proc.Descriptor(dir), filepath.Base(name))
}

// syncDir has the names in a directory on the disk.
func (s *Store) syncDir(dir string) error {
	d, err := s.root.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

// Failed makes an error of this package of any other, with what can be done about a full disk.
func Failed(err error) error {
	if err == nil || errors.As(err, new(*result.Error)) {
		return err
	}
	e := &result.Error{Code: "data", Message: "snapshots: " + err.Error(), Hint: proc.DescriptorsHint(err), Err: err}
	switch {
	case e.Hint != "":
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		e.Code, e.Hint = "quota-disk", "free space there, or remove snapshots: sbxrun snapshot rm"
	case errors.Is(err, unix.EAGAIN):
		e.Hint = "another sbxrun holds it, and may be stopped (SIGSTOP)"
	default:
		e.Hint = state.DataHint
	}
	return e
}
