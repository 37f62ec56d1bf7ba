package layers

import (
	"archive/tar"
	"bufio"
	"io"
	"os"
	"path"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/tree"
)

// This file unpacks layers of foreign images. Unlike Unpack, which reads only layers that this package packed, it accepts
// what other tools write: absolute and repeated names, missing directories, devices (which it skips), deletions of any file
// type. It creates no whiteouts, because overlayfs refuses them on an overlay. Instead, a list next to the tree
// records the changes to lower layers, for Merge.

// Kinds of changes. In the list of changes each is one byte, followed by a path and NUL.
const (
	changeDeleted = 'd'
	changeOpaque  = 'o'
	changeParent  = 'p' // a directory that the layer contains, but does not list
	changeLink    = 'l' // a hard link to a file that is not in the layer; another path and NUL follow
)

const (
	maxChanges = 32 << 20 // bytes of the list
	maxParents = 16 << 20 // bytes of the paths of unlisted directories
)

// Plain unpacks the tar of a layer into an empty private directory, and writes the list of changes. The files get the
// owner, unless that is nil. Owners, setuid bits and extended attributes of the tar are dropped, and owners can read all
// files and search all directories. Missing directories count as entries. After an error the caller removes the
// directory.
func Plain(from io.Reader, root *os.File, changes io.Writer, owner *proc.Cred, most Count) (Count, error) {
	p := &plain{layer: layer{root: int(root.Fd()), owner: owner, parent: -1}, changes: bufio.NewWriter(changes), parents: map[string]bool{}, most: most.Entries}
	defer p.leave()
	over := &result.Error{Code: "too-large", Message: "the image has more bytes unpacked than allowed", Hint: "raise --max-size"}
	c, err := read(from, most, over, p.entry)
	if c.Entries += len(p.parents); err == nil && c.Entries > most.Entries {
		err = tooMany(most.Entries)
	}
	if err == nil {
		err = p.finish()
	}
	c.LeftOut = p.leftOut
	return c, err
}

type plain struct {
	layer
	changes *bufio.Writer
	written int             // bytes of changes
	parents map[string]bool // unlisted directories
	most    int             // of them
	text    int             // bytes of parents
	leftOut int
}

// plainName cleans the name of an entry, which may be absolute. It returns "" for the top directory.
func plainName(name string) (string, error) {
	clean := path.Clean(strings.TrimLeft(name, "/"))
	if clean == "." {
		return "", nil
	}
	return cleanName(clean)
}

func (p *plain) entry(h *tar.Header, content io.Reader) error {
	if h.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	name, err := plainName(h.Name)
	if err != nil || name == "" {
		return err
	}
	dir, base := path.Split(name)
	if kind := h.PAXRecords[tree.Kind]; kind != tree.KindFile {
		if kind == "" && (strings.HasPrefix(name, ".wh..wh.") || strings.Contains(name, "/.wh..wh.")) {
			if base == tree.OpaqueMarker {
				return p.change(changeOpaque, strings.TrimSuffix(dir, "/"))
			}
			return nil // aufs's own files
		}
		if hidden, ok := strings.CutPrefix(base, tree.Whiteout); ok {
			if err := checkHidden(name, hidden); err != nil {
				return err
			}
			return p.change(changeDeleted, dir+hidden)
		}
	}
	switch h.Typeflag {
	case tar.TypeDir:
		return p.dir(name, h)
	case tar.TypeReg, tar.TypeCont, tar.TypeGNUSparse:
		return p.file(name, h, content)
	case tar.TypeSymlink:
		if err := p.vacate(name); err != nil {
			return err
		}
		return p.symlink(name, h)
	case tar.TypeLink:
		first, err := plainName(h.Linkname)
		if err != nil {
			return err
		}
		return p.link(name, first)
	}
	p.leftOut++
	return nil
}

// change adds to the list of changes.
func (p *plain) change(kind byte, names ...string) error {
	p.written++
	if err := p.changes.WriteByte(kind); err != nil {
		return err
	}
	for _, name := range names {
		if p.written += len(name) + 1; p.written > maxChanges {
			return refused("too many deletions")
		}
		if _, err := p.changes.WriteString(name + "\x00"); err != nil {
			return err
		}
	}
	return nil
}

// vacate makes sure that the parent of a name exists, and removes the file of an earlier entry.
func (p *plain) vacate(name string) error {
	dir, base, err := p.at(name)
	if err != nil {
		return err
	}
	if err := unix.Unlinkat(dir, base, 0); err == nil || err == unix.ENOENT {
		return nil
	}
	p.leave() // it may be below
	if dir, base, err = p.at(name); err != nil {
		return err
	}
	if err := tree.Remove(dir, base); err != nil {
		return misplaced(name, err)
	}
	return nil
}

