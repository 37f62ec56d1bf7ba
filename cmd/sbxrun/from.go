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

// startFrom adds the overlays of a snapshot to a sandbox. The snapshot's layers are below the one for new changes.
func startFrom(ctx context.Context, name string, f *cli.View, parts *sandbox.Parts, p *room.Policy) error {
	if name == "" {
		return nil
	}
	dir, err := snapshots.Dir()
	if err != nil {
		return err
	}
	store, err := snapshots.Look(dir)
	if err != nil {
		return err
	}
	defer store.Close()
	m, err := store.Find(name)
	if err != nil {
		return err
	}
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
