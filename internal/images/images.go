// Package images adds container images to the store of package snapshots and unpacks them, for sbxrund. sbxrun itself only
// looks images up there, because it must not link archives, compression and hashes.
//
// Import reads the blobs of an image from a [Source], such as a directory in OCI layout ([OpenLayout]), an archive
// ([OpenArchive]) or a registry. Nothing in a source is trusted: all digests are verified, sizes and counts have limits, and
// files are created only inside the store.
//
// A layer is kept as received, and unpacked to a plain tree. The tree of an image consists of hard links to the files
// of its layers' trees, so images that share a layer share its files.
package images

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/snapshots"
)

// Descriptor describes a blob (descriptor.md of the OCI image specification).
type Descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int64             `json:"size"`
	Platform    *Platform         `json:"platform,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

// Platform is the platform of an image.
type Platform struct {
	OS           string `json:"os"`
	Architecture string `json:"architecture"`
	Variant      string `json:"variant,omitempty"`
}

func (p Platform) String() string {
	if p.Variant != "" {
		return p.OS + "/" + p.Architecture + "/" + p.Variant
	}
	return p.OS + "/" + p.Architecture
}

// ParsePlatform parses OS/ARCH[/VARIANT].
func ParsePlatform(text string) (p Platform, err error) {
	parts := strings.Split(text, "/")
	if len(parts) < 2 || len(parts) > 3 || parts[0] == "" || parts[1] == "" {
		return p, &result.Error{Code: "usage", Message: fmt.Sprintf("invalid platform %.80q: want one such as linux/amd64", text)}
	}
	p.OS, p.Architecture = parts[0], parts[1]
	if len(parts) == 3 {
		p.Variant = parts[2]
	}
	return p, nil
}

// Host is the platform of this machine.
func Host() Platform { return Platform{OS: "linux", Architecture: runtime.GOARCH} }

// Source provides the blobs of an image. Import verifies what it returns.
type Source interface {
	// Manifest returns the bytes of a manifest or an index, at most snapshots.MaxImageText.
	Manifest(ctx context.Context) ([]byte, error)
	// Blob opens the blob with the descriptor's digest. Import closes it, and reads at most the descriptor's size plus one
	// byte.
	Blob(ctx context.Context, d Descriptor) (io.ReadCloser, error)
}

// Options of an import.
type Options struct {
	Name     string         // new name of the image; "" for none
	Digest   string         // required digest of the source's manifest or index; "" for any
	Platform *Platform      // nil for this machine's
	TTL      time.Duration  // 0 for an image that does not expire
	MaxSize  int64          // bound of the store, and of the unpacked image
	Owner    *proc.Cred     // user to unpack for; nil for this process's user
	Packed   bool           // don't unpack the image
	Progress func(Progress) // called for each layer at the start, during the import and at the end; may be nil
}

// Progress reports on a layer of an import.
type Progress struct {
	Layer, Layers int // number of the layer, from 1, and of all layers
	Digest        string
	Bytes, Size   int64 // read so far, and in total
	Done          bool
	Present       bool // Done, because the store already had it
}

// DefaultMaxSize is the default of Options.MaxSize.
const DefaultMaxSize = 16 << 30

// Media types of manifests. Those of docker are equivalent.
const (
	MediaTypeIndex    = "application/vnd.oci.image.index.v1+json"
	MediaTypeManifest = "application/vnd.oci.image.manifest.v1+json"
	MediaTypeConfig   = "application/vnd.oci.image.config.v1+json"
	MediaTypeLayer    = "application/vnd.oci.image.layer.v1.tar"

	dockerIndex    = "application/vnd.docker.distribution.manifest.list.v2+json"
	dockerManifest = "application/vnd.docker.distribution.manifest.v2+json"
)

const (
	maxManifests = 1000    // in an index
	maxNested    = 3       // indexes in indexes
	maxEntries   = 4 << 20 // of all layers together
)

// Manifest is a manifest (manifest.md) or an index (image-index.md).
type Manifest struct {
	SchemaVersion int          `json:"schemaVersion"`
	MediaType     string       `json:"mediaType,omitempty"`
	Config        *Descriptor  `json:"config,omitempty"`
	Layers        []Descriptor `json:"layers,omitempty"`
	Manifests     []Descriptor `json:"manifests,omitempty"`
}

// config is the part of an image's configuration (config.md) that is used.
type config struct {
	OS           string `json:"os"`
	Architecture string `json:"architecture"`
	Variant      string `json:"variant"`
	Config       struct {
		User       string
		Env        []string
		Entrypoint []string
		Cmd        []string
		WorkingDir string
	} `json:"config"`
	RootFS struct {
		Type    string   `json:"type"`
		DiffIDs []string `json:"diff_ids"`
	} `json:"rootfs"`
}

func invalid(format string, args ...any) error {
	return &result.Error{Code: "damaged", Message: "invalid image: " + fmt.Sprintf(format, args...)}
}

// Digest returns the digest of data.
func Digest(data []byte) string {
	sum := sha256.Sum256(data)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// small reads a small blob and verifies it.
func small(ctx context.Context, src Source, d Descriptor, what string) ([]byte, error) {
	if _, ok := snapshots.Hex(d.Digest); !ok {
		return nil, invalid("%s has the digest %.80q; only sha256 is supported", what, d.Digest)
	}
	if d.Size < 0 || d.Size > snapshots.MaxImageText {
		return nil, invalid("%s has %d bytes, more than %d", what, d.Size, int64(snapshots.MaxImageText))
	}
	r, err := src.Blob(ctx, d)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	data, err := io.ReadAll(io.LimitReader(r, d.Size+1))
	if err != nil {
		return nil, err
	}
	if int64(len(data)) != d.Size || Digest(data) != d.Digest {
		return nil, invalid("%s %.19s does not match its digest or its size of %d bytes", what, d.Digest, d.Size)
	}
	return data, nil
}

// ParseManifest parses a manifest or an index.
func ParseManifest(data []byte) (*Manifest, error) {
	if len(data) > snapshots.MaxImageText {
		return nil, invalid("its manifest has more than %d bytes", snapshots.MaxImageText)
	}
	m := new(Manifest)
	if err := json.Unmarshal(data, m); err != nil {
		return nil, invalid("its manifest is not valid JSON")
	}
	if m.SchemaVersion != 2 {
		return nil, invalid("its manifest has schema version %d; only 2 is supported", m.SchemaVersion)
	}
	if len(m.Manifests) > maxManifests || len(m.Layers) > snapshots.MaxImageLayers {
		return nil, invalid("%d manifests, %d layers", len(m.Manifests), len(m.Layers))
	}
	switch {
	case m.index() && m.Config != nil:
		return nil, invalid("its manifest is also an index")
	case !m.index() && m.Config == nil:
		return nil, invalid("its manifest has no configuration")
	}
	return m, nil
}

func (m *Manifest) index() bool {
	return m.MediaType == MediaTypeIndex || m.MediaType == dockerIndex || m.Config == nil && m.Manifests != nil
}

// resolve returns the bytes of a manifest, selected from an index if necessary, and the digest of that index.
func resolve(ctx context.Context, src Source, o *Options) (m *Manifest, raw []byte, index string, err error) {
	if raw, err = src.Manifest(ctx); err != nil {
		return nil, nil, "", err
	}
	first := Digest(raw)
	for range maxNested {
		if m, err = ParseManifest(raw); err != nil {
			return nil, nil, "", err
		}
		if !m.index() {
			if o.Digest != "" && o.Digest != first && o.Digest != Digest(raw) {
				return nil, nil, "", invalid("its digest is %s, not %s", first, o.Digest)
			}
			if first == Digest(raw) {
				first = ""
			}
			return m, raw, first, nil
		}
		d, err := choose(m.Manifests, o)
		if err != nil {
			return nil, nil, "", err
		}
		if raw, err = small(ctx, src, d, "manifest"); err != nil {
			return nil, nil, "", err
		}
	}
	return nil, nil, "", invalid("more than %d nested indexes", maxNested)
}

// choose selects the manifest for a platform.
func choose(list []Descriptor, o *Options) (Descriptor, error) {
	want := Host()
	if o.Platform != nil {
		want = *o.Platform
	}
	var there []string
	var fits []Descriptor
	for _, d := range list {
		switch {
		case d.Digest == o.Digest && o.Digest != "":
			return d, nil
		case d.Platform == nil:
			there = append(there, "unknown")
		case d.Platform.OS == "unknown": // an attestation
		default:
			there = append(there, fmt.Sprintf("%.40s", d.Platform))
			if d.Platform.OS == want.OS && d.Platform.Architecture == want.Architecture {
				fits = append(fits, d)
			}
		}
	}
	for _, d := range fits {
		if want.Variant == "" || d.Platform.Variant == want.Variant {
			return d, nil
		}
	}
	if len(list) == 1 && o.Platform == nil && (list[0].Platform == nil || list[0].Platform.OS != "unknown") {
		return list[0], nil
	}
	return Descriptor{}, &result.Error{Code: "platform", Message: fmt.Sprintf("the image is not available for %s, but for %.200s", want, strings.Join(there, ", "))}
}

// describe reads the manifest and the configuration of an image.
func describe(ctx context.Context, src Source, o *Options) (*snapshots.Image, []Descriptor, error) {
	m, raw, index, err := resolve(ctx, src, o)
	if err != nil {
		return nil, nil, err
	}
	text, err := small(ctx, src, *m.Config, "configuration")
	if err != nil {
		return nil, nil, err
	}
	var c config
	if err := json.Unmarshal(text, &c); err != nil {
		return nil, nil, invalid("its configuration is not valid JSON, or not that of a container image")
	}
	if c.OS == "" || c.Architecture == "" || len(c.OS)+len(c.Architecture)+len(c.Variant) > 80 || strings.ContainsFunc(c.OS+c.Architecture+c.Variant, unprintable) {
		return nil, nil, invalid("its configuration names no platform; it may not be a container image")
	}
	if len(c.RootFS.DiffIDs) != len(m.Layers) {
		return nil, nil, invalid("%d layers, but %d DiffIDs", len(m.Layers), len(c.RootFS.DiffIDs))
	}
	if slices.Equal(c.Config.Entrypoint, []string{""}) { // a Dockerfile removes the base image's so
		c.Config.Entrypoint = nil
	}
	now := time.Now().UTC()
	image := &snapshots.Image{Digest: Digest(raw), Index: index, ConfigID: m.Config.Digest, Platform: Platform{c.OS, c.Architecture, c.Variant}.String(),
		CreatedAt: now.Format(result.TimeFormat), Manifest: raw, RawConfig: text,
		Config: snapshots.ImageConfig{Env: c.Config.Env, Entrypoint: c.Config.Entrypoint, Cmd: c.Config.Cmd, Workdir: c.Config.WorkingDir, User: c.Config.User}}
	if o.TTL > 0 {
		image.ExpiresAt = now.Add(o.TTL).Format(result.TimeFormat)
	}
	for i, l := range m.Layers {
		diff, ok := snapshots.Hex(c.RootFS.DiffIDs[i])
		if _, ok2 := snapshots.Hex(l.Digest); !ok || !ok2 {
			return nil, nil, invalid("layer %.80q; only sha256 is supported", l.Digest)
		}
		if strings.Contains(l.MediaType, "encrypted") {
			return nil, nil, invalid("layer %.19s is encrypted", l.Digest)
		}
		if l.Size < 0 || o.MaxSize > 0 && l.Size > o.MaxSize {
			return nil, nil, snapshots.Full(o.MaxSize)
		}
		image.Layers = append(image.Layers, snapshots.ImageLayer{Layer: snapshots.Layer{SHA256: diff}, Digest: l.Digest, MediaType: l.MediaType})
	}
	return image, m.Layers, nil
}

func unprintable(r rune) bool { return r <= ' ' || r > '~' }

// damaged reports whether an error means that the image is invalid, so that trying again does not help.
func damaged(err error) bool {
	code := result.CodeOf(err)
	return code == "damaged" || code == "too-large"
}
