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

// Version of the manifests that are written. Others are refused: a reader must know all that a
// snapshot needs.
const Version = 1

// Manifest says what a snapshot has. It is checked before it is written and after it was read:
// that of another machine may say anything.
type Manifest struct {
	Version   int    `json:"version"`
	ID        string `json:"id"`
	Name      string `json:"name,omitempty"`
	CreatedAt string `json:"created_at"`
	ExpiresAt string `json:"expires_at,omitempty"`

	Sandbox     string `json:"sandbox"`                // id of the one that it was taken of
	SandboxName string `json:"sandbox_name,omitempty"` // likewise
	Frozen      bool   `json:"frozen"`                 // nothing ran in it meanwhile
	Imported    bool   `json:"imported,omitempty"`     // whoever exported it chose the sources of its trees
	Workdir     string `json:"workdir"`
	Trees       []Tree `json:"trees"`

	// LeftOut is how many entries of the layers that this snapshot has added were not kept:
	// sockets, named pipes and devices.
	LeftOut int `json:"left_out,omitempty"`
}

// Tree is what is shown at one place of a sandbox.
type Tree struct {
	Dest   string  `json:"dest"`
	Source string  `json:"source"`         // the host's directory below the layers
	Layers []Layer `json:"layers"`         // the lowest first
	Mode   string  `json:"mode,omitempty"` // of the directory itself, in octal, if that is not the source's
	// Since is when the source was looked at first, before anything was written to the lowest
	// layer: what has changed there since is in conflict with what the layers have.
	Since string `json:"since"`
}

// First is Since; the zero time if it is none.
func (t *Tree) First() time.Time {
	at, _ := time.Parse(time.RFC3339Nano, t.Since)
	return at
}

// Layer is what was written above what is below it.
type Layer = state.Layer

// Bounds of a manifest.
const (
	maxManifest = 1 << 20
	maxTrees    = 16
	MaxLayers   = 32 // overlayfs takes many more; each is one more look for every file
	MaxEntries  = 2_000_000
	maxBytes    = 1 << 46
)

// Title names a snapshot to people.
func (m *Manifest) Title() string {
	if m.Name != "" {
		return m.Name
	}
	return m.ID
}

// Size is what the layers have in the store; equal ones count once.
func (m *Manifest) Size() (n int64) {
	for _, l := range m.Layers() {
		n += l.Size
	}
	return n
}

// Layers are all that the snapshot has, each once.
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

// Expired reports whether its time to live is over.
func (m *Manifest) Expired(now time.Time) bool {
	if m.ExpiresAt == "" {
		return false
	}
	at, err := time.Parse(result.TimeFormat, m.ExpiresAt)
	return err == nil && !now.Before(at)
}

// Parse reads a manifest and checks it.
func Parse(data []byte) (*Manifest, error) {
	m := new(Manifest)
	if err := json.Unmarshal(data, m); err != nil {
		return nil, damaged("the manifest is not JSON as it should be")
	}
	return m, m.check()
}

func damaged(format string, args ...any) error {
	return &result.Error{Code: "damaged", Message: "the snapshot is damaged: " + fmt.Sprintf(format, args...)}
}

func (m *Manifest) check() error {
	if m.Version != Version {
		return &result.Error{Code: "damaged", Message: fmt.Sprintf("the snapshot's manifest has version %d, and this sbxrun knows %d", m.Version, Version), Hint: "a newer sbxrun may read it"}
	}
	if !state.ValidID(m.ID) {
		return damaged("its id is %.40q", m.ID)
	}
	if m.Name != "" && state.ValidName(m.Name) != nil {
		return damaged("its name is %.80q", m.Name)
	}
	for _, at := range []string{m.CreatedAt, m.ExpiresAt} {
		if _, err := time.Parse(result.TimeFormat, at); err != nil && (at != "" || m.CreatedAt == "") {
			return damaged("a time is %.40q", at)
		}
	}
	if m.Sandbox != "" && !state.ValidID(m.Sandbox) || m.SandboxName != "" && state.ValidName(m.SandboxName) != nil {
		return damaged("its sandbox is %.40q %.80q", m.Sandbox, m.SandboxName)
	}
	if !clean(m.Workdir) {
		return damaged("its working directory is %.80q", m.Workdir)
	}
	if len(m.Trees) == 0 || len(m.Trees) > maxTrees {
		return damaged("it has %d trees", len(m.Trees))
	}
	seen := map[string]bool{}
	for _, t := range m.Trees {
		if !clean(t.Dest) || !clean(t.Source) || seen[t.Dest] {
			return damaged("a tree is of %.80q at %.80q", t.Source, t.Dest)
		}
		seen[t.Dest] = true
		if mode, err := strconv.ParseUint(t.Mode, 8, 32); t.Mode != "" && (err != nil || mode > 0o777) {
			return damaged("the mode of %q is %.40q", t.Dest, t.Mode)
		}
		if t.First().IsZero() {
			return damaged("the time of %q is %.40q", t.Dest, t.Since)
		}
		if len(t.Layers) == 0 || len(t.Layers) > MaxLayers {
			return damaged("%q has %d layers", t.Dest, len(t.Layers))
		}
		for _, l := range t.Layers {
			if len(l.SHA256) != 64 || !state.IsHex(l.SHA256) || l.Size <= 0 || l.Size > maxBytes || l.Bytes <= 0 || l.Bytes > maxBytes || l.Entries < 0 || l.Entries > MaxEntries {
				return damaged("a layer of %q is %.80q with %d bytes", t.Dest, l.SHA256, l.Bytes)
			}
		}
	}
	return nil
}

// clean reports whether a path is absolute, in its shortest form, and no longer than paths can be.
func clean(p string) bool {
	return path.IsAbs(p) && path.Clean(p) == p && len(p) < 4096 && !strings.ContainsRune(p, 0)
}
