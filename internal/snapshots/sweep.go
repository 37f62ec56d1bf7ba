package snapshots

import (
	"path/filepath"
	"time"
)

// Leftover is an unneeded file in the store.
type Leftover struct {
	Kind string // "snapshot" or "image" (expired), "layer", "tree", "draft" or "damaged"
	ID   string // of a snapshot or an image
	Name string // of a snapshot or an image
	What string // description
	Err  error  // why it could not be removed

	path string // path in the store of a file to remove without the lock
}

// Sweep removes expired snapshots and images, layers without a snapshot or image, trees of layers that no sandbox uses,
// except those of images, and leftovers of killed processes. With dryRun it only lists them.
func (s *Store) Sweep(dryRun bool) (found []Leftover) {
	if s.root == nil {
		return nil
	}
	do := func(l Leftover, path string) {
		if !dryRun {
			l.Err = Failed(s.scrap(path))
		}
		found = append(found, l)
	}
	err := s.alone(func() error {
		list, wrong := s.List()
		now := time.Now()
		for _, err := range wrong {
			found = append(found, Leftover{Kind: "damaged", What: "manifest of a snapshot; all layers are kept while it exists", Err: err})
		}
		needed, wrong := s.neededTrees(now)
		for _, err := range wrong {
			found = append(found, Leftover{Kind: "damaged", What: "record of an image; all layers are kept while it exists", Err: err})
		}
		images, _ := s.Images()
		// Layers before their manifests: a crash in between leaves an expired manifest without layers.
		for _, hash := range s.orphans(now) {
			do(Leftover{Kind: "layer", What: "layer without a snapshot " + hash}, layerPath(hash))
		}
		for _, m := range list {
			if m.Expired(now) {
				do(Leftover{Kind: "snapshot", ID: m.ID, Name: m.Name, What: "expired snapshot"}, filepath.Join(manifestsDir, m.ID+manifestSuffix))
			}
		}
		for _, m := range images {
			l := Leftover{Kind: "image", ID: m.Digest, What: "expired image"}
			if m.Pending {
				l.What = "incomplete image"
			}
			if !s.keeps(m, now) {
				for _, name := range m.Names {
					l.Name = name
					do(l, filepath.Join(namesDir, escape(name)))
				}
				do(l, filepath.Join(imagesDir, imageFile(m.Digest)))
			}
		}
		for _, name := range s.abandoned() { // before retire adds more
			found = append(found, Leftover{Kind: "draft", What: "incomplete file or directory " + name, path: filepath.Join(tmpDir, name)})
		}
		for _, key := range s.names(treesDir) {
			if at := filepath.Join(treesDir, key); !needed(key) && s.idle(at) {
				l := Leftover{Kind: "tree", What: "unpacked layer that no sandbox uses " + key}
				if !dryRun {
					if as, err := s.retire(at); err != nil {
						l.Err = Failed(err)
					} else {
						l.path = as
					}
				}
				found = append(found, l)
			}
		}
		return nil
	})
	for i, l := range found {
		if l.path != "" && !dryRun {
			found[i].Err = Failed(s.scrap(l.path))
		}
	}
	if err != nil {
		found = append(found, Leftover{Kind: "damaged", What: "directory of snapshots " + s.path, Err: err})
	}
	return found
}
