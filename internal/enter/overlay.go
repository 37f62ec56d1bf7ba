package enter

import (
	"path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/helper"
)

// This file mounts the overlays of a new room (overlayfs in the kernel's documentation; in a user namespace since Linux
// 5.11, with the option userxattr). bwrap has an option for overlays only since 0.11.
//
// The kernel gets only paths that this code has chosen. They are relative to a directory that no other process can see: a
// tmpfs, mounted for a moment over the overlay's destination, in which the layers are attached by their descriptors. So
// no user-supplied name is looked up twice or needs quoting. After the tmpfs is unmounted no path leads to a layer,
// because the overlay has its own copies of these mounts. The new layer of an overlay in memory is in the same tmpfs.

// Overlay is a view of several directories that leaves them unchanged.
type Overlay struct {
	// Lower are the layers that stay unchanged, the uppermost first.
	Lower []Bind
	// Upper is a directory on disk. It contains a directory for written files ([UpperName]) and one for the kernel
	// ([WorkName]). If it is nil, both are in memory, with Size bytes; without a Size the view is read-only.
	Upper *Bind
	Size  int64
	Mode  uint32 // of the overlay's root directory, if it is in memory
}

// writable reports whether the overlay has a layer for changes.
func (o *Overlay) writable() bool { return o.Upper != nil || o.Size > 0 }

// Names in the Upper directory of an [Overlay].
const (
	UpperName = "upper"
	WorkName  = "work"
)

// Slots of the descriptors that calls return.
const (
	slotRoom  helper.Slot = iota + 1 // a pidfd of the room's PID 1
	slotOuter                        // a user namespace
	slotLayer
	slotTarget
	slotPlace
	slotMount
	slotFS
	slotDir
	slotFile
	slotPID
	slotPayload
	slotSignals
	slotResult
	slotOwnPID    // init's pidfd, followed by the others that it sends
	slotOwnMounts // its mount namespace
	slotOwnDir    // its working directory
	slotOwnPIDs   // its PID namespace
	slotFirst     // the first of any number
)

// script lays out the calls that furnish a room.
type script struct {
	*helper.Script
	dir   helper.Ptr    // how to open a directory
	any   helper.Ptr    // how to open a file or directory
	stats [2]helper.Ptr // results of statx(2)
}

// openHowSize is the size of struct open_how (openat2(2)).
const openHowSize = 24

// statxSize is the size of struct statx (statx(2)).
const statxSize = 256

func newScript(s *helper.Script) *script {
	how := func(flags uint64) helper.Ptr { return s.Words(flags|unix.O_CLOEXEC, 0, unix.RESOLVE_NO_SYMLINKS) }
	return &script{Script: s, dir: how(unix.O_PATH | unix.O_DIRECTORY), any: how(unix.O_PATH), stats: [2]helper.Ptr{s.Space(statxSize), s.Space(statxSize)}}
}

// overlay lays out the calls that mount m.Overlay.
func (s *script) overlay(m *Mount) {
	s.makePoint(m)
	s.scratch(m.Overlay)
	s.union(s.layers(m.Overlay))
	s.Do(StepOverlay, unix.SYS_CHDIR, "/")
	s.confirm(slotMount, m.Dest)
	s.finish(m.Overlay)
}

// layers attaches the layers and returns their paths. A writable overlay's new layer becomes slotLayer.
func (s *script) layers(o *Overlay) (lowers []string, upper, work string) {
	for i, lower := range o.Lower {
		lowers = append(lowers, strconv.Itoa(i))
		s.take(lower, lowers[i])
	}
	if o.writable() {
		upper, work = s.upper(o)
	}
	return lowers, upper, work
}

// union mounts an overlay of these layers over slotTarget, replacing the tmpfs for the layers, as slotMount.
func (s *script) union(lowers []string, upper, work string) {
	s.Add(StepOverlay, slotFS, unix.SYS_FSOPEN, "overlay", unix.FSOPEN_CLOEXEC)
	s.option("lowerdir", strings.Join(lowers, ":"))
	if upper != "" {
		s.option("upperdir", upper)
		s.option("workdir", work)
	}
	// With userxattr the kernel neither follows nor makes redirects and metacopies, through which a layer could name files
	// elsewhere.
	s.Do(StepOverlay, unix.SYS_FSCONFIG, slotFS, unix.FSCONFIG_SET_FLAG, "userxattr", 0, 0)
	s.option("index", "off")
	s.option("xino", "off")
	s.mount(slotMount)
	s.Do(StepOverlay, unix.SYS_UMOUNT2, ".", unix.MNT_DETACH)
	s.Do(StepOverlay, unix.SYS_MOVE_MOUNT, slotMount, "", slotTarget, "", byDescriptors)
}

