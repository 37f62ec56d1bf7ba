package enter

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
)

// Maker is a process in a room that makes inits before their commands are known, so that a command does not wait for the
// entering. It runs one command at a time. Each command has its own PID, mount, IPC and cgroup namespaces, /proc and
// directories of [Entry.Fresh]. One keeper is above all of them and lasts as long as the Maker.
type Maker struct {
	way
	entry  Entry
	places [places]*proc.Block // memory for commands; the keeper's
	made   int                 // number of requested inits
	next   *Exec               // the last requested init, without a command yet
	err    error               // why next is unusable
}

// commandSize is the maximum size of a command with its arguments and environment.
const commandSize = 1 << 20

// errTooLarge reports a command larger than commandSize.
var errTooLarge = &result.Error{Code: "too-large", Message: "the command and its environment are too large for a warm room"}

// errBroken reports that a Maker has ended.
var errBroken = errors.New("the room's maker has ended")

// Make starts a Maker in a room, which makes its first init. The entry sets what all commands share: identity, network,
// bounds, filter, fresh directories, and the working directory. Make blocks until the init is ready, for at most
// [SetupBound] or until ctx is done. The caller closes the Maker, even after an error.
func (e Entry) Make(ctx context.Context, room *proc.Process) (*Maker, error) {
	m := &Maker{entry: e}
	err := m.open()
	if err == nil {
		err = m.openLauncher()
	}
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
	end, gate, launcher := m.inner[0], m.inner[1], m.inner[2]
	m.Keeper, err = proc.Keep(proc.Command{
		Way:  &proc.Way{Lay: m.lay, Enter: enter, Files: []*os.File{null, null, null, end, gate, launcher, gate}, Bounds: e.Bounds},
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

// lay lays out the maker's memory for system calls.
func (m *Maker) lay(b *proc.Block) unsafe.Pointer {
	n := newEntry(b, m.entry.HostNet)
	n.maker = proc.New[maker](b)
	n.maker.filter = layFilter(b, m.entry.Filter)
	o := &n.maker.order
	o.lay(uintptr(unsafe.Pointer(&n.maker.data)), unsafe.Sizeof(n.maker.data))
	for i := range m.places {
		m.places[i] = b.Part(commandSize)
		at := newEntry(b, m.entry.HostNet)
		at.spaces |= unix.CLONE_NEWIPC
		dirs := make([]fresh, len(m.entry.Fresh))
		for i, t := range m.entry.Fresh {
			dirs[i] = fresh{b.Text(t.Dest), b.Text(t.Options)}
		}
		at.fresh = proc.Copy(b, dirs)
		at.ahead = proc.New[ahead](b)
		at.payload.command = proc.New[command](m.places[i])
		at.ahead.place, at.ahead.size = uintptr(unsafe.Pointer(at.payload.command)), commandSize
		at.payload.letter = proc.New[letter](b)
		at.payload.letter.lay(0, 0)
		at.ahead.workdir = b.Text(m.entry.Workdir)
		at.ahead.hello.lay(0, 0)
		n.maker.places[i] = at
	}
	return unsafe.Pointer(n)
}

func (l *letter) lay(place, size uintptr) {
	l.iov.place, l.iov.left = place, size
	l.msg.Iov = (*unix.Iovec)(unsafe.Pointer(&l.iov))
	l.msg.SetIovlen(1)
	l.msg.Control = (*byte)(unsafe.Pointer(&l.control))
}

// explain returns the error that the maker or the keeper has reported, or err.
func (m *Maker) explain(err error) error {
	m.Keeper.Kill()
	_ = m.socket.SetReadDeadline(time.Now().Add(bound)) // a socket supports deadlines
	if msg, _, readErr := m.read(); readErr == nil && msg.kind == messageFailed {
		err = msg.err()
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
	m.made++
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
	return unix.Sendmsg(proc.Descriptor(m.socket), []byte{byte(m.made % places)}, rights, nil, unix.MSG_NOSIGNAL)
}

// meet is Identify for an init made ahead. The init sends its own pidfd through a socket that no other process has.
func (x *Exec) meet(ctx context.Context, deadline time.Time) error {
	stop := proc.ReadUntil(ctx, x.socket, deadline)
	msg, pid, files, err := x.readFiles()
	stop()
	for i, fd := range files {
		switch i {
		case helloPidfd:
			x.Init = proc.Adopt(pid, fd)
		case helloMounts:
			x.Hold(fd)
		case helloWorkdir:
			x.Workdir = os.NewFile(uintptr(fd), x.maker.entry.Workdir)
		}
	}
	switch {
	case err != nil:
		return err
	case msg.kind != messageReady:
		return msg.err()
	case msg.inside != 1 || x.Workdir == nil:
		return fmt.Errorf("process %d is not the init that was asked for", pid)
	}
	x.InitNS = msg.pidNS
	return nil
}

// Take assigns a command to the next init. The payload waits for [Exec.Release]. stdio stays the caller's and must stay
// open until then. The previous command must have ended. After any error but errTooLarge, the Maker is unusable.
func (m *Maker) Take(ctx context.Context, e *Entry, stdio [3]*os.File) (*Exec, error) {
	if err := m.Meet(ctx); err != nil {
		return nil, err
	}
	x := m.next
	place := m.places[(m.made-1)%places]
	place.Renew()
	command := e.layCommand(place, false)
	if e.Bounds.CPUs != nil {
		command.cpus = proc.New[unix.CPUSet](place)
		*command.cpus = *e.Bounds.CPUs
	}
	command.size = uintptr(len(place.Bytes()))
	if place.Err() != nil {
		return nil, errTooLarge
	}
	m.Keeper.Forget()
	if x.Init.Exited() { // by itself, or by the OOM killer
		m.err = errBroken
		if msg, _, err := x.read(); err == nil && msg.kind == messageFailed {
			m.err = msg.err() // for example a lack of tasks
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

// send releases a command by sending it to its payload, and requests the next init.
func (m *Maker) send(x *Exec) {
	text := m.places[(m.made-1)%places].Bytes()
	var fds [3]int
	for i, f := range x.stdio {
		fds[i] = proc.Descriptor(f)
	}
	n, err := unix.SendmsgN(proc.Descriptor(x.gate), text, unix.UnixRights(fds[:]...), nil, unix.MSG_NOSIGNAL)
	if err == nil && n < len(text) {
		_, err = x.gate.Write(text[n:])
	}
	if err != nil {
		_ = x.Init.Signal(unix.SIGKILL) // otherwise its payload would wait for the rest forever
	}
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
