package enter

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/helper"
	"github.com/sbxrun/sbxrun/internal/proc"
)

// Maker is a process in a room that makes inits before their commands are known, so that a command does not wait for
// its init to enter. It runs one command at a time. Each command has its own PID, mount, IPC and cgroup namespaces,
// /proc and directories of [Entry.Fresh]. One keeper is above all of them and lasts as long as the Maker.
type Maker struct {
	way
	entry Entry
	next  *Exec // the last requested init, without a command yet
	err   error // why next is unusable
}

// errBroken reports that a Maker has ended.
var errBroken = errors.New("the room's maker has ended")

// Make starts a Maker in a room, which makes its first init. The entry sets what all commands share: identity, network,
// bounds, filter, fresh directories, and the working directory. Make blocks until the init is ready, for at most
// [SetupBound] or until ctx is done. The caller closes the Maker, even after an error.
func (e Entry) Make(ctx context.Context, room *proc.Process) (*Maker, error) {
	m := &Maker{entry: e}
	err := m.open()
	if err == nil {
		err = m.enter(room)
	}
	if err != nil {
		return m, err
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return m, err
	}
	defer null.Close()
	m.Keeper, err = proc.Keep(proc.Command{
		Way:  &proc.Way{Lay: m.lay, Files: []*os.File{null, null, null, m.inner[0], m.inner[1]}, Bounds: e.Bounds},
		Cred: e.Cred, Remove: e.Bounds.Remove, Lasting: true,
	})
	m.Entered()
	if err != nil {
		return m, err
	}
	if m.prepare(); m.err == nil {
		m.err = m.Meet(ctx)
	}
	if m.err != nil {
		m.err = m.explain(m.err)
	}
	return m, m.err
}

// enter hands over the room.
func (m *Maker) enter(room *proc.Process) error {
	outer, err := room.NamespaceOwner("mnt")
	if err != nil {
		return err
	}
	defer outer.Close()
	return m.Enter(room, outer)
}

