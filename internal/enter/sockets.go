package enter

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/helper"
	"github.com/sbxrun/sbxrun/internal/proc"
)

// This file makes sockets in a room's network namespace. A socket always belongs to the namespace in which it was made
// (network_namespaces(7)), so a process outside can listen and connect in the room.

// MaxSockets is the maximum number of sockets per call of [Sockets]: the descriptors that fit into one message (unix(7),
// SCM_MAX_FD).
const MaxSockets = 253

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
	err = w.send(room, cred, func(s *helper.Script) { laySockets(s, ports, others) }, owner)
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
	case err == nil && msg.Kind == helper.Failed:
		err = proc.Failure(&msg)
	case err == nil && len(fds) != want:
		err = errors.New("too few descriptors are left")
	}
	return fds, err
}

// laySockets lays out the calls that make the sockets. The entering process receives the user namespace that owns the
// network namespace.
func laySockets(s *helper.Script, ports []uint16, others int) {
	const (
		first  = slotOuter + 1 // of the sockets
		step   = "make a socket in the room"
		listen = "listen in the room"
		stream = unix.SOCK_STREAM | unix.SOCK_CLOEXEC | unix.SOCK_NONBLOCK
	)
	layStart(s, 2)
	s.Do("join the user namespace of the room's network", unix.SYS_SETNS, slotOuter, unix.CLONE_NEWUSER)
	s.Do(stepSetns, unix.SYS_SETNS, slotRoom, unix.CLONE_NEWNET)
	for i, port := range ports {
		fd := first + helper.Slot(i)
		addr := s.Data([]byte{unix.AF_INET, 0, byte(port >> 8), byte(port), 127, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0}) // struct sockaddr_in
		s.Add(step, fd, unix.SYS_SOCKET, unix.AF_INET, stream, 0)
		s.Do(step, unix.SYS_SETSOCKOPT, fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, s.Words(1), 4)
		s.Do(listen, unix.SYS_BIND, fd, addr, 16)
		s.Do(listen, unix.SYS_LISTEN, fd, backlog)
	}
	for i := range others {
		fd := first + helper.Slot(len(ports)+i)
		s.Add(step, fd, unix.SYS_SOCKET, unix.AF_INET6, stream, 0) // can connect in both families
		s.Allow(0, helper.AnyError)
		s.Over(1)
		s.Add(step, fd, unix.SYS_SOCKET, unix.AF_INET, stream, 0)
	}
	s.Do(step, helper.Say, reportSockets, len(ports)+others, int(first))
	s.Do("exit", helper.Exit, 0)
}

// backlog is the backlog of listening sockets.
const backlog = 128
