package images

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"strings"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/layers"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/snapshots"
)

// Ensure returns the image with a reference that has a kind, such as oci:DIR, unpacked for the owner. It imports the
// image if the store does not have it. Such an image expires after a week, unless it gets a name.
func Ensure(ctx context.Context, store *snapshots.Store, ref string, owner *proc.Cred) (*snapshots.Image, error) {
	const ttl = 7 * 24 * time.Hour
	src, err := Open(store, ref, DefaultMaxSize)
	if err != nil {
		return nil, err
	}
	defer src.Close()
	var known string // digest of the manifest, or of the configuration where compressed layers would have to be hashed first
	if d, ok := src.(*docker); ok {
		known = d.config.Digest
	} else if raw, err := src.Manifest(ctx); err != nil {
		return nil, err
	} else {
		known = Digest(raw)
	}
	if m, err := store.FindImage(known); err == nil {
		return m, Unpack(ctx, store, m, owner)
	}
	return Import(ctx, store, src, Options{TTL: ttl, Owner: owner})
}

// Export writes an image as a tar in OCI layout. Layers have the digests with which they were imported, unless the store
// has an equal layer that was compressed differently.
func Export(store *snapshots.Store, m *snapshots.Image, to io.Writer) error {
	w := tar.NewWriter(to)
	add := func(name string, data []byte) error {
		if err := w.WriteHeader(&tar.Header{Name: name, Size: int64(len(data)), Mode: 0o644}); err != nil {
			return err
		}
		_, err := w.Write(data)
		return err
	}
	blob := func(digest string) string { return "blobs/sha256/" + strings.TrimPrefix(digest, "sha256:") }
	if err := add("oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)); err != nil {
		return err
	}
	manifest, err := ParseManifest(m.Manifest)
	if err != nil {
		return err
	}
	raw, changed := m.Manifest, false
	done := map[string]bool{}
	for i, l := range m.Layers {
		d, unpack, err := stored(store, l)
		if err != nil {
			return err
		}
		if d.Digest != l.Digest && d.Digest != manifest.Layers[i].Digest {
			manifest.Layers[i].MediaType, manifest.Layers[i].Digest, manifest.Layers[i].Size, changed = d.MediaType, d.Digest, d.Size, true
		}
		if done[d.Digest] {
			continue
		}
		done[d.Digest] = true
		if err := w.WriteHeader(&tar.Header{Name: blob(d.Digest), Size: d.Size, Mode: 0o644}); err != nil {
			return err
		}
		if err := copyLayer(store, l.Layer, w, unpack); err != nil {
			return err
		}
	}
	if changed {
		if raw, err = json.Marshal(manifest); err != nil {
			return err
		}
	}
	top := Descriptor{MediaType: manifest.MediaType, Digest: Digest(raw), Size: int64(len(raw))}
	if top.MediaType == "" {
		top.MediaType = MediaTypeManifest
	}
	if p, err := ParsePlatform(m.Platform); err == nil {
		top.Platform = &p
	}
	if len(m.Names) > 0 {
		top.Annotations = map[string]string{refName: m.Names[0]}
	}
	index, err := json.Marshal(Manifest{SchemaVersion: 2, MediaType: MediaTypeIndex, Manifests: []Descriptor{top}})
	for _, f := range []struct {
		name string
		data []byte
	}{{blob(m.ConfigID), m.RawConfig}, {blob(top.Digest), raw}, {"index.json", index}} {
		if err == nil {
			err = add(f.name, f.data)
		}
	}
	return result.All(err, w.Close())
}

// stored describes the blob to export for a layer. If unpack is set, it is the uncompressed layer.
func stored(store *snapshots.Store, l snapshots.ImageLayer) (d Descriptor, unpack bool, err error) {
	if l.Digest == "sha256:"+l.SHA256 {
		return Descriptor{MediaType: l.MediaType, Digest: l.Digest, Size: l.Bytes}, true, nil
	}
	from, err := store.Layer(l.Layer)
	if err != nil {
		return d, false, err
	}
	defer from.Close()
	var begin [4]byte
	n, err := io.ReadFull(from, begin[:])
	if err != nil && err != io.ErrUnexpectedEOF {
		return d, false, err
	}
	h := sha256.New()
	h.Write(begin[:n])
	size, err := io.Copy(h, from)
	d = Descriptor{MediaType: l.MediaType, Digest: "sha256:" + hex.EncodeToString(h.Sum(nil)), Size: size + int64(n)}
	if d.Digest != l.Digest {
		d.MediaType = MediaTypeLayer + "+" + layers.Compression(begin[:n])
	}
	return d, false, err
}

func copyLayer(store *snapshots.Store, l snapshots.Layer, to io.Writer, unpack bool) error {
	from, err := store.Layer(l)
	if err != nil {
		return err
	}
	defer from.Close()
	if !unpack {
		_, err = io.Copy(to, from)
		return err
	}
	r, err := layers.NewReader(from)
	if err != nil {
		return err
	}
	defer r.Close()
	_, err = io.Copy(to, r)
	return err
}
