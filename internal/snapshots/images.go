package snapshots

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/state"
)

// This file keeps images. A name moves to another image by a rename. Package images imports and unpacks them.

const (
	imagesDir = "images"
	namesDir  = "names"

	imageVersion = 1
	maxImage     = 8 << 20 // bytes of a record
	maxImageName = 128
	// MaxImageLayers is the largest number of layers of an image; docker's is 127.
	MaxImageLayers = 256
	// MaxImageText is the largest size of a manifest or a configuration.
	MaxImageText = 2 << 20
	// pendingFor is how long an incomplete import keeps its layers, so that it can continue.
	pendingFor = 24 * time.Hour
)

// Image describes an image of the store.
type Image struct {
	Version   int          `json:"version"`
	Names     []string     `json:"names"`
	Digest    string       `json:"digest"`          // of the manifest, such as sha256:HEX
	Index     string       `json:"index,omitempty"` // digest of the index that lists the manifest
	ConfigID  string       `json:"config_digest"`   // docker's image ID
	Platform  string       `json:"platform"`        // such as linux/amd64
	CreatedAt string       `json:"created_at"`      // when it was added to the store
	ExpiresAt string       `json:"expires_at,omitempty"`
	Config    ImageConfig  `json:"config"`
	Layers    []ImageLayer `json:"layers"` // the lowest first
	// Pending reports that the import has not finished. Only layers that are already in the store have a size.
	Pending bool `json:"pending,omitempty"`

	// Exact bytes of the manifest and the configuration, for export.
	Manifest  []byte `json:"manifest"`
	RawConfig []byte `json:"raw_config"`
}

// ImageConfig is the part of an image's configuration that a sandbox uses.
type ImageConfig struct {
	Env        []string `json:"env,omitempty"`
	Entrypoint []string `json:"entrypoint,omitempty"`
	Cmd        []string `json:"cmd,omitempty"`
	Workdir    string   `json:"workdir,omitempty"`
	User       string   `json:"user,omitempty"`
}

// ImageLayer is a layer of an image. Its SHA256 is the DiffID.
type ImageLayer struct {
	Layer
	Digest    string `json:"digest"` // of the blob that the manifest lists
	MediaType string `json:"media_type"`
}

// Hex returns the hash of a digest of the form sha256:HEX; ok is false for others.
func Hex(digest string) (hash string, ok bool) {
	hash, ok = strings.CutPrefix(digest, "sha256:")
	return hash, ok && len(hash) == 64 && state.IsHex(hash)
}

// Title returns a name, or the abbreviated digest, for messages.
func (m *Image) Title() string {
	if len(m.Names) > 0 {
		return m.Names[0]
	}
	return m.Digest[:min(len(m.Digest), len("sha256:")+12)]
}

// Size returns the size of the layers in the store. Equal layers count once.
func (m *Image) Size() (n int64) {
	seen := map[string]bool{}
	for _, l := range m.Layers {
		if !seen[l.SHA256] {
			n += l.Size
		}
		seen[l.SHA256] = true
	}
	return n
}

// Expired reports whether its time to live has passed.
func (m *Image) Expired(now time.Time) bool { return expired(m.ExpiresAt, now) }

// ParseImageName checks a name: the characters of registry references, without a digest.
func ParseImageName(name string) error {
	bad := func() error {
		return &result.Error{Code: "usage", Message: fmt.Sprintf("invalid image name %.160q: want lower-case words such as python:3.13 or ghcr.io/org/tool:1, at most %d bytes", name, maxImageName)}
	}
	if len(name) > maxImageName || strings.Contains(name, "..") {
		return bad()
	}
	path, tag, tagged := name, "", false
	if i := strings.LastIndexByte(name, ':'); i > strings.LastIndexByte(name, '/') {
		path, tag, tagged = name[:i], name[i+1:], true
	}
	word := func(s, also string) bool {
		return s != "" && strings.IndexFunc(s[:1], func(r rune) bool {
			return !alphanumeric(r) && !strings.ContainsRune(strings.ReplaceAll(also, ".", ""), r)
		}) < 0 &&
			strings.IndexFunc(s, func(r rune) bool { return !alphanumeric(r) && !strings.ContainsRune(also, r) }) < 0
	}
	const upper = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
	if tagged && !word(tag, upper+"_.-") {
		return bad()
	}
	parts := strings.Split(path, "/")
	for i, part := range parts {
		if host, port, ok := strings.Cut(part, ":"); ok && i == 0 && len(parts) > 1 && port != "" && strings.Trim(port, "0123456789") == "" { // a registry
			part = host
		}
		if !word(part, "_.-") || strings.HasPrefix(part, "-") || strings.HasPrefix(part, "_") {
			return bad()
		}
	}
	if parts[0] == "sha256" || parts[0] == "oci" || parts[0] == "oci-archive" || parts[0] == "docker-archive" { // other kinds of references
		return bad()
	}
	return nil
}

