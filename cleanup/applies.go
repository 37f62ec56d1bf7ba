package cleanup

import (
	"github.com/sbxrun/sbxrun/internal/overlay"
	"github.com/sbxrun/sbxrun/internal/state"
)

// applies removes the temporary files of killed applies.
func (s *sweep) applies(dir *state.Dir) {
	err := overlay.SweepNotes(dir, s.DryRun, func(left overlay.Staging) (err error) {
		s.do(Finding{Kind: "apply", What: "note of a killed apply and its temporary files in " + string(left.Source)}, func() error {
			err = left.Sweep()
			return err
		})
		return err
	})
	if err != nil {
		s.note(Finding{Kind: "damaged", What: "notes of applies", Err: err.Error()})
	}
}
