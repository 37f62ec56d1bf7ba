// Package overlay compares the changes of a sandbox to a directory of the host (room.Overlay) with
// the original, prints the differences, and applies them to the original.
//
// A command has written the layer, and may still be writing to it, so nothing in it is trusted, and
// package tree reads it. The layers of a snapshot below it were written by commands, too. In such
// an overlay the kernel neither makes nor follows redirects (mount option userxattr, overlayfs.rst).
// The sandbox therefore sees the uppermost layer's file at each path.
package overlay

import (
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/hostfiles"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/safeopen"
	"github.com/sbxrun/sbxrun/internal/tree"
)

// Kind is the kind of a change.
type Kind string

// Kinds of a [Change].
const (
	Added   Kind = "added"
	Changed Kind = "changed" // other content, target or type
	Deleted Kind = "deleted"
	Mode    Kind = "mode" // only other permissions
)

// Type is the type of a file.
type Type string

// Types of files. Other is a device, a FIFO or a socket, which is never applied.
const (
	File      Type = "file"
	Directory Type = "directory"
	Link      Type = "link"
	Other     Type = "other"
)

// Change is a path at which layer and original differ. The contents of a deleted directory are part of
// that directory's change.
type Change struct {
	Path string `json:"path"` // relative to the overlay; "." is the directory itself
	Kind Kind   `json:"change"`
	Type Type   `json:"type"`           // current type, or type of a deleted file
	Was  Type   `json:"was,omitempty"`  // previous type, if different
	Size int64  `json:"size,omitempty"` // current size of a file
	// Permissions, except for links.
	Mode    string `json:"mode,omitempty"` // current
	WasMode string `json:"was_mode,omitempty"`
	Target  string `json:"target,omitempty"` // target of a link
	Same    string `json:"same,omitempty"`   // first path of the same file (hard link)
	// Conflict is true if the original has changed or was created since the sandbox began.
	Conflict bool `json:"conflict,omitempty"`
	// Held is true if programs on the host execute or trust the file (package hostfiles). Apply makes the
	// change only with Options.All, or after [Tree.Release].
	Held       bool `json:"held_back,omitempty"`
	Executable bool `json:"executable,omitempty"` // newly executable, by its mode or its first line ([Tree.Mark])
	Outside    bool `json:"outside,omitempty"`    // a link that may lead out of the original

	mode  uint32
	layer int           // index in Tree.Layers
	why   *result.Error // the conflict of a directory above
}

// Tree is an overlay to be compared.
type Tree struct {
	Layers []*os.File // directories of the layers, the uppermost first: the sandbox's own, then a snapshot's
	Source *os.File   // the original's directory
	Since  time.Time  // later changes of the original are conflicts

	Entries, Text int // bounds as in [tree.Walk]; 0 means the default

	Count func(entries, text int) error // see [tree.Walk]

	ours map[tree.Inode]unix.Stat_t // files with their last change by Apply, or by git status (see sameIndex)
	// seen are the directories of the original that were compared or created by Apply.
	seen map[string]tree.Inode

	top      string // prefix of paths for package hostfiles
	owner    uint32 // owner of the original's directory
	root     bool   // this process runs as root
	layered  bool   // the original is on overlayfs
	replaced bool   // the original's directory is not the one that the sandbox saw
	index    string // digest of the original's .git/index when the sandbox began (hostfiles.GitIndex)
}

// Open opens an overlay: its layer, which the caller still owns, the directories between layer and
// original, the uppermost first, and the original at source. It follows only links that others could not
// have made (package safeopen).
func Open(layer *os.File, source string, since time.Time, lower ...string) (t *Tree, err error) {
	t = &Tree{Layers: []*os.File{layer}, Since: since, seen: map[string]tree.Inode{}, root: os.Geteuid() == 0}
	defer func() {
		if err != nil {
			t.Close()
			t = nil
		}
	}()
	for _, dir := range lower {
		f, err := openDir(dir)
		if err != nil {
			return t, &result.Error{Code: "layer", Message: "cannot open a layer of its snapshot: " + err.Error(), Err: err}
		}
		t.Layers = append(t.Layers, f)
	}
	if t.Source, err = openDir(source); err != nil {
		return t, &result.Error{Code: "original", Message: "cannot open the original: " + err.Error(), Err: err}
	}
	t.top = hostfiles.Top(source, repository(t.Source))
	var fs unix.Statfs_t
	err = unix.Fstatfs(proc.Descriptor(t.Source), &fs)
	t.layered = fs.Type == unix.OVERLAYFS_SUPER_MAGIC
	return t, err
}

// repository reports whether a directory is a bare git repository.
func repository(dir *os.File) bool {
	for _, name := range []string{"HEAD", "objects", "refs"} {
		if look(proc.Descriptor(dir), name) == nil {
			return false
		}
	}
	return true
}

// Expect sets the original's identity and the digest of its git index ([hostfiles.GitIndex]) when the sandbox began;
// "" means unknown.
func (t *Tree) Expect(base, index string) {
	now, err := tree.Identity(proc.Descriptor(t.Source))
	t.replaced = base != "" && (err != nil || now != base)
	t.index = index
}

// sameIndex reports whether a layer's git index has the same entries as the original's. If the original's entries are
// those from when the sandbox began, its change on the host is not a conflict: git status on the host writes the
// index whenever the status of a file has changed.
func (w *comparison) sameIndex(e *tree.Entry, was *unix.Stat_t) bool {
	if was == nil || typeOf(was) != File || typeOf(&e.Stat) != File {
		return false
	}
	now := hostfiles.GitIndex(proc.Descriptor(w.Source))
	if now == "" {
		return false
	}
	if now == w.index {
		if w.ours == nil {
			w.ours = map[tree.Inode]unix.Stat_t{}
		}
		w.ours[tree.InodeOf(was)] = *was
	}
	return permissions(was) == permissions(&e.Stat) && now == hostfiles.GitIndex(proc.Descriptor(w.Layers[w.layer]))
}

func openDir(name string) (*os.File, error) {
	place, err := safeopen.Dir(name)
	if err != nil {
		return nil, err
	}
	defer unix.Close(place)
	fd, err := safeopen.Reopen(place, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}

// Close closes the files opened by [Open].
func (t *Tree) Close() {
	for _, f := range append(t.Layers[1:], t.Source) {
		if f != nil {
			f.Close() // only read
		}
	}
}
