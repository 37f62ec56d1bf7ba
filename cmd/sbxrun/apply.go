package main

import (
	"cmp"
	"context"
	"fmt"
	"os"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/overlay"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/state"
)

func applyCommand(flags *cli.Apply) int {
	list, err := layersOf(flags.Sandbox)
	if err != nil {
		return refuse(flags, err)
	}
	done, err := applyAll(context.Background(), list, flags.Paths, flags, "--delete")
	if err != nil && !isLeftOut(err) {
		return refuse(flags, err)
	}
	code := 0
	if err != nil {
		code = fail(err) // the rest is applied
		done.Error = asError(err).Report()
	}
	if flags.JSON {
		return cmp.Or(printed(printJSON(done)), code)
	}
	return code
}

// applied is what apply --json prints.
type applied struct {
	Changes int                 `json:"changes"`
	Left    int                 `json:"left"`
	Checked bool                `json:"checked,omitempty"`
	Error   *result.ReportError `json:"error,omitempty"` // some changes could not be read
}

// applyAll makes the changes of some overlays in their originals. What is to be deleted is told
// before anything is done; deletion is the flag that has it done.
func applyAll(ctx context.Context, list []*room.Overlay, paths []string, flags *cli.Apply, deletion string) (done applied, err error) {
	trees, err := openChanges(ctx, list, paths, 0)
	if err != nil {
		return done, err
	}
	// All of them before anything is done.
	for _, o := range trees {
		for _, c := range o.changes {
			if c.Conflict && !flags.Force && (!c.Removes() || flags.Delete) {
				return done, overlay.Conflict(c.Path)
			}
		}
	}
	for _, o := range trees {
		for _, c := range o.changes {
			if (c.Removes() || flags.Check) && !flags.Quiet {
				say(o.line(&c))
			}
		}
	}
	if done.Checked = flags.Check; flags.Check {
		return done, unreadable(trees)
	}
	for _, o := range trees {
		finish, err := noteApply(o.Source)
		if err != nil {
			return done, err
		}
		a, err := o.tree.Apply(ctx, o.changes, overlay.Options{Delete: flags.Delete, Force: flags.Force})
		if !a.Litter {
			finish()
		}
		done.Changes += a.Changes
		done.Left += len(a.Left)
		for _, u := range a.Unread {
			o.unread = append(o.unread, u.Path)
		}
		if err != nil {
			return done, err
		}
	}
	if done.Left > 0 && !flags.Quiet {
		why := "deletions need " + deletion + "; devices, FIFOs and sockets are never applied"
		if flags.Delete {
			why = "devices, FIFOs and sockets are never applied"
		}
		say(fmt.Sprintf("sbxrun: left out: %d; %s", done.Left, why))
	}
	return done, unreadable(trees)
}

// noteApply leaves a note of where changes are about to be applied, by which cleanup finds what is
// left if this process is killed. finish removes the note.
func noteApply(source string) (finish func(), err error) {
	dir, err := state.Open(state.Mine())
	if err != nil {
		return nil, err
	}
	return dir.NoteApply(source) // which needs it until we exit
}

// countable bounds how many files are counted for the report. A command can make a million, each takes
// up to 65 µs on a busy machine, and nobody wants to wait for that after a deadline.
const countable = 100_000

// countChanges counts, for the report, what was changed in overlays; nil if it cannot be told.
func countChanges(ctx context.Context, list []*room.Overlay) *result.ReportChanges {
	var n result.ReportChanges
	for _, o := range list {
		trees, err := openChanges(ctx, []*room.Overlay{o}, nil, countable)
		if err != nil {
			warn(err)
			return nil
		}
		sum := overlay.Sum(trees[0].changes)
		n.Count += sum.Count
		n.Bytes += sum.Bytes
		trees[0].tree.Close()
	}
	return &n
}

// bringHome counts, prints and applies the changes, as a run was asked to. It comes before the report,
// which tells of a failure.
func (r *runner) bringHome(ctx context.Context, list []*room.Overlay, res *result.Result) {
	if len(list) > 0 && r.reports() {
		r.changes = countChanges(ctx, list)
	}
	var err error
	if r.flags.Diff {
		if err = showDiffs(ctx, os.Stderr, list, nil, &cli.Diff{}); isLeftOut(err) {
			err = nil // a warning has said so
		}
	}
	if err == nil && r.flags.Apply && res.ExitCode() == 0 {
		_, err = applyAll(ctx, list, nil, &cli.Apply{Delete: r.flags.ApplyDelete, Quiet: r.flags.Quiet}, "--apply-delete")
	}
	if err != nil {
		spoil(res, err)
	}
}
