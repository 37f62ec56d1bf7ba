package enter

import (
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/proc"
)

// This file is what a room gets from us when bwrap has built it, and before anything else
// enters it. bwrap has options for all of this, but the older ones not for sizes (0.7),
// modes (0.5) and user namespaces (0.8). With one way for all of them no version makes a
// weaker room than another. And a bwrap that copies nothing needs no descriptors, so it can be
// started before it is known what is to be copied.
//
// It takes the user namespace in which bwrap has mounted everything. That of the room's
// PID 1 is another one, made by bwrap below that when all is mounted, unless the uid
// inside is 0; nothing in the room has a capability in either.

// Furnishing is what to do in a new room.
type Furnishing struct {
	// Ready is the end of a pipe where the room's PID 1 says that bwrap has built the room.
	Ready *os.File
	Tmpfs []Mounted
	Files []File
	// Clones come after Files.
	Clones []Clone
	// Mounts come after Clones. A descriptor of each new layer of an overlay comes back, that of Root last.
	Mounts []Mount
	// Root, if not nil, becomes the room's root, with everything above in it.
	Root *Root
	// ReadOnly are mounts of bwrap's own, to be written to by nobody.
	ReadOnly []string
	// NoUserns: nothing in the room can make user namespaces.
	NoUserns bool
	// OwnNet: the command gets a network namespace of its own, and not the room's. The kernel takes a
	// millisecond to make one. bwrap would do so before it mounts anything; we do it meanwhile.
	OwnNet bool
}

// Mounted is a tmpfs that bwrap has mounted. It is remounted with its options, of which
// the kernel takes the size and not the mode; so that is set by itself.
type Mounted struct {
	Tmpfs
	Mode uint32
}

// File is one that is copied into a room, into a directory of bwrap's.
type File struct {
	Dest string
	From *os.File // from its offset on; it stays the caller's
}

// FileMode is that of a file that is copied into a room.
const FileMode = 0o444

// furnishing is a [Furnishing] as system calls take it.
type furnishing struct {
	wanted   bool
	noUserns bool
	ownNet   bool
	loopback unix.Ifreq // to be brought up
	tmpfs    []mounted
	mounts   *mounts // nil for none
	files    []*byte // copies of entryFiles and those that follow
	readOnly []*byte
	dir      *unix.OpenHow
	create   unix.OpenHow
}

// mounted is a [Mounted].
type mounted struct {
	fresh
	mode uintptr
}

// layFurnishing returns f in the block.
func layFurnishing(b *proc.Block, f *Furnishing) furnishing {
	if f == nil {
		return furnishing{}
	}
	list := make([]mounted, len(f.Tmpfs))
	for i, t := range f.Tmpfs {
		list[i] = mounted{fresh{b.Text(t.Dest), b.Text(t.Options)}, uintptr(t.Mode)}
	}
	files := make([]*byte, len(f.Files))
	for i := range files {
		files[i] = b.Text(f.Files[i].Dest)
	}
	dir := proc.New[unix.OpenHow](b)
	*dir = unix.OpenHow{Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS}
	n := furnishing{wanted: true, noUserns: f.NoUserns, ownNet: f.OwnNet, tmpfs: proc.Copy(b, list), mounts: layMounts(b, f.Clones, f.Mounts, f.Root, dir),
		files: proc.Copy(b, files), readOnly: b.Texts(f.ReadOnly)[:len(f.ReadOnly)],
		dir:    dir,
		create: unix.OpenHow{Flags: unix.O_WRONLY | unix.O_CREAT | unix.O_EXCL | unix.O_CLOEXEC, Mode: FileMode, Resolve: unix.RESOLVE_NO_SYMLINKS}}
	if lo, err := unix.NewIfreq("lo"); err == nil {
		lo.SetUint16(unix.IFF_UP)
		n.loopback = *lo
	}
	return n
}

// overlays is how many layers come back.
func (f *Furnishing) overlays() (n int) {
	for _, m := range f.Mounts {
		if m.Overlay != nil {
			n++
		}
	}
	if f.Root != nil && f.Root.Overlay != nil {
		n++
	}
	return n
}

// from are the files that are copied, as descriptors of what enters.
func (f *Furnishing) from() (list []*os.File) {
	for _, file := range f.Files {
		list = append(list, file.From)
	}
	return list
}

var (
	maxUserns = [...]byte{'/', 'p', 'r', 'o', 'c', '/', 's', 'y', 's', '/', 'u', 's', 'e', 'r', '/',
		'm', 'a', 'x', '_', 'u', 's', 'e', 'r', '_', 'n', 'a', 'm', 'e', 's', 'p', 'a', 'c', 'e', 's', 0}
	zero = [...]byte{'0'}
	dot  = [...]byte{'.', 0}
)

