package cleanup

import (
	"os"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/links"
	"github.com/sbxrun/sbxrun/internal/overlay"
	"github.com/sbxrun/sbxrun/internal/state"
)

// applies removes what an apply that was killed has left beside the files that it was to replace.
func (s *sweep) applies(dir *state.Dir) {
	err := dir.Applies(s.DryRun, func(path string) error {
		f := Finding{Kind: "apply", What: "note of an apply that was killed, and its temporary files in " + path}
		if !s.DryRun {
			err := sweepApply(path)
			if f.Done = err == nil; err != nil {
				f.Err = err.Error()
			}
			s.note(f)
			return err
		}
		s.note(f)
		return nil
	})
	if err != nil {
		s.note(Finding{Kind: "damaged", What: "notes of applies", Err: err.Error()})
	}
}

func sweepApply(path string) error {
	fd, err := links.Dir(path)
	if err != nil {
		return nil // it is gone, or not ours to look at any more, and so is what was in it
	}
	defer unix.Close(fd)
	dir, err := links.Reopen(fd, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(dir), path)
	defer f.Close()
	return overlay.Sweep(f)
}
