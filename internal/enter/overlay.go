package enter

import (
	"path"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/proc"
)

// This file is the part of the furnishing that mounts overlays (overlayfs(5) of the kernel's
// documentation; in a user namespace from Linux 5.11 on, with the option userxattr). bwrap has
// an option for it only from 0.11 on.
//
// All paths that the kernel is given are our own, and relative to a place that nobody but us
// can see: a directory in memory, mounted for a moment over the overlay's destination, to which
// the layers are attached by their descriptors. So no name of the user's is looked up twice,
// none needs quoting, and when that place is gone no path leads to a layer: the overlay has its
// own copies of these mounts. The new layer of an overlay in memory is in that same file system.

// Overlay is a writable view of a directory that leaves the directory unchanged. Its lowest
// layer is the bind of its [Mount].
type Overlay struct {
	// Lower are further layers that nothing writes to, the uppermost first: directories that
	// bwrap has bound below LayersDir.
	Lower []Bind
	// Upper has, on disk, a directory for what is written ([UpperName]) and one for the
	// kernel ([WorkName]); it is bound as those are. nil is in memory, with Size bytes.
	Upper *Bind
	Size  int64
	Mode  uint32 // of the directory that is shown
}

// scratchSize is the size of the tmpfs in which the layers are attached; o may be nil.
func (o *Overlay) scratchSize() int64 {
	if o == nil || o.Upper != nil {
		return 64 << 10 // for directories alone
	}
	return o.Size
}

// What the directory Upper of an [Overlay] has in it.
const (
	UpperName = "upper"
	WorkName  = "work"
)

// call is a system call that is laid out before the fork, for a process that can do nothing
// but make it: what to do for an overlay is too much for the stack of code that cannot grow it.
type call struct {
	step   int64
	number uintptr
	args   [5]uintptr
	slots  uint8 // bit n says that args[n] is the number of a slot, which has the value
	result uint8 // the slot for what it returns
	exists bool  // EEXIST is no error
	skips  uint8 // how many calls are left out after ENOENT, which is no error then
	mount  int64 // number of the [Mount] that it is for, from 1
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

// slot is an argument that an earlier call has returned.
type slot uint8

// mounts are the calls for a room's [Furnishing.Mounts].
type mounts struct {
	calls []call
	slots [slotCount]uintptr
	stats [2]unix.Statx_t
	hello letter // brings a layer
}

// script lays out calls.
type script struct {
	b      *proc.Block
	dir    *unix.OpenHow
	any    *unix.OpenHow // of a file or directory
	stats  *[2]unix.Statx_t
	hello  *letter
	number int64 // the number of the mount that calls are added for
	calls  []call
}

// add lays a call out. An argument is a number, a text, a slot, or what is in the Block
// already; result is the slot for what it returns.
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

// layMounts lays out, in the block, what finishes them.
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

// overlay lays out the calls for the one of m.
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

// upper makes the directories for what is written, or takes those on disk, and opens the first as slotLayer.
func (s *script) upper(o *Overlay) (upper, work string) {
	upper, work = UpperName, WorkName
	if o.Upper != nil {
		const disk = "disk"
		s.take(*o.Upper, disk)
		upper, work = path.Join(disk, UpperName), path.Join(disk, WorkName)
	} else {
		s.add(stepOverlay, slotNone, unix.SYS_MKDIRAT, unix.AT_FDCWD, upper, 0o700)
		s.add(stepOverlay, slotNone, unix.SYS_FCHMODAT, unix.AT_FDCWD, upper, int(o.Mode)) // whatever the umask is
		s.add(stepOverlay, slotNone, unix.SYS_MKDIRAT, unix.AT_FDCWD, work, 0o700)
	}
	// Without such attributes a directory that replaces another could not be told from it, and
	// the kernel only warns. tmpfs has them from Linux 6.6 on (tmpfs(5)).
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

// scratch mounts a tmpfs, in which layers are attached, over slotTarget, and makes it slotPlace and the
// current directory.
func (s *script) scratch(size int64) {
	s.add(stepOverlay, slotFS, unix.SYS_FSOPEN, "tmpfs", unix.FSOPEN_CLOEXEC)
	s.option("size", strconv.FormatInt(size, 10))
	s.option("nr_inodes", Inodes(size))
	s.option("mode", "0700")
	s.mount(slotPlace)
	s.add(stepOverlay, slotNone, unix.SYS_MOVE_MOUNT, slot(slotPlace), "", slot(slotTarget), "", byDescriptors)
	s.add(stepOverlay, slotNone, unix.SYS_FCHDIR, slot(slotPlace))
}

// overlayOptions sets what all overlays have in common. With userxattr the kernel neither follows nor makes
// redirects and metacopies, which are how a layer could name files elsewhere.
func (s *script) overlayOptions() {
	s.add(stepOverlay, slotNone, unix.SYS_FSCONFIG, slot(slotFS), unix.FSCONFIG_SET_FLAG, "userxattr", 0, 0)
	s.option("index", "off")
	s.option("xino", "off")
}

func (s *script) option(name, value string) {
	s.add(stepOverlay, slotNone, unix.SYS_FSCONFIG, slot(slotFS), unix.FSCONFIG_SET_STRING, name, value, 0)
}

// mount makes a mount of a file system that has its options.
func (s *script) mount(result slot) {
	s.add(stepOverlay, slotNone, unix.SYS_FSCONFIG, slot(slotFS), unix.FSCONFIG_CMD_CREATE, 0, 0, 0)
	s.add(stepOverlay, result, unix.SYS_FSMOUNT, slot(slotFS), unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV)
	s.close(slotFS)
}
