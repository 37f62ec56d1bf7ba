package snapshots

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/safeopen"
	"github.com/sbxrun/sbxrun/internal/state"
)

// List returns the snapshots, including expired ones, the oldest first, and errors for unreadable
// manifests.
func (s *Store) List() (list []*Manifest, wrong []error) {
	for _, name := range s.names(manifestsDir) {
		m, err := s.load(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed since
		}
		if err != nil {
			wrong = append(wrong, fmt.Errorf("%s: %w", filepath.Join(s.path, manifestsDir, name), err))
			continue
		}
		list = append(list, m)
	}
	slices.SortFunc(list, func(a, b *Manifest) int {
		return strings.Compare(a.CreatedAt+a.ID, b.CreatedAt+b.ID)
	})
	return list, wrong
}

func (s *Store) load(name string) (*Manifest, error) {
	f, err := s.root.Open(filepath.Join(manifestsDir, name))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxManifest))
	if err != nil {
		return nil, err
	}
	m, err := Parse(data)
	if err == nil && m.ID+manifestSuffix != name {
		err = damaged("its file has the name of another snapshot")
	}
	return m, err
}

// Find returns the snapshot with this ID or name.
func (s *Store) Find(name string) (*Manifest, error) {
	m, err := s.any(name)
	if err == nil && m.Expired(time.Now()) {
		return nil, &result.Error{Code: "not-found", Message: fmt.Sprintf("snapshot %.80q has expired", name), Hint: "remove it: sbxrun cleanup"}
	}
	return m, err
}

// any is like Find, but includes expired snapshots.
func (s *Store) any(name string) (*Manifest, error) {
	list, _ := s.List()
	if m := find(list, name); m != nil {
		return m, nil
	}
	return nil, &result.Error{Code: "not-found", Message: fmt.Sprintf("no snapshot named %.80q", name), Hint: "list them: sbxrun snapshot ls"}
}

// find prefers an ID, which is unique, to a name.
func find(list []*Manifest, name string) (found *Manifest) {
	for _, m := range list {
		if m.ID == name {
			return m
		}
		if m.Name == name && name != "" {
			found = m
		}
	}
	return found
}

// perSnapshot is what each snapshot adds to its layers in the quota: its manifest uses a disk block and an inode.
// Without it, snapshots with equal layers could use up both.
const perSnapshot = 4096

// Used returns the size of all snapshots together.
func (s *Store) Used() (n int64) {
	n = perSnapshot * int64(len(s.names(manifestsDir))+len(s.names(imagesDir))+len(s.names(namesDir)))
	for _, name := range s.names(layersDir) {
		if info, err := s.root.Lstat(filepath.Join(layersDir, name)); err == nil {
			n += info.Size()
		}
	}
	return n
}

// NewManifest returns a manifest with an ID and the current time.
func NewManifest(name string, ttl time.Duration) (*Manifest, error) {
	if name != "" {
		if err := state.ValidName(name); err != nil {
			e := *err.(*result.Error)
			e.Message = strings.Replace(e.Message, "sandbox", "snapshot", 1)
			return nil, &e
		}
	}
	now := time.Now().UTC()
	m := &Manifest{Version: Version, ID: safeopen.RandomName(), Name: name, CreatedAt: now.Format(result.TimeFormat)}
	if ttl > 0 {
		m.ExpiresAt = now.Add(ttl).Format(result.TimeFormat)
	}
	return m, nil
}

// layerPath returns the path of a layer in the store.
func layerPath(hash string) string { return filepath.Join(layersDir, hash+layerSuffix) }

// Add names a snapshot. drafts are the layers that may be new, by hash, completely written; the caller closes
// them. most bounds the size of all snapshots together. After an error the store is unchanged, except that
// an expired snapshot of the same name may be gone.
func (s *Store) Add(m *Manifest, drafts map[string]*Draft, most int64) error {
	for _, d := range drafts {
		if err := d.File.Sync(); err != nil {
			return Failed(err)
		}
	}
	text, err := s.NewFile()
	if err != nil {
		return err
	}
	defer text.Close()
	return s.alone(func() error {
		if err := s.free(m); err != nil {
			return err
		}
		fresh, err := s.lacking(m, drafts, most)
		if err != nil {
			return err
		}
		named := false
		if err = s.take(fresh, drafts); err == nil {
			named, err = s.publish(m, text)
		}
		if err != nil && !named {
			for _, hash := range fresh {
				_ = s.root.Remove(layerPath(hash)) // otherwise Sweep removes it
			}
		}
		return Failed(err)
	})
}

// free checks that the name is free, and takes it from an expired snapshot.
func (s *Store) free(m *Manifest) error {
	if m.Name == "" {
		return nil
	}
	list, _ := s.List()
	other := find(list, m.Name)
	if other == nil {
		return nil
	}
	if other.Expired(time.Now()) {
		return Failed(s.root.Remove(filepath.Join(manifestsDir, other.ID+manifestSuffix)))
	}
	return &result.Error{Code: "name-in-use", Message: fmt.Sprintf("snapshot %q already exists", m.Name), Hint: "choose another name, or remove it: sbxrun snapshot rm " + m.Name}
}

