package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"

	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/output"
	"github.com/sbxrun/sbxrun/internal/overlay"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/sandbox"
	"github.com/sbxrun/sbxrun/internal/state"
)

func diffCommand(flags *cli.Diff) (r output.Result, err error) {
	list, err := layersOf(flags.Sandbox)
	if err != nil {
		return r, err
	}
	d, err := openDiff(context.Background(), list, flags)
	if err != nil {
		return r, err
	}
	return output.Result{Value: d.value(), Text: func(w io.Writer) error { return d.print(w, term.IsTerminal(unix.Stdout)) }}, unreadable(d.trees)
}

// layersOf opens the layers of a sandbox's overlays, which stay open until sbxrun exits.
func layersOf(name string) ([]*room.Overlay, error) {
	e, err := find(name)
	if err != nil {
		return nil, err
	}
	switch list, err := sandbox.Overlays(e); {
	case err != nil:
		return nil, err
	case len(list) > 0:
		return list, nil
	case !e.Lives() && e.Record.Phase == state.Ended:
		return nil, &result.Error{Code: "ended", Message: e.What() + " has ended and left no layer",
			Hint: "a layer in memory ends with its sandbox: keep it with --upper DIR, or use run --diff and run --apply"}
	case !e.Lives() && len(e.Record.Overlays) > 0:
		return nil, &result.Error{Code: "ended", Message: e.What() + " has ended, and its layer with it", Hint: "keep it with --upper DIR"}
	}
	return nil, &result.Error{Code: "no-overlay", Message: e.What() + " has no overlay", Hint: "start it with --overlay DIR or --cwd overlay"}
}

// diffed is what diff --json prints.
type diffed struct {
	Overlays []diffedOverlay `json:"overlays"`
}

type diffedOverlay struct {
	Source  string               `json:"source"`
	Dest    string               `json:"dest"`
	Changes []overlay.Change     `json:"changes"`
	Total   result.ReportChanges `json:"total"`
}

// opened is an overlay that is compared with its original.
type opened struct {
	*room.Overlay
	tree    *overlay.Tree
	changes []overlay.Change // selected changes
	named   []string         // the paths that select them, relative to the overlay
	prefix  string           // precedes printed paths if there are several overlays
	unread  []string         // selected paths that could not be read
}

func unreadable(trees []*opened) error {
	for _, o := range trees {
		if len(o.unread) > 0 {
			return &result.Error{Code: leftOut, Message: fmt.Sprintf("unreadable paths, such as %.200q, are left out", o.unread[0]),
				Hint: "chmod u+rwX it in the sandbox"}
		}
	}
	return nil
}

// openChanges compares the overlays with their originals and selects the changes at and below paths that exclude does
// not match. most limits the number of files in each overlay; 0 means the default. Warnings go to stderr.
func openChanges(ctx context.Context, list []*room.Overlay, paths, exclude []string, most int) (out []*opened, err error) {
	found := map[string]bool{}
	for _, o := range list {
		t, err := overlay.Open(o.Layer, o.Source, o.Compared(), o.Lower...)
		if err != nil {
			return nil, err
		}
		t.Entries = most
		t.Expect(o.Base, o.Index)
		n := &opened{Overlay: o, tree: t}
		if len(list) > 1 {
			n.prefix = o.Dest
		}
		changes, warnings, err := n.tree.Changes(ctx)
		if err != nil {
			return nil, err
		}
		for _, w := range warnings {
			warn(w)
			if u, ok := errors.AsType[*overlay.Unread](w); ok {
				n.unread = append(n.unread, u.Path)
			}
		}
		n.changes = changes
		if len(paths) > 0 {
			n.choose(paths, found)
		}
		if n.changes, err = overlay.Exclude(n.changes, n.patterns(exclude)); err != nil {
			return nil, &result.Error{Code: "usage", Message: "--exclude: " + err.Error(), Hint: "use *, ?, [abc] and \\ as in glob patterns"}
		}
		out = append(out, n)
	}
	for _, p := range paths {
		if !found[p] {
			return nil, &result.Error{Code: "no-such-path", Message: fmt.Sprintf("nothing has changed at %q", p), Hint: "paths are relative to the overlay's directory, or absolute in the sandbox"}
		}
	}
	return out, nil
}

// relative returns a path relative to the overlay. ok is false for an absolute path elsewhere.
func (o *opened) relative(name string) (rel string, ok bool) {
	name = path.Clean(name)
	if !path.IsAbs(name) {
		return name, true
	}
	rest, ok := strings.CutPrefix(name+"/", strings.TrimSuffix(o.Dest, "/")+"/")
	return path.Clean("./" + rest), ok
}

// patterns returns patterns of --exclude relative to the overlay.
func (o *opened) patterns(exclude []string) (list []string) {
	for _, p := range exclude {
		if !path.IsAbs(p) {
			list = append(list, p)
		} else if rel, ok := o.relative(p); ok {
			list = append(list, "./"+rel) // matches as a path even without a slash
		}
	}
	return list
}