func alphanumeric(r rune) bool { return '0' <= r && r <= '9' || 'a' <= r && r <= 'z' }

// escape returns the file name of an image's name, which has no percent sign.
func escape(name string) string { return strings.ReplaceAll(name, "/", "%") }

func damagedImage(format string, args ...any) error {
	return &result.Error{Code: "damaged", Message: "invalid image: " + fmt.Sprintf(format, args...)}
}

// check checks a record that was read, or that is about to be written.
func (m *Image) check() error {
	if m.Version != imageVersion {
		return &result.Error{Code: "damaged", Message: fmt.Sprintf("the image's record has version %d, but this sbxrun supports %d", m.Version, imageVersion), Hint: "try a newer sbxrun"}
	}
	for _, digest := range []string{m.Digest, m.ConfigID, cmp.Or(m.Index, m.Digest)} {
		if _, ok := Hex(digest); !ok {
			return damagedImage("digest %.80q", digest)
		}
	}
	if len(m.Manifest) == 0 || len(m.Manifest) > MaxImageText || len(m.RawConfig) == 0 || len(m.RawConfig) > MaxImageText {
		return damagedImage("manifest of %d bytes, configuration of %d", len(m.Manifest), len(m.RawConfig))
	}
	if len(m.Layers) > MaxImageLayers {
		return damagedImage("%d layers, more than %d", len(m.Layers), MaxImageLayers)
	}
	for _, l := range m.Layers {
		_, ok := Hex(l.Digest)
		if _, diff := Hex("sha256:" + l.SHA256); !ok || !diff || l.Size < 0 || l.Bytes < 0 || l.Bytes > maxBytes || l.Entries < 0 || l.Entries > MaxEntries {
			return damagedImage("layer %.80q of %d bytes", l.SHA256, l.Bytes)
		}
	}
	return nil
}

func (s *Store) loadImage(file string) (*Image, error) {
	f, err := s.root.Open(filepath.Join(imagesDir, file))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxImage))
	if err != nil {
		return nil, err
	}
	m := new(Image)
	if json.Unmarshal(data, m) != nil {
		return nil, damagedImage("its record is not valid JSON")
	}
	m.Names = nil
	if err = m.check(); err == nil && imageFile(m.Digest) != file {
		err = damagedImage("its record has the name of another image")
	}
	return m, err
}

// imageFile returns the name of the record of an image with a valid digest.
func imageFile(digest string) string { return strings.TrimPrefix(digest, "sha256:") + manifestSuffix }

// named returns the digest of the image with a name; "" for none.
func (s *Store) named(name string) string {
	if s.root == nil {
		return ""
	}
	f, err := s.root.Open(filepath.Join(namesDir, escape(name)))
	if err != nil {
		return ""
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, 128))
	digest := strings.TrimSpace(string(data))
	if _, ok := Hex(digest); err != nil || !ok {
		return ""
	}
	return digest
}

// imageNames returns the names of all images, sorted, by digest.
func (s *Store) imageNames() map[string][]string {
	all := map[string][]string{}
	for _, file := range s.names(namesDir) {
		name := strings.ReplaceAll(file, "%", "/")
		if digest := s.named(name); digest != "" {
			all[digest] = append(all[digest], name)
		}
	}
	for _, names := range all {
		slices.Sort(names)
	}
	return all
}

// Images returns the images, including expired and pending ones, the oldest first, and errors for unreadable records.
func (s *Store) Images() (list []*Image, wrong []error) {
	names := s.imageNames()
	for _, file := range s.names(imagesDir) {
		m, err := s.loadImage(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed since
		}
		if err != nil {
			wrong = append(wrong, fmt.Errorf("%s: %w", filepath.Join(s.path, imagesDir, file), err))
			continue
		}
		m.Names = append([]string{}, names[m.Digest]...)
		list = append(list, m)
	}
	slices.SortFunc(list, func(a, b *Image) int { return strings.Compare(a.CreatedAt+a.Digest, b.CreatedAt+b.Digest) })
	return list, wrong
}