// lay lays out the script of *inside*, which stays in the room as the maker, of the inits that it makes, and of their
// payloads up to the command.
//
// The maker has loaded the filter for all of them. The filter allows namespaces and mounts, for which the maker has
// the capabilities. An init drops them before it forks its payload, so these calls fail for the payload.
func (m *Maker) lay(s *helper.Script) {
	layStart(s, 2)
	m.layMounts(s)
	layInside(s)
	layName(s, makerName)
	s.Do("close descriptors", unix.SYS_CLOSE_RANGE, entryTimer, proc.MaxFD, 0)
	layNoGain(s)
	layFilter(s, m.entry.Filter)
	init := s.Make("make a PID namespace in the room", spaces|unix.CLONE_NEWIPC)

	s.Begin(init)
	layProc(s)
	for _, t := range m.entry.Fresh {
		s.Do("mount a directory in memory", unix.SYS_MOUNT, "tmpfs", t.Dest, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, t.options())
	}
	// Otherwise the next command would see the terminals' modes and times. The options are bwrap's.
	s.Do("mount /dev/pts", unix.SYS_MOUNT, "devpts", "/dev/pts", "devpts", unix.MS_NOSUID|unix.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")
	layNoCapabilities(s)
	payload := layPayload(s)
	m.layHello(s)
	layReaping(s, entryTimer)

	s.Begin(payload)
	s.Do("receive the command", helper.Load, entryGate)
}

// layMounts joins the room's namespaces and takes a copy of its mounts, which each init copies in turn. It unmounts
// what every init mounts again. Only the user namespace that owns the mounts may do that: in any other they are
// locked (mount_namespaces(7)).
func (m *Maker) layMounts(s *helper.Script) {
	s.Do("join the user namespace of the room's mounts", unix.SYS_SETNS, slotOuter, unix.CLONE_NEWUSER)
	s.Do(stepSetns, unix.SYS_SETNS, slotRoom, namespaces(m.entry.HostNet)&^unix.CLONE_NEWUSER)
	s.Do("make mounts private", unix.SYS_UNSHARE, unix.CLONE_NEWNS)
	s.Do("make mounts private", unix.SYS_MOUNT, 0, "/", 0, unix.MS_REC|unix.MS_PRIVATE, 0)
	for _, t := range slices.Backward(m.entry.Fresh) {
		s.Do("unmount a directory in memory", unix.SYS_UMOUNT2, t.Dest, unix.MNT_DETACH)
		s.Allow(0, helper.AnyError)
	}
	s.Do("unmount /dev/pts", unix.SYS_UMOUNT2, "/dev/pts", unix.MNT_DETACH)
	s.Allow(0, helper.AnyError)
	layUser(s)
}

// layHello makes init report that it is complete, with descriptors that identify it beyond doubt.
func (m *Maker) layHello(s *helper.Script) {
	const (
		step       = "send a pidfd, the mounts and the working directory"
		pidfdMount = 0xff03 // PIDFD_GET_MNT_NAMESPACE (linux/pidfd.h)
		pidfdPID   = 0xff05 // PIDFD_GET_PID_NAMESPACE
	)
	layDeath(s)
	layName(s, initName)
	s.Add(step, slotOwnPID, unix.SYS_PIDFD_OPEN, 1, 0)
	// An ioctl of the pidfd opens a namespace. Before Linux 6.11 it is opened in /proc, for which the kernel has to make four
	// inodes.
	for _, ns := range []struct {
		slot    helper.Slot
		request int
		path    string
	}{{slotOwnMounts, pidfdMount, "/proc/self/ns/mnt"}, {slotOwnPIDs, pidfdPID, "/proc/self/ns/pid"}} {
		s.Add(step, ns.slot, unix.SYS_IOCTL, slotOwnPID, ns.request, 0)
		s.Allow(0, helper.AnyError)
		s.Over(1)
		s.Add(step, ns.slot, unix.SYS_OPENAT, unix.AT_FDCWD, ns.path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	}
	status := s.Space(statxSize)
	s.Do(step, unix.SYS_STATX, slotOwnPIDs, "", unix.AT_EMPTY_PATH, unix.STATX_INO, status)
	s.Add(step, slotPID, unix.SYS_GETPID)
	// The policy's working directory may not exist; the command's chdir reports that. Then the pidfd is sent again.
	s.Add(step, slotOwnDir, unix.SYS_OPENAT, unix.AT_FDCWD, m.entry.Workdir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	s.Allow(0, helper.AnyError)
	s.Over(1)
	s.Add(step, slotOwnDir, helper.Set, slotOwnPID)
	s.Do(step, helper.ReportReady, status, slotPID, 3, int(slotOwnPID))
	// These were opened last, after the descriptors that init needs.
	s.Do(step, unix.SYS_CLOSE_RANGE, slotOwnPID, proc.MaxFD, 0)
}

// explain returns the error that the maker or the keeper has reported, or err.
func (m *Maker) explain(err error) error {
	m.Keeper.Kill()
	_ = m.socket.SetReadDeadline(time.Now().Add(bound)) // a socket supports deadlines
	if msg, _, readErr := m.read(); readErr == nil && msg.Kind == helper.Failed {
		err = proc.Failure(&msg)
	}
	if abandonErr := m.abandon(); abandonErr != nil {
		err = abandonErr
	}
	m.Keeper = nil
	return fmt.Errorf("enter the room: %w", err)
}

// prepare requests the next init without waiting for it.
func (m *Maker) prepare() {
	x := &Exec{maker: m}
	x.Keeper, x.Lasting = m.Keeper, true
	if m.err = x.openAhead(m); m.err != nil {
		x.Close()
		return
	}
	m.next = x
}

// openAhead makes the sockets and the timer of the next init and sends their other ends to the maker.
func (x *Exec) openAhead(m *Maker) (err error) {
	var socket, gate [2]int
	// Non-blocking for the poller; init polls its end, too.
	if socket, err = unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0); err != nil {
		return fmt.Errorf("socketpair: %w", err)
	}
	defer unix.Close(socket[1])
	x.socket = os.NewFile(uintptr(socket[0]), "entry")
	if err := unix.SetsockoptInt(socket[0], unix.SOL_SOCKET, unix.SO_PASSCRED, 1); err != nil {
		return fmt.Errorf("SO_PASSCRED: %w", err)
	}
	if gate, err = unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
		return fmt.Errorf("socketpair: %w", err)
	}
	defer unix.Close(gate[1])
	x.gate = os.NewFile(uintptr(gate[0]), "gate")
	if x.Timer, err = proc.NewTimer(); err != nil {
		return err
	}
	rights := unix.UnixRights(socket[1], gate[1], proc.Descriptor(x.Timer))
	return unix.Sendmsg(proc.Descriptor(m.socket), []byte{0}, rights, nil, unix.MSG_NOSIGNAL)
}

// meet is Identify for an init made ahead. The init sends its own pidfd through a socket that no other process has.
func (x *Exec) meet(ctx context.Context, deadline time.Time) error {
	stop := proc.ReadUntil(ctx, x.socket, deadline)
	msg, pid, files, err := x.readFiles()
	stop()
	for i, fd := range files {
		switch i {
		case 0:
			x.Init = proc.Adopt(pid, fd)
		case 1:
			x.Hold(fd)
		default:
			x.Workdir = os.NewFile(uintptr(fd), x.maker.entry.Workdir)
		}
	}
	switch {
	case err != nil:
		return err
	case msg.Kind != helper.Ready:
		return proc.Failure(&msg)
	case msg.Number != 1 || x.Workdir == nil:
		return fmt.Errorf("process %d is not the init that was asked for", pid)
	}
	x.InitNS = uint64(msg.Value)
	return nil
}

// Take assigns a command to the next init. The payload waits for [Exec.Release]. stdio stays the caller's and must stay
// open until then. The previous command must have ended. After an error from the Maker, it is unusable.
func (m *Maker) Take(ctx context.Context, e *Entry, stdio [3]*os.File) (*Exec, error) {
	if err := m.Meet(ctx); err != nil {
		return nil, err
	}
	x := m.next
	command, err := e.sealed()
	if err != nil {
		return nil, err
	}
	x.command = command
	m.Keeper.Forget()
	if x.Init.Exited() { // by itself, or by the OOM killer
		m.err = errBroken
		if msg, _, err := x.read(); err == nil && msg.Kind == helper.Failed {
			m.err = proc.Failure(&msg) // for example a lack of tasks
		}
		return nil, m.err
	}
	x.name, x.workdir, x.confirm = e.Command[0], e.Workdir, e.Confirm
	x.running, x.exited = make(chan struct{}), make(chan struct{})
	x.stdio = stdio
	m.next = nil
	return x, nil
}

// Meet waits until the next init is ready, for at most [SetupBound] or until ctx is done.
func (m *Maker) Meet(ctx context.Context) error {
	if m.err != nil {
		return m.err
	}
	if m.next == nil {
		return errBroken
	}
	if m.next.Init != nil {
		return nil
	}
	by := time.Now().Add(SetupBound)
	m.err = m.next.Identify(ctx, by)
	if errors.Is(m.err, unix.EAGAIN) {
		// The previous command used all tasks of the cgroup (pids.max), so this init could not fork its payload. That
		// command has ended: try again.
		m.next.Close()
		if m.prepare(); m.err == nil {
			m.err = m.next.Identify(ctx, by)
		}
	}
	return m.err
}

// Workdir returns the room's working directory as the next command will see it, empty if it is in memory. Call it after
// Meet. The file stays the Maker's.
func (m *Maker) Workdir() *os.File { return m.next.Workdir }

// sealed returns the script with which the payload of an init made ahead becomes the command.
func (e *Entry) sealed() (*os.File, error) {
	var s helper.Script
	if e.Bounds.CPUs != nil {
		proc.LayAffinity(&s, e.Bounds.CPUs)
	}
	e.layLimits(&s)
	e.layWorkdir(&s)
	s.Do(stepWorkdir, helper.Check, slotResult)
	e.layExec(&s)
	return s.Seal()
}

// send releases a command by sending it to its payload, and requests the next init.
func (m *Maker) send(x *Exec) {
	var fds []int
	for _, f := range append(x.stdio[:], x.command) {
		fds = append(fds, proc.Descriptor(f))
	}
	if err := unix.Sendmsg(proc.Descriptor(x.gate), []byte{0}, unix.UnixRights(fds...), nil, unix.MSG_NOSIGNAL); err != nil {
		x.unreleased(err)
	}
	x.command.Close()
	m.prepare()
}

// Usable reports whether the Maker can probably take another command.
func (m *Maker) Usable() bool {
	if m.err != nil || m.next == nil {
		return false
	}
	// The maker sends only errors, and its end makes the socket readable, too.
	return proc.Poll(proc.Descriptor(m.socket), unix.POLLIN) == 0
}

// Close ends the Maker with all its processes and waits for their end. It fails after [SetupBound].
func (m *Maker) Close() error {
	err := m.abandon()
	if m.next != nil {
		m.next.Close()
	}
	m.way.Close()
	return err
}
