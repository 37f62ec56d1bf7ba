package layers

import (
	"archive/tar"
	"bytes"
	"io"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/safeopen"
	"github.com/sbxrun/sbxrun/internal/tree"
)

// Merge applies a plain layer with its list of changes to the tree of an image. Files of the layer become hard links in
// the tree, so both must be on one file system. New directories get the owner, unless that is nil.
func Merge(root, layer *os.File, changes io.Reader, owner *proc.Cred) error {
	list, err := io.ReadAll(io.LimitReader(changes, maxChanges+maxParents))
	if err != nil {
		return err
	}
	m := &merge{root: int(root.Fd()), owner: owner, parents: map[string]bool{}, copies: map[uint64]int{}}
	defer m.forget()
	all, err := parseChanges(list)
	if err != nil {
		return err
	}
	// The layer may delete a file that it links to, so save these files before the deletions.
	saved := tree.Hidden()
	defer func() { _ = tree.Remove(m.root, saved) }() // after an error, the caller removes the tree
	links := map[string]int{}
	for i, c := range all {
		if c.kind != changeLink {
			continue
		}
		first := c.target
		if before, ok := links[first]; ok { // a link to a link
			first = path.Join(saved, strconv.Itoa(before))
		}
		if err := m.save(first, saved, strconv.Itoa(i)); err != nil {
			return misplaced(c.name, err)
		}
		links[c.name] = i
	}
	for _, c := range all {
		switch c.kind {
		case changeDeleted:
			err = m.delete(c.name)
		case changeOpaque:
			err = m.empty(c.name, saved)
		case changeParent:
			m.parents[c.name] = true
		}
		if err != nil {
			return misplaced(c.name, err)
		}
	}
	if err := m.dir(int(layer.Fd()), m.root, ""); err != nil {
		return err
	}
	for i, c := range all {
		if c.kind == changeLink {
			if err := m.link(int(layer.Fd()), c.name, path.Join(saved, strconv.Itoa(i))); err != nil {
				return misplaced(c.name, err)
			}
		}
	}
	return tree.Remove(m.root, saved)
}

// change is an item of the list of changes.
type change struct {
	kind         byte
	name, target string // target of a link
}

func parseChanges(list []byte) (all []change, err error) {
	next := func() (text string) {
		word, rest, ok := bytes.Cut(list, []byte{0})
		if !ok {
			err = refused("the list of its changes is cut off")
		}
		list = rest
		return string(word)
	}
	for len(list) > 0 && err == nil {
		c := change{kind: list[0]}
		list = list[1:]
		if c.name = next(); c.kind == changeLink {
			c.target = next()
		}
		all = append(all, c)
	}
	return all, err
}

type merge struct {
	root    int
	owner   *proc.Cred
	parents map[string]bool // directories that the layer does not list
	copies  map[uint64]int  // descriptors of copies, by the inode that has no more links
}

// inside opens a path in the tree. Symbolic links are resolved within the tree.
func (m *merge) inside(name string, flags int) (int, error) {
	if name == "" {
		name = "."
	}
	return safeopen.InRoot(m.root, name, flags, unix.RESOLVE_NO_XDEV)
}

// parent opens the directory of a name in the tree, or returns -1 if it does not exist.
func (m *merge) parent(name string) (fd int, base string, err error) {
	fd, err = m.inside(strings.TrimSuffix(path.Dir(name), "."), unix.O_RDONLY|unix.O_DIRECTORY)
	if absent(err) {
		return -1, "", nil
	}
	return fd, path.Base(name), err
}

func absent(err error) bool { return err == unix.ENOENT || err == unix.ENOTDIR || err == unix.ELOOP }

// keeping runs f, which changes a directory, and restores the time of the directory.
func keeping(dir int, f func() error) error {
	var st unix.Stat_t
	if err := unix.Fstat(dir, &st); err != nil {
		return err
	}
	if err := f(); err != nil {
		return err
	}
	return restamp(dir, &st)
}

func restamp(dir int, st *unix.Stat_t) error {
	return unix.UtimesNanoAt(dir, ".", []unix.Timespec{st.Mtim, st.Mtim}, 0)
}

func (m *merge) delete(name string) error {
	dir, base, err := m.parent(name)
	if err != nil || dir < 0 {
		return err
	}
	defer unix.Close(dir)
	return keeping(dir, func() error { return tree.Remove(dir, base) })
}

