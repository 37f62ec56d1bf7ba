package server

import (
	"context"
	"errors"
	"math"
	"net/http"
	"path/filepath"
	"reflect"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/capture"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/overlay"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/sessions"
	"github.com/sbxrun/sbxrun/internal/snapshots"
	"github.com/sbxrun/sbxrun/internal/tenants"
	"github.com/sbxrun/sbxrun/internal/volumes"
)

// Directories below a tenant's data directory.
const (
	snapshotsDir = "snapshots" // as in package snapshots
	volumesDir   = "volumes"
)

// overlayOf opens the overlay of a session and holds the session. Whatever depends on a client must end with
// the context.
func (s *Server) overlayOf(ctx context.Context, id string) (x *sessions.Session, o *room.Overlay, both context.Context, release func(), err error) {
	x, both, free, err := s.used(ctx, id)
	if err != nil {
		return nil, nil, nil, nil, err
	}
	list, err := x.Parts.Look()
	switch {
	case err != nil:
	case x.Asked.Overlay == nil:
		err = usage("the session has no overlay")
	case len(list) == 0:
		err = errEnded
	}
	if err != nil {
		free()
		return nil, nil, nil, nil, err
	}
	return x, list[0], both, func() {
		list[0].Close()
		free()
	}, nil
}

// Limits of a diff, and its memory per entry: the change and its JSON.
const (
	maxChanges = 16 << 20
	perChange  = 512 // without the path
	perEntry   = 2 * perChange
	perByte    = 2 + escaped // of a path
)

// diff sends the changes in a session's overlay.
func (s *Server) diff(ctx context.Context, q Request, id string) error {
	x, o, both, release, err := s.overlayOf(ctx, id)
	if err != nil {
		return err
	}
	defer release()
	leave, err := wait(both, s.walking, eachTenant)
	if err != nil {
		return err
	}
	defer leave()
	tree, err := overlay.Open(o.Layer, o.Source, o.Compared(), o.Lower...)
	if err != nil {
		return err
	}
	defer tree.Close()
	tree.Expect(o.Base, o.Index)
	tree.Entries, tree.Text = maxChanges/perChange, maxChanges/2
	tree.Count = func(entries, text int) error { return s.Hold(ctx, int64(perEntry*entries+perByte*text)) }
	changes, warnings, err := tree.Changes(both)
	leave() // a client that reads slowly must not delay other requests
	if err = unlessEnded(both, err); err != nil {
		return err
	}
	if changes == nil {
		changes = []overlay.Change{}
	}
	defer q.w.(*timeoutWriter).out.until(both)()
	if strings.Contains(q.r.Header.Get("Accept"), "application/x-tar") {
		leave, err := wait(both, s.archives, eachTenant)
		if err != nil {
			return err
		}
		defer leave()
		q.w.Header().Set("Content-Type", "application/x-tar")
		if err := tree.Tar(q.w, changes); err != nil {
			panic(http.ErrAbortHandler) // a truncated archive must not look complete
		}
		return nil
	}
	tree.Mark(ctx, changes)
	sum := overlay.Sum(changes)
	out := api.Diff{Path: x.Asked.Overlay.Path, Changes: changes, Count: sum.Count, Bytes: sum.Bytes}
	for _, w := range warnings {
		out.Warnings = append(out.Warnings, w.Error())
	}
	writeJSON(q.w, out)
	return nil
}

// Snapshot takes a snapshot of a session's overlay.
func (s *Server) Snapshot(ctx context.Context, id string, n api.NewSnapshot) (*api.Snapshot, error) {
	set := s.settings.Load()
	tenant := IdentityOf(ctx).Tenant
	quota := int64(set.Of(tenant).Snapshots)
	if quota == 0 {
		return nil, notAllowed("snapshots", "use snapshots")
	}
	if err := s.begin(); err != nil {
		return nil, err
	}
	defer s.running.Done()
	x, o, both, release, err := s.overlayOf(ctx, id)
	if err != nil {
		return nil, err
	}
	defer release()
	if !x.Capture.TryLock() {
		return nil, api.NewError(api.BusySession, "another snapshot of this session is in progress", "try again later")
	}
	defer x.Capture.Unlock()
	both, cancel := s.Until(both)
	defer cancel()
	leave, err := wait(both, s.packing, tenants.Ceilings{Concurrency: 1, Queue: math.MaxInt})
	if err == nil {
		defer leave()
	}
	if err := unlessEnded(both, err); err != nil {
		return nil, err
	}
	m, err := snapshots.NewManifest(n.Name, milliseconds(n.TTLMS))
	if err != nil {
		return nil, err
	}
	data, err := set.Data(tenant)
	if err != nil {
		return nil, err
	}
	store, err := snapshots.Open(filepath.Join(data, snapshotsDir))
	if err != nil {
		return nil, err
	}
	defer store.Close()
	m.Workdir = room.Home
	from := capture.Source{Overlays: []*room.Overlay{o}, Layers: x.Parts.Layers, Cgroups: x.Parts.Cgroups}
	if err := capture.Take(both, store, m, from, quota); err != nil {
		return nil, unlessEnded(both, err)
	}
	s.log.Info("snapshot", "request", IdentityOf(ctx).RequestID, "tenant", tenant, "session", x.ID, "snapshot", m.ID, "size", m.Size())
	out := shown(m)
	out.Session = x.ID
	return &out, nil
}

