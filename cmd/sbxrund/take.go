package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/capture"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/layers"
	"github.com/sbxrun/sbxrun/internal/output"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/sandbox"
	"github.com/sbxrun/sbxrun/internal/snapshots"
	"github.com/sbxrun/sbxrun/internal/state"
)

// createSnapshot stores the layers of a sandbox.
func createSnapshot(store *snapshots.Store, flags *cli.SnapshotCreate) (r output.Result, err error) {
	m, err := snapshots.NewManifest(flags.Name, time.Duration(flags.TTL))
	if err == nil {
		err = takeSnapshot(store, m, flags.Sandbox, int64(flags.MaxSize), func(*room.Overlay) bool { return true }, noOverlays)
	}
	if err != nil {
		return r, err
	}
	return output.Line(m, m.ID), nil
}

// takeSnapshot stores the wanted overlays of a sandbox; none returns the error if there are none. It freezes a running sandbox in the meantime, if the sandbox has a cgroup
// for that, and notes it in the manifest. SIGSTOP is no substitute, because processes can continue each other (SIGCONT) and parents notice it
// (SIGCHLD).
func takeSnapshot(store *snapshots.Store, m *snapshots.Manifest, name string, most int64, wanted func(*room.Overlay) bool, none func(*state.Entry) error) error {
	dir, err := state.Look(state.Mine())
	if err != nil {
		return err
	}
	defer dir.Close()
	e, err := dir.Find(name)
	if err != nil {
		return err
	}
	overlays, err := sandbox.Overlays(e)
	if err != nil {
		return err
	}
	defer func() {
		for _, o := range overlays {
			o.Close()
		}
	}()
	chosen := slices.DeleteFunc(slices.Clone(overlays), func(o *room.Overlay) bool { return !wanted(o) })
	if len(chosen) == 0 {
		return none(e)
	}
	m.Sandbox, m.SandboxName, m.Workdir = e.ID, e.Record.Name, e.Record.Workdir
	from := capture.Source{Overlays: chosen, Layers: map[string][]snapshots.Layer{}}
	for _, o := range e.Record.Overlays {
		from.Layers[o.Dest] = o.Layers
	}
	if e.Lives() {
		use, err := sandbox.Enter(e.ID) // keeps it from becoming idle
		if err != nil {
			return err
		}
		defer use.Close()
		from.Cgroups = use.Access.Cgroups
	} else { // another sandbox may be using its layers
		from.Ended = !slices.ContainsFunc(overlays, func(o *room.Overlay) bool { return !o.Still() })
	}
	if err := capture.Take(context.Background(), store, m, from, most); err != nil {
		return output.Advise(err, "too-large", "raise --max-size")
	}
	if m.LeftOut > 0 {
		output.Warn(fmt.Errorf("left out sockets, named pipes or devices: %d", m.LeftOut))
	}
	return nil
}

func noOverlays(e *state.Entry) error {
	err := &result.Error{Code: "no-overlay", Message: "the sandbox " + e.Title() + " has no overlay, so there is nothing to keep", Hint: "start it with --overlay or --cwd overlay"}
	if !e.Lives() {
		err.Code, err.Message, err.Hint = "ended", "the sandbox "+e.Title()+" has ended without a layer on disk", "create the snapshot while it runs, or start it with --upper"
	}
	return err
}

// unpack unpacks the layers of a snapshot, for the user with the UID and GID that may follow.
func unpack(args []string) error {
	var owner *proc.Cred
	if len(args) == 3 {
		owner = &proc.Cred{}
		if _, err := fmt.Sscan(strings.Join(args[1:], " "), &owner.UID, &owner.GID); err != nil {
			return err
		}
	}
	store, err := snapshots.Mine(snapshots.Open)
	if err != nil {
		return err
	}
	defer store.Close()
	m, err := store.Find(args[0])
	if err != nil {
		return err
	}
	for _, l := range m.Layers() {
		if err := layers.Ensure(store, l, owner); err != nil {
			return err
		}
	}
	return nil
}