// empty removes everything in a directory but one name.
func (m *merge) empty(name, except string) error {
	dir, err := m.inside(name, unix.O_RDONLY|unix.O_DIRECTORY)
	if absent(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(dir)
	return keeping(dir, func() error {
		for {
			names, err := namesIn(dir, name)
			names = slices.DeleteFunc(names, func(name string) bool { return name == except })
			if err != nil || len(names) == 0 {
				return err
			}
			for _, name := range names {
				if err := tree.Remove(dir, name); err != nil {
					return err
				}
			}
		}
	})
}

// namesIn lists the names in an open directory.
func namesIn(dir int, name string) ([]string, error) {
	again, err := tree.Open(dir, ".", unix.O_RDONLY|unix.O_DIRECTORY) // the os.File closes it
	if err != nil {
		return nil, err
	}
	list := os.NewFile(uintptr(again), name)
	defer list.Close()
	return list.Readdirnames(-1)
}

// dir merges the directory from of the layer into the directory to of the tree. Both descriptors are readable.
func (m *merge) dir(from, to int, at string) error {
	names, err := namesIn(from, at)
	if err != nil {
		return err
	}
	for _, name := range names {
		if err := m.entry(from, to, path.Join(at, name), name); err != nil {
			return misplaced(path.Join(at, name), err)
		}
	}
	return nil
}

func (m *merge) entry(from, to int, at, name string) error {
	var st unix.Stat_t
	if err := unix.Fstatat(from, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return m.subdir(from, to, at, name, &st)
	}
	return m.replace(from, name, to, name)
}

// replace links a file, and removes the previous file of that name.
func (m *merge) replace(from int, name string, to int, base string) error {
	err := m.place(from, name, to, base)
	if err == unix.EEXIST {
		if err = tree.Remove(to, base); err == nil {
			err = m.place(from, name, to, base)
		}
	}
	return err
}

// maxCopies bounds the descriptors of copies. No usual layer has this many files with so many links.
const maxCopies = 64

// place links a file. Each file system limits the links of a file; beyond that, further names share a copy of it.
func (m *merge) place(from int, name string, to int, base string) error {
	err := unix.Linkat(from, name, to, base, 0)
	if err != unix.EMLINK {
		return err
	}
	var st unix.Stat_t
	if err := unix.Fstatat(from, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	if fd, ok := m.copies[st.Ino]; ok {
		if err := tree.Link(fd, to, base); err != unix.EMLINK {
			return err
		}
		unix.Close(fd)
		delete(m.copies, st.Ino)
	}
	if err := m.copy(from, name, to, base, &st); err != nil {
		return err
	}
	if len(m.copies) >= maxCopies {
		m.forget()
	}
	fd, err := tree.Open(to, base, unix.O_PATH)
	if err == nil {
		m.copies[st.Ino] = fd
	}
	return err
}

// forget closes the copies.
func (m *merge) forget() {
	for _, fd := range m.copies {
		unix.Close(fd)
	}
	clear(m.copies)
}

// copy copies a file or a symbolic link.
func (m *merge) copy(from int, name string, to int, base string, st *unix.Stat_t) error {
	l := layer{root: to, owner: m.owner, parent: -1}
	h := &tar.Header{Mode: int64(st.Mode & 0o777), ModTime: time.Unix(st.Mtim.Unix())}
	if st.Mode&unix.S_IFMT == unix.S_IFLNK {
		target := make([]byte, unix.PathMax)
		n, err := unix.Readlinkat(from, name, target)
		if err != nil {
			return err
		}
		h.Linkname = string(target[:n])
		return l.symlink(base, h)
	}
	fd, err := tree.Open(from, name, unix.O_RDONLY)
	if err != nil {
		return err
	}
	source := os.NewFile(uintptr(fd), name)
	defer source.Close()
	return l.file(base, h, source)
}

func (m *merge) subdir(from, to int, at, name string, st *unix.Stat_t) error {
	unlisted := m.parents[at]
	into, made, err := m.makeDir(to, at, name, unlisted)
	if err != nil {
		return err
	}
	defer unix.Close(into)
	var before unix.Stat_t
	if err := unix.Fstat(into, &before); err != nil {
		return err
	}
	source, err := tree.Open(from, name, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	err = m.dir(source, into, at)
	unix.Close(source)
	if err != nil {
		return err
	}
	if unlisted && !made {
		return restamp(into, &before)
	}
	if err := unix.Fchmod(into, st.Mode&0o777); err != nil {
		return err
	}
	return restamp(into, st)
}

// makeDir opens a directory of the tree, and creates it if necessary. If the layer does not list it, it may also be a link
// to a directory in the tree.
func (m *merge) makeDir(to int, at, name string, unlisted bool) (fd int, made bool, err error) {
	err = unix.Mkdirat(to, name, 0o700)
	if err == unix.EEXIST {
		fd, err = tree.Open(to, name, unix.O_RDONLY|unix.O_DIRECTORY)
		if err == nil {
			return fd, false, nil
		}
		if !absent(err) {
			return -1, false, err
		}
		if unlisted {
			if fd, err = m.inside(at, unix.O_RDONLY|unix.O_DIRECTORY); err == nil {
				return fd, false, nil
			}
		}
		if err = tree.Remove(to, name); err == nil {
			err = unix.Mkdirat(to, name, 0o700)
		}
	}
	if err == nil && m.owner != nil {
		err = unix.Fchownat(to, name, int(m.owner.UID), int(m.owner.GID), unix.AT_SYMLINK_NOFOLLOW)
	}
	if err == nil {
		fd, err = tree.Open(to, name, unix.O_RDONLY|unix.O_DIRECTORY)
	}
	return fd, true, err
}

// save links a file of a lower layer into a directory of the tree, which it creates if necessary. A missing file is
// skipped, as other tools do.
func (m *merge) save(first, dir, as string) error {
	source, last, err := m.parent(first)
	if err != nil || source < 0 {
		return err
	}
	defer unix.Close(source)
	var st unix.Stat_t
	if err := unix.Fstatat(source, last, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil || st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return nil
	}
	if err := unix.Mkdirat(m.root, dir, 0o700); err != nil && err != unix.EEXIST {
		return err
	}
	return m.place(source, last, m.root, path.Join(dir, as))
}

// link creates another name for a saved file.
func (m *merge) link(layer int, name, saved string) error {
	if fd, err := tree.Open(layer, name, unix.O_PATH); err == nil { // a later entry of the layer has the name
		return unix.Close(fd)
	}
	dir, base, err := m.parent(name)
	if err != nil || dir < 0 {
		return err
	}
	defer unix.Close(dir)
	return keeping(dir, func() error {
		err := m.replace(m.root, saved, dir, base)
		if err == unix.ENOENT { // not saved
			err = nil
		}
		return err
	})
}
