package main

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/hashicorp/go-multierror"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/layers"
	"github.com/sbxrun/sbxrun/internal/output"
	"github.com/sbxrun/sbxrun/internal/snapshots"
	"github.com/sbxrun/sbxrun/internal/state"
)

// onSnapshots returns a command that works on the caller's snapshots and images. These are here because sbxrun must not
// link archives and compression.
func onSnapshots[F any](open func(string) (*snapshots.Store, error), work func(*snapshots.Store, *F) (output.Result, error)) func(*F) (output.Result, error) {
	return func(flags *F) (r output.Result, err error) {
		store, err := snapshots.Mine(open)
		if err != nil {
			return r, err
		}
		defer store.Close()
		return work(store, flags)
	}
}

// snapshotGroup reports a missing or unknown word after snapshot, which may be the name of a sandbox.
func snapshotGroup(args []string) int {
	if dir, err := state.Look(state.Mine()); err == nil && len(args) > 1 {
		if _, err = dir.Find(args[1]); err == nil {
			return output.Fail(&result.Error{Code: "usage", Message: fmt.Sprintf("snapshot has no command %q, but there is a sandbox with that name", args[1]),
				Hint: "use sbxrun snapshot create " + args[1]})
		}
	}
	return cli.Group(args)
}

// removeSnapshots removes as many of the snapshots as it can.
func removeSnapshots(store *snapshots.Store, flags *cli.SnapshotRm) (r output.Result, err error) {
	return r, output.Each(flags.Names, store.Discard)
}

func exportSnapshot(store *snapshots.Store, flags *cli.SnapshotExport) (r output.Result, err error) {
	m, err := store.Find(flags.Name)
	if err != nil {
		return r, err
	}
	return r, output.Export(flags.File, func(w io.Writer) error { return layers.Export(store, m, w) })
}

func importSnapshot(store *snapshots.Store, flags *cli.SnapshotImport) (r output.Result, err error) {
	var from io.Reader = os.Stdin
	if flags.File != "" && flags.File != "-" {
		f, err := os.Open(flags.File)
		if err != nil {
			return r, err
		}
		defer f.Close()
		from = f
	}
	m, err := layers.Import(store, from, flags.Name, time.Duration(flags.TTL), int64(flags.MaxSize))
	if err != nil {
		return r, err
	}
	return output.Line(m, m.ID), nil
}

func listSnapshots(store *snapshots.Store, flags *cli.SnapshotLs) (output.Result, error) {
	list, wrong := store.List()
	return output.Result{Value: append([]*snapshots.Manifest{}, list...), Text: func(w io.Writer) error {
		if flags.Quiet {
			for _, m := range list {
				fmt.Fprintln(w, m.ID)
			}
			return nil
		}
		return printTable(w, list)
	}}, multierror.Append(nil, wrong...).ErrorOrNil()
}

func printTable(w io.Writer, list []*snapshots.Manifest) error {
	if len(list) == 0 {
		return nil
	}
	t := output.NewTable(w, "NAME", "ID", "CREATED", "LAYERS", "SIZE", "EXPIRES")
	for _, m := range list {
		n := 0
		for _, t := range m.Trees {
			n += len(t.Layers)
		}
		t.Row(cmp.Or(m.Name, "-"), m.ID, moment(m.CreatedAt), n, output.Size(m.Size()), cmp.Or(moment(m.ExpiresAt), "never"))
	}
	return t.Flush()
}

// moment returns a time of a manifest in whole seconds, or "".
func moment(at string) string {
	t, err := time.Parse(result.TimeFormat, at)
	if err != nil {
		return ""
	}
	return t.Format(time.DateTime) + "Z"
}
