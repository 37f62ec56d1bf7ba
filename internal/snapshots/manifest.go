package snapshots

import (
	"encoding/json"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/state"
)

// Version is the version of manifests. Others are rejected, because a reader must know everything that a
// snapshot needs.
const Version = 1

// Manifest describes a snapshot. It is checked before it is written and after it was read, because it may
// come from another machine.
type Manifest struct {
	Version   int    `json:"version"`
	ID        string `json:"id"`
	Name      string `json:"name,omitempty"`
	CreatedAt string `json:"created_at"`
	ExpiresAt string `json:"expires_at,omitempty"`

	Sandbox     string `json:"sandbox"`                // ID of the sandbox that it was taken from
	SandboxName string `json:"sandbox_name,omitempty"` // name of that sandbox
	Frozen      bool   `json:"frozen"`                 // the sandbox was frozen
	Imported    bool   `json:"imported,omitempty"`     // the exporter chose the sources of its trees
	Workdir     string `json:"workdir"`
	Trees       []Tree `json:"trees"`

	// LeftOut is the number of sockets, named pipes and devices in the layers added by this
	// snapshot, which are not kept.
	LeftOut int `json:"left_out,omitempty"`
}

// Tree is the content of one mount point of a sandbox.
type Tree struct {
	Dest   string  `json:"dest"`
	Source string  `json:"source"`          // host directory below the layers
	Image  string  `json:"image,omitempty"` // digest of the image whose tree the source is
	Layers []Layer `json:"layers"`          // the lowest first
	Mode   string  `json:"mode,omitempty"`  // mode of the directory itself, in octal, if not the source's
	// Since is when the source was first compared, before the lowest layer was written: later
	// changes of the source conflict with the layers.
	Since string `json:"since"`
}

// First returns Since, or the zero time if it is invalid.
func (t *Tree) First() time.Time {
	at, _ := time.Parse(time.RFC3339Nano, t.Since)
	return at
}

// Layer contains the changes to the layers below it.
type Layer = state.Layer

// Bounds of a manifest.
const (
	maxManifest = 1 << 20
	maxTrees    = 16
	MaxLayers   = 32 // overlayfs allows more, but each slows down every lookup
	MaxEntries  = 2_000_000
	maxBytes    = 1 << 46
)

// Title returns the name or ID, for messages.
func (m *Manifest) Title() string {
	if m.Name != "" {
		return m.Name
	}
	return m.ID
}

// Size returns the size of the layers in the store. Equal layers count once.
func (m *Manifest) Size() (n int64) {
	for _, l := range m.Layers() {
		n += l.Size
	}
	return n
}

// Layers returns all layers, without duplicates.
func (m *Manifest) Layers() (all []Layer) {
	for _, t := range m.Trees {
		for _, l := range t.Layers {
			if !slices.ContainsFunc(all, func(other Layer) bool { return other.SHA256 == l.SHA256 }) {
				all = append(all, l)
			}
		}
	}
	return all
}

// Expired reports whether its time to live has passed.
func (m *Manifest) Expired(now time.Time) bool { return expired(m.ExpiresAt, now) }

func expired(when string, now time.Time) bool {
	at, err := time.Parse(result.TimeFormat, when)
	return when != "" && err == nil && !now.Before(at)
}

// Parse reads a manifest and checks it.
func Parse(data []byte) (*Manifest, error) {
	m := new(Manifest)
	if err := json.Unmarshal(data, m); err != nil {
		return nil, damaged("the manifest is not valid JSON")
	}
	return m, m.check()
}

func damaged(format string, args ...any) error {
	return &result.Error{Code: "damaged", Message: "the snapshot is damaged: " + fmt.Sprintf(format, args...)}
}

func (m *Manifest) check() error {
	if m.Version != Version {
		return &result.Error{Code: "damaged", Message: fmt.Sprintf("the snapshot's manifest has version %d, but this sbxrun supports %d", m.Version, Version), Hint: "try a newer sbxrun"}
	}
	if !state.ValidID(m.ID) {
		return damaged("invalid ID %.40q", m.ID)
	}
	if m.Name != "" && state.ValidName(m.Name) != nil {
		return damaged("invalid name %.80q", m.Name)
	}
	for _, at := range []string{m.CreatedAt, m.ExpiresAt} {
		if _, err := time.Parse(result.TimeFormat, at); err != nil && (at != "" || m.CreatedAt == "") {
			return damaged("invalid time %.40q", at)
		}
	}
	if m.Sandbox != "" && !state.ValidID(m.Sandbox) || m.SandboxName != "" && state.ValidName(m.SandboxName) != nil {
		return damaged("invalid sandbox %.40q %.80q", m.Sandbox, m.SandboxName)
	}
	if !clean(m.Workdir) {
		return damaged("invalid working directory %.80q", m.Workdir)
	}
	if len(m.Trees) == 0 || len(m.Trees) > maxTrees {
		return damaged("%d trees", len(m.Trees))
	}
	seen := map[string]bool{}
	for _, t := range m.Trees {
		if !clean(t.Dest) || !clean(t.Source) || seen[t.Dest] {
			return damaged("invalid tree of %.80q at %.80q", t.Source, t.Dest)
		}
		seen[t.Dest] = true
		if _, ok := Hex(t.Image); t.Image != "" && (!ok || t.Dest != "/") {
			return damaged("%q has an invalid image %.80q", t.Dest, t.Image)
		}
		if mode, err := strconv.ParseUint(t.Mode, 8, 32); t.Mode != "" && (err != nil || mode > 0o777) {
			return damaged("%q has an invalid mode %.40q", t.Dest, t.Mode)
		}
		if t.First().IsZero() {
			return damaged("%q has an invalid time %.40q", t.Dest, t.Since)
		}
		if len(t.Layers) == 0 || len(t.Layers) > MaxLayers {
			return damaged("%q has %d layers", t.Dest, len(t.Layers))
		}
		for _, l := range t.Layers {
			if len(l.SHA256) != 64 || !state.IsHex(l.SHA256) || l.Size <= 0 || l.Size > maxBytes || l.Bytes <= 0 || l.Bytes > maxBytes || l.Entries < 0 || l.Entries > MaxEntries {
				return damaged("%q has an invalid layer %.80q of %d bytes", t.Dest, l.SHA256, l.Bytes)
			}
		}
	}
	return nil
}

// clean reports whether p is absolute, clean and not too long.
func clean(p string) bool {
	return path.IsAbs(p) && path.Clean(p) == p && len(p) < 4096 && !strings.ContainsRune(p, 0)
}
