package enter

import (
	"path"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/proc"
)

// This file mounts the overlays of a new room (overlayfs in the kernel's documentation; in a user namespace since Linux
// 5.11, with the option userxattr). bwrap has an option for overlays only since 0.11.
//
// The kernel gets only paths that this code has chosen. They are relative to a directory that no other process can see: a
// tmpfs, mounted for a moment over the overlay's destination, in which the layers are attached by their descriptors. So
// no user-supplied name is looked up twice or needs quoting. After the tmpfs is unmounted no path leads to a layer,
// because the overlay has its own copies of these mounts. The new layer of an overlay in memory is in the same tmpfs.

// Overlay is a writable view of a directory that leaves the directory unchanged. Its lowest
// layer is the bind of its [Mount].
type Overlay struct {
	// Lower are further read-only layers, the uppermost first: directories that bwrap has bound below LayersDir.
	Lower []Bind
	// Upper is a directory on disk, bound like the Lower ones. It contains a directory for written files ([UpperName]) and
	// one for the kernel ([WorkName]). If it is nil, both are in memory, with Size bytes.
	Upper *Bind
	Size  int64
	Mode  uint32 // of the overlay's root directory, if it is in memory
}

// scratchSize is the size of the tmpfs in which the layers are attached; o may be nil.
func (o *Overlay) scratchSize() int64 {
	if o == nil || o.Upper != nil {
		return 64 << 10 // for directories alone
	}
	return o.Size
}

// Names in the Upper directory of an [Overlay].
const (
	UpperName = "upper"
	WorkName  = "work"
)

// call is a system call, laid out before the fork so that the entering process only has to make it. That process cannot
// grow its stack, which is too small for the code that prepares an overlay.
type call struct {
	step   int64
	number uintptr
	args   [5]uintptr
	slots  uint8 // bit n is set if args[n] is the number of a slot, which has the value
	result uint8 // slot for the return value
	exists bool  // EEXIST is not an error
	skips  uint8 // number of calls to skip after ENOENT; if 0, ENOENT is an error
	mount  int64 // number of its [Mount], from 1; 0 for none
}

// Pseudo system calls that compare results of statx(2).
const (
	compareInode  = ^uintptr(0) - iota // the first result, with a device and an inode
	compareMounts                      // the mount IDs of both results
)

// Slots of the descriptors that calls return.
const (
	slotNone = iota
	slotLayer
	slotTarget
	slotPlace
	slotLowest
	slotMount
	slotFS
	slotDir
	slotCount
)

// slot is an argument whose value an earlier call has returned.
type slot uint8

// mounts are the calls for a room's [Furnishing.Mounts].
type mounts struct {
	calls []call
	slots [slotCount]uintptr
	stats [2]unix.Statx_t
	hello letter // sends a layer to sbxrun
}

// script lays out calls.
type script struct {
	b      *proc.Block
	dir    *unix.OpenHow
	any    *unix.OpenHow // for a file or directory
	stats  *[2]unix.Statx_t
	hello  *letter
	number int64 // number of the [Mount] of the next calls
	calls  []call
}

// add lays out a call. An argument is an int, a string, a slot, or a pointer into the Block; result is the slot for the
// return value.
func (s *script) add(step int64, result slot, number uintptr, args ...any) {
	c := call{step: step, number: number, result: uint8(result), mount: s.number}
	for i, a := range args {
		switch a := a.(type) {
		case int:
			c.args[i] = uintptr(a)
		case string:
			c.args[i] = uintptr(unsafe.Pointer(s.b.Text(a)))
		case slot:
			c.args[i], c.slots = uintptr(a), c.slots|1<<i
		case unsafe.Pointer:
			c.args[i] = uintptr(a)
		}
	}
	s.calls = append(s.calls, c)
}

// layMounts lays out, in the block, the calls that finish the mounts. It returns nil if there are none.
func layMounts(b *proc.Block, clones []Clone, list []Mount, root *Root, dir *unix.OpenHow) *mounts {
	if len(clones)+len(list) == 0 && root == nil {
		return nil
	}
	out := proc.New[mounts](b)
	msg := proc.New[message](b)
	msg.kind = messageLayer
	h := &out.hello
	h.lay(uintptr(unsafe.Pointer(msg)), unsafe.Sizeof(*msg))
	c := &h.control.header
	c.Level, c.Type = unix.SOL_SOCKET, unix.SCM_RIGHTS
	c.Len = uint64(unsafe.Sizeof(*c) + unsafe.Sizeof(h.control.fds[0]))
	h.msg.SetControllen(unix.CmsgSpace(int(unsafe.Sizeof(h.control.fds[0]))))
	s := &script{b: b, dir: dir, any: proc.New[unix.OpenHow](b), stats: &out.stats, hello: h}
	*s.any = *dir
	s.any.Flags &^= unix.O_DIRECTORY
	s.clones(clones)
	s.all(list, root, len(clones) > 0)
	out.calls = proc.Copy(b, s.calls)
	return out
}

