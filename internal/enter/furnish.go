package enter

import (
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/proc"
)

// This file finishes a new room after bwrap has built it and before any other process enters it. bwrap has options for
// all of this, but older versions lack those for sizes (added in 0.7), modes (0.5) and user namespaces (0.8). Because the
// same code runs with all versions, no version makes a weaker room than another. Also, a bwrap that copies nothing needs
// no descriptors, so it can start before the files to copy are known.
//
// The code needs the user namespace in which bwrap has made all mounts. Unless the uid inside is 0, bwrap then makes
// another one below it for the room's PID 1. No process in the room has a capability in either.

// Furnishing describes the changes to a new room.
type Furnishing struct {
	// Ready is the read end of a pipe. The room's PID 1 writes to it when bwrap has built the room.
	Ready *os.File
	Tmpfs []Mounted
	Files []File
	// Clones come after Files.
	Clones []Clone
	// Mounts come after Clones. sbxrun receives a descriptor of each overlay's new layer, with Root's last.
	Mounts []Mount
	// Root, if not nil, becomes the room's root and includes everything above.
	Root *Root
	// ReadOnly are bwrap's own mounts that become read-only.
	ReadOnly []string
	// NoUserns prevents the room's processes from making user namespaces.
	NoUserns bool
	// OwnNet gives the command its own network namespace instead of the room's. The kernel takes a millisecond to make
	// one. bwrap would make it before its mounts; the entering process makes it while bwrap mounts.
	OwnNet bool
}

// Mounted is a tmpfs that bwrap has mounted. A remount with its options changes the size but not the mode, which is
// therefore set separately.
type Mounted struct {
	Tmpfs
	Mode uint32
}

// File is a file to copy into one of bwrap's directories in a room.
type File struct {
	Dest string
	From *os.File // read from its offset on; it stays the caller's
}

// FileMode is the mode of files that are copied into a room.
const FileMode = 0o444

// furnishing is a [Furnishing], laid out for system calls.
type furnishing struct {
	wanted   bool
	noUserns bool
	ownNet   bool
	loopback unix.Ifreq // brings up the loopback device
	tmpfs    []mounted
	mounts   *mounts // nil for none
	files    []*byte // destinations for entryFiles and the descriptors after it
	readOnly []*byte
	dir      *unix.OpenHow
	create   unix.OpenHow
}

// mounted is a [Mounted].
type mounted struct {
	fresh
	mode uintptr
}

// layFurnishing lays out f in the block.
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

// overlays returns the number of layers that sbxrun receives.
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

// from returns the files to copy, which become descriptors of the entering process.
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

// enterNew waits until a new room is built, joins its namespaces and furnishes it; outer is the user namespace that owns
// its mounts.
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
		// The limit belongs to the current user namespace and applies to all namespaces below it (user_namespaces(7)).
		// Open the file while the host's /proc is visible, because the room's is read-only. The room's own namespaces
		// already exist.
		fd := e.must(stepUserns, unix.SYS_OPENAT, uintptr(proc.AtCWD), uintptr(unsafe.Pointer(&maxUserns)), unix.O_WRONLY|unix.O_CLOEXEC, 0, 0)
		e.must(stepUserns, unix.SYS_WRITE, fd, uintptr(unsafe.Pointer(&zero)), unsafe.Sizeof(zero), 0, 0)
		e.must(stepUserns, unix.SYS_CLOSE, fd, 0, 0, 0, 0)
	}
	e.must(stepSetns, unix.SYS_SETNS, room, e.namespaces&^unix.CLONE_NEWUSER, 0, 0, 0)
	e.furnish()
	e.joinUser(room)
}

// joinUser joins the user namespace of the room's PID 1. EINVAL means that bwrap has made only one, which the process has
// already joined.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (e *entry) joinUser(room uintptr) {
	if _, _, errno := syscall.RawSyscall(unix.SYS_SETNS, room, unix.CLONE_NEWUSER, 0); errno != 0 && errno != unix.EINVAL {
		e.fail(stepSetns, errno)
	}
}

// makeNetwork makes a network namespace with only a loopback device.
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

// furnish applies the [Furnishing].
//
//go:nosplit
//go:norace
//go:nocheckptr
func (e *entry) furnish() {
	f := &e.furnishing
	list := f.tmpfs
	for i := range list {
		// The kernel checks that this is the root of a mount in the room (mount(2), MS_REMOUNT: EINVAL).
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
		e.must(stepCopy, unix.SYS_FCHMOD, fd, FileMode, 0, 0, 0) // regardless of the umask
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
