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
	err := dir.Applies(s.DryRun, func(path string) (err error) {
		f := Finding{Kind: "apply", What: "note of an apply that was killed, and its temporary files in " + path}
		s.do(f, func() error {
			err = sweepApply(path)
			return err
		})
		return err
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
