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
	"github.com/sbxrun/sbxrun/internal/values"
	"github.com/sbxrun/sbxrun/internal/volumes"
)

// Parts are what a sandbox has beside its room. Whoever makes one takes these steps, in this order:
//
//	List, Use, From    while its policy is made
//	Begin              before the room is built
//	Held               when it is built, and nothing of the command has run
//	End                when nothing of the sandbox is left, or if it comes to nothing
//
// The zero Parts, and nil, are none. If the process is killed the kernel ends them: locks go with
// their descriptors, the keeper's included, the proxy with its keeper, and layers in memory with
// the last mount of them.
type Parts struct {
	Files *files.Files // nil if nothing is put or got

	// Overlays are those of the room, from Held to End, in the order of the policy.
	Overlays []*room.Overlay
	// Layers are those of a snapshot, the lowest first, that lie below what is written, by the
	// destinations of overlays.
	Layers  map[string][]state.Layer
	Cgroups []string // directories of the room's own, of one that stays

	mu      sync.Mutex // of the overlays, for Look and End
	spec    network.Spec
	proxy   *network.Proxy // nil if nothing of a network is listed
	volumes []*volumes.Volume
	lost    *result.Error // what was written to one of them may be
	held    map[string]*snapshots.Unpacked
}

// Volume is a volume as a sandbox is to show it.
type Volume struct {
	Name, Dest string
	ReadOnly   bool
}

// List gives a sandbox what of a network is listed. The variables that tell programs of the proxy
// are the caller's to add.
func (p *Parts) List(spec network.Spec, pol *room.Policy) error {
	if pol.Network == room.NetHost && spec.Wanted() {
		return errors.New("--publish and --connect are for a sandbox with a network of its own; with --net host its ports are the host's")
	}
	p.spec = spec
	return spec.Check()
}

// Allowed returns the hosts that the sandbox may reach.
func (p *Parts) Allowed() []network.Rule { return p.spec.Allow }

// Variables are those that tell programs of the proxy.
func (p *Parts) Variables(rootfs string) (vars []values.Var) {
	for _, pair := range p.spec.Variables(rootfs) {
		name, value, _ := strings.Cut(pair, "=")
		vars = append(vars, values.Var{Name: name, Value: value})
	}
	return vars
}

// Use locks volumes, and adds them to a policy for a sandbox that caller makes. A [volumes.BusyError]
// says that somebody has one.
func (p *Parts) Use(store *volumes.Store, list []Volume, pol *room.Policy) error {
	var owner *proc.Cred // of new ones
	if pol.User != nil && pol.User.UID != 0 && os.Geteuid() == 0 {
		owner = &proc.Cred{UID: pol.User.UID, GID: pol.User.GID}
	}
	for i, use := range list { // before one is made
		if slices.ContainsFunc(list[:i], func(other Volume) bool { return other.Name == use.Name }) {
			return &result.Error{Code: "usage", Message: fmt.Sprintf("the volume %q is given twice", use.Name)}
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

// From adds to a policy the overlays of a snapshot, over the directories that it has there already
// or else over those that they were over, with the snapshot's layers below what will be written. Of
// one that was imported it has to have them: an archive does not decide what of the host is shown.
// Those that are not unpacked yet are; upper is where what is written to added ones is kept on disk.
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
		if m.Imported && index(t) < 0 {
			flag := "--overlay " + room.ShellQuote(t.Source+":"+t.Dest)
			if t.Dest == "/" {
				flag = "--rootfs " + room.ShellQuote(t.Source)
			}
			return &result.Error{Code: "usage", Message: fmt.Sprintf("the snapshot %s was imported, and its archive would decide that the sandbox sees %q", m.Title(), t.Source),
				Hint: "name the directory: " + flag + ", or another one in its place"}
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
		if at.Source == t.Source {
			at.Since = t.First()
		}
		if at.Kind == room.ReadOnly { // a root directory, which the snapshot makes writable
			at.Kind, at.Upper = room.Overlaid, upper
		}
		for _, l := range t.Layers {
			at.Lower = slices.Insert(at.Lower, 0, p.held[l.SHA256].Path)
		}
	}
	return nil
}

// Begin starts what the room must find; cred is who the sandbox runs as.
func (p *Parts) Begin(cred *proc.Cred) (err error) {
	if p != nil && p.spec.Wanted() {
		p.proxy, err = network.Start(p.spec, cred)
	}
	return err
}

// Held gives its parts to a room that is built, and whose overlays are set. PID 1 of it stays the
// caller's.
func (p *Parts) Held(ctx context.Context, init *proc.Process, cred *proc.Cred) error {
	if p == nil {
		return nil
	}
	if p.proxy != nil {
		if err := p.proxy.Serve(ctx, init); err != nil {
			return err
		}
	}
	if p.Files != nil {
		return p.Files.Held(ctx, init, cred)
	}
	return nil
}

// Look opens the layers of the overlays anew, for reading while commands write to them. The caller
// closes what it gets, which is nothing after the sandbox's end.
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
		again := &room.Overlay{Source: o.Source, Dest: o.Dest, Since: o.Since, Base: o.Base, Index: o.Index, Upper: o.Upper, Lower: o.Lower, Layer: os.NewFile(uintptr(fd), "layer")}
		list = append(list, again)
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

// Listed reports whether hosts are listed, and so none but them can be reached.
func (p *Parts) Listed() bool { return p != nil && p.spec.Proxied }

// Network reports whether anything of a network is listed.
func (p *Parts) Network() bool { return p != nil && p.spec.Wanted() }

// Published is what leads into the sandbox.
func (p *Parts) Published() []result.ReportPublished {
	if p == nil {
		return nil
	}
	return p.proxy.Published()
}

// Refused has the hosts that are refused, as [network.Proxy.Refused]; nil if none are listed.
func (p *Parts) Refused() <-chan result.ReportHost {
	if p == nil || p.proxy == nil {
		return nil
	}
	return p.proxy.Refused()
}

// Picked are the published ports that nobody has named.
func (p *Parts) Picked() []result.ReportPublished {
	if p == nil || p.proxy == nil {
		return nil
	}
	return p.proxy.Picked()
}

// Unused removes the volumes and unpacked layers that Use and From have made, for a sandbox in which no
// command has run. It is called before End, and may be called on nil.
func (p *Parts) Unused() {
	if p == nil {
		return
	}
	for _, v := range p.volumes {
		_ = v.Discard() // or cleanup and volume rm do it
	}
	for _, u := range p.held {
		_ = u.Discard() // likewise
	}
	p.held = nil
}

// End gives all parts up, and returns when nothing of them is left: what was written to volumes is
// on the disk then, unless lost says otherwise. It may be called again, and on nil. used is what
// became of the network; nil if nothing is listed.
func (p *Parts) End() (used *result.ReportNetwork, lost *result.Error) {
	if p == nil {
		return nil, nil
	}
	used = p.proxy.End() // first: a disk may take its time
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
		u.Close() // nothing was written
	}
	p.volumes, p.held = nil, nil
	p.Files.Close()
	return used, p.lost
}