// unlessEnded returns err, or the error for the end of the session or the server if that is the reason.
func unlessEnded(both context.Context, err error) error {
	switch {
	case errors.Is(context.Cause(both), errDraining):
		return draining()
	case both.Err() != nil:
		return errEnded
	}
	return err
}

func shown(m *snapshots.Manifest) api.Snapshot {
	t := m.Trees[0]
	return api.Snapshot{ID: m.ID, Name: m.Name, Made: m.CreatedAt, Expires: m.ExpiresAt, Path: t.Dest, Layers: len(t.Layers), Size: m.Size(), Frozen: m.Frozen, LeftOut: m.LeftOut}
}

// snapshotsOf opens the snapshots of the request's tenant.
func (s *Server) snapshotsOf(ctx context.Context) (*snapshots.Store, error) {
	data, err := s.settings.Load().Data(IdentityOf(ctx).Tenant)
	if err != nil {
		return nil, err
	}
	return snapshots.Look(filepath.Join(data, snapshotsDir))
}

// volumesOf opens the volumes of the request's tenant.
func (s *Server) volumesOf(ctx context.Context) (*volumes.Store, error) {
	data, err := s.settings.Load().Data(IdentityOf(ctx).Tenant)
	if err != nil {
		return nil, err
	}
	return volumes.OpenAt(filepath.Join(data, volumesDir), false)
}

// sweep removes expired data and the remains of killed servers.
func (s *Server) sweep() {
	if machine, err := limits.Detect(); err == nil { // otherwise there are no cgroups
		for _, l := range machine.Leftovers() { // of calls whose shim had not started
			if err := limits.RemoveDirs([]string{l.Dir}, time.Now().Add(time.Second)); err != nil {
				s.log.Warn("remove leftovers", "directory", l.Dir, "error", err)
			}
		}
	}
	data, err := s.settings.Load().Data("")
	if err != nil {
		return // no data directory
	}
	for kind, sweep := range map[string]func(dir string) error{snapshotsDir: sweepSnapshots, volumesDir: sweepVolumes} {
		dirs, _ := filepath.Glob(filepath.Join(data, "*", kind)) // the pattern is valid
		for _, dir := range dirs {
			if err := sweep(dir); err != nil {
				s.log.Warn("remove leftovers", "directory", dir, "error", err)
			}
		}
	}
}

func sweepSnapshots(dir string) error {
	store, err := snapshots.Look(dir)
	if err != nil {
		return err
	}
	defer store.Close()
	var errs []error
	for _, l := range store.Sweep(false) {
		errs = append(errs, l.Err)
	}
	return result.All(errs...)
}

func sweepVolumes(dir string) error {
	store, err := volumes.OpenAt(dir, false)
	if err != nil {
		return err
	}
	defer store.Close()
	list, err := store.Leftovers()
	errs := []error{err}
	for _, l := range list {
		errs = append(errs, store.Discard(l))
	}
	return result.All(errs...)
}

