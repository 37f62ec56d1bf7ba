package server

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/config"
	"github.com/sbxrun/sbxrun/internal/network"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/sandbox"
	"github.com/sbxrun/sbxrun/internal/slot"
	"github.com/sbxrun/sbxrun/internal/snapshots"
	"github.com/sbxrun/sbxrun/internal/values"
	"github.com/sbxrun/sbxrun/internal/volumes"
)

// overlayPath is the default mount point of an overlay.
const overlayPath = "/work"

// parts are the checked parts of a sandbox. Nothing is opened or locked yet.
type parts struct {
	api.Parts
	data    string // the tenant's directory
	overlay string // the server's directory
	spec    network.Spec
	volumes []sandbox.Volume
}

// partsSize estimates the memory of the description of parts.
func partsSize(p api.Parts) (size int64) {
	var words []string
	if p.Overlay != nil {
		words = append(words, p.Overlay.Name, p.Overlay.Path)
	}
	for _, v := range p.Volumes {
		words = append(words, v.Name, v.Path)
	}
	if p.Network != nil {
		words = append(words, p.Network.Allow...)
	}
	for _, word := range words {
		size += wordRest + int64(len(word))
	}
	return size
}

// checkParts validates the requested parts against the tenant's permissions. It returns nil if there are
// none.
func checkParts(set *settings, tenant string, t config.Tenant, asked api.Parts) (*parts, error) {
	if asked.Overlay == nil && asked.Snapshot == "" && len(asked.Volumes) == 0 && asked.Network == nil {
		return nil, nil
	}
	p := &parts{Parts: asked}
	var err error
	if p.data, err = set.Data(tenant); err != nil {
		return nil, err
	}
	if o := asked.Overlay; o != nil {
		if !slices.Contains(t.Overlays, o.Name) {
			return nil, notAllowed("overlays", fmt.Sprintf("use the overlay %.64q", o.Name))
		}
		at := api.Overlay{Name: o.Name, Path: overlayPath}
		if o.Path != "" {
			if at.Path, err = destination("overlay", o.Path); err != nil {
				return nil, err
			}
		}
		p.Overlay, p.overlay = &at, set.Overlays[o.Name]
	}
	if asked.Snapshot != "" && t.Snapshots == 0 {
		return nil, notAllowed("snapshots", "use snapshots")
	}
	if len(asked.Volumes) > 0 && t.Volumes == 0 {
		return nil, notAllowed("volumes", "use volumes")
	}
	for _, v := range asked.Volumes {
		if err := volumes.CheckName(v.Name); err != nil {
			return nil, err
		}
		dest, err := destination("volume", v.Path)
		if err != nil {
			return nil, err
		}
		if p.Overlay != nil && (values.Within(dest, p.Overlay.Path) || values.Within(p.Overlay.Path, dest)) {
			return nil, usage("volume: %s and the overlay overlap", dest)
		}
		p.volumes = append(p.volumes, sandbox.Volume{Name: v.Name, Dest: dest, ReadOnly: v.ReadOnly})
	}
	if asked.Network != nil {
		if set.Sandbox.Network == "host" {
			return nil, usage("network: this server gives its sandboxes the host's network, without a list of hosts")
		}
		p.spec.Proxied = true
		own, err := network.OwnAddresses()
		if err != nil {
			return nil, err
		}
		for _, word := range asked.Network.Allow {
			r, err := network.ParseRule(word)
			if err == nil {
				_, err = network.Compile(r)
			}
			if err != nil {
				return nil, usage("network.allow: %v", err)
			}
			if !t.Within(r, own) {
				return nil, notAllowed("network", fmt.Sprintf("reach %.100q", word))
			}
			p.spec.Allow = append(p.spec.Allow, r)
		}
	}
	return p, nil
}

// notAllowed returns the error for something that a tenant may not use, whether or not it exists.
func notAllowed(key, what string) error {
	return api.NewError(api.Policy, "the tenant may not "+what, "the operator can permit it with "+key+" of [tenant] in the server's configuration")
}

// destination checks a mount point. The workspace is not allowed, because it belongs to the file operations.
func destination(what, at string) (string, error) {
	dest, err := room.CleanDest(at)
	if err == nil && (values.Within(dest, room.Home) || values.Within(room.Home, dest)) {
		err = fmt.Errorf("%s is in the workspace", dest)
	}
	if err != nil {
		return "", usage("%s: %v", what, err)
	}
	return dest, nil
}

