package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/files"
	"github.com/sbxrun/sbxrun/internal/network"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/snapshots"
	"github.com/sbxrun/sbxrun/internal/state"
	"github.com/sbxrun/sbxrun/internal/supervise"
	"github.com/sbxrun/sbxrun/internal/values"
	"github.com/sbxrun/sbxrun/internal/volumes"
)

// Parts are the files, network, volumes and layers of a sandbox. Call the methods in this order:
//
//	List, Use, From    while its policy is made
//	Begin              before the sandbox is built
//	Held               when it is built, before the command runs
//	End                when all its processes have exited, or after a failed start
//
// The zero Parts, and nil, are empty. If the process is killed the kernel releases them: locks with their
// descriptors, including the keeper's, the proxy with its keeper, and layers in memory with their last
// mount.
type Parts struct {
	Files *files.Files // nil without --put and --get

	// Overlays are the sandbox's overlays in the order of the policy, from Held to End.
	Overlays []*room.Overlay
	// Layers are the layers of a snapshot below the writable one, the lowest first, by the destinations of
	// overlays.
	Layers map[string][]state.Layer
	// Image describes the image that is the root, or is nil.
	Image        *result.ReportImage
	ImageCommand []string // entry point and arguments of the image
	Cgroups      []string // directories of a long-lived sandbox's cgroups

	mu      sync.Mutex // protects the overlays, for Look and End
	spec    network.Spec
	proxy   *network.Proxy // nil without network lists
	volumes []*volumes.Volume
	lost    *result.Error // error of syncing a volume
	held    map[string]*snapshots.Unpacked
	image   *snapshots.Unpacked // tree of the image
}

// Volume is a volume to mount in a sandbox.
type Volume struct {
	Name, Dest string
	ReadOnly   bool
}

// List sets the network lists. The caller adds the variables that tell programs about the proxy.
func (p *Parts) List(spec network.Spec, pol *room.Policy) error {
	if pol.Network == room.NetHost && spec.Wanted() {
		return errors.New("--publish and --connect need the sandbox's own network; with --net host it shares the host's ports")
	}
	p.spec = spec
	return spec.Check()
}

// Allowed returns the hosts that the sandbox may reach.
func (p *Parts) Allowed() []network.Rule { return p.spec.Allow }

// Variables returns the variables that tell programs about the proxy.
func (p *Parts) Variables(rootfs string) (vars []values.Var) {
	for _, pair := range p.spec.Variables(rootfs) {
		name, value, _ := strings.Cut(pair, "=")
		vars = append(vars, values.Var{Name: name, Value: value})
	}
	return vars
}

// Use locks volumes and adds them to a policy. A [volumes.BusyError] means that one is in use.
func (p *Parts) Use(store *volumes.Store, list []Volume, pol *room.Policy) error {
	var owner *proc.Cred // owner of new volumes
	if pol.User != nil && pol.User.UID != 0 && os.Geteuid() == 0 {
		owner = &proc.Cred{UID: pol.User.UID, GID: pol.User.GID}
	}
	for i, use := range list { // before creating one
		if slices.ContainsFunc(list[:i], func(other Volume) bool { return other.Name == use.Name }) {
			return &result.Error{Code: "usage", Message: fmt.Sprintf("volume %q is given twice", use.Name)}
		}
	}
	for _, use := range list {
		v, err := store.Use(use.Name, !use.ReadOnly, owner)
		if err != nil {
			return err
		}
		p.volumes = append(p.volumes, v)
		pol.Hold = append(pol.Hold, v.Lock)
		m := room.Mount{Kind: room.ReadWrite, Source: v.Path, Dest: use.Dest}
		if use.ReadOnly {
			m.Kind, m.Owned = room.ReadOnly, true
		}
		pol.Mounts = append(pol.Mounts, m)
	}
	return nil
}

// From adds the overlays of a snapshot to a policy, with the snapshot's layers below the writable one. It uses
// overlays of the policy with the same destination, or else adds one over the original source. For an
// imported snapshot the policy must have the overlays, because an archive must not decide which host
// directories are visible. From unpacks layers if necessary. upper is the directory on disk for the writable
// layers of added overlays.
func (p *Parts) From(ctx context.Context, store *snapshots.Store, m *snapshots.Manifest, pol *room.Policy, c room.Caller, upper string) (err error) {
	if pol.Workdir == "" && pol.Cwd == "" {
		pol.Workdir = m.Workdir
	}
	index := func(t snapshots.Tree) int {
		return slices.IndexFunc(pol.Mounts, func(m room.Mount) bool {
			return m.Dest == t.Dest && (m.Kind == room.Overlaid || m.Dest == "/" && m.Kind == room.ReadOnly)
		})
	}
	for _, t := range m.Trees {
		if i := index(t); t.Dest == "/" && i >= 0 && pol.Mounts[i].Image != t.Image {
			return otherRoot(m, t.Image, pol.Mounts[i].Image)
		}
		if m.Imported && index(t) < 0 {
			flag := "--overlay " + values.ShellQuote(t.Source+":"+t.Dest)
			if t.Dest == "/" {
				flag = "--rootfs " + values.ShellQuote(t.Source)
			}
			return &result.Error{Code: "usage", Message: fmt.Sprintf("the snapshot %s was imported, so its archive would decide that the sandbox sees %q", m.Title(), t.Source),
				Hint: "name the directory: " + flag + ", or another directory instead"}
		}
	}
	user := pol.Outside(c)
	if p.held, err = store.Hold(ctx, m, user.UID, user.GID); err != nil {
		return err
	}
	p.Layers = map[string][]state.Layer{}
	for _, t := range m.Trees {
		i := index(t)
		if i < 0 {
			i = len(pol.Mounts)
			pol.Mounts = append(pol.Mounts, room.Mount{Kind: room.Overlaid, Source: t.Source, Dest: t.Dest, Upper: upper})
		}
		p.Layers[t.Dest], pol.Mounts[i].Mode = t.Layers, t.Mode
		at := &pol.Mounts[i]
		if at.Source == t.Source || t.Image != "" {
			at.Since = t.First()
		}
		if at.Kind == room.ReadOnly { // a root directory, which the snapshot makes writable
			at.Kind, at.Upper = room.Overlaid, upper
			if p.Image != nil {
				p.Image.Writable = true
			}
		}
		for _, l := range t.Layers {
			at.Lower = slices.Insert(at.Lower, 0, p.held[l.SHA256].Path)
		}
	}
	return nil
}

