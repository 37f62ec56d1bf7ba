package snapshots

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/proc"
)

// UnpackWord is the first argument with which sbxrund unpacks a snapshot; the snapshot's ID and the uid
// and gid of the files follow.
const UnpackWord = "unpack-snapshot"

// UnpackImageWord is UnpackWord for an image; its digest follows.
const UnpackImageWord = "unpack-image"

// EnsureImageWord is the first argument with which sbxrund imports an image, unless it is in the store, and prints its
// digest. A reference with a kind, such as oci:DIR, and the uid and gid of the files follow.
const EnsureImageWord = "ensure-image"

// Unpacked is an unpacked layer, for use as a lower layer of overlayfs. It is not removed before it is
// closed.
type Unpacked struct {
	Path string // path of the directory
	lock *os.File
	made string // the store's path, if Hold has unpacked it
	key  string
}

// Discard closes the layer, and removes it if Hold unpacked it and no other process uses it. It is for
// sandboxes that never started.
func (u *Unpacked) Discard() error {
	defer u.Close()
	if u.made == "" {
		return nil
	}
	s, err := Look(u.made)
	if err != nil {
		return err
	}
	defer s.Close()
	old := ""
	err = s.alone(func() (err error) {
		if proc.TryLock(proc.Descriptor(u.lock), unix.F_WRLCK) == nil {
			old, err = s.retire(filepath.Join(treesDir, u.key))
		}
		return err
	})
	if old != "" {
		err = s.scrap(old)
	}
	return err
}

// Close releases the layer.
func (u *Unpacked) Close() error { return u.lock.Close() }

// Key returns the name of a layer unpacked for a user.
func Key(l Layer, uid, gid uint32) string { return fmt.Sprintf("%s-%d-%d", l.SHA256, uid, gid) }

// Unpacked holds an unpacked layer. The error is [fs.ErrNotExist] if it was not unpacked in this boot.
func (s *Store) Unpacked(key string) (u *Unpacked, err error) {
	err = s.alone(func() error {
		u, err = s.holdTree(key)
		return err
	})
	return u, Failed(err)
}

// holdTree takes a shared lock of a tree. The caller holds the store's lock.
func (s *Store) holdTree(key string) (*Unpacked, error) {
	at := filepath.Join(treesDir, key)
	lock, err := s.root.OpenFile(filepath.Join(at, lockName), os.O_RDWR|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	made, err := io.ReadAll(io.LimitReader(lock, 64))
	boot, bootErr := proc.BootID()
	if err = cmp.Or(err, bootErr); err == nil && string(made) != boot && string(made) != durable {
		err = fs.ErrNotExist // a tree of another boot may be incomplete
	}
	if info, statErr := s.root.Lstat(filepath.Join(at, rootName)); err == nil && (statErr != nil || !info.IsDir()) {
		err = fs.ErrNotExist // in its place, a link would show another directory to sandboxes
	}
	if err == nil {
		err = proc.TryLock(proc.Descriptor(lock), unix.F_RDLCK)
	}
	if err != nil {
		lock.Close()
		return nil, err
	}
	return &Unpacked{Path: filepath.Join(s.path, at, rootName), lock: lock}, nil
}

// durable replaces the boot ID in the lock of a tree that is on the disk.
const durable = "durable"

// Durable syncs the file system of a store, and then marks these trees as complete, so that they stay valid after a reboot.
func (s *Store) Durable(list ...*Unpacked) error {
	if err := unix.Syncfs(proc.Descriptor(list[0].lock)); err != nil {
		return Failed(err)
	}
	return s.alone(func() error {
		for _, u := range list {
			err := u.lock.Truncate(0)
			if err == nil {
				_, err = u.lock.WriteAt([]byte(durable), 0)
			}
			if err != nil {
				return Failed(err)
			}
		}
		return nil
	})
}

// Create creates a file next to the root of a new tree.
func (d *Draft) Create(name string) (*os.File, error) {
	f, err := d.store.root.OpenFile(filepath.Join(d.path(), name), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	return f, Failed(err)
}

// Open opens a file next to the root of an unpacked tree.
func (u *Unpacked) Open(name string) (*os.File, error) {
	return os.OpenFile(filepath.Join(filepath.Dir(u.Path), name), os.O_RDONLY|unix.O_NOFOLLOW, 0)
}

// NewTree creates a directory to unpack a layer to.
func (s *Store) NewTree() (*Draft, error) {
	return s.draft(func(d *Draft) (err error) {
		if err = s.root.Mkdir(d.path(), 0o700); err != nil {
			return err
		}
		if d.lock, err = s.root.OpenFile(filepath.Join(d.path(), lockName), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600); err != nil {
			return err
		}
		if err = proc.TryLock(proc.Descriptor(d.lock), unix.F_WRLCK); err != nil {
			return err
		}
		boot, err := proc.BootID()
		if err != nil {
			return err
		}
		if _, err = d.lock.WriteString(boot); err != nil {
			return err
		}
		root := filepath.Join(d.path(), rootName)
		if err = s.root.Mkdir(root, 0o700); err != nil {
			return err
		}
		d.File, err = s.root.Open(root)
		return err
	})
}

// Keep names the directory, unless another process has unpacked the same layer first. It replaces a tree from before
// the last boot.
func (d *Draft) Keep(key string) error {
	s, old := d.store, ""
	err := s.alone(func() (err error) {
		if u, err := s.holdTree(key); err == nil {
			return u.Close()
		}
		at := filepath.Join(treesDir, key)
		if s.idle(at) {
			if old, err = s.retire(at); errors.Is(err, fs.ErrNotExist) {
				old, err = "", nil
			}
		}
		if err == nil {
			err = s.root.Rename(d.path(), at)
		}
		if err != nil {
			return Failed(err)
		}
		d.name = ""
		return Failed(proc.TryLock(proc.Descriptor(d.lock), unix.F_RDLCK)) // as a user of the tree, until the draft is closed
	})
	if old != "" {
		_ = s.scrap(old) // Sweep reports it
	}
	return err
}
