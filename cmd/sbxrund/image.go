package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/hashicorp/go-multierror"
	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/images"
	"github.com/sbxrun/sbxrun/internal/output"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/snapshots"
	"github.com/sbxrun/sbxrun/internal/state"
)

// imageOwner returns the user for whom images are unpacked in advance: the user of sandboxes without --user.
func imageOwner() *proc.Cred {
	if os.Geteuid() != 0 {
		return nil
	}
	user := new(room.Policy).Outside(room.ThisCaller())
	return &proc.Cred{UID: user.UID, GID: user.GID}
}

func importOptions(flags *cli.Stored, name, platform string) (o images.Options, err error) {
	o = images.Options{Name: name, TTL: time.Duration(flags.TTL), MaxSize: int64(flags.MaxSize), Owner: imageOwner()}
	if platform != "" {
		p, err := images.ParsePlatform(platform)
		if err != nil {
			return o, err
		}
		o.Platform = &p
	}
	return o, nil
}

func importImage(store *snapshots.Store, flags *cli.ImageImport) (r output.Result, err error) {
	o, err := importOptions(&flags.Stored, flags.Name, flags.Platform)
	if err != nil {
		return r, err
	}
	if flags.Source == "-" && term.IsTerminal(unix.Stdin) {
		return r, &result.Error{Code: "usage", Message: "image import: stdin is a terminal", Hint: "name a directory or an archive, or read from a pipe"}
	}
	src, err := images.Open(store, flags.Source, int64(flags.MaxSize))
	if err != nil {
		return r, err
	}
	defer src.Close()
	m, err := images.Import(context.Background(), store, src, o)
	if err != nil {
		return r, err
	}
	return output.Line(shownImage(m), m.Digest), nil
}

// imageInfo is the JSON of an image.
type imageInfo struct {
	*snapshots.Image
	Size      int64   `json:"size"`
	Manifest  *[]byte `json:"manifest,omitempty"` // hidden
	RawConfig *[]byte `json:"raw_config,omitempty"`
}

func shownImage(m *snapshots.Image) imageInfo {
	m.Names = append([]string{}, m.Names...)
	return imageInfo{Image: m, Size: m.Size()}
}

func listImages(store *snapshots.Store, flags *cli.ImageLs) (output.Result, error) {
	all, wrong := store.Images()
	list := []imageInfo{}
	for _, m := range all {
		if !m.Pending {
			list = append(list, shownImage(m))
		}
	}
	return output.Result{Value: list, Text: func(w io.Writer) error {
		if flags.Quiet {
			for _, m := range list {
				fmt.Fprintln(w, m.Digest)
			}
			return nil
		}
		if len(list) == 0 {
			return nil
		}
		t := output.NewTable(w, "NAME", "DIGEST", "PLATFORM", "CREATED", "LAYERS", "SIZE", "EXPIRES")
		for _, m := range list {
			names := m.Names
			if len(names) == 0 {
				names = []string{"-"}
			}
			for _, name := range names {
				t.Row(name, m.Digest[len("sha256:"):][:12], m.Platform, moment(m.CreatedAt), len(m.Layers), output.Size(m.Size), cmp.Or(moment(m.ExpiresAt), "never"))
			}
		}
		return t.Flush()
	}}, multierror.Append(nil, wrong...).ErrorOrNil()
}

// inspectImages describes as many of the images as it can.
func inspectImages(store *snapshots.Store, flags *cli.ImageInspect) (r output.Result, err error) {
	var list []imageInfo
	err = output.Each(flags.Names, func(ref string) error {
		m, err := store.FindImage(ref)
		if err == nil {
			list = append(list, shownImage(m))
		}
		return err
	})
	if list == nil {
		return r, err
	}
	return output.Result{Value: list, Text: func(w io.Writer) error {
		for i, m := range list {
			if i > 0 {
				fmt.Fprintln(w)
			}
			line := func(name string, values ...string) {
				if text := strings.Join(values, " "); text != "" {
					fmt.Fprintf(w, "%-11s %s\n", name+":", output.Printable(text))
				}
			}
			line("names", m.Names...)
			line("digest", m.Digest)
			line("index", m.Index)
			line("platform", m.Platform)
			line("created", moment(m.CreatedAt))
			line("expires", moment(m.ExpiresAt))
			line("size", output.Size(m.Size))
			line("entrypoint", m.Config.Entrypoint...)
			line("command", m.Config.Cmd...)
			line("workdir", m.Config.Workdir)
			line("user", m.Config.User)
			for _, v := range m.Config.Env {
				line("env", v)
			}
			for _, l := range m.Layers {
				line("layer", l.Digest, output.Size(l.Size))
			}
		}
		return nil
	}}, err
}