// at is enter, but creates missing directories.
func (p *plain) at(name string) (dir int, base string, err error) {
	if dir, base, err = p.open(name); err != unix.ENOENT {
		if err != nil {
			err = misplaced(name, err)
		}
		return dir, base, err
	}
	parent := path.Dir(name)
	up, last, err := p.at(parent)
	if err != nil {
		return -1, "", err
	}
	if err := unix.Mkdirat(up, last, 0o755); err != nil {
		return -1, "", misplaced(parent, err)
	}
	if err := p.own(up, last); err != nil {
		return -1, "", err
	}
	if err := p.unlisted(parent); err != nil {
		return -1, "", err
	}
	return p.enter(name)
}

// unlisted notes that a directory is there only because of its contents.
func (p *plain) unlisted(name string) error {
	if p.text += len(name); p.text > maxParents {
		return refused("too many directories are not listed")
	}
	if p.parents[name] = true; len(p.parents) > p.most {
		return tooMany(p.most)
	}
	return nil
}

func (p *plain) dir(name string, h *tar.Header) error {
	dir, base, err := p.at(name)
	if err != nil {
		return err
	}
	var st unix.Stat_t
	delete(p.parents, name)
	err = unix.Fstatat(dir, base, &st, unix.AT_SYMLINK_NOFOLLOW)
	if err == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return p.remember(name, h)
	}
	if err == nil {
		if err := p.vacate(name); err != nil {
			return err
		}
	}
	h.Mode |= 0o700
	return p.layer.dir(name, h)
}

// remember sets the mode and time of a directory at the end.
func (p *plain) remember(name string, h *tar.Header) error {
	if p.layer.text += len(name); p.layer.text > maxText {
		return refused("the paths of its directories are too long in total")
	}
	p.dirs = append(p.dirs, directory{name, uint32(h.Mode&0o777) | 0o700, h.ModTime})
	return nil
}

func (p *plain) file(name string, h *tar.Header, content io.Reader) error {
	if err := p.vacate(name); err != nil {
		return err
	}
	h.Mode |= 0o400
	return p.layer.file(name, h, content)
}

// link creates another name for an unpacked file or symbolic link, or notes that its first name is in a lower layer.
func (p *plain) link(name, first string) error {
	if name == first {
		return nil
	}
	if first == "" {
		return refused("%.80q is a hard link to a directory", name)
	}
	fd, err := tree.Open(p.root, first, unix.O_PATH)
	if absent(err) {
		if err := p.vacate(name); err != nil { // which creates its directory
			return err
		}
		return p.change(changeLink, name, first)
	}
	if err != nil {
		return misplaced(first, err)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return refused("%.80q is a hard link to %.80q, which is a directory", name, first)
	}
	if err := p.vacate(name); err != nil {
		return err
	}
	dir, base, err := p.enter(name)
	if err != nil {
		return err
	}
	if err := tree.Link(fd, dir, base); err != nil {
		return misplaced(name, err)
	}
	return nil
}

// finish sets the modes and times of the listed directories, and completes the list of changes.
func (p *plain) finish() error {
	p.leave()
	for _, d := range p.dirs { // of repeated entries the last counts
		if err := p.settle(d.name, d.time, func(fd int) error { return tree.Chmod(fd, d.mode) }); err != nil {
			return err
		}
	}
	for name := range p.parents {
		// The same layer always gets the same tree.
		if err := p.settle(name, time.Unix(0, 0), func(int) error { return nil }); err != nil {
			return err
		}
		if err := p.change(changeParent, name); err != nil {
			return err
		}
	}
	if p.owner != nil {
		if err := unix.Fchown(p.root, int(p.owner.UID), int(p.owner.GID)); err != nil {
			return err
		}
	}
	if err := unix.Fchmod(p.root, 0o755); err != nil {
		return err
	}
	return p.changes.Flush()
}

// settle sets the mode, with chmod, and the time of a directory, unless a later entry has replaced it.
func (p *plain) settle(name string, at time.Time, chmod func(fd int) error) error {
	fd, err := tree.Open(p.root, name, unix.O_PATH|unix.O_DIRECTORY)
	if absent(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := chmod(fd); err != nil {
		return err
	}
	return stamp(fd, ".", at)
}
