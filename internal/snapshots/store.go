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

// List returns the snapshots, the oldest first, those that have expired included, and what is
// wrong with manifests that cannot be read.
func (s *Store) List() (list []*Manifest, wrong []error) {
	for _, name := range s.names(manifestsDir) {
		m, err := s.load(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue // it was removed meanwhile
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
		err = damaged("its file is that of another one")
	}
	return m, err
}

// Find returns the snapshot of this id or name.
func (s *Store) Find(name string) (*Manifest, error) {
	m, err := s.any(name)
	if err == nil && m.Expired(time.Now()) {
		return nil, &result.Error{Code: "not-found", Message: fmt.Sprintf("the time to live of snapshot %.80q is over", name), Hint: "sbxrun cleanup removes it"}
	}
	return m, err
}

// any is Find, whether or not the snapshot has expired.
func (s *Store) any(name string) (*Manifest, error) {
	list, _ := s.List()
	if m := find(list, name); m != nil {
		return m, nil
	}
	return nil, &result.Error{Code: "not-found", Message: fmt.Sprintf("no snapshot %.80q", name), Hint: "sbxrun snapshots lists them"}
}

// find prefers an id, which is nobody else's.
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

// perSnapshot is what one counts for beside its layers: its manifest is a block of the disk, and an inode.
// A quota of layers alone, which equal snapshots share, would let them use all of both.
const perSnapshot = 4096

// Used is how many bytes all snapshots have together.
func (s *Store) Used() (n int64) {
	n = perSnapshot * int64(len(s.names(manifestsDir)))
	for _, name := range s.names(layersDir) {
		if info, err := s.root.Lstat(filepath.Join(layersDir, name)); err == nil {
			n += info.Size()
		}
	}
	return n
}

// NewManifest is one with an id and the time.
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

// layerPath is where a layer is in the store.
func layerPath(hash string) string { return filepath.Join(layersDir, hash+layerSuffix) }

// Add gives a snapshot its name. drafts are those of its layers that may not be in the store yet,
// by hash, and are written to their ends; the caller closes them. All snapshots together may then
// have so many bytes. After an error the store is as it was, but for one of this name that had expired.
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
				_ = s.root.Remove(layerPath(hash)) // or Sweep does
			}
		}
		return Failed(err)
	})
}

// free checks that nobody has the name, and takes it from a snapshot that has expired.
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
	return &result.Error{Code: "name-in-use", Message: fmt.Sprintf("there is a snapshot %q already", m.Name), Hint: "choose another name, or remove it: sbxrun snapshot rm " + m.Name}
}

// lacking returns those layers that the store does not have, by hash, if there is room for them.
func (s *Store) lacking(m *Manifest, drafts map[string]*Draft, most int64) (hashes []string, err error) {
	used := s.Used() + perSnapshot
	if used > most {
		return nil, Full(most)
	}
	for i := range m.Trees {
		for j := range m.Trees[i].Layers {
			l := &m.Trees[i].Layers[j]
			// An equal one may have been packed by other means, and be smaller or larger.
			if info, err := s.root.Lstat(layerPath(l.SHA256)); err == nil {
				l.Size = info.Size()
				continue
			}
			d := drafts[l.SHA256]
			if d == nil {
				return nil, damaged("layer %.12s is not there", l.SHA256)
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

// take moves these layers into the store. The caller is alone.
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

// Full says that there is no room for a snapshot.
func Full(most int64) error {
	return &result.Error{Code: "quota-disk", Message: fmt.Sprintf("the snapshots would take more than %d bytes together", most),
		Hint: "remove some (sbxrun snapshot rm, and cleanup for those that have expired), or raise --max-size"}
}

// publish writes the manifest, and gives it its name. named: it has the name although it failed, on a
// disk that does not let it be taken back.
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

// Discard is Remove by id or name, whether or not the snapshot has expired.
func (s *Store) Discard(name string) error {
	m, err := s.any(name)
	if err != nil {
		return err
	}
	return s.Remove(m)
}

// Remove removes a snapshot, and the layers that no other one has.
func (s *Store) Remove(m *Manifest) error {
	return s.alone(func() error {
		if err := s.root.Remove(filepath.Join(manifestsDir, m.ID+manifestSuffix)); err != nil {
			return Failed(err)
		}
		for _, hash := range s.orphans(time.Time{}) {
			if err := s.root.Remove(layerPath(hash)); err != nil {
				return Failed(err)
			}
		}
		return Failed(s.syncDir(manifestsDir))
	})
}

// orphans lists the layers that no snapshot has which has not expired by then, and no sandbox shows:
// of that one a snapshot may be taken. None if a manifest cannot be read, since nobody knows what
// that one has. The caller is alone.
func (s *Store) orphans(then time.Time) (hashes []string) {
	list, wrong := s.List()
	if len(wrong) > 0 {
		return nil
	}
	needed := map[string]bool{}
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

// Layer opens a layer. It can be read to its end whatever becomes of its name.
func (s *Store) Layer(l Layer) (io.ReadCloser, error) {
	f, err := s.root.Open(layerPath(l.SHA256))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, damaged("layer %.12s is not there", l.SHA256)
	}
	return f, Failed(err)
}
