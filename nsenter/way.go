package nsenter

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/proc"
)

// Target is a sandbox that runs.
type Target struct {
	Init    *proc.Process // verified; stays the caller's
	Cred    *proc.Cred    // who the sandbox runs as; nil if as sbxrun
	HostNet bool          // it has the host's network namespace
}

// namespaces are the sandbox's own.
func (t *Target) namespaces() uintptr {
	const all = unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWCGROUP
	if t.HostNet {
		return all &^ unix.CLONE_NEWNET // the host's, which only its owner may join
	}
	return all
}

// way is a way into a sandbox: the keeper above what goes in, and what that says.
type way struct {
	proc.Kept
	socket *os.File // to what is inside
	gate   *os.File // write end: a byte releases the payload
}

// enter begins to go. What was forked has descriptors of its own when it returns. Also
// after an error the caller abandons the way and closes it.
func (w *way) enter(t *Target, e *entry, stdio [3]*os.File, tty *proc.Terminal, bounds proc.Bounds) error {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("socketpair: %w", err)
	}
	theirs := os.NewFile(uintptr(pair[1]), "entry")
	defer theirs.Close()                // what is inside must be the last to have it, so that its death ends the stream
	_ = unix.SetNonblock(pair[0], true) // for the poller
	w.socket = os.NewFile(uintptr(pair[0]), "entry")
	if err := unix.SetsockoptInt(pair[0], unix.SOL_SOCKET, unix.SO_PASSCRED, 1); err != nil {
		return fmt.Errorf("SO_PASSCRED: %w", err)
	}
	// Not os.Pipe: the payload has to wait at its end.
	var ends [2]int
	if err := unix.Pipe2(ends[:], unix.O_CLOEXEC); err != nil {
		return fmt.Errorf("pipe: %w", err)
	}
	gate := os.NewFile(uintptr(ends[0]), "gate")
	defer gate.Close()
	_ = unix.SetNonblock(ends[1], true) // for the poller
	w.gate = os.NewFile(uintptr(ends[1]), "gate")
	w.Keeper, err = proc.Keep(proc.Command{
		Files:    []*os.File{stdio[0], stdio[1], stdio[2], theirs, gate, t.Init.File()},
		Cred:     t.Cred,
		Terminal: tty,
		Enter:    enter,
		Arg:      unsafe.Pointer(e),
		Bounds:   bounds,
	})
	return err
}

// abandon ends all that has gone this way, and returns when nothing is left, or after
// SetupBound with an error. One that the keeper has told comes first.
func (w *way) abandon() error {
	if w.Keeper == nil {
		return nil
	}
	err := w.Abandon(time.Now().Add(SetupBound))
	if startErr := w.Keeper.StartError(); startErr != nil {
		return startErr
	}
	return err
}

// read takes one message, with its sender as the kernel names it.
func (w *way) read() (msg message, pid int, err error) {
	conn, err := w.socket.SyscallConn()
	if err != nil {
		return msg, 0, err
	}
	buf := (*[unsafe.Sizeof(msg)]byte)(unsafe.Pointer(&msg))
	var oob [64]byte
	var n, oobn int
	var failed error
	err = conn.Read(func(fd uintptr) bool {
		n, oobn, _, _, failed = unix.Recvmsg(int(fd), buf[:], oob[:], unix.MSG_CMSG_CLOEXEC)
		return failed != unix.EAGAIN && failed != unix.EINTR
	})
	switch {
	case err != nil:
		return msg, 0, err
	case failed != nil:
		return msg, 0, failed
	case n == 0:
		return msg, 0, errClosed
	case n != len(buf):
		return msg, 0, errors.New("short message from the sandbox")
	}
	for _, c := range controls(oob[:oobn]) {
		if cred, err := unix.ParseUnixCredentials(&c); err == nil {
			return msg, int(cred.Pid), nil
		}
	}
	return msg, 0, errors.New("message without its sender's pid (SO_PASSCRED)")
}

func controls(oob []byte) []unix.SocketControlMessage {
	list, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil // and so no sender, which is an error
	}
	return list
}

// errClosed: nobody is left who could say something.
var errClosed = errors.New("it ended before it was ready")

// err is a step that failed.
func (m message) err() error {
	step := "enter"
	if m.step > 0 && m.step < int64(len(stepNames)) {
		step = stepNames[m.step]
	}
	return &proc.StartError{Step: step, Err: syscall.Errno(m.value)}
}

// Close gives up all descriptors. Should the keeper still have something, it
// goes on killing it.
func (w *way) Close() {
	if w.Keeper != nil {
		w.Keeper.Kill()
	}
	for _, f := range []*os.File{w.socket, w.gate} {
		if f != nil {
			f.Close()
		}
	}
	if w.Init != nil {
		w.Init.Close()
	}
}