// FindImage returns the image that ref names: NAME, NAME@sha256:HEX, sha256:HEX, or at least 12 digits of HEX. Of
// NAME@DIGEST only the digest matters, which may also be the digest of an index or of the configuration.
func (s *Store) FindImage(ref string) (*Image, error) {
	m, err := s.anyImage(ref)
	if err == nil && m.Expired(time.Now()) {
		return nil, &result.Error{Code: "no-such-image", Message: fmt.Sprintf("image %.160q has expired", ref), Hint: "pull or import it again"}
	}
	return m, err
}

func (s *Store) anyImage(ref string) (*Image, error) {
	if name, digest, ok := strings.Cut(ref, "@"); ok {
		if err := ParseImageName(name); err != nil {
			return nil, err
		}
		return s.imageByDigest(digest, ref)
	}
	if strings.HasPrefix(ref, "sha256:") {
		return s.imageByDigest(ref, ref)
	}
	if err := ParseImageName(ref); err != nil {
		return nil, err
	}
	if digest := s.named(ref); digest != "" {
		if m, err := s.loadImage(imageFile(digest)); err == nil && !m.Pending {
			m.Names = []string{ref}
			return m, nil
		}
	}
	if len(ref) >= 12 && state.IsHex(ref) {
		var found *Image
		list, _ := s.Images()
		for _, m := range list {
			if !m.Pending && strings.HasPrefix(imageFile(m.Digest), ref) {
				if found != nil {
					return nil, &result.Error{Code: "no-such-image", Message: fmt.Sprintf("several images have digests that begin with %s", ref), Hint: "give more digits"}
				}
				found = m
			}
		}
		if found != nil {
			return found, nil
		}
	}
	return nil, noImage(ref)
}

func noImage(ref string) error {
	hint := "list images: sbxrun image ls"
	if !strings.HasPrefix(ref, "sha256:") {
		hint = "pull it: sbxrun image pull " + ref + ", or " + hint
	}
	return &result.Error{Code: "no-such-image", Message: fmt.Sprintf("no image named %.160q", ref), Hint: hint}
}

// Image returns the image with this digest, even if it has expired.
func (s *Store) Image(digest string) (*Image, error) { return s.imageByDigest(digest, digest) }

// imageByDigest returns the image whose manifest, index or configuration has this digest. Of several images of an index it
// prefers one that has not expired, and one for this machine.
func (s *Store) imageByDigest(digest, ref string) (*Image, error) {
	if _, ok := Hex(digest); !ok {
		return nil, &result.Error{Code: "usage", Message: fmt.Sprintf("invalid digest %.80q: want sha256: and 64 hexadecimal digits", digest)}
	}
	if s.root != nil {
		if m, err := s.loadImage(imageFile(digest)); err == nil && !m.Pending {
			m.Names = append([]string{}, s.imageNames()[m.Digest]...)
			return m, nil
		}
	}
	list, _ := s.Images()
	var best *Image
	most := -1
	for _, m := range list {
		if m.Pending || m.Index != digest && m.ConfigID != digest {
			continue
		}
		points := 0
		if !m.Expired(time.Now()) {
			points = 2
		}
		if strings.HasPrefix(m.Platform+"/", "linux/"+runtime.GOARCH+"/") {
			points++
		}
		if points > most {
			best, most = m, points
		}
	}
	if best == nil {
		return nil, noImage(ref)
	}
	return best, nil
}

// BeginImage records that an image is being imported, so that the layers of an interrupted import are kept for a while.
// It returns the layers that are there, by hash: the image's, as far as they are known.
func (s *Store) BeginImage(m *Image) (there map[string]Layer, err error) {
	there = map[string]Layer{}
	draft, err := s.NewFile()
	if err != nil {
		return nil, err
	}
	defer draft.Close()
	return there, s.alone(func() error {
		known, _ := s.knownLayers()
		for _, l := range m.Layers {
			if info, err := s.root.Lstat(layerPath(l.SHA256)); err == nil && known[l.SHA256].SHA256 != "" {
				k := known[l.SHA256]
				k.Size = info.Size()
				there[l.SHA256] = k
			}
		}
		old, err := s.loadImage(imageFile(m.Digest))
		if err == nil && !old.Pending {
			return nil
		}
		if err == nil { // its layers are still counted
			for i, l := range m.Layers {
				if k, ok := there[l.SHA256]; ok {
					m.Layers[i].Layer = k
				}
			}
		}
		pending := *m
		pending.Pending = true
		return Failed(s.writeImage(&pending, draft))
	})
}