// finish sends the new layer to sbxrun and closes the descriptors of an overlay.
func (s *script) finish(o *Overlay) {
	slots := []helper.Slot{slotMount, slotPlace, slotTarget}
	if o.writable() {
		s.Do(StepLayer, helper.Say, reportLayer, 1, int(slotLayer))
		slots = append(slots, slotLayer)
	}
	for _, n := range slots {
		s.close(n)
	}
}

func (s *script) close(n helper.Slot) { s.Do(StepOverlay, unix.SYS_CLOSE, n) }

// open opens a file or directory of the room without following links: other sandboxes may
// write to the directory above it.
func (s *script) open(result helper.Slot, name string, how helper.Ptr) {
	s.Add(StepMount, result, unix.SYS_OPENAT2, unix.AT_FDCWD, name, how, openHowSize)
}

// clone creates a detached mount of the directory dir. It fails with EINVAL if mounts below dir came
// from a more privileged namespace (mount_namespaces(7)), because a clone without them would reveal
// what they hide.
func (s *script) clone(result, dir helper.Slot) {
	s.Add(StepLayer, result, unix.SYS_OPEN_TREE, dir, "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
}

// attach mounts a clone at a new directory in the working directory and closes its descriptor.
func (s *script) attach(mount helper.Slot, name string) {
	s.Do(StepOverlay, unix.SYS_MKDIRAT, unix.AT_FDCWD, name, 0o700)
	s.Do(StepOverlay, unix.SYS_MOVE_MOUNT, mount, "", unix.AT_FDCWD, name, unix.MOVE_MOUNT_F_EMPTY_PATH)
	s.close(mount)
}

// take attaches a clone of a bind that bwrap made below [LayersDir].
func (s *script) take(b Bind, name string) {
	s.open(slotDir, b.Place, s.dir)
	s.check(slotDir, &b)
	s.clone(slotMount, slotDir)
	s.attach(slotMount, name)
	s.close(slotDir)
}

// upper makes the directories for written files and for the kernel, or attaches those on disk. It opens the first as
// slotLayer.
func (s *script) upper(o *Overlay) (upper, work string) {
	upper, work = UpperName, WorkName
	if o.Upper != nil {
		const disk = "disk"
		s.take(*o.Upper, disk)
		upper, work = path.Join(disk, UpperName), path.Join(disk, WorkName)
	} else {
		s.Do(StepOverlay, unix.SYS_MKDIRAT, unix.AT_FDCWD, upper, 0o700)
		s.Do(StepOverlay, unix.SYS_FCHMODAT, unix.AT_FDCWD, upper, int(o.Mode)) // regardless of the umask
		s.Do(StepOverlay, unix.SYS_MKDIRAT, unix.AT_FDCWD, work, 0o700)
	}
	// Without such attributes the kernel cannot mark a directory that replaces another one, and only warns. tmpfs has them
	// since Linux 6.6 (tmpfs(5)).
	const trial = "user.sbxrun"
	s.Do(StepXattr, unix.SYS_SETXATTR, work, trial, trial, len(trial), 0)
	s.Do(StepXattr, unix.SYS_REMOVEXATTR, work, trial)
	s.Add(StepOverlay, slotLayer, unix.SYS_OPENAT, unix.AT_FDCWD, upper, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	return upper, work
}

// scratch mounts a tmpfs for the layers of o over slotTarget, and makes it slotPlace and the current directory.
func (s *script) scratch(o *Overlay) {
	size := o.Size
	if o.Upper != nil || size == 0 {
		size = 64 << 10 // for directories only
	}
	s.Add(StepOverlay, slotFS, unix.SYS_FSOPEN, "tmpfs", unix.FSOPEN_CLOEXEC)
	s.option("size", strconv.FormatInt(size, 10))
	s.option("nr_inodes", inodes(size))
	s.option("mode", "0700")
	s.mount(slotPlace)
	s.Do(StepOverlay, unix.SYS_MOVE_MOUNT, slotPlace, "", slotTarget, "", byDescriptors)
	s.Do(StepOverlay, unix.SYS_FCHDIR, slotPlace)
}

func (s *script) option(name, value string) {
	s.Do(StepOverlay, unix.SYS_FSCONFIG, slotFS, unix.FSCONFIG_SET_STRING, name, value, 0)
}

// mount creates the file system in slotFS, whose options are set, and returns a detached mount of it as result.
func (s *script) mount(result helper.Slot) {
	s.Do(StepOverlay, unix.SYS_FSCONFIG, slotFS, unix.FSCONFIG_CMD_CREATE, 0, 0, 0)
	s.Add(StepOverlay, result, unix.SYS_FSMOUNT, slotFS, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV)
	s.close(slotFS)
}