// enterNew joins the namespaces of a new room, when it is built, and furnishes it; outer is the user
// namespace that its mounts belong to.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (e *entry) enterNew(room, outer uintptr) {
	e.must(stepOuter, unix.SYS_SETNS, outer, unix.CLONE_NEWUSER, 0, 0, 0)
	if e.furnishing.ownNet {
		e.makeNetwork()
	}
	e.awaitRoom()
	if e.furnishing.noUserns {
		// The numbers are those of the user namespace that we are in, and hold for all below
		// it (user_namespaces(7)); the file is opened while the host's /proc is there, because
		// that in the room is read-only. The room's own namespaces exist by now.
		fd := e.must(stepUserns, unix.SYS_OPENAT, uintptr(proc.AtCWD), uintptr(unsafe.Pointer(&maxUserns)), unix.O_WRONLY|unix.O_CLOEXEC, 0, 0)
		e.must(stepUserns, unix.SYS_WRITE, fd, uintptr(unsafe.Pointer(&zero)), unsafe.Sizeof(zero), 0, 0)
		e.must(stepUserns, unix.SYS_CLOSE, fd, 0, 0, 0, 0)
	}
	e.must(stepSetns, unix.SYS_SETNS, room, e.namespaces&^unix.CLONE_NEWUSER, 0, 0, 0)
	e.furnish()
	e.joinUser(room)
}

// joinUser joins the user namespace of the room's PID 1. EINVAL: bwrap has made only one, and the process is in it.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (e *entry) joinUser(room uintptr) {
	if _, _, errno := syscall.RawSyscall(unix.SYS_SETNS, room, unix.CLONE_NEWUSER, 0); errno != 0 && errno != unix.EINVAL {
		e.fail(stepSetns, errno)
	}
}

// makeNetwork makes a network namespace, which has nothing but a loopback device.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (e *entry) makeNetwork() {
	e.must(stepNetwork, unix.SYS_UNSHARE, unix.CLONE_NEWNET, 0, 0, 0, 0)
	// Any socket will do (netdevice(7)). The device gets its addresses when it is brought up.
	fd := e.must(stepLoopback, unix.SYS_SOCKET, unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0, 0, 0)
	e.must(stepLoopback, unix.SYS_IOCTL, fd, unix.SIOCSIFFLAGS, uintptr(unsafe.Pointer(&e.furnishing.loopback)), 0, 0)
	e.must(stepLoopback, unix.SYS_CLOSE, fd, 0, 0, 0, 0)
}

// furnish does what [Furnishing] says.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (e *entry) furnish() {
	f := &e.furnishing
	list := f.tmpfs
	for i := range list {
		// That this is the root of a mount in the room the kernel checks (mount(2), MS_REMOUNT:
		// EINVAL).
		fd := e.must(stepTmpfs, unix.SYS_OPENAT2, uintptr(proc.AtCWD), uintptr(unsafe.Pointer(list[i].target)), uintptr(unsafe.Pointer(f.dir)), unsafe.Sizeof(*f.dir), 0)
		e.must(stepTmpfs, unix.SYS_FCHDIR, fd, 0, 0, 0, 0)
		e.must(stepTmpfs, unix.SYS_MOUNT, 0, uintptr(unsafe.Pointer(&dot)), 0, unix.MS_REMOUNT|unix.MS_NOSUID|unix.MS_NODEV, uintptr(unsafe.Pointer(list[i].options)))
		e.must(stepTmpfs, unix.SYS_FCHMODAT, uintptr(proc.AtCWD), uintptr(unsafe.Pointer(&dot)), list[i].mode, 0, 0)
		e.must(stepTmpfs, unix.SYS_CLOSE, fd, 0, 0, 0, 0)
	}
	files := f.files
	for i := range files {
		fd := e.must(stepCopy, unix.SYS_OPENAT2, uintptr(proc.AtCWD), uintptr(unsafe.Pointer(files[i])), uintptr(unsafe.Pointer(&f.create)), unsafe.Sizeof(f.create), 0)
		const most = 1 << 30
		for e.must(stepCopy, unix.SYS_SENDFILE, fd, uintptr(entryFiles+i), 0, most, 0) != 0 {
		}
		e.must(stepCopy, unix.SYS_FCHMOD, fd, FileMode, 0, 0, 0) // whatever the umask is
		e.must(stepCopy, unix.SYS_CLOSE, fd, 0, 0, 0, 0)
	}
	e.finishMounts()
	mounts := f.readOnly
	for i := range mounts {
		fd := e.must(stepReadOnly, unix.SYS_OPENAT2, uintptr(proc.AtCWD), uintptr(unsafe.Pointer(mounts[i])), uintptr(unsafe.Pointer(f.dir)), unsafe.Sizeof(*f.dir), 0)
		e.must(stepReadOnly, unix.SYS_FCHDIR, fd, 0, 0, 0, 0)
		e.must(stepReadOnly, unix.SYS_MOUNT, 0, uintptr(unsafe.Pointer(&dot)), 0, unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV, 0)
		e.must(stepReadOnly, unix.SYS_CLOSE, fd, 0, 0, 0, 0)
	}
	e.must(stepSetns, unix.SYS_CHDIR, uintptr(unsafe.Pointer(&proc.Root)), 0, 0, 0, 0)
}
