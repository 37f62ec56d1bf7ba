package enter

import (
	"errors"
	"fmt"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/helper"
	"github.com/sbxrun/sbxrun/internal/proc"
)

// way is the connection to processes that enter a room, with their keeper.
type way struct {
	proc.Kept
	socket *os.File    // to the processes inside
	gate   *os.File    // write end: a byte releases the payload
	inner  [2]*os.File // the other ends, until the fork
	// Layers are the open directories of the new layers of the room's overlays, in the overlays' order. Code that takes
	// them over sets Layers to nil.
	Layers   []*os.File
	expected int // number of layers
}

// open makes the socket and the gate. The caller closes the way even after an error.
func (w *way) open() error {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("socketpair: %w", err)
	}
	w.inner[0] = os.NewFile(uintptr(pair[1]), "entry")
	_ = unix.SetNonblock(pair[0], true) // for the poller
	w.socket = os.NewFile(uintptr(pair[0]), "entry")
	if w.socket.SetReadDeadline(time.Time{}) != nil {
		return errors.New("this user waits for as many descriptors as it may (epoll(7), fs.epoll.max_user_watches)")
	}
	if err := unix.SetsockoptInt(pair[0], unix.SOL_SOCKET, unix.SO_PASSCRED, 1); err != nil {
		return fmt.Errorf("SO_PASSCRED: %w", err)
	}
	// Not os.Pipe: the payload's end must block.
	var ends [2]int
	if err := unix.Pipe2(ends[:], unix.O_CLOEXEC); err != nil {
		return fmt.Errorf("pipe: %w", err)
	}
	w.inner[1] = os.NewFile(uintptr(ends[0]), "gate")
	_ = unix.SetNonblock(ends[1], true) // for the poller
	w.gate = os.NewFile(uintptr(ends[1]), "gate")
	return nil
}

// Entered closes the inner ends after the fork. The forked processes must be the only ones with these ends, so that
// their death ends the stream.
func (w *way) Entered() {
	for i, f := range w.inner {
		f.Close() // on nil it only returns an error
		w.inner[i] = nil
	}
}

// Enter sends the verified PID 1 of the room to the waiting process, which then enters. A new room and a Maker also need
// outer, the user namespace that owns the room's mounts. Both stay the caller's.
func (w *way) Enter(room *proc.Process, outer ...*os.File) error {
	fds := []int{room.FD()}
	for _, f := range outer {
		fds = append(fds, proc.Descriptor(f))
	}
	err := unix.Sendmsg(proc.Descriptor(w.socket), []byte{0}, unix.UnixRights(fds...), nil, 0)
	if err == unix.EPIPE || err == unix.ECONNRESET {
		if msg, _, readErr := w.read(); readErr == nil && msg.Kind == helper.Failed {
			return proc.Failure(&msg) // the waiting process could not start
		}
		err = ErrClosed // the keeper ends the waiting process when bwrap fails
	}
	if err != nil {
		return fmt.Errorf("hand over the room: %w", err)
	}
	return nil
}

// abandon ends all processes of the way and waits for their end, at most SetupBound. An error that the keeper has
// reported takes precedence.
func (w *way) abandon() error {
	if w.Keeper == nil {
		return nil
	}
	_, err := w.Abandon(time.Now().Add(SetupBound))
	if startErr := w.Keeper.StartError(); startErr != nil {
		return startErr
	}
	return err
}

// readNext collects the layers of overlays, which come first, and returns the next other message.
func (w *way) readNext() (msg helper.Report, pid int, err error) {
	for {
		msg, pid, files, err := w.readFiles()
		for i, fd := range files {
			if i > 0 || msg.Kind != reportLayer || len(w.Layers) == w.expected {
				unix.Close(fd)
				continue
			}
			w.Layers = append(w.Layers, os.NewFile(uintptr(fd), "layer"))
		}
		if err != nil || msg.Kind != reportLayer {
			return msg, pid, err
		}
		if len(files) == 0 {
			return msg, pid, unix.EMFILE // the kernel dropped the descriptor (unix(7))
		}
	}
}

// read returns one message and its sender's PID from the kernel.
func (w *way) read() (msg helper.Report, pid int, err error) {
	msg, pid, files, err := w.readFiles()
	for _, fd := range files {
		unix.Close(fd) // not expected
	}
	return msg, pid, err
}

// readFiles returns one message with its sender's PID and its descriptors.
func (w *way) readFiles() (msg helper.Report, pid int, files []int, err error) {
	conn, err := w.socket.SyscallConn()
	if err != nil {
		return msg, 0, nil, err
	}
	buf := (*[unsafe.Sizeof(msg)]byte)(unsafe.Pointer(&msg))
	var oob [1200]byte // the sender, and MaxSockets descriptors
	var n, oobn int
	var failed error
	err = conn.Read(func(fd uintptr) bool {
		n, oobn, _, _, failed = unix.Recvmsg(int(fd), buf[:], oob[:], unix.MSG_CMSG_CLOEXEC)
		if failed == unix.ECONNRESET {
			// The kernel returns this once if init has exited with an unread order (unix(7)). Its earlier messages are still
			// there.
			n, oobn, _, _, failed = unix.Recvmsg(int(fd), buf[:], oob[:], unix.MSG_CMSG_CLOEXEC)
		}
		return failed != unix.EAGAIN && failed != unix.EINTR
	})
	switch {
	case err != nil:
		return msg, 0, nil, err
	case failed != nil:
		return msg, 0, nil, failed
	case n == 0:
		return msg, 0, nil, ErrClosed
	case n != len(buf):
		return msg, 0, nil, errors.New("short message from the sandbox")
	}
	list, _ := unix.ParseSocketControlMessage(oob[:oobn]) // after an error there is no sender, which is reported below
	for _, c := range list {
		if cred, err := unix.ParseUnixCredentials(&c); err == nil {
			pid = int(cred.Pid)
		} else if rights, err := unix.ParseUnixRights(&c); err == nil {
			files = rights
		}
	}
	if pid == 0 {
		err = errors.New("message without its sender's pid (SO_PASSCRED)")
	}
	return msg, pid, files, err
}

// ErrClosed reports that all processes inside have exited without a message.
var ErrClosed = errors.New("it ended before it was ready")

// Close closes all descriptors. A keeper with processes left continues to kill them.
func (w *way) Close() {
	if w.Keeper != nil {
		w.Kill()
	}
	w.Entered()
	for _, f := range append([]*os.File{w.socket, w.gate, w.Timer}, w.Layers...) {
		f.Close() // on nil it only returns an error
	}
	w.Init.Close()
}