// addParts adds parts to the policy of a sandbox: it locks volumes, and unpacks and holds layers. The caller
// ends the parts, except after an error.
func (s *Server) addParts(ctx context.Context, set *settings, t config.Tenant, p *parts, out *slot.Policy) (err error) {
	out.Parts = &sandbox.Parts{}
	defer func() {
		if err != nil {
			out.Parts.Unused()
			out.Parts.End()
		}
	}()
	if p.spec.Wanted() {
		if err := out.Parts.List(p.spec, &out.Policy); err != nil {
			return err
		}
		out.Env = out.Env.Clone() // other calls have the same
		for _, v := range out.Parts.Variables(out.Rootfs()) {
			out.Env.Put(v)
		}
	}
	if p.Overlay != nil {
		out.Mounts = append(out.Mounts, room.Mount{Kind: room.Overlaid, Source: p.overlay, Dest: p.Overlay.Path})
	}
	if p.Snapshot != "" {
		if err := s.fromSnapshot(ctx, set, t, p, out); err != nil {
			return err
		}
	}
	if len(p.volumes) > 0 {
		return s.useVolumes(t, p, out)
	}
	return nil
}

// fromSnapshot starts the overlay from a snapshot. The tenant must still have access to its directory.
func (s *Server) fromSnapshot(ctx context.Context, set *settings, t config.Tenant, p *parts, out *slot.Policy) error {
	store, err := snapshots.Look(filepath.Join(p.data, snapshotsDir))
	if err != nil {
		return err
	}
	defer store.Close()
	m, err := findSnapshot(store, p.Snapshot)
	if err != nil {
		return err
	}
	tree := m.Trees[0] // a session has one
	if len(m.Trees) > 1 {
		return usage("the snapshot has %d overlays, but a session has only one", len(m.Trees))
	}
	if p.Overlay == nil {
		i := slices.IndexFunc(t.Overlays, func(name string) bool {
			real, err := filepath.EvalSymlinks(set.Overlays[name])
			return err == nil && real == tree.Source
		})
		if i < 0 {
			return notAllowed("overlays", "use the directory below the snapshot")
		}
		p.Overlay = &api.Overlay{Name: t.Overlays[i], Path: tree.Dest}
	} else if p.Overlay.Path != tree.Dest {
		return usage("the snapshot's overlay belongs at %s, not at %s", tree.Dest, p.Overlay.Path)
	}
	p.Snapshot = m.ID
	return out.Parts.From(ctx, store, m, &out.Policy, room.ThisCaller(), "")
}

// useVolumes locks volumes and enforces the tenant's limit on their number.
func (s *Server) useVolumes(t config.Tenant, p *parts, out *slot.Policy) error {
	store, err := volumes.OpenAt(filepath.Join(p.data, volumesDir), true)
	if err != nil {
		return err
	}
	defer store.Close()
	// Without the mutex, two requests could both create the last volume allowed. It is per tenant because
	// locking a volume can block.
	one, _ := s.stores.LoadOrStore(p.data, new(sync.Mutex))
	one.(*sync.Mutex).Lock()
	defer one.(*sync.Mutex).Unlock()
	names, err := store.Names()
	if err != nil {
		return err
	}
	for _, v := range p.volumes {
		if !slices.Contains(names, v.Name) {
			names = append(names, v.Name)
		}
	}
	if len(names) > t.Volumes {
		return api.NewError(api.QuotaKept, fmt.Sprintf("the tenant has reached its limit of %d volumes", t.Volumes), "DELETE /v1/volumes/{name} removes one")
	}
	return busyVolume(out.Parts.Use(store, p.volumes, &out.Policy))
}

func busyVolume(err error) error {
	if busy := (*volumes.BusyError)(nil); errors.As(err, &busy) {
		return api.NewError(api.BusyVolume, busy.Error(), "one sandbox can write to a volume, or several read it (read_only)")
	}
	return err
}

// removeVolume removes an existing volume.
func (s *Server) removeVolume(store *volumes.Store, name string) error {
	names, err := store.Names()
	if err != nil {
		return err
	}
	if !slices.Contains(names, name) {
		return api.NewError(api.NoSuchVolume, fmt.Sprintf("no volume named %.80q", name), "GET /v1/volumes lists them")
	}
	return busyVolume(store.Remove(name))
}

// findSnapshot returns a tenant's snapshot by ID or name.
func findSnapshot(store *snapshots.Store, name string) (*snapshots.Manifest, error) {
	m, err := store.Find(name)
	if e := (*result.Error)(nil); errors.As(err, &e) && e.Code == "not-found" {
		return nil, api.NewError(api.NoSuchSnap, e.Message, "GET /v1/snapshots lists them")
	}
	return m, err
}
