// Package snapshots stores snapshots, which are the packed upper layers of overlays with a manifest each, and container
// images, in a directory of the user.
//
//	DIR/lock                   held while a name is added or removed
//	DIR/manifests/ID.json      [Manifest]
//	DIR/images/HEX.json        [Image]
//	DIR/names/NAME             digest of the image with this name
//	DIR/layers/SHA256.tar.zst  a layer, named by the hash of its tar; gzip if an image's is
//	DIR/trees/KEY/root         an unpacked layer or image; KEY contains the user that it was unpacked for
//	DIR/trees/KEY/changes      what an unpacked layer of an image deletes
//	DIR/trees/KEY/lock         held, shared, by every sandbox that uses it; contains the boot ID, or says durable
//	DIR/tmp/ID                 a file that is being written, locked; or a directory with root and lock
//
// A layer or a manifest is written below tmp, synced (fsync(2)), and renamed under DIR/lock, a layer
// before the manifest that names it. After a crash a snapshot is therefore complete or has no
// name. [Store.Sweep] removes leftovers: unlocked files below tmp, and layers that no manifest names.
//
// Trees are a cache. Those of images are synced ([Store.Durable]); the others are not used after a reboot.
//
// The directory is private to its owner (0700). Commands see only the trees, read-only. This package
// neither packs nor unpacks (see package layers), so that sbxrun need not initialise a compressor.
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
	root *os.Root // nil if it does not exist, which means empty
	path string
}

// Dir returns the directory of the caller's snapshots.
func Dir() (string, error) {
	data, err := state.DataDir()
	return filepath.Join(data, "snapshots"), err
}

// Mine returns the caller's store, opened with [Open] or [Look].
func Mine(open func(path string) (*Store, error)) (*Store, error) {
	dir, err := Dir()
	if err != nil {
		return nil, err
	}
	return open(dir)
}

// Open opens a store and creates it if necessary.
func Open(path string) (*Store, error) {
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, Failed(err)
	}
	s, err := Look(path)
	if err != nil {
		return nil, err
	}
	for _, name := range []string{manifestsDir, layersDir, treesDir, tmpDir, imagesDir, namesDir} {
		if err := s.root.Mkdir(name, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			s.Close()
			return nil, Failed(err)
		}
	}
	return s, nil
}

// Look is Open for readers: it creates nothing, and a missing store has no snapshots.
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

// private checks that only the caller can use the store.
func (s *Store) private() error {
	info, err := s.root.Stat(".")
	if err != nil {
		return Failed(err)
	}
	if uid := info.Sys().(*syscall.Stat_t).Uid; int(uid) != os.Geteuid() || info.Mode().Perm()&0o077 != 0 {
		return &result.Error{Code: "data", Message: fmt.Sprintf("the snapshot directory %q must be private to you (it has uid %d, mode %04o)", s.path, uid, info.Mode().Perm()),
			Hint: state.DataHint}
	}
	return nil
}

// Path returns the path of the store, for messages.
func (s *Store) Path() string { return s.path }

func (s *Store) Close() error {
	if s.root == nil {
		return nil
	}
	return s.root.Close()
}

// stoppedAfter is the timeout for the lock, which is held for renames and a sync.
const stoppedAfter = 20 * time.Second

// alone runs f with the lock held.
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

// Draft is a file or directory that has no name yet. Other processes do not remove it until it is closed or
// this process ends.
type Draft struct {
	File  *os.File // the file, or the root of a directory
	lock  *os.File
	store *Store
	name  string // below tmp; "" once it is named
}

// NewFile creates a file.
func (s *Store) NewFile() (*Draft, error) {
	return s.draft(func(d *Draft) (err error) {
		if d.File, err = s.root.OpenFile(d.path(), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600); err == nil {
			err = proc.TryLock(proc.Descriptor(d.File), unix.F_WRLCK)
		}
		return err
	})
}

// draft creates a draft under the lock, and removes drafts of killed processes.
func (s *Store) draft(create func(*Draft) error) (*Draft, error) {
	d := &Draft{store: s}
	var left []string
	err := s.alone(func() error {
		left, d.name = s.abandoned(), safeopen.RandomName()
		return create(d)
	})
	for _, name := range left {
		_ = s.scrap(filepath.Join(tmpDir, name)) // Sweep reports it
	}
	if err != nil {
		return nil, result.All(Failed(err), d.Close())
	}
	return d, nil
}

// retire renames a directory, so that it can be removed without the lock: it may have millions of files.
// Until then it is abandoned. The caller holds the lock.
func (s *Store) retire(name string) (as string, err error) {
	as = filepath.Join(tmpDir, safeopen.RandomName())
	return as, s.root.Rename(name, as)
}

func (d *Draft) path() string { return filepath.Join(tmpDir, d.name) }

// Close removes the draft unless it was named.
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

// abandoned lists the files below tmp that no process uses. The caller holds the lock.
func (s *Store) abandoned() (names []string) {
	for _, name := range s.names(tmpDir) {
		if s.idle(filepath.Join(tmpDir, name)) {
			names = append(names, name)
		}
	}
	return names
}

// idle reports whether the lock of a file or directory is free.
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

// names lists a directory of the store; a missing one is empty.
func (s *Store) names(dir string) []string {
	if s.root == nil {
		return nil
	}
	d, err := s.root.Open(dir)
	if err != nil {
		return nil
	}
	defer d.Close()
	names, _ := d.Readdirnames(-1) // a partial list is fine
	return names
}

// scrap removes a file, or a directory with everything in it. Unpacked directories may be closed to
// their owner.
func (s *Store) scrap(name string) error {
	dir, err := s.root.Open(filepath.Dir(name))
	if err != nil {
		return err
	}
	defer dir.Close()
	return tree.Remove(proc.Descriptor(dir), filepath.Base(name))
}

// syncDir syncs a directory.
func (s *Store) syncDir(dir string) error {
	d, err := s.root.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

// Failed converts an error to a [*result.Error], with a hint for a full disk.
func Failed(err error) error {
	if err == nil || errors.As(err, new(*result.Error)) {
		return err
	}
	e := &result.Error{Code: "data", Message: "snapshots: " + err.Error(), Hint: proc.DescriptorsHint(err), Err: err}
	switch {
	case e.Hint != "":
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		e.Code, e.Hint = "quota-disk", "free disk space there, or remove snapshots or images: sbxrun snapshot rm, sbxrun image rm"
	case errors.Is(err, unix.EAGAIN):
		e.Hint = "another sbxrun holds it; check whether that is stopped (SIGSTOP)"
	default:
		e.Hint = state.DataHint
	}
	return e
}
