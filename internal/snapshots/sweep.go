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
	type late struct {
		n    int // of what was found
		path string
	}
	var later []late
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
			if !dryRun {
				later = append(later, late{len(found), filepath.Join(tmpDir, name)})
			}
			found = append(found, Leftover{Kind: "draft", What: "half-made file or directory " + name})
		}
		for _, key := range s.names(treesDir) {
			if at := filepath.Join(treesDir, key); s.idle(at) {
				l := Leftover{Kind: "tree", What: "unpacked layer that no sandbox shows " + key}
				if !dryRun {
					as, err := s.retire(at)
					if l.Err = Failed(err); err == nil {
						later = append(later, late{len(found), as})
					}
				}
				found = append(found, l)
			}
		}
		return nil
	})
	for _, l := range later {
		found[l.n].Err = Failed(s.scrap(l.path))
	}
	if err != nil {
		found = append(found, Leftover{Kind: "damaged", What: "directory of snapshots " + s.path, Err: err})
	}
	return found
}