// lacking returns the hashes of layers that the store does not have, if they fit into the quota.
func (s *Store) lacking(m *Manifest, drafts map[string]*Draft, most int64) (hashes []string, err error) {
	used := s.Used() + perSnapshot
	if used > most {
		return nil, Full(most)
	}
	for i := range m.Trees {
		for j := range m.Trees[i].Layers {
			l := &m.Trees[i].Layers[j]
			// An equal layer may have been packed differently, and have another size.
			if info, err := s.root.Lstat(layerPath(l.SHA256)); err == nil {
				l.Size = info.Size()
				continue
			}
			d := drafts[l.SHA256]
			if d == nil {
				return nil, damaged("missing layer %.12s", l.SHA256)
			}
			info, err := d.File.Stat()
			if err != nil {
				return nil, Failed(err)
			}
			if l.Size = info.Size(); slices.Contains(hashes, l.SHA256) {
				continue
			}
			if used += l.Size; used > most {
				return nil, Full(most)
			}
			hashes = append(hashes, l.SHA256)
		}
	}
	return hashes, nil
}

// take moves these layers into the store. The caller holds the lock.
func (s *Store) take(hashes []string, drafts map[string]*Draft) error {
	for _, hash := range hashes {
		d := drafts[hash]
		if err := s.root.Rename(d.path(), layerPath(hash)); err != nil {
			return err
		}
		d.name = ""
	}
	return s.syncDir(layersDir)
}

// Full returns the error for an exceeded quota.
func Full(most int64) error {
	return &result.Error{Code: "quota-disk", Message: fmt.Sprintf("the snapshots and images would exceed %d bytes in total", most),
		Hint: "remove some (sbxrun snapshot rm, image rm, or cleanup for expired ones) or raise --max-size"}
}

// publish writes the manifest and names it. named is true after an error if the name could not be removed
// again.
func (s *Store) publish(m *Manifest, draft *Draft) (named bool, err error) {
	if err := m.check(); err != nil {
		return false, err
	}
	data, err := result.JSON(m)
	if err == nil {
		_, err = draft.File.Write(data)
	}
	if err == nil {
		err = draft.File.Sync()
	}
	name := filepath.Join(manifestsDir, m.ID+manifestSuffix)
	if err == nil {
		err = s.root.Rename(draft.path(), name)
	}
	if err != nil {
		return false, err
	}
	draft.name = ""
	if err = s.syncDir(manifestsDir); err != nil {
		return s.root.Remove(name) != nil, err
	}
	return true, nil
}

// Discard is Remove by ID or name, also for an expired snapshot.
func (s *Store) Discard(name string) error {
	m, err := s.any(name)
	if err != nil {
		return err
	}
	return s.Remove(m)
}

// Remove removes a snapshot and the layers that no other snapshot has.
func (s *Store) Remove(m *Manifest) error {
	return s.alone(func() error {
		if err := s.root.Remove(filepath.Join(manifestsDir, m.ID+manifestSuffix)); err != nil {
			return Failed(err)
		}
		if err := s.dropOrphans(); err != nil {
			return err
		}
		return Failed(s.syncDir(manifestsDir))
	})
}

// orphans lists the layers that belong to no snapshot or image, or only to ones expired at then, and that no sandbox
// uses: a snapshot may still be taken of a sandbox that uses a layer. If a manifest is unreadable, it lists none,
// because that snapshot's layers are unknown. The caller holds the lock.
func (s *Store) orphans(then time.Time) (hashes []string) {
	list, wrong := s.List()
	images, damaged := s.Images()
	if len(wrong)+len(damaged) > 0 {
		return nil
	}
	needed := map[string]bool{}
	for _, m := range images {
		keeps := s.keeps(m, then)
		for _, l := range m.Layers {
			needed[l.SHA256] = needed[l.SHA256] || keeps
		}
	}
	for _, m := range list {
		for _, l := range m.Layers() {
			needed[l.SHA256] = needed[l.SHA256] || then.IsZero() || !m.Expired(then)
		}
	}
	for _, key := range s.names(treesDir) {
		if hash, _, ok := strings.Cut(key, "-"); ok && !s.idle(filepath.Join(treesDir, key)) {
			needed[hash] = true
		}
	}
	for _, name := range s.names(layersDir) {
		if hash, ok := strings.CutSuffix(name, layerSuffix); ok && !needed[hash] {
			hashes = append(hashes, hash)
		}
	}
	return hashes
}

// Layer opens a layer. It stays readable when it is removed.
func (s *Store) Layer(l Layer) (io.ReadCloser, error) {
	f, err := s.root.Open(layerPath(l.SHA256))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, &result.Error{Code: "damaged", Message: fmt.Sprintf("missing layer %.12s in the store", l.SHA256), Hint: "remove the image or snapshot, and import it again"}
	}
	return f, Failed(err)
}