func (s *Server) defineParts(a huma.API) {
	none := []api.Code{api.NoSuchSession, api.Ended}
	diff := content(a, "The changes; as a tar archive, an OCI layer in which .wh.NAME marks a deletion", map[string]reflect.Type{"application/json": reflect.TypeFor[api.Diff]()})
	diff.Content["application/x-tar"] = &huma.MediaType{Schema: &huma.Schema{Type: "string", Format: "binary"}}
	register(a, s.operation(a, huma.Operation{
		OperationID: "diff", Method: http.MethodGet, Path: "/v1/sessions/{id}/diff", Summary: "Get the changes in a session's overlay",
		Description: "Compares the overlay with the current content of the server's directory. Accept: application/x-tar returns added and changed files with their content.",
		Responses:   map[string]*huma.Response{"200": diff},
	}, append(none, api.TooLarge, api.Policy, api.Quota, api.Busy)...), func(ctx context.Context, q *struct {
		Request
		SessionPath
	}) (*streamed, error) {
		return q.writes(func() error { return s.diff(ctx, q.Request, q.ID) })
	})

	register(a, s.operation(a, huma.Operation{
		OperationID: "takeSnapshot", Method: http.MethodPost, Path: "/v1/sessions/{id}/snapshot", Summary: "Take a snapshot of a session's overlay", DefaultStatus: http.StatusCreated,
		Description: "The session continues. New sessions can start from the snapshot, even after this one has ended.",
	}, append(none, api.TooLarge, api.MediaType, api.Policy, api.BusySession, api.NameInUse, api.Draining, api.QuotaDisk)...), func(ctx context.Context, q *struct {
		Request
		SessionPath
		Body api.NewSnapshot
	}) (*answer[*api.Snapshot], error) {
		return with(s.Snapshot(ctx, q.ID, q.Body))
	})

	register(a, s.operation(a, huma.Operation{
		OperationID: "listSnapshots", Method: http.MethodGet, Path: "/v1/snapshots", Summary: "List the snapshots, oldest first",
	}), func(ctx context.Context, _ *struct{}) (*answer[api.Snapshots], error) {
		store, err := s.snapshotsOf(ctx)
		if err != nil {
			return nil, err
		}
		defer store.Close()
		leave, err := wait(ctx, s.walking, eachTenant)
		if err != nil {
			return nil, err
		}
		defer leave()
		all, wrong := store.List()
		if len(all) == 0 && len(wrong) > 0 {
			return nil, wrong[0]
		}
		out, size := api.Snapshots{Snapshots: []api.Snapshot{}}, int64(0)
		for _, m := range all {
			if !m.Expired(time.Now()) {
				one := shown(m)
				const rest = 256
				size += rest + int64(len(one.Path))
				out.Snapshots = append(out.Snapshots, one)
			}
		}
		return with(out, s.holdLong(ctx, size))
	})

	register(a, s.operation(a, huma.Operation{
		OperationID: "deleteSnapshot", Method: http.MethodDelete, Path: "/v1/snapshots/{id}", Summary: "Remove a snapshot", DefaultStatus: http.StatusNoContent,
		Description: "Sessions that started from it continue.",
	}, api.NoSuchSnap), func(ctx context.Context, q *struct {
		ID string `path:"id" maxLength:"64" doc:"ID or name"`
	}) (*struct{}, error) {
		store, err := s.snapshotsOf(ctx)
		if err != nil {
			return nil, err
		}
		defer store.Close()
		leave, err := wait(ctx, s.walking, eachTenant)
		if err != nil {
			return nil, err
		}
		defer leave()
		m, err := findSnapshot(store, q.ID)
		if err != nil {
			return nil, err
		}
		return nil, store.Remove(m)
	})

	register(a, s.operation(a, huma.Operation{
		OperationID: "listVolumes", Method: http.MethodGet, Path: "/v1/volumes", Summary: "List the volumes",
	}), func(ctx context.Context, _ *struct{}) (*answer[api.Volumes], error) {
		store, err := s.volumesOf(ctx)
		if err != nil {
			return nil, err
		}
		defer store.Close()
		names, err := store.Names()
		if err != nil {
			return nil, err
		}
		out := api.Volumes{Volumes: []api.VolumeInfo{}}
		for _, name := range names {
			out.Volumes = append(out.Volumes, api.VolumeInfo{Name: name})
		}
		return with(out, nil)
	})

	register(a, s.operation(a, huma.Operation{
		OperationID: "deleteVolume", Method: http.MethodDelete, Path: "/v1/volumes/{name}", Summary: "Remove an unused volume and its content", DefaultStatus: http.StatusNoContent,
	}, api.NoSuchVolume, api.BusyVolume), func(ctx context.Context, q *struct {
		Name string `path:"name" maxLength:"63"`
	}) (*struct{}, error) {
		store, err := s.volumesOf(ctx)
		if err != nil {
			return nil, err
		}
		defer store.Close()
		leave, err := wait(ctx, s.walking, eachTenant)
		if err != nil {
			return nil, err
		}
		defer leave()
		return nil, s.removeVolume(store, q.Name)
	})
}
