package server

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/config"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/sandbox"
	"github.com/sbxrun/sbxrun/internal/sessions"
	"github.com/sbxrun/sbxrun/internal/slot"
	"github.com/sbxrun/sbxrun/internal/snapshots"
)

// image is an image of the configuration. It is held, so that no one removes it, by the settings and by each sandbox.
type image struct {
	api.Image
	policy slot.Policy
	parts  *sandbox.Parts // holds the tree

	mu    sync.Mutex
	users int // 0: released
}

// use holds the image. It returns false if the image was released.
func (m *image) use() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.users == 0 {
		return false
	}
	m.users++
	return true
}

// release ends a use. m may be nil.
func (m *image) release() {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.users--; m.users == 0 {
		m.parts.End()
	}
}

// openImage looks up the image with a key in the store of this process's user, and unpacks it if necessary. It returns
// the current image if that is still the same.
func (s *Server) openImage(c *config.Config, key string) (*image, error) {
	m, err := c.FindImage(key)
	if err != nil {
		return nil, err
	}
	if set := s.settings.Load(); set != nil {
		if old := set.images[key]; old != nil && old.Digest == m.Digest && slices.Equal(old.Devices, c.Images[key].Devices) && old.use() {
			return old, nil
		}
	}
	policy, err := c.PolicyFor(key)
	if err != nil {
		return nil, err
	}
	store, err := snapshots.Mine(snapshots.Look)
	if err != nil {
		return nil, err
	}
	defer store.Close()
	out := &image{Image: api.Image{Name: key, Digest: m.Digest, Platform: m.Platform, Devices: c.Images[key].Devices}, parts: &sandbox.Parts{}, users: 1}
	policy.Workdir = room.Home // not the image's
	vars, err := out.parts.UseImage(context.Background(), store, m, key, &policy, room.ThisCaller(), false, "")
	if err != nil {
		out.parts.End()
		return nil, err
	}
	for _, v := range vars {
		policy.Base.Put(v)
	}
	policy.Mounts = slices.Clip(policy.Mounts)
	out.policy = slot.Policy{Policy: policy, ProofTimeout: time.Duration(c.ProofTimeout)}
	return out, nil
}

// release releases the images of settings that are no longer current. set may be nil.
func (set *settings) release() {
	if set != nil {
		for _, m := range set.images {
			m.release()
		}
	}
}

// policyOf returns the policy of sandboxes with an image; nil is the host's root.
func (set *settings) policyOf(m *image) slot.Policy {
	if m == nil {
		return set.policy
	}
	return m.policy
}

// allows returns an error if a tenant may not use the image with a key; "" is the host's root.
func (set *settings) allows(t config.Tenant, key string) error {
	if key != "" && (set.images[key] == nil || !slices.Contains(t.Images, key)) {
		return notAllowed("images", fmt.Sprintf("use the image %.64q", key))
	}
	return nil
}

// useImage holds the current image with a key until the caller releases it. It returns nil for "".
func (s *Server) useImage(t config.Tenant, key string) (*image, error) {
	for {
		set := s.settings.Load()
		if err := set.allows(t, key); err != nil || key == "" {
			return nil, err
		}
		if m := set.images[key]; m.use() {
			return m, nil
		}
	}
}

// take takes a slot with an image, which it holds until the slot ends. m may be nil.
func (s *Server) take(ctx context.Context, tenant string, m *image, policy slot.Policy) (slot.Slot, error) {
	at, err := s.source.Take(ctx, tenant, policy)
	switch {
	case err != nil:
		m.release()
		return nil, err
	case m == nil:
		return at, nil
	}
	return rooted{at, m}, nil
}

// rooted is a slot with an image.
type rooted struct {
	slot.Slot
	image *image
}

func (r rooted) Give() (*result.Result, error) {
	res, err := r.Slot.Give()
	if res == nil || res.Verdict != result.Unproven { // survivors use it
		r.image.release()
	}
	return res, err
}

// imageOf returns the image of a slot for a report, and its devices.
func imageOf(at slot.Slot) (*result.ReportImage, []string) {
	if r, ok := at.(rooted); ok {
		return &result.ReportImage{Name: r.image.Name, Digest: r.image.Digest, Platform: r.image.Platform}, r.image.Devices
	}
	return nil, nil
}

// checkImage rejects an execution in a session that names an image, or whose language needs one that the session lacks.
func (ex *execution) checkImage(x *sessions.Session) error {
	switch language := ex.language.Image; {
	case ex.named:
		return usage("image belongs to the session, not to a command in it")
	case language != "" && x.Asked.Image == "":
		return api.NewError(api.Usage, fmt.Sprintf("the language runs in the image %q, which the session does not have", language), "create the session with this image")
	}
	return nil
}

// Images returns the images that a tenant may use.
func (s *Server) Images(tenant string) []api.Image {
	set := s.settings.Load()
	list := []api.Image{}
	for _, key := range slices.Sorted(maps.Keys(set.images)) {
		if slices.Contains(set.Of(tenant).Images, key) {
			list = append(list, set.images[key].Image)
		}
	}
	return list
}

// WarmImages returns the images with warm rooms, and their policies.
func (s *Server) WarmImages() map[string]slot.Policy {
	all := map[string]slot.Policy{}
	set := s.settings.Load()
	for key, m := range set.images {
		if set.Config.Images[key].Rooms.Max > 0 {
			all[key] = m.policy
		}
	}
	return all
}

func (s *Server) defineImages(a huma.API) {
	register(a, s.operation(a, huma.Operation{
		OperationID: "images", Method: http.MethodGet, Path: "/v1/images", Summary: "List the images that requests can name",
	}), func(ctx context.Context, _ *struct{}) (*answer[api.Images], error) {
		return with(api.Images{Images: s.Images(IdentityOf(ctx).Tenant)}, nil)
	})
}