// removeImages removes as many of the images as it can.
func removeImages(store *snapshots.Store, flags *cli.ImageRm) (r output.Result, err error) {
	return r, output.Each(flags.Names, store.RemoveImage)
}

func exportImage(store *snapshots.Store, flags *cli.ImageExport) (r output.Result, err error) {
	m, err := store.FindImage(flags.Name)
	if err != nil {
		return r, err
	}
	return r, output.Export(flags.File, func(w io.Writer) error { return images.Export(store, m, w) })
}

// commitImage makes an image of a sandbox's image and its changes. It keeps them as a snapshot in the meantime.
func commitImage(store *snapshots.Store, flags *cli.ImageCommit) (r output.Result, err error) {
	if err := snapshots.ParseImageName(flags.Name); err != nil {
		return r, err
	}
	m, err := snapshots.NewManifest("", 24*time.Hour)
	if err != nil {
		return r, err
	}
	err = takeSnapshot(store, m, flags.Sandbox, int64(flags.MaxSize), func(o *room.Overlay) bool { return o.Image != "" }, func(e *state.Entry) error {
		err := &result.Error{Code: "no-overlay", Message: "the sandbox " + e.Title() + " has no writable image", Hint: "start it with --image and --overlay /"}
		if !e.Lives() {
			err.Code, err.Message, err.Hint = "ended", "the sandbox "+e.Title()+" has ended without a layer on disk", "commit it while it runs, or start it with --upper"
		}
		return err
	})
	if err != nil {
		return r, err
	}
	image, err := images.Commit(store, m, flags.Name, time.Duration(flags.TTL), int64(flags.MaxSize))
	if err = result.All(err, store.Remove(m)); err != nil {
		return r, err
	}
	if err := images.Unpack(context.Background(), store, image, imageOwner()); err != nil {
		return r, err
	}
	return output.Line(shownImage(image), image.Digest), nil
}

// unpackImage unpacks an image, for the user with the UID and GID that may follow.
func unpackImage(args []string) error {
	owner, err := ownerOf(args)
	if err != nil {
		return err
	}
	if len(args) == 0 {
		return errors.New("unpack-image: want a digest")
	}
	_, err = onSnapshots(snapshots.Open, func(store *snapshots.Store, ref *string) (r output.Result, err error) {
		m, err := store.FindImage(*ref)
		if err == nil {
			err = images.Unpack(context.Background(), store, m, owner)
		}
		return r, err
	})(&args[0])
	return err
}

// ownerOf returns the user that args, after the first one, name by UID and GID, or nil.
func ownerOf(args []string) (owner *proc.Cred, err error) {
	if len(args) == 3 {
		owner = &proc.Cred{}
		_, err = fmt.Sscan(strings.Join(args[1:], " "), &owner.UID, &owner.GID)
	}
	return owner, err
}

// ensureImage imports the image with a reference that has a kind, such as oci:DIR, unless the store has it, and prints its
// digest.
func ensureImage(args []string) (r output.Result, err error) {
	owner, err := ownerOf(args)
	if err == nil && len(args) == 0 {
		err = errors.New("ensure-image: want a reference")
	}
	if err != nil {
		return r, err
	}
	return onSnapshots(snapshots.Open, func(store *snapshots.Store, ref *string) (r output.Result, err error) {
		m, err := images.Ensure(context.Background(), store, *ref, owner)
		if err != nil {
			return r, err
		}
		return output.Line(nil, m.Digest), nil
	})(&args[0])
}
