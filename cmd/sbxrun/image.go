package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/sandbox"
	"github.com/sbxrun/sbxrun/internal/snapshots"
	"github.com/sbxrun/sbxrun/internal/values"
)

// useImage makes the image of --image, or of the snapshot of --from, the root of a sandbox, and returns the image's
// variables. It calls admit before it creates files.
func useImage(ctx context.Context, f *cli.View, parts *sandbox.Parts, p *room.Policy, admit func() error) (vars []values.Var, err error) {
	switch {
	case f.Image == "" && (f.From == "" || f.Rootfs != ""):
		return nil, nil
	case f.Image != "" && f.Rootfs != "":
		return nil, errors.New("--image and --rootfs exclude each other")
	case f.Image != "" && f.Tools:
		return nil, errors.New("--tools shows programs of the host, which need the host's libraries: leave it out with --image")
	}
	store, err := snapshots.Mine(snapshots.Look)
	if err != nil {
		return nil, err
	}
	defer store.Close()
	ref, snapshot := f.Image, ""
	if ref == "" {
		m, err := store.Find(f.From)
		if err != nil {
			return nil, nil // useStored reports it
		}
		i := slices.IndexFunc(m.Trees, func(t snapshots.Tree) bool { return t.Image != "" })
		if i < 0 {
			return nil, nil
		}
		ref, snapshot = m.Trees[i].Image, m.Title()
	}
	digest := ref
	if kind, _, _ := strings.Cut(ref, ":"); kind == "oci" || kind == "oci-archive" || kind == "docker-archive" {
		if err := admit(); err != nil {
			return nil, err
		}
		if digest, err = importImage(ctx, ref, p); err != nil {
			return nil, err
		}
		if store, err = snapshots.Mine(snapshots.Look); err != nil { // importImage may have created it
			return nil, err
		}
		defer store.Close()
	}
	m, err := store.FindImage(digest)
	if err != nil && snapshot != "" {
		err = &result.Error{Code: "no-such-image", Message: fmt.Sprintf("snapshot %s needs image %s, which is not in the store", snapshot, ref), Hint: "pull or import the image again"}
	}
	if err == nil {
		err = admit()
	}
	if err != nil {
		return nil, err
	}
	return parts.UseImage(ctx, store, m, ref, p, room.ThisCaller(), slices.Contains(f.Overlay, "/"), f.Upper)
}

// importImage has sbxrund import an image unless the store has it, and returns its digest.
func importImage(ctx context.Context, ref string, p *room.Policy) (string, error) {
	store, err := snapshots.Mine(snapshots.Open)
	if err != nil {
		return "", err
	}
	defer store.Close()
	user := p.Outside(room.ThisCaller())
	return store.RunSibling(ctx, "import image "+ref, snapshots.EnsureImageWord, ref, strconv.Itoa(int(user.UID)), strconv.Itoa(int(user.GID)))
}
