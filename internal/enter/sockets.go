package enter

import (
	"errors"
	"fmt"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/proc"
)

// This file makes sockets in a room's network namespace. A socket always belongs to the namespace in which it was made
// (network_namespaces(7)), so a process outside can listen and connect in the room.

// MaxSockets is the maximum number of sockets per call of [Sockets]: the descriptors that fit into one message (unix(7),
// SCM_MAX_FD).
const MaxSockets = 253

// sockets are the requested sockets, laid out for system calls.
type sockets struct {
	list    []socket
	one     int32
	msg     unix.Msghdr
	iov     unix.Iovec
	control struct {
		header unix.Cmsghdr
		fds    [MaxSockets + 1]int32
	}
}

// socket listens on its address if that has a port.
type socket struct{ addr unix.RawSockaddrInet4 }

// Sockets makes TCP sockets in the network namespace of a room; room is its verified PID 1. The first ones listen on
// these ports of 127.0.0.1. The others are unconnected IPv6 sockets, or IPv4 sockets if the kernel has no IPv6. Sockets
// blocks for a fork, at most two seconds, or [SetupBound] if the forked process does not exit. The caller closes the
// descriptors. It returns [proc.ErrGone] if the room has ended.
func Sockets(room *proc.Process, cred *proc.Cred, ports []uint16, others int) (fds []int, err error) {
	// Ports below 1024 need the user namespace that owns the network namespace. The room's processes are in one below it.
	owner, err := room.NamespaceOwner("net")
	if err != nil {
		return nil, err
	}
	defer owner.Close()
	var w way
	defer w.Close()
	err = w.send(room, cred, func(b *proc.Block) *entry {
		n := newEntry(b, false)
		n.sockets = n.laySockets(b, ports, others)
		return n
	}, owner)
	if err == nil {
		fds, err = w.receiveSockets(len(ports) + others)
	}
	if err = w.over(room, err); err != nil {
		for _, fd := range fds {
			unix.Close(fd)
		}
		return nil, fmt.Errorf("make sockets in the room of process %d: %w", room.PID, err)
	}
	return fds, nil
}

// receiveSockets returns the received descriptors even with an error.
func (w *way) receiveSockets(want int) (fds []int, err error) {
	msg, _, fds, err := w.readFiles()
	switch {
	case err == nil && msg.kind == messageFailed:
		err = msg.err()
	case err == nil && len(fds) != want:
		err = errors.New("too few descriptors are left")
	}
	return fds, err
}

func (e *entry) laySockets(b *proc.Block, ports []uint16, others int) *sockets {
	list := make([]socket, len(ports)+others)
	for i, port := range ports {
		be := [2]byte{byte(port >> 8), byte(port)}
		list[i].addr = unix.RawSockaddrInet4{Family: unix.AF_INET, Port: *(*uint16)(unsafe.Pointer(&be)), Addr: [4]byte{127, 0, 0, 1}}
	}
	s := proc.New[sockets](b)
	s.list, s.one = proc.Copy(b, list), 1
	s.iov.Base = (*byte)(unsafe.Pointer(&e.msg))
	s.iov.SetLen(int(unsafe.Sizeof(e.msg)))
	s.msg.Iov = &s.iov
	s.msg.SetIovlen(1)
	s.msg.Control = (*byte)(unsafe.Pointer(&s.control))
	c := &s.control.header
	c.Level, c.Type = unix.SOL_SOCKET, unix.SCM_RIGHTS
	size := int(unsafe.Sizeof(*c)) + 4*len(list)
	c.SetLen(size)
	s.msg.SetControllen((size + 7) &^ 7)
	return s
}

// makeSockets makes the sockets and exits; owner is the user namespace of the network namespace.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (e *entry) makeSockets(room, owner uintptr) {
	e.must(stepOuter, unix.SYS_SETNS, owner, unix.CLONE_NEWUSER, 0, 0, 0)
	e.must(stepSetns, unix.SYS_SETNS, room, unix.CLONE_NEWNET, 0, 0, 0)
	s := e.sockets
	list := s.list
	const stream = unix.SOCK_STREAM | unix.SOCK_CLOEXEC | unix.SOCK_NONBLOCK
	fds := unsafe.Pointer(&s.control.fds)
	for i := range list {
		fd := ^uintptr(0)
		if list[i].addr.Port != 0 {
			fd = e.must(stepSocket, unix.SYS_SOCKET, unix.AF_INET, stream, 0, 0, 0)
			e.must(stepSocket, unix.SYS_SETSOCKOPT, fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, uintptr(unsafe.Pointer(&s.one)), unsafe.Sizeof(s.one))
			e.must(stepListen, unix.SYS_BIND, fd, uintptr(unsafe.Pointer(&list[i].addr)), unsafe.Sizeof(list[i].addr), 0, 0)
			e.must(stepListen, unix.SYS_LISTEN, fd, backlog, 0, 0, 0)
		} else {
			// An IPv6 socket can connect in both families.
			var errno syscall.Errno
			if fd, _, errno = syscall.RawSyscall(unix.SYS_SOCKET, unix.AF_INET6, stream, 0); errno != 0 {
				fd = e.must(stepSocket, unix.SYS_SOCKET, unix.AF_INET, stream, 0, 0, 0)
			}
		}
		*(*int32)(fds) = int32(fd)
		fds = unsafe.Add(fds, 4)
	}
	e.msg.kind = messageSockets
	e.must(stepSocket, unix.SYS_SENDMSG, entrySocket, uintptr(unsafe.Pointer(&s.msg)), 0, 0, 0)
	proc.Exit(0)
}

// backlog is the backlog of listening sockets.
const backlog = 128
