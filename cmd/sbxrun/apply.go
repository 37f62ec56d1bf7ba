package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/output"
	"github.com/sbxrun/sbxrun/internal/overlay"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/state"
)

func applyCommand(flags *cli.Apply) (r output.Result, err error) {
	list, err := layersOf(flags.Sandbox)
	if err != nil {
		return r, err
	}
	done, err := applyAll(context.Background(), list, flags.Paths, flags, "--")
	if !flags.Quiet {
		r.Text = done.list
	}
	switch {
	case err == nil:
		r.Value = done
	case output.Is(err, leftOut) || output.Is(err, heldBack): // the rest is applied
		done.Error = output.Error(err).Report()
		r.Value = done
	}
	return r, err
}

// applied is what apply --json prints.
type applied struct {
	Changes int  `json:"changes"`
	Left    int  `json:"left"`
	Checked bool `json:"checked,omitempty"`
	// HeldBack lists the paths that were held back, except those below another one.
	HeldBack []string            `json:"held_back,omitempty"`
	Applied  []string            `json:"applied,omitempty"`
	Error    *result.ReportError `json:"error,omitempty"` // some changes could not be read, or were held back

	made []func(w io.Writer) // print the applied changes, by overlay
}

func (a *applied) list(w io.Writer) error {
	for _, print := range a.made {
		print(w)
	}
	return nil
}

// applyAll applies the changes of some overlays to the host. It prints deletions that are not applied, and for run,
// whose flags begin with a prefix other than "--", all deletions before it begins.
func applyAll(ctx context.Context, list []*room.Overlay, paths []string, flags *cli.Apply, prefix string) (done applied, err error) {
	trees, err := openChanges(ctx, list, paths, flags.Exclude, 0)
	if err != nil {
		return done, err
	}
	// Check all of them first.
	for _, o := range trees {
		if o.Dest == "/" && len(o.changes) > 0 {
			return done, &result.Error{Code: "overlay", Message: "changes to a root directory cannot be applied", Hint: "keep them with sbxrun snapshot create"}
		}
		for _, c := range o.changes {
			if c.Conflict && !flags.Force && (!c.Removes() || flags.Delete) && !holdsBack(&c, flags) {
				return done, c.Refusal()
			}
		}
	}
	for _, o := range trees {
		for _, c := range o.changes {
			if (c.Removes() && !(flags.Delete && prefix == "--") || flags.Check) && !holdsBack(&c, flags) && !flags.Quiet {
				output.Say(o.line(&c))
			}
		}
	}
	held := func() error { return done.holdBack(trees, flags, prefix) }
	if done.Checked = flags.Check; flags.Check {
		return done, cmp.Or(unreadable(trees), held())
	}
	for _, o := range trees {
		a, err := o.apply(ctx, flags)
		done.Changes += len(a.Made)
		for _, c := range a.Made {
			done.Applied = append(done.Applied, path.Join(o.prefix, c.Path))
		}
		done.made = append(done.made, func(w io.Writer) { o.print(w, a.Made) })
		done.Left += len(a.Left)
		for _, u := range a.Unread {
			o.unread = append(o.unread, u.Path)
		}
		if err != nil {
			return done, err
		}
	}
	if done.Left > 0 && !flags.Quiet {
		why := "deletions need " + prefix + "delete; devices, FIFOs and sockets are never applied"
		if flags.Delete {
			why = "devices, FIFOs and sockets are never applied"
		}
		output.Note(fmt.Sprintf("left out: %d; %s", done.Left, why))
	}
	return done, cmp.Or(unreadable(trees), held())
}

// heldBack is the code of the error after an apply that held files back, and applied the others.
const heldBack = "held-back"

// holdsBack reports whether the only reason to skip a change is that it is held back.
func holdsBack(c *overlay.Change, flags *cli.Apply) bool {
	return c.Held && !flags.All && (!c.Removes() || flags.Delete)
}

// holdBack lists the changes that are held back, and returns an error about them.
func (a *applied) holdBack(trees []*opened, flags *cli.Apply, prefix string) error {
	for _, o := range trees {
		var held []overlay.Change
		for _, c := range o.changes {
			if holdsBack(&c, flags) {
				held = append(held, c)
			}
		}
		for _, c := range overlay.Top(held) {
			a.HeldBack = append(a.HeldBack, path.Join(o.prefix, c.Path))
			if !flags.Quiet {
				output.Say(o.line(&c))
			}
		}
	}
	if len(a.HeldBack) == 0 {
		return nil
	}
	e := &result.Error{Code: heldBack, ExitCode: 1, Message: fmt.Sprintf("%q is held back because programs on the host execute or trust it", a.HeldBack[0]),
		Hint: "see sbxrun diff -p; " + prefix + "all applies it"}
	if n := len(a.HeldBack); n > 1 {
		e.Message = fmt.Sprintf("%d paths, such as %q, are held back because programs on the host execute or trust them", n, a.HeldBack[0])
		e.Hint = "see sbxrun diff -p; " + prefix + "all applies them"
	}
	if prefix == "--" {
		e.Hint += ", and naming a path applies that one"
	}
	return e
}

// apply applies the changes of one overlay. If this process is killed, a note tells cleanup and the next apply in the
// same directory where its temporary files are.
func (o *opened) apply(ctx context.Context, flags *cli.Apply) (a overlay.Applied, err error) {
	dir, err := state.Open(state.Mine())
	if err != nil {
		return a, err
	}
	defer dir.Close()
	err = overlay.SweepNotes(dir, false, func(left overlay.Staging) error {
		if string(left.Source) != o.tree.Source.Name() {
			return errors.New("left to cleanup")
		}
		return left.Sweep()
	})
	if err != nil {
		return a, err
	}
	note, err := overlay.NewNote(dir)
	if err != nil {
		return a, err
	}
	a, err = o.tree.Apply(ctx, o.changes, overlay.Options{Delete: flags.Delete, All: flags.All, Force: flags.Force, Note: note.Write})
	if !a.Litter {
		note.Remove()
	}
	return a, err
}

// countable limits the files counted for the report. A command can create a million, and each takes up to 65 µs on a
// busy machine, which would delay sbxrun after a deadline.
const countable = 100_000

// countChanges counts the changes in overlays for the report. It returns nil if it cannot.
func countChanges(ctx context.Context, list []*room.Overlay) *result.ReportChanges {
	var n result.ReportChanges
	for _, o := range list {
		trees, err := openChanges(ctx, []*room.Overlay{o}, nil, nil, countable)
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

// bringHome counts, prints and applies the changes, as the flags ask. It runs before the report is written, so that
// the report includes its failure.
func (r *runner) bringHome(ctx context.Context, list []*room.Overlay, res *result.Result) {
	if len(list) > 0 && r.reports() {
		r.changes = countChanges(ctx, list)
	}
	var err error
	if r.flags.Diff {
		var d *comparison
		if d, err = openDiff(ctx, list, &cli.Diff{}); err == nil { // warnings have named unreadable files
			w := bufio.NewWriter(os.Stderr)
			err = cmp.Or(d.print(w, false), w.Flush())
		}
	}
	if err == nil && r.flags.Apply && res.ExitCode() == 0 {
		_, err = applyAll(ctx, list, nil, &cli.Apply{Delete: r.flags.ApplyDelete, All: r.flags.ApplyAll, Quiet: r.flags.Quiet}, "--apply-")
	}
	if err != nil {
		addFailure(res, err)
	}
}
