package snapshots

import (
	"path/filepath"
	"time"
)

// Leftover is something in the store that nobody needs.
type Leftover struct {
	Kind string // "snapshot", which has expired; "layer", "tree", "draft" or "damaged"
	ID   string // of a snapshot
	Name string // likewise
	What string // for people
	Err  error  // why it is still there

	path string // below the store, of what is removed when others may use that again
}

// Sweep removes the snapshots that have expired, layers that no snapshot has, unpacked layers that
// no sandbox shows, and what processes have left that were killed. With dryRun it only looks.
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
			found = append(found, Leftover{Kind: "damaged", What: "manifest of a snapshot; layers are kept as long as it is there", Err: err})
		}
		// Before their manifests: a crash between the two leaves a manifest without layers, which
		// has expired.
		for _, hash := range s.orphans(now) {
			do(Leftover{Kind: "layer", What: "layer of no snapshot " + hash}, layerPath(hash))
		}
		for _, m := range list {
			if m.Expired(now) {
				do(Leftover{Kind: "snapshot", ID: m.ID, Name: m.Name, What: "snapshot whose time to live is over"}, filepath.Join(manifestsDir, m.ID+manifestSuffix))
			}
		}
		for _, name := range s.abandoned() { // before more are
			found = append(found, Leftover{Kind: "draft", What: "half-made file or directory " + name, path: filepath.Join(tmpDir, name)})
		}
		for _, key := range s.names(treesDir) {
			if at := filepath.Join(treesDir, key); s.idle(at) {
				l := Leftover{Kind: "tree", What: "unpacked layer that no sandbox shows " + key}
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
