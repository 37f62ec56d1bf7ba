package images

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/layers"
	"github.com/sbxrun/sbxrun/internal/snapshots"
)

// docker is an image in an archive made by docker save or podman save. Such an archive has no manifest, so one is
// made from the configuration. The same image always gets the same manifest.
type docker struct {
	*archive
	config Descriptor
	layers []string // names of members
	diffs  []string
	raw    []byte
	blobs  map[string]string // names of members by digest
	hashed map[int64]string  // digests of compressed members by position
	most   int64             // bytes of a layer
}

// newDocker selects an image of an archive.
func newDocker(a *archive, tag string, most int64) (*docker, error) {
	text, err := readSmall(a, "manifest.json")
	if err != nil {
		return nil, invalid("it has no manifest.json, so it is not made by docker save")
	}
	var list []struct {
		Config   string
		RepoTags []string
		Layers   []string
	}
	if err := json.Unmarshal(text, &list); err != nil {
		return nil, invalid("its manifest.json is not valid")
	}
	var tags []string
	found := -1
	for i, m := range list {
		tags = append(tags, m.RepoTags...)
		if tag == "" || slices.ContainsFunc(m.RepoTags, func(t string) bool { return sameTag(t, tag) }) {
			if found >= 0 {
				return nil, noTag(tag, tags)
			}
			found = i
		}
	}
	if found < 0 {
		return nil, noTag(tag, tags)
	}
	m := list[found]
	if len(m.Layers) > snapshots.MaxImageLayers {
		return nil, invalid("%d layers, more than %d", len(m.Layers), snapshots.MaxImageLayers)
	}
	conf, err := readSmall(a, m.Config)
	if err != nil {
		return nil, missing(m.Config, err)
	}
	var c config
	if err := json.Unmarshal(conf, &c); err != nil || len(c.RootFS.DiffIDs) != len(m.Layers) {
		return nil, invalid("its configuration does not describe %d layers", len(m.Layers))
	}
	d := &docker{archive: a, layers: m.Layers, diffs: c.RootFS.DiffIDs, blobs: map[string]string{}, hashed: map[int64]string{}, most: most}
	d.config = Descriptor{MediaType: MediaTypeConfig, Digest: Digest(conf), Size: int64(len(conf))}
	d.blobs[d.config.Digest] = m.Config
	return d, nil
}

func missing(name string, err error) error {
	if errors.As(err, new(*result.Error)) || errors.Is(err, context.Canceled) {
		return err
	}
	return invalid("cannot read %.80q in the archive: %v", name, err)
}

// sameTag reports whether a tag of an archive is the wanted one, which may lack docker's default registry and tag.
func sameTag(have, want string) bool {
	full := func(name string) string {
		name = strings.TrimPrefix(strings.TrimPrefix(name, "docker.io/"), "library/")
		if strings.LastIndexByte(name, ':') <= strings.LastIndexByte(name, '/') {
			name += ":latest"
		}
		return name
	}
	return full(have) == full(want)
}

// layer describes the layer in a member: a tar, whose digest is then the DiffID, or a compressed one, which is hashed.
func (d *docker) layer(ctx context.Context, name, diff string) (Descriptor, error) {
	m, err := d.find(name)
	if err != nil {
		return Descriptor{}, err
	}
	if m.size > d.most {
		return Descriptor{}, snapshots.Full(d.most)
	}
	r := io.NewSectionReader(d.f, m.at, m.size)
	var begin [4]byte
	n, _ := r.ReadAt(begin[:], 0)
	kind := layers.Compression(begin[:n])
	out := Descriptor{MediaType: MediaTypeLayer, Digest: diff, Size: m.size}
	if kind != "" {
		if d.hashed[m.at] == "" {
			all := &blob{ctx: ctx, from: r, left: m.size, hash: sha256.New()}
			if _, err := io.Copy(io.Discard, all); err != nil {
				return out, err
			}
			d.hashed[m.at] = "sha256:" + hex.EncodeToString(all.hash.Sum(nil))
		}
		out.MediaType, out.Digest = MediaTypeLayer+"+"+kind, d.hashed[m.at]
	}
	return out, nil
}

func (d *docker) Manifest(ctx context.Context) ([]byte, error) {
	if d.raw != nil {
		return d.raw, nil
	}
	out := Manifest{SchemaVersion: 2, MediaType: MediaTypeManifest, Config: &d.config, Layers: []Descriptor{}}
	for i, name := range d.layers {
		l, err := d.layer(ctx, name, d.diffs[i])
		if err != nil {
			return nil, missing(name, err)
		}
		out.Layers = append(out.Layers, l)
		d.blobs[l.Digest] = name
	}
	raw, err := json.Marshal(out)
	d.raw = raw
	return raw, err
}

func (d *docker) Blob(_ context.Context, want Descriptor) (io.ReadCloser, error) {
	name, ok := d.blobs[want.Digest]
	if !ok {
		return nil, fmt.Errorf("no blob %.19s in the archive", want.Digest)
	}
	return d.open(name)
}
