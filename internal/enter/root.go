package enter

import (
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/helper"
)

// RootDir is where the new root of a room is mounted before it becomes the root.
const RootDir = "/.root"

// Root replaces bwrap's root with an overlayfs, in which the files and mounts of bwrap and of the rest of the furnishing
// cover the files in Lower. The directories on the path to a mount are therefore always bwrap's own, and a symbolic link
// in Lower cannot redirect a mount.
type Root struct {
	Lower []Bind // directories below LayersDir, the uppermost first
	// Overlay, if not nil, makes the root writable. Its Lower directories are above the Root's.
	Overlay *Overlay
	Moved   []string // mounts in bwrap's root, except mounts inside another one
}

// root lays out the calls that make r the root. They run after all other mounts are in place.
func (s *script) root(r *Root) {
	s.open(slotTarget, RootDir, s.dir)
	s.scratch(r.Overlay.scratchSize())
	// bwrap's root as a layer, and above it a whiteout (overlayfs(5)) for RootDir itself.
	const hide, made = "hide", "made"
	s.Do(StepOverlay, unix.SYS_MKDIRAT, unix.AT_FDCWD, hide, 0o755)
	s.Do(StepOverlay, unix.SYS_MKNODAT, unix.AT_FDCWD, hide+RootDir, unix.S_IFCHR, 0)
	s.open(slotDir, "/", s.dir)
	s.clone(slotMount, slotDir)
	s.attach(slotMount, made)
	s.close(slotDir)
	layers := []string{hide, made}
	lowers := r.Lower
	if r.Overlay != nil {
		lowers = slices.Concat(r.Overlay.Lower, lowers)
	}
	for i, lower := range lowers {
		layers = append(layers, strconv.Itoa(i))
		s.take(lower, layers[i+2])
	}
	var upper, work string
	if r.Overlay != nil {
		upper, work = s.upper(r.Overlay)
	}
	s.removeLayersDir()
	s.Add(StepOverlay, slotFS, unix.SYS_FSOPEN, "overlay", unix.FSOPEN_CLOEXEC)
	s.option("lowerdir", strings.Join(layers, ":"))
	if r.Overlay != nil {
		s.option("upperdir", upper)
		s.option("workdir", work)
	}
	s.overlayOptions()
	s.mount(slotMount)
	s.Do(StepOverlay, unix.SYS_UMOUNT2, ".", unix.MNT_DETACH)
	s.Do(StepOverlay, unix.SYS_MOVE_MOUNT, slotMount, "", slotTarget, "", byDescriptors)
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
	if r.Overlay != nil {
		s.sendLayer()
	}
	for _, n := range []helper.Slot{slotMount, slotPlace, slotTarget} {
		s.close(n)
	}
}
