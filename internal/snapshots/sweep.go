package snapshots

import (
	"path/filepath"
	"time"
)

// Leftover is an unneeded file in the store.
type Leftover struct {
	Kind string // "snapshot" (expired), "layer", "tree", "draft" or "damaged"
	ID   string // of a snapshot
	Name string // of a snapshot
	What string // description
	Err  error  // why it could not be removed

	path string // path in the store of a file to remove without the lock
}

// Sweep removes expired snapshots, layers without a snapshot, unpacked layers that no sandbox uses, and
// leftovers of killed processes. With dryRun it only lists them.
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
		// Layers before their manifests: a crash in between leaves an expired manifest without layers.
		for _, hash := range s.orphans(now) {
			do(Leftover{Kind: "layer", What: "layer without a snapshot " + hash}, layerPath(hash))
		}
		for _, m := range list {
			if m.Expired(now) {
				do(Leftover{Kind: "snapshot", ID: m.ID, Name: m.Name, What: "expired snapshot"}, filepath.Join(manifestsDir, m.ID+manifestSuffix))
			}
		}
		for _, name := range s.abandoned() { // before retire adds more
			found = append(found, Leftover{Kind: "draft", What: "incomplete file or directory " + name, path: filepath.Join(tmpDir, name)})
		}
		for _, key := range s.names(treesDir) {
			if at := filepath.Join(treesDir, key); s.idle(at) {
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
