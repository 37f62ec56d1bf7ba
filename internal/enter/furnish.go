package enter

import (
	"os"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/helper"
)

// This file finishes a new room after bwrap has built it and before any other process enters it. bwrap has options for
// all of this, but older versions lack those for sizes (added in 0.7), modes (0.5) and user namespaces (0.8). Because the
// same code runs with all versions, no version makes a weaker room than another.
//
// The code needs the user namespace in which bwrap made all mounts. Unless the uid inside is 0, bwrap then makes
// another one below it for the room's PID 1. No process in the room has a capability in either.

// Furnishing describes the changes to a new room.
type Furnishing struct {
	// Ready is the read end of a pipe. The room's PID 1 writes to it when bwrap has built the room.
	Ready *os.File
	Tmpfs []Tmpfs // mounted by bwrap
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

// File is a new file in one of bwrap's directories in a room.
type File struct {
	Dest string
	Data []byte
}

// FileMode is the mode of new files in a room. The owner may change them in a writable root, because
// programs like groupadd(8) open /etc/group for writing.
const FileMode = 0o644

// overlays returns the number of layers that sbxrun receives.
func (f *Furnishing) overlays() (n int) {
	for _, m := range f.Mounts {
		if m.Overlay != nil {
			n++
		}
	}
	if f.Root != nil && f.Root.writable() {
		n++
	}
	return n
}

// lay lays out the calls with which the entering process waits until a new room is built, joins its namespaces and
// furnishes it. slotOuter is the user namespace that owns its mounts.
func (f *Furnishing) lay(plain *helper.Script, hostNet bool) {
	s := newScript(plain)
	s.Do("join the user namespace of the room's mounts", unix.SYS_SETNS, slotOuter, unix.CLONE_NEWUSER)
	if f.OwnNet {
		s.network()
	}
	s.Do("wait for the room", helper.Await, entryReady)
	if f.NoUserns {
		// The limit belongs to the current user namespace and applies to all namespaces below it (user_namespaces(7)).
		// Open the file while the host's /proc is visible, because the room's is read-only. The room's own namespaces
		// already exist.
		s.Add(StepUserns, slotFile, unix.SYS_OPENAT, unix.AT_FDCWD, "/proc/sys/user/max_user_namespaces", unix.O_WRONLY|unix.O_CLOEXEC, 0)
		s.Do(StepUserns, unix.SYS_WRITE, slotFile, "0", 1)
		s.Do(StepUserns, unix.SYS_CLOSE, slotFile)
	}
	s.Do(stepSetns, unix.SYS_SETNS, slotRoom, namespaces(hostNet)&^unix.CLONE_NEWUSER)
	for _, t := range f.Tmpfs {
		const step = "set the size and mode of a tmpfs"
		// The kernel checks that this is the root of a mount in the room (mount(2), MS_REMOUNT: EINVAL).
		s.enter(step, t.Dest)
		s.Do(step, unix.SYS_MOUNT, 0, ".", 0, unix.MS_REMOUNT|unix.MS_NOSUID|unix.MS_NODEV, t.options())
		s.Do(step, unix.SYS_FCHMODAT, unix.AT_FDCWD, ".", t.Mode) // a remount leaves the mode
	}
	create := s.Words(unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, FileMode, unix.RESOLVE_NO_SYMLINKS)
	for _, file := range f.Files {
		const step = "copy a file into the room"
		s.Add(step, slotFile, unix.SYS_OPENAT2, unix.AT_FDCWD, file.Dest, create, openHowSize)
		s.Do(step, unix.SYS_WRITE, slotFile, s.Data(file.Data), len(file.Data))
		s.Do(step, unix.SYS_FCHMOD, slotFile, FileMode) // regardless of the umask
		s.Do(step, unix.SYS_CLOSE, slotFile)
	}
	s.clones(f.Clones)
	s.all(f.Mounts, f.Root, len(f.Clones) > 0)
	for _, dest := range f.ReadOnly {
		const step = "make a mount read-only"
		s.enter(step, dest)
		s.Do(step, unix.SYS_MOUNT, 0, ".", 0, unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV, 0)
	}
	s.Do(stepSetns, unix.SYS_CHDIR, "/")
	layUser(plain)
}

// enter makes a directory of the room the working directory.
func (s *script) enter(step, dest string) {
	s.Add(step, slotFile, unix.SYS_OPENAT2, unix.AT_FDCWD, dest, s.dir, openHowSize)
	s.Do(step, unix.SYS_FCHDIR, slotFile)
	s.Do(step, unix.SYS_CLOSE, slotFile)
}

// layUser joins the user namespace of the room's PID 1. EINVAL means that bwrap made only one, which the process has
// already joined.
func layUser(s *helper.Script) {
	s.Do(stepSetns, unix.SYS_SETNS, slotRoom, unix.CLONE_NEWUSER)
	s.Allow(0, unix.EINVAL)
}

// network makes a network namespace with only a loopback device.
func (s *script) network() {
	const step = "bring up the loopback device"
	up := make([]byte, 40) // struct ifreq (netdevice(7))
	copy(up, "lo")
	up[16] = unix.IFF_UP
	s.Do(StepNetwork, unix.SYS_UNSHARE, unix.CLONE_NEWNET)
	// Any socket will do. The device gets its addresses when it is brought up.
	s.Add(step, slotFile, unix.SYS_SOCKET, unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	s.Do(step, unix.SYS_IOCTL, slotFile, unix.SIOCSIFFLAGS, s.Data(up))
	s.Do(step, unix.SYS_CLOSE, slotFile)
}
