package images

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/snapshots"
)

// Commit makes an image of a snapshot of a sandbox with a writable image: it has the layers of the image and of the
// snapshot.
func Commit(store *snapshots.Store, m *snapshots.Manifest, name string, ttl time.Duration, most int64) (*snapshots.Image, error) {
	tree := m.Trees[0]
	base, err := store.Image(tree.Image)
	if err != nil {
		return nil, err
	}
	manifest, err := ParseManifest(base.Manifest)
	if err != nil {
		return nil, err
	}
	layers := append([]snapshots.ImageLayer{}, base.Layers...)
	var diffs []string
	for _, l := range tree.Layers {
		d, _, err := stored(store, snapshots.ImageLayer{Layer: l})
		if err != nil {
			return nil, err
		}
		d.Annotations = nil
		manifest.Layers = append(manifest.Layers, d)
		layers = append(layers, snapshots.ImageLayer{Layer: l, Digest: d.Digest, MediaType: d.MediaType})
		diffs = append(diffs, "sha256:"+l.SHA256)
	}
	if len(layers) > snapshots.MaxImageLayers {
		return nil, &result.Error{Code: "too-large", Message: fmt.Sprintf("the image would have %d layers, more than %d", len(layers), snapshots.MaxImageLayers)}
	}
	text, err := configWith(base.RawConfig, diffs, m.CreatedAt)
	if err != nil {
		return nil, err
	}
	// Layers with zstd need an OCI manifest.
	manifest.MediaType = MediaTypeManifest
	for i := range manifest.Layers {
		l := &manifest.Layers[i]
		if strings.HasPrefix(l.MediaType, "application/vnd.docker.image.rootfs.") {
			if _, kind, _ := strings.Cut(l.MediaType, "tar."); kind == "gzip" || kind == "zstd" {
				l.MediaType = MediaTypeLayer + "+" + kind
			} else {
				l.MediaType = MediaTypeLayer
			}
		}
		layers[i].MediaType = l.MediaType
	}
	manifest.Config = &Descriptor{MediaType: MediaTypeConfig, Digest: Digest(text), Size: int64(len(text))}
	raw, err := json.Marshal(manifest)
	if err != nil {
		return nil, err
	}
	now := time.Now().UTC()
	image := &snapshots.Image{Digest: Digest(raw), ConfigID: manifest.Config.Digest, Platform: base.Platform, CreatedAt: now.Format(result.TimeFormat),
		Config: base.Config, Layers: layers, Manifest: raw, RawConfig: text}
	if ttl > 0 {
		image.ExpiresAt = now.Add(ttl).Format(result.TimeFormat)
	}
	if store.Used() > most {
		return nil, snapshots.Full(most)
	}
	return image, store.AddImage(image, name)
}

// configWith adds layers to a configuration, whose other members stay as they are.
func configWith(text []byte, diffs []string, created string) ([]byte, error) {
	var all, fs map[string]json.RawMessage
	var list []string
	var history []json.RawMessage
	if json.Unmarshal(text, &all) != nil || json.Unmarshal(all["rootfs"], &fs) != nil || json.Unmarshal(fs["diff_ids"], &list) != nil {
		return nil, invalid("its configuration is not valid")
	}
	_ = json.Unmarshal(all["history"], &history) // optional
	for range diffs {
		entry, err := json.Marshal(map[string]string{"created": created, "created_by": "sbxrun image commit"})
		if err != nil {
			return nil, err
		}
		history = append(history, entry)
	}
	for _, set := range []struct {
		in    map[string]json.RawMessage
		name  string
		value any
	}{{fs, "diff_ids", append(list, diffs...)}, {all, "rootfs", fs}, {all, "history", history}, {all, "created", created}} {
		b, err := json.Marshal(set.value)
		if err != nil {
			return nil, err
		}
		set.in[set.name] = b
	}
	return json.Marshal(all)
}
