package enter

import (
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/helper"
)

// This file finishes the mounts of a new room. bwrap creates mount points only in its own
// tmpfs. If a destination lies in a host directory, another process may replace a directory
// on its path with a symbolic link, and bwrap before 0.12.0 follows that link to the host's
// root (CVE-2026-87766). So bwrap mounts below [LayersDir], and the entering process
// moves the mount to its destination, or for an overlay mounts it there. It opens the path component by component, without
// following links, and in the room's mount namespace, from which the host's root cannot be
// reached.
//
// bwrap resolves the path of a source itself, so another process may replace the source after
// sbxrun has opened it. The entering process compares each bind with the file that sbxrun
// holds open.

// LayersDir is a tmpfs for mounts that are moved or cloned later. Furnishing the room removes it.
const LayersDir = "/.layers"

// Bind is a mount made by bwrap.
type Bind struct {
	Place string // in the room
	// Dev and Inode identify the source. If Inode is 0, the source is not compared.
	Dev, Inode uint64
}

// Mount is a mount to be finished.
type Mount struct {
	Dest string
	// Base is the mount, made by bwrap, in which Dest lies. "" means that bwrap made the mount at Dest.
	Base string
	File bool // not a directory
	Bind Bind // Place is below LayersDir, or Dest if Base is ""
	// Overlay, if not nil, is mounted at Dest instead of the bind.
	Overlay *Overlay
}

// Clone shows a part of a tree that bwrap has bound below [LayersDir]. Its Dest is in one of
// bwrap's own directories.
type Clone struct {
	Source, Dest string
	File         bool // not a directory
}

// copied reports whether m is one of [Furnishing.Files], and not a mount yet.
func (m Mount) copied() bool { return m.File && m.Bind.Inode == 0 }

// byDescriptors are the flags of a move_mount(2) whose paths are empty.
const byDescriptors = unix.MOVE_MOUNT_F_EMPTY_PATH | unix.MOVE_MOUNT_T_EMPTY_PATH

// clones lays out the calls for a list of clones. If a source is gone from the host, the mount point stays empty.
// A mount(2) costs half as much as open_tree(2) and move_mount(2). It follows a link in the source, but that leads
// nowhere: the host's root cannot be reached.
func (s *script) clones(list []Clone) {
	for _, c := range list {
		if c.File {
			s.Do(StepMount, unix.SYS_MKNODAT, unix.AT_FDCWD, c.Dest, unix.S_IFREG|FileMode, 0)
		} else {
			s.Do(StepMount, unix.SYS_MKDIRAT, unix.AT_FDCWD, c.Dest, 0o755)
		}
		s.Allow(0, unix.EEXIST)
		s.Do(StepMount, unix.SYS_MOUNT, c.Source, c.Dest, 0, unix.MS_BIND|unix.MS_REC)
		s.Allow(0, unix.ENOENT)
	}
}

// all lays out the calls for a list of mounts, parents before mounts inside them, and then for the root,
// if it is not nil. staged is true if there are mounts below LayersDir already.
func (s *script) all(list []Mount, root *Root, staged bool) {
	// First the mounts that bwrap made in place: later ones may lie in them.
	for i := range list {
		if m := &list[i]; m.Base == "" {
			s.Mount(i + 1)
			s.open(slotMount, m.Dest, s.any)
			s.check(slotMount, &m.Bind)
			s.close(slotMount)
		}
	}
	s.Mount(0)
	if slices.ContainsFunc(list, Mount.copied) {
		// The clones of files in it inherit these flags.
		s.Do(StepMount, unix.SYS_MOUNT, 0, LayersDir, 0, unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV, 0)
	}
	for i := range list {
		m := &list[i]
		s.Mount(i + 1)
		switch {
		case m.Overlay != nil:
			s.overlay(m)
		case m.Base != "":
			s.move(m)
		}
		staged = staged || m.Base != ""
	}
	s.Mount(0)
	switch {
	case root != nil:
		s.Mount(len(list) + 1)
		s.root(root)
	case staged:
		s.removeLayersDir()
	}
}

// removeLayersDir unmounts and removes [LayersDir].
func (s *script) removeLayersDir() {
	s.Do(StepMount, unix.SYS_UMOUNT2, LayersDir, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	s.Do(StepMount, unix.SYS_UNLINKAT, unix.AT_FDCWD, LayersDir, unix.AT_REMOVEDIR)
}

// move lays out the calls that move a mount from below [LayersDir] to its destination.
func (s *script) move(m *Mount) {
	if m.copied() {
		s.open(slotDir, m.Bind.Place, s.any)
		s.clone(slotMount, slotDir)
		s.close(slotDir)
	} else {
		s.open(slotMount, m.Bind.Place, s.any)
	}
	s.check(slotMount, &m.Bind)
	s.makePoint(m)
	s.Do(StepMount, unix.SYS_MOVE_MOUNT, slotMount, "", slotTarget, "", byDescriptors)
	s.confirm(slotMount, m.Dest)
	s.close(slotTarget)
	s.close(slotMount)
}

// makePoint lays out the calls that open the mount point at m.Dest as slotTarget. They create
// missing components, with the sandbox's identity.
func (s *script) makePoint(m *Mount) {
	names := strings.Split(strings.TrimPrefix(m.Dest[len(m.Base):], "/"), "/")
	at, next := slotTarget, slotPlace
	if len(names)%2 == 1 {
		at, next = next, at // so that the last one is slotTarget
	}
	s.open(at, m.Base, s.dir)
	for i, name := range names {
		how := s.dir
		if m.File && i == len(names)-1 {
			how = s.any
			s.Do(StepMount, unix.SYS_MKNODAT, at, name, unix.S_IFREG|FileMode, 0)
		} else {
			s.Do(StepMount, unix.SYS_MKDIRAT, at, name, 0o755)
		}
		s.Allow(0, unix.EEXIST)
		s.Add(StepMount, next, unix.SYS_OPENAT2, at, name, how, openHowSize)
		s.close(at)
		at, next = next, at
	}
}

// check lays out the comparison of an open file with the source of a bind.
func (s *script) check(fd helper.Slot, b *Bind) {
	if b.Inode == 0 {
		return
	}
	s.stat(fd, 0)
	s.Do(StepSource, helper.SameFile, s.stats[0], int(unix.Major(b.Dev)), int(unix.Minor(b.Dev)), int(b.Inode))
}

// confirm lays out the check that a path leads to a mount, because another process may have
// moved the mount point at the same time.
func (s *script) confirm(mount helper.Slot, dest string) {
	s.stat(mount, 0)
	s.open(slotDir, dest, s.any)
	s.stat(slotDir, 1)
	s.close(slotDir)
	s.Do(StepMount, helper.SameMount, s.stats[0], s.stats[1])
}

// stat lays out a statx(2) of a descriptor. It does not query the server of a network file system,
// because neither the inode nor the mount can have changed.
func (s *script) stat(fd helper.Slot, n int) {
	s.Do(StepMount, unix.SYS_STATX, fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_INO|unix.STATX_MNT_ID, s.stats[n])
}