// overlay lays out the calls that mount m.Overlay.
func (s *script) overlay(m *Mount) {
	o := m.Overlay
	s.open(slotTarget, m.Bind.Place, s.dir)
	s.check(slotTarget, &m.Bind)
	s.clone(slotLowest, slotTarget) // before anything is mounted over it
	if m.Base != "" {
		s.close(slotTarget)
		s.makePoint(m)
	}

	s.scratch(o.scratchSize())
	var places []string
	for i, lower := range o.Lower {
		places = append(places, strconv.Itoa(i))
		s.take(lower, places[i])
	}
	const lowest = "lowest"
	places = append(places, lowest)
	s.attach(slotLowest, lowest)
	upper, work := s.upper(o)
	s.add(stepOverlay, slotFS, unix.SYS_FSOPEN, "overlay", unix.FSOPEN_CLOEXEC)
	s.option("lowerdir", strings.Join(places, ":"))
	s.option("upperdir", upper)
	s.option("workdir", work)
	s.overlayOptions()
	s.mount(slotMount)
	s.add(stepOverlay, slotNone, unix.SYS_UMOUNT2, ".", unix.MNT_DETACH)
	s.add(stepOverlay, slotNone, unix.SYS_MOVE_MOUNT, slot(slotMount), "", slot(slotTarget), "", byDescriptors)
	s.add(stepOverlay, slotNone, unix.SYS_CHDIR, "/")
	s.confirm(slotMount, m.Dest)
	s.sendLayer()
	for _, n := range []slot{slotMount, slotPlace, slotTarget} {
		s.close(n)
	}
}

func (s *script) close(n slot) { s.add(stepOverlay, slotNone, unix.SYS_CLOSE, n) }

// open opens a file or directory of the room without following links: other sandboxes may
// write to the directory above it.
func (s *script) open(result slot, name string, how *unix.OpenHow) {
	s.add(stepMount, result, unix.SYS_OPENAT2, unix.AT_FDCWD, name, unsafe.Pointer(how), int(unsafe.Sizeof(*how)))
}

// clone creates a detached mount of the directory dir. It fails with EINVAL if mounts below dir came
// from a more privileged namespace (mount_namespaces(7)), because a clone without them would reveal
// what they hide.
func (s *script) clone(result, dir slot) {
	s.add(stepLayer, result, unix.SYS_OPEN_TREE, dir, "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
}

// attach mounts a clone at a new directory in the working directory and closes its descriptor.
func (s *script) attach(mount slot, name string) {
	s.add(stepOverlay, slotNone, unix.SYS_MKDIRAT, unix.AT_FDCWD, name, 0o700)
	s.add(stepOverlay, slotNone, unix.SYS_MOVE_MOUNT, mount, "", unix.AT_FDCWD, name, unix.MOVE_MOUNT_F_EMPTY_PATH)
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
		s.add(stepOverlay, slotNone, unix.SYS_MKDIRAT, unix.AT_FDCWD, upper, 0o700)
		s.add(stepOverlay, slotNone, unix.SYS_FCHMODAT, unix.AT_FDCWD, upper, int(o.Mode)) // regardless of the umask
		s.add(stepOverlay, slotNone, unix.SYS_MKDIRAT, unix.AT_FDCWD, work, 0o700)
	}
	// Without such attributes the kernel cannot mark a directory that replaces another one, and only warns. tmpfs has them
	// since Linux 6.6 (tmpfs(5)).
	const trial = "user.sbxrun"
	s.add(stepXattr, slotNone, unix.SYS_SETXATTR, work, trial, trial, len(trial), 0)
	s.add(stepXattr, slotNone, unix.SYS_REMOVEXATTR, work, trial)
	s.add(stepOverlay, slotLayer, unix.SYS_OPENAT, unix.AT_FDCWD, upper, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	return upper, work
}

// sendLayer sends slotLayer to sbxrun and closes it.
func (s *script) sendLayer() {
	s.add(stepLayer, slotNone, unix.SYS_SENDMSG, entrySocket, unsafe.Pointer(&s.hello.msg), 0)
	s.close(slotLayer)
}

// scratch mounts a tmpfs for the layers over slotTarget, and makes it slotPlace and the current directory.
func (s *script) scratch(size int64) {
	s.add(stepOverlay, slotFS, unix.SYS_FSOPEN, "tmpfs", unix.FSOPEN_CLOEXEC)
	s.option("size", strconv.FormatInt(size, 10))
	s.option("nr_inodes", Inodes(size))
	s.option("mode", "0700")
	s.mount(slotPlace)
	s.add(stepOverlay, slotNone, unix.SYS_MOVE_MOUNT, slot(slotPlace), "", slot(slotTarget), "", byDescriptors)
	s.add(stepOverlay, slotNone, unix.SYS_FCHDIR, slot(slotPlace))
}

// overlayOptions sets the options that all overlays share. With userxattr the kernel neither follows nor makes redirects
// and metacopies, through which a layer could name files elsewhere.
func (s *script) overlayOptions() {
	s.add(stepOverlay, slotNone, unix.SYS_FSCONFIG, slot(slotFS), unix.FSCONFIG_SET_FLAG, "userxattr", 0, 0)
	s.option("index", "off")
	s.option("xino", "off")
}

func (s *script) option(name, value string) {
	s.add(stepOverlay, slotNone, unix.SYS_FSCONFIG, slot(slotFS), unix.FSCONFIG_SET_STRING, name, value, 0)
}

// mount creates the file system in slotFS, whose options are set, and returns a detached mount of it as result.
func (s *script) mount(result slot) {
	s.add(stepOverlay, slotNone, unix.SYS_FSCONFIG, slot(slotFS), unix.FSCONFIG_CMD_CREATE, 0, 0, 0)
	s.add(stepOverlay, result, unix.SYS_FSMOUNT, slot(slotFS), unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV)
	s.close(slotFS)
}
