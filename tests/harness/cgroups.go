package harness

import (
	"io/fs"
	"path/filepath"
)

// Cgroups returns the directories of the cgroups of a run, an exec or a sandbox, by its ID.
func Cgroups(id string) (dirs []string) {
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && d.Name() == "sbxrun-"+id {
			dirs = append(dirs, path)
		}
		return nil // other cgroups come and go
	})
	return dirs
}
