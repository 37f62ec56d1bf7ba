package cleanup

import (
	"github.com/sbxrun/sbxrun/internal/overlay"
	"github.com/sbxrun/sbxrun/internal/state"
)

// applies removes what an apply that was killed has left beside the files that it was to replace.
func (s *sweep) applies(dir *state.Dir) {
	err := dir.Applies(s.DryRun, func(note []byte) error {
		left, err := overlay.ReadStaging(note)
		if err != nil {
			return nil // the note of an older version, or one that was not written to its end
		}
		s.do(Finding{Kind: "apply", What: "note of an apply that was killed, and its temporary files in " + string(left.Source)}, func() error {
			err = left.Sweep()
			return err
		})
		return err
	})
	if err != nil {
		s.note(Finding{Kind: "damaged", What: "notes of applies", Err: err.Error()})
	}
}
