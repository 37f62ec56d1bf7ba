// Package overlay reads what a sandbox has written over a directory of the host (room.Overlay):
// it compares the layer with the original, shows the difference, and makes it there.
//
// A command has written the layer, and may be writing to it at the moment: nothing in it is
// trusted, and package tree reads it. Commands have written the layers of a snapshot, which may
// lie below it, too.
// The kernel makes no redirects and follows none in such an overlay (mount option userxattr,
// overlayfs.rst), so what the uppermost layer has at a path is what the sandbox sees there.
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

// Kind is what has become of a path.
type Kind string

// Kinds of a [Change].
const (
	Added   Kind = "added"
	Changed Kind = "changed" // what it holds, where it leads, or what it is
	Deleted Kind = "deleted"
	Mode    Kind = "mode" // nothing but its permissions
)

// Type is what there is at a path.
type Type string

// Types of what is at a path. The last is a device, a FIFO or a socket, which is never applied.
const (
	File      Type = "file"
	Directory Type = "directory"
	Link      Type = "link"
	Other     Type = "other"
)

// Change is one path at which layer and original differ. What is below a directory that was
// deleted is part of that change.
type Change struct {
	Path string `json:"path"` // relative to the overlay; "." is the directory itself
	Kind Kind   `json:"change"`
	Type Type   `json:"type"`           // now; of what was deleted, before
	Was  Type   `json:"was,omitempty"`  // Changed: before, if it was something else
	Size int64  `json:"size,omitempty"` // of a file, now
	// Permissions, and not of links.
	Mode    string `json:"mode,omitempty"` // now
	WasMode string `json:"was_mode,omitempty"`
	Target  string `json:"target,omitempty"` // of a link
	Same    string `json:"same,omitempty"`   // of a file: the first path of the same (hard link)
	// Conflict says that the original has changed, or come into being, since the sandbox began.
	Conflict bool `json:"conflict,omitempty"`
	// Held is true if programs on the host execute or trust the file (package hostfiles). An apply makes the
	// change only with Options.All, or after [Release].
	Held       bool `json:"held_back,omitempty"`
	Executable bool `json:"executable,omitempty"` // now, by its mode or its first line, and not before ([Tree.Mark])
	Outside    bool `json:"outside,omitempty"`    // a link that may lead out of the original

	mode  uint32
	layer int           // which has it, of Tree.Layers
	why   *result.Error // the conflict, if it is about a directory above
}

// Tree is an overlay that is looked at.
type Tree struct {
	Layers []*os.File // their directories, the uppermost first: what the sandbox writes to, and those of a snapshot
	Source *os.File   // the original's directory
	Since  time.Time  // conflicts are counted from here

	Entries, Text int // bounds of what is looked at, as of a [tree.Walk]; 0 for a million, and 256 MiB

	Count func(entries, text int) error // see [tree.Walk]

	ours map[tree.Inode]unix.Stat_t // what an apply has made of files with several names
	// seen are the directories of the original that were compared, and those that an apply has made.
	seen map[string]tree.Inode

	top      string // before paths, for package hostfiles
	owner    uint32 // of the original's directory
	root     bool   // this process is root's
	layered  bool   // the original is on overlayfs
	replaced bool   // the original's directory is not the one that the sandbox saw
	index    string // digest of the original's .git/index when the sandbox began (hostfiles.GitIndex)
}

// Open opens an overlay: its layer, which stays the caller's; the directories between that and the
// original, the uppermost first; and the original at source. Links are followed if others could not
// have made them (package links).
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
			return t, &result.Error{Code: "layer", Message: "a layer of its snapshot cannot be opened: " + err.Error(), Err: err}
		}
		t.Layers = append(t.Layers, f)
	}
	if t.Source, err = openDir(source); err != nil {
		return t, &result.Error{Code: "original", Message: "the original cannot be opened: " + err.Error(), Err: err}
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

// sameIndex reports whether a layer's git index has the same entries as the original's. If the original's
// entries are those from when the sandbox began, its change on the host is no conflict: git status on the
// host writes the index whenever the status of a file has changed.
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

// Close closes what [Open] has opened.
func (t *Tree) Close() {
	for _, f := range append(t.Layers[1:], t.Source) {
		if f != nil {
			f.Close() // directories
		}
	}
}