// knownLayers returns the layers of all images and snapshots. The caller holds the lock.
func (s *Store) knownLayers() (map[string]Layer, []error) {
	known := map[string]Layer{}
	images, wrong := s.Images()
	for _, m := range images {
		for _, l := range m.Layers {
			if l.Size > 0 {
				known[l.SHA256] = l.Layer
			}
		}
	}
	list, damaged := s.List()
	for _, m := range list {
		for _, l := range m.Layers() {
			known[l.SHA256] = l
		}
	}
	return known, append(wrong, damaged...)
}

// AddLayer adds a verified layer of a pending image to the store and sets its size. draft is completely written. most
// bounds the size of the store.
func (s *Store) AddLayer(m *Image, l *Layer, draft *Draft, most int64) error {
	if err := draft.File.Sync(); err != nil {
		return Failed(err)
	}
	info, err := draft.File.Stat()
	if err != nil {
		return Failed(err)
	}
	record, err := s.NewFile()
	if err != nil {
		return err
	}
	defer record.Close()
	return s.alone(func() error {
		if other, err := s.root.Lstat(layerPath(l.SHA256)); err == nil {
			l.Size = other.Size() // packed differently, perhaps
		} else {
			if l.Size = info.Size(); s.Used()+l.Size > most {
				return Full(most)
			}
			if err := s.take([]string{l.SHA256}, map[string]*Draft{l.SHA256: draft}); err != nil {
				return Failed(err)
			}
		}
		for i := range m.Layers {
			if m.Layers[i].SHA256 == l.SHA256 {
				m.Layers[i].Layer = *l
			}
		}
		if old, err := s.loadImage(imageFile(m.Digest)); err == nil && !old.Pending {
			return nil
		}
		pending := *m
		pending.Pending = true
		return Failed(s.writeImage(&pending, record))
	})
}

// AddImage completes an import: all layers are in the store. name may be "". It moves the name from another image.
func (s *Store) AddImage(m *Image, name string) error {
	if name != "" {
		if err := ParseImageName(name); err != nil {
			return err
		}
	}
	record, err := s.NewFile()
	if err != nil {
		return err
	}
	defer record.Close()
	label, err := s.NewFile()
	if err != nil {
		return err
	}
	defer label.Close()
	return s.alone(func() error {
		for _, l := range m.Layers {
			if _, err := s.root.Lstat(layerPath(l.SHA256)); err != nil {
				return &result.Error{Code: "busy", Message: fmt.Sprintf("layer %.12s was removed during the import", l.SHA256), Hint: "try again"}
			}
		}
		m.Pending = false
		if err := s.writeImage(m, record); err != nil {
			return Failed(err)
		}
		if name == "" {
			return nil
		}
		_, err := label.File.WriteString(m.Digest + "\n")
		if err == nil {
			err = label.File.Sync()
		}
		if err == nil {
			err = s.root.Rename(label.path(), filepath.Join(namesDir, escape(name)))
		}
		if err != nil {
			return Failed(err)
		}
		label.name = ""
		m.Names = append([]string{}, s.imageNames()[m.Digest]...)
		return Failed(s.syncDir(namesDir))
	})
}

// DropImage forgets a pending image, whose layers turned out to be invalid.
func (s *Store) DropImage(m *Image) error {
	var trees []string
	err := s.alone(func() error {
		if old, err := s.loadImage(imageFile(m.Digest)); err != nil || !old.Pending {
			return nil
		}
		if err := s.root.Remove(filepath.Join(imagesDir, imageFile(m.Digest))); err != nil {
			return Failed(err)
		}
		trees = s.retireTrees()
		return s.dropOrphans()
	})
	s.scrapAll(trees)
	return err
}

// retireTrees retires the trees that no image needs and no sandbox uses. The caller holds the lock, and then passes them
// to scrapAll without it.
func (s *Store) retireTrees() (list []string) {
	needed, _ := s.neededTrees(time.Time{})
	for _, key := range s.names(treesDir) {
		ours := strings.HasPrefix(key, "image-") || strings.HasPrefix(key, "layer-")
		if at := filepath.Join(treesDir, key); ours && !needed(key) && s.idle(at) {
			if as, err := s.retire(at); err == nil {
				list = append(list, as)
			}
		}
	}
	return list
}

func (s *Store) scrapAll(list []string) {
	for _, name := range list {
		_ = s.scrap(name) // Sweep reports it
	}
}

// dropOrphans removes the layers that are not needed. The caller holds the lock.
func (s *Store) dropOrphans() error {
	for _, hash := range s.orphans(time.Time{}) {
		if err := s.root.Remove(layerPath(hash)); err != nil {
			return Failed(err)
		}
	}
	return nil
}

