package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"io"
	"io/fs"
	"os/exec"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/snapshots"
	"github.com/sbxrun/sbxrun/internal/state"
)

// startFrom adds to a policy the overlays of a snapshot, with its layers below what will be
// written. They are returned by their destinations, and held until they are closed; this process's
// end does that, too.
func startFrom(ctx context.Context, name string, f *cli.View, p *room.Policy) (map[string][]state.Layer, []io.Closer, error) {
	if name == "" {
		return nil, nil, nil
	}
	dir, err := snapshots.Dir()
	if err != nil {
		return nil, nil, err
	}
	store, err := snapshots.Look(dir)
	if err != nil {
		return nil, nil, err
	}
	defer store.Close()
	m, err := store.Find(name)
	if err != nil {
		return nil, nil, err
	}
	if p.Workdir == "" && p.Cwd == "" {
		p.Workdir = m.Workdir
	}
	if p.Cwd == room.CwdOverlay && p.CwdRoot == "" {
		overlayHere(p, m)
	}
	unpacked, err := holdLayers(ctx, store, m, p.Outside(thisCaller()))
	if err != nil {
		return nil, nil, err
	}
	layers, held := map[string][]state.Layer{}, []io.Closer{}
	for _, t := range m.Trees {
		layers[t.Dest] = t.Layers
		mount := overlayAt(p, t, string(f.Upper))
		for _, l := range t.Layers {
			mount.Lower = slices.Insert(mount.Lower, 0, unpacked[l.SHA256].Path)
		}
	}
	for _, u := range unpacked {
		held = append(held, u)
	}
	return layers, held, nil
}

// overlayHere is --cwd overlay in a directory that the snapshot has an overlay for: the two are one.
func overlayHere(p *room.Policy, m *snapshots.Manifest) {
	here, err := unix.Getwd()
	if err != nil || !slices.ContainsFunc(m.Trees, func(t snapshots.Tree) bool { return t.Dest == here }) {
		return // it is one more, or an error that the plan tells
	}
	p.Mounts = append(p.Mounts, room.Mount{Kind: room.Overlaid, Source: here, Dest: here, Upper: p.CwdUpper})
	p.Cwd, p.Workdir = "", cmp.Or(p.Workdir, here)
}

// overlayAt is the overlay of a policy at the place of a snapshot's: over what the caller has said,
// or else over what it was over.
func overlayAt(p *room.Policy, t snapshots.Tree, upper string) *room.Mount {
	i := slices.IndexFunc(p.Mounts, func(m room.Mount) bool { return m.Dest == t.Dest && m.Kind == room.Overlaid })
	if i < 0 {
		i = len(p.Mounts)
		p.Mounts = append(p.Mounts, room.Mount{Kind: room.Overlaid, Source: t.Source, Dest: t.Dest, Upper: upper})
	}
	return &p.Mounts[i]
}

// holdLayers holds the layers of a snapshot, unpacked for a user. The server's program unpacks them,
// if nobody has in this boot.
func holdLayers(ctx context.Context, store *snapshots.Store, m *snapshots.Manifest, user room.User) (map[string]*snapshots.Unpacked, error) {
	for range 3 { // cleanup may take one away before it is held
		held, err := holdAll(store, m, user)
		if err == nil || !errors.Is(err, fs.ErrNotExist) {
			return held, err
		}
		if err := unpack(ctx, m, user); err != nil {
			return nil, err
		}
	}
	return nil, errors.New("the layers of snapshot " + m.Title() + " are removed as often as they are unpacked")
}

func holdAll(store *snapshots.Store, m *snapshots.Manifest, user room.User) (_ map[string]*snapshots.Unpacked, err error) {
	held := map[string]*snapshots.Unpacked{}
	defer func() {
		if err != nil {
			for _, u := range held {
				u.Close()
			}
		}
	}()
	for _, t := range m.Trees {
		for _, l := range t.Layers {
			if held[l.SHA256] == nil {
				u, err := store.Unpacked(snapshots.Key(l, user.UID, user.GID))
				if err != nil {
					return nil, err
				}
				held[l.SHA256] = u
			}
		}
	}
	return held, nil
}

// unpack has the server's program unpack a snapshot.
func unpack(ctx context.Context, m *snapshots.Manifest, user room.User) error {
	server, err := serverProgram()
	if err != nil {
		return err
	}
	args := []string{snapshots.UnpackWord, m.ID}
	if c := thisCaller(); c.UID == 0 {
		args = append(args, strconv.Itoa(int(user.UID)), strconv.Itoa(int(user.GID)))
	}
	c := exec.CommandContext(ctx, server, args...)
	var said bytes.Buffer
	c.Stderr = &said
	err = c.Run()
	if failed := (*exec.ExitError)(nil); errors.As(err, &failed) {
		text := strings.TrimPrefix(strings.TrimSpace(said.String()), "sbxrun: error: ")
		return &result.Error{Code: "snapshot", Message: "cannot unpack snapshot " + m.Title() + ": " + text, Err: err}
	}
	if err != nil {
		return noServer(server, err)
	}
	return nil
}