// otherRoot returns the error for a snapshot over another root than the sandbox has.
func otherRoot(m *snapshots.Manifest, want, have string) error {
	of := func(digest string) string {
		if digest == "" {
			return "a root directory"
		}
		return "image " + digest
	}
	e := &result.Error{Code: "usage", Message: fmt.Sprintf("snapshot %s was taken over %s, not over %s", m.Title(), of(want), of(have))}
	if want != "" {
		e.Hint = "leave out --image and --rootfs: the snapshot selects its image"
	}
	return e
}

// Begin starts the proxy; cred is the user of the sandbox.
func (p *Parts) Begin(cred *proc.Cred) (err error) {
	if p != nil && p.spec.Wanted() {
		p.proxy, err = network.Start(p.spec, cred)
	}
	return err
}

// Held connects the parts with the new sandbox of a command, for [supervise.Command.Held].
func (p *Parts) Held(ctx context.Context, c *supervise.Command) error {
	p.Overlays = append(p.Overlays, c.TakeOverlays()...)
	if p.proxy != nil {
		if err := p.proxy.Serve(ctx, c.Kept().Room); err != nil {
			return err
		}
	}
	if p.Files != nil {
		return p.Files.Held(ctx, c.Kept().Room, c.Place.Plan.Cred())
	}
	return nil
}

// Look reopens the layers of the overlays for reading, while commands may be writing to them. The caller closes
// them. After the sandbox's end there are none.
func (p *Parts) Look() (list []*room.Overlay, err error) {
	if p == nil {
		return nil, nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, o := range p.Overlays {
		var fd int
		if fd, err = proc.Duplicate(o.Layer); err != nil {
			break
		}
		again := *o
		again.Layer = os.NewFile(uintptr(fd), "layer")
		list = append(list, &again)
	}
	if err != nil {
		closeOverlays(list)
		return nil, err
	}
	return list, nil
}

func closeOverlays(list []*room.Overlay) {
	for _, o := range list {
		o.Close()
	}
}

// Listed reports whether only listed hosts can be reached.
func (p *Parts) Listed() bool { return p != nil && p.spec.Proxied }

// Network reports whether there are any network lists.
func (p *Parts) Network() bool { return p != nil && p.spec.Wanted() }

// Published returns the published ports.
func (p *Parts) Published() []result.ReportPublished {
	if p == nil {
		return nil
	}
	return p.proxy.Published()
}

// Refused returns [network.Proxy.Refused], or nil without a list of hosts.
func (p *Parts) Refused() <-chan result.ReportHost {
	if p == nil || p.proxy == nil {
		return nil
	}
	return p.proxy.Refused()
}

// Picked returns the published ports that were chosen automatically.
func (p *Parts) Picked() []result.ReportPublished {
	if p == nil || p.proxy == nil {
		return nil
	}
	return p.proxy.Picked()
}

// Unused removes the volumes and unpacked layers that Use and From have created, for a sandbox in which no command
// has run. Call it before End; it may be called on nil.
func (p *Parts) Unused() {
	if p == nil {
		return
	}
	for _, v := range p.volumes {
		_ = v.Discard() // otherwise cleanup or volume rm can do it
	}
	for _, u := range p.held {
		_ = u.Discard() // otherwise cleanup can do it
	}
	p.held = nil
}

// End releases all parts. On return, data written to volumes is on the disk, unless lost is set. End may be
// called again, and on nil. used is the network's usage, or nil without network lists.
func (p *Parts) End() (used *result.ReportNetwork, lost *result.Error) {
	if p == nil {
		return nil, nil
	}
	used = p.proxy.End() // first, because a disk may be slow
	for _, v := range p.volumes {
		if err := v.Sync(); err != nil {
			p.lost = err
		}
		v.Close()
	}
	p.mu.Lock()
	closeOverlays(p.Overlays)
	p.Overlays = nil
	p.mu.Unlock()
	for _, u := range p.held {
		u.Close() // only read
	}
	if p.image != nil {
		p.image.Close() // only read
	}
	p.volumes, p.held, p.image = nil, nil, nil
	p.Files.Close()
	return used, p.lost
}