// writeImage writes the record of an image. The caller holds the lock.
func (s *Store) writeImage(m *Image, draft *Draft) error {
	m.Version = imageVersion
	if err := m.check(); err != nil {
		return err
	}
	data, err := result.JSON(m)
	if err == nil && len(data) > maxImage {
		err = damagedImage("its record has %d bytes", len(data))
	}
	if err == nil {
		_, err = draft.File.Write(data)
	}
	if err == nil {
		err = draft.File.Sync()
	}
	if err == nil {
		err = s.root.Rename(draft.path(), filepath.Join(imagesDir, imageFile(m.Digest)))
	}
	if err != nil {
		return err
	}
	draft.name = ""
	return s.syncDir(imagesDir)
}

// RemoveImage removes a name, or an image with all its names if ref is a digest or its only name. An image in use stays.
func (s *Store) RemoveImage(ref string) error {
	var old []string
	err := s.alone(func() error {
		m, err := s.anyImage(ref)
		if err != nil {
			return err
		}
		names := s.imageNames()[m.Digest]
		if s.named(ref) == m.Digest && len(names) > 1 {
			return Failed(result.All(s.root.Remove(filepath.Join(namesDir, escape(ref))), s.syncDir(namesDir)))
		}
		old, err = s.removeImage(m, names)
		return err
	})
	s.scrapAll(old)
	return err
}

// removeImage removes an image, and retires its trees. The caller holds the lock.
func (s *Store) removeImage(m *Image, names []string) (old []string, err error) {
	if s.imageInUse(m.Digest) {
		return nil, &result.Error{Code: "in-use", ExitCode: result.ExitInUse, Message: fmt.Sprintf("image %q is in use", m.Title()), Hint: "end the sandboxes that use it first"}
	}
	// Remove the names last: a crash leaves names of a missing image, which have no effect.
	if err := s.root.Remove(filepath.Join(imagesDir, imageFile(m.Digest))); err != nil {
		return nil, Failed(err)
	}
	for _, name := range names {
		err = result.All(err, s.root.Remove(filepath.Join(namesDir, escape(name))))
	}
	old = s.retireTrees()
	return old, Failed(result.All(err, s.dropOrphans(), s.syncDir(imagesDir)))
}

// imageInUse reports whether a sandbox uses a tree of the image. The caller holds the lock.
func (s *Store) imageInUse(digest string) bool {
	return slices.ContainsFunc(s.names(treesDir), func(key string) bool {
		return strings.HasPrefix(key, imageKey(digest)) && !s.idle(filepath.Join(treesDir, key))
	})
}

// neededTrees returns a function that reports whether a tree belongs to an image that has not expired at then (zero
// for never), or may belong to an image with an unreadable record. The caller holds the lock.
func (s *Store) neededTrees(then time.Time) (needed func(key string) bool, wrong []error) {
	prefixes := map[string]bool{}
	list, wrong := s.Images()
	for _, m := range list {
		if !s.keeps(m, then) {
			continue
		}
		prefixes[imageKey(m.Digest)] = true
		for _, l := range m.Layers {
			prefixes[layerKey(l.SHA256)] = true
		}
	}
	return func(key string) bool {
		kind, rest, _ := strings.Cut(key, "-")
		hash, _, ok := strings.Cut(rest, "-")
		return ok && (len(wrong) > 0 && (kind == "image" || kind == "layer") || prefixes[kind+"-"+hash+"-"])
	}, wrong
}

// keeps reports whether an image keeps its layers and trees: it is needed, or a sandbox uses it. The caller holds the lock.
func (s *Store) keeps(m *Image, then time.Time) bool {
	return m.needed(then) || !m.Pending && s.imageInUse(m.Digest)
}

// needed reports whether an image keeps its layers: it has not expired at then, unless that is zero, and its import is
// complete or recent.
func (m *Image) needed(then time.Time) bool {
	if m.Pending {
		at, err := time.Parse(result.TimeFormat, m.CreatedAt)
		return err == nil && time.Since(at) < pendingFor
	}
	return then.IsZero() || !m.Expired(then)
}

func imageKey(digest string) string { return "image-" + strings.TrimPrefix(digest, "sha256:") + "-" }
func layerKey(hash string) string   { return "layer-" + hash + "-" }

// ImageKey returns the name of the tree of an image for a user.
func ImageKey(digest string, uid, gid uint32) string {
	return fmt.Sprintf("%s%d-%d", imageKey(digest), uid, gid)
}

// LayerKey returns the name of the plain tree of one layer of images, for a user.
func LayerKey(hash string, uid, gid uint32) string {
	return fmt.Sprintf("%s%d-%d", layerKey(hash), uid, gid)
}
