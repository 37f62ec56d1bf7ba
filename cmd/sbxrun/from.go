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

// startFrom adds to a sandbox the overlays of a snapshot, with its layers below what will be
// written.
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
	return parts.From(ctx, store, m, p, room.ThisCaller(), string(f.Upper))
}

// overlayHere is --cwd overlay in a directory that the snapshot has an overlay for: the two are one.
func overlayHere(p *room.Policy, m *snapshots.Manifest) {
	here, err := unix.Getwd()
	if err != nil || !slices.ContainsFunc(m.Trees, func(t snapshots.Tree) bool { return t.Dest == here }) {
		return // it is one more, or an error that the plan tells
	}
	p.Mounts = append(p.Mounts, room.Mount{Kind: room.Overlaid, Source: here, Here: ".", Dest: here, Upper: p.CwdUpper})
	p.Cwd, p.Workdir = "", cmp.Or(p.Workdir, here)
}