// choose selects the changes at and below these paths.
func (o *opened) choose(paths []string, found map[string]bool) {
	var within, unread []string
	for _, p := range paths {
		name, ok := o.relative(p)
		if !ok {
			continue
		}
		if len(overlay.Select(o.changes, []string{name})) > 0 {
			found[p] = true
			within = append(within, name)
		}
		for _, u := range o.unread {
			if name == "." || strings.HasPrefix(u+"/", name+"/") || strings.HasPrefix(name+"/", u+"/") {
				found[p] = true
				unread = append(unread, u)
			}
		}
	}
	o.unread, o.named = unread, within
	if len(within) == 0 {
		o.changes = nil
		return
	}
	o.changes = overlay.Select(o.changes, within)
	for _, name := range within {
		o.tree.Release(o.changes, name)
	}
}

type comparison struct {
	trees []*opened
	flags *cli.Diff
}

func openDiff(ctx context.Context, list []*room.Overlay, flags *cli.Diff) (*comparison, error) {
	trees, err := openChanges(ctx, list, flags.Paths, flags.Exclude, 0)
	switch {
	case err != nil:
		return nil, err
	case flags.Tar && len(trees) > 1:
		return nil, cli.UsageError(flags, errors.New("--tar: the sandbox has several overlays, but a tar can hold only one"))
	case flags.Tar && term.IsTerminal(unix.Stdout):
		return nil, cli.UsageError(flags, errors.New("--tar: stdout is a terminal"))
	case !flags.Patch && !flags.Stat && !flags.Tar:
		for _, o := range trees {
			o.tree.Mark(ctx, o.changes)
		}
	}
	return &comparison{trees, flags}, nil
}

func (d *comparison) value() diffed {
	v := diffed{Overlays: []diffedOverlay{}}
	for _, o := range d.trees {
		v.Overlays = append(v.Overlays, diffedOverlay{o.Source, o.Dest, append([]overlay.Change{}, o.changes...), overlay.Sum(o.changes)})
	}
	return v
}

func (d *comparison) print(w io.Writer, terminal bool) (err error) {
	if d.flags.Patch && terminal {
		w = output.Terminal(w)
	}
	for _, o := range d.trees {
		switch {
		case d.flags.Tar:
			err = o.tree.Tar(w, o.changes)
		case d.flags.Patch:
			err = o.patch(w)
		case d.flags.Stat:
			o.stat(w)
		default:
			o.print(w, o.changes)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// letters are the kinds of changes, as in git status.
var letters = map[overlay.Kind]string{overlay.Added: "A", overlay.Changed: "M", overlay.Deleted: "D", overlay.Mode: "P"}

// print prints changes, with a single line per repository for git's data.
func (o *opened) print(w io.Writer, list []overlay.Change) {
	rest, repositories := overlay.Summarise(list, o.named)
	for _, c := range rest {
		fmt.Fprintln(w, o.line(&c))
	}
	for _, r := range repositories {
		fmt.Fprintf(w, "M %s/ (%s)\n", output.Printable(path.Join(o.prefix, r.Dir)), gitChanges(r))
	}
}

func gitChanges(r overlay.GitData) string {
	return output.Count(r.Changes, "change", "s") + " of git's data"
}

// patch prints a patch without git's data, which git apply would reject.
func (o *opened) patch(w io.Writer) error {
	rest, repositories := overlay.Summarise(o.changes, o.named)
	for _, r := range repositories {
		output.Note(fmt.Sprintf("left out: %s in %s; name it to see them", gitChanges(r), path.Join(o.prefix, r.Dir)))
	}
	return o.tree.Patch(w, rest)
}

func (o *opened) line(c *overlay.Change) string {
	name := c.Path
	if o.prefix != "" {
		name = path.Join(o.prefix, name)
	}
	line := letters[c.Kind] + " " + output.Printable(name)
	switch {
	case c.Type == overlay.Directory:
		line += "/"
	case c.Type == overlay.Link && c.Kind != overlay.Deleted:
		line += " -> " + output.Printable(c.Target)
	case c.Type == overlay.Other:
		line += " (a device, FIFO or socket)"
	}
	if c.Was != "" {
		line += " (was a " + string(c.Was) + ")"
	} else if c.WasMode != "" && c.Mode != "" && c.WasMode != c.Mode {
		line += " (mode " + c.WasMode + " to " + c.Mode + ")"
	}
	for _, mark := range []struct {
		set  bool
		text string
	}{{c.Executable, "executable"}, {c.Outside, "leads outside"}, {c.Held, "held back"}, {c.Conflict, "changed on the host, too"}} {
		if mark.set {
			line += " (" + mark.text + ")"
		}
	}
	return line
}

func (o *opened) stat(to io.Writer) {
	kinds := map[overlay.Kind]int{}
	for _, c := range o.changes {
		kinds[c.Kind]++
	}
	n := overlay.Sum(o.changes)
	fmt.Fprintf(to, "%s: %d added, %d changed, %d deleted, %d with another mode; %d bytes\n", output.Printable(o.Source),
		kinds[overlay.Added], kinds[overlay.Changed], kinds[overlay.Deleted], kinds[overlay.Mode], n.Bytes)
}
