package enter

import (
	"strings"

	"golang.org/x/sys/unix"
)

// RootDir is where the new root of a room is mounted before it becomes the root.
const RootDir = "/.root"

// Root replaces bwrap's root with an overlay, in which the files and mounts of bwrap and of the rest of the furnishing
// cover the files in its layers. The directories on the path to a mount are therefore always bwrap's own, and a symbolic
// link in a layer cannot redirect a mount.
type Root struct {
	Overlay
	Moved []string // mounts in bwrap's root, except mounts inside another one
}

// root lays out the calls that make r the root. They run after all other mounts are in place.
func (s *script) root(r *Root) {
	s.open(slotTarget, RootDir, s.dir)
	s.scratch(&r.Overlay)
	// bwrap's root as a layer, and above it a whiteout (overlayfs(5)) for RootDir itself.
	const hide, made = "hide", "made"
	s.Do(StepOverlay, unix.SYS_MKDIRAT, unix.AT_FDCWD, hide, 0o755)
	s.Do(StepOverlay, unix.SYS_MKNODAT, unix.AT_FDCWD, hide+RootDir, unix.S_IFCHR, 0)
	s.open(slotDir, "/", s.dir)
	s.clone(slotMount, slotDir)
	s.attach(slotMount, made)
	s.close(slotDir)
	lowers, upper, work := s.layers(&r.Overlay)
	s.removeLayersDir()
	s.union(append([]string{hide, made}, lowers...), upper, work)
	s.Do(StepOverlay, unix.SYS_FCHDIR, slotMount)
	for _, name := range r.Moved {
		s.open(slotDir, name, s.any)
		s.Do(StepMount, unix.SYS_MOVE_MOUNT, slotDir, "", unix.AT_FDCWD, strings.TrimPrefix(name, "/"), unix.MOVE_MOUNT_F_EMPTY_PATH)
		s.close(slotDir)
	}
	// pivot_root(2), NOTES: the old root is then the uppermost mount at ".".
	s.Do(StepMount, unix.SYS_PIVOT_ROOT, ".", ".")
	s.Do(StepMount, unix.SYS_UMOUNT2, ".", unix.MNT_DETACH)
	s.Do(StepMount, unix.SYS_CHDIR, "/")
	s.finish(&r.Overlay)
}
