package harness

import (
	"io/fs"
	"path/filepath"
)

// Cgroups are the directories of the cgroups that were made for a run, an exec or a
// sandbox, by its id, wherever they are.
func Cgroups(id string) (dirs []string) {
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && d.Name() == "sbxrun-"+id {
			dirs = append(dirs, path)
		}
		return nil // others come and go meanwhile
	})
	return dirs
}
