package main

import (
	"cmp"
	"context"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/sandbox"
	"github.com/sbxrun/sbxrun/internal/snapshots"
)

// useStored adds the volumes and the snapshot of a sandbox, after admission, because it creates files. With create it
// also creates missing volumes.
func useStored(ctx context.Context, f *cli.View, parts *sandbox.Parts, p *room.Policy, create bool, admit func() error) error {
	if f.From == "" && len(f.Volume) == 0 {
		return nil
	}
	err := admit()
	if err == nil {
		err = useVolumes(parts, p, f.Volume, create)
	}
	if err != nil || f.From == "" {
		return err
	}
	store, err := snapshots.Mine(snapshots.Look)
	if err != nil {
		return err
	}
	defer store.Close()
	m, err := store.Find(f.From)
	if err != nil {
		return err
	}
	// The snapshot's layers are below the one for new changes.
	if p.Cwd == room.CwdOverlay && p.CwdRoot == "" {
		overlayHere(p, m)
	}
	return parts.From(ctx, store, m, p, room.ThisCaller(), f.Upper)
}

// overlayHere combines --cwd overlay with the snapshot's overlay of the current directory, if it has one.
func overlayHere(p *room.Policy, m *snapshots.Manifest) {
	here, err := unix.Getwd()
	if err != nil || !slices.ContainsFunc(m.Trees, func(t snapshots.Tree) bool { return t.Dest == here }) {
		return // another overlay, or an error that planning reports
	}
	p.Mounts = append(p.Mounts, room.Mount{Kind: room.Overlaid, Source: here, Here: ".", Dest: here, Upper: p.CwdUpper})
	p.Cwd, p.Workdir = "", cmp.Or(p.Workdir, here)
}
