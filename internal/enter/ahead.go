package enter

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/proc"
)

// This file runs in a warm room, by the rules of enter.go. *inside* stays there as the maker and makes an init on
// request, before its command is known. So a command does not wait for the entering, its mounts, or the filter, which
// the maker has loaded for all of them. The filter allows namespaces and mounts, for which the maker has the
// capabilities. An init drops them before it forks its payload, for which such calls therefore fail.
//
// All these processes share their memory, and sbxrun has the same memory mapped at the same address (a [proc.Block]
// made before the fork). sbxrun lays a command out there and sends a copy through the gate, here a socket, with the
// payload's descriptors 0, 1 and 2. The payload receives it at the address for which its pointers are valid.

// places is the maximum number of inits at a time: a running one and the next one.
const places = 2

// maker is the state of inside as the maker.
type maker struct {
	filter *unix.SockFprog // nil for none
	places [places]*entry
	order  letter // data is the place
	data   [1]byte
}

// ahead is the state of an init made ahead.
type ahead struct {
	files       [3]int32 // in the maker: socket, gate, timer
	place, size uintptr  // of the command
	workdir     *byte    // of the room
	hello       letter
}

// Descriptors in the first message of an init made ahead.
const (
	helloPidfd   = iota // of itself
	helloMounts         // its mount namespace, which sbxrun may not be allowed to open
	helloWorkdir        // as the command will see it; the pidfd again if it cannot be opened
)

// letter is a message with up to three descriptors for recvmsg(2).
type letter struct {
	msg unix.Msghdr
	iov struct { // struct iovec with a number, because a bare fork stores no pointers
		place, left uintptr
	}
	control struct {
		header unix.Cmsghdr
		fds    [3]int32
		_      int32
	}
}

// arm prepares the letter for the next message.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (l *letter) arm() { l.msg.Controllen = uint64(unsafe.Sizeof(l.control)) }

// complete reports whether the message had three descriptors.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (l *letter) complete() bool {
	c := &l.control.header
	return uint64(l.msg.Controllen) >= uint64(unsafe.Sizeof(*c)) && c.Level == unix.SOL_SOCKET && c.Type == unix.SCM_RIGHTS &&
		uint64(c.Len) == uint64(unsafe.Sizeof(*c)+unsafe.Sizeof(l.control.fds))
}

var ownMounts = [...]byte{'/', 'p', 'r', 'o', 'c', '/', 's', 'e', 'l', 'f', '/', 'n', 's', '/', 'm', 'n', 't', 0}

var makerName = [16]byte{'s', 'b', 'x', 'r', 'u', 'n', '-', 'm', 'a', 'k', 'e', 'r'}

// enterMaker joins the room's namespaces and takes a copy of its mounts, which each init copies in turn. It unmounts
// what every init mounts anew. Only the user namespace that owns the mounts, outer, may do that: in any other they are
// locked (mount_namespaces(7)).
//
//go:nosplit
//go:norace
//go:nocheckptr
func (e *entry) enterMaker(room, outer uintptr) {
	e.must(stepOuter, unix.SYS_SETNS, outer, unix.CLONE_NEWUSER, 0, 0, 0)
	e.must(stepSetns, unix.SYS_SETNS, room, e.namespaces&^unix.CLONE_NEWUSER, 0, 0, 0)
	e.must(stepMounts, unix.SYS_UNSHARE, unix.CLONE_NEWNS, 0, 0, 0, 0)
	e.must(stepMounts, unix.SYS_MOUNT, 0, uintptr(unsafe.Pointer(&proc.Root)), 0, unix.MS_REC|unix.MS_PRIVATE, 0)
	dirs := e.maker.places[0].fresh
	for i := len(dirs) - 1; i >= 0; i-- {
		syscall.RawSyscall(unix.SYS_UMOUNT2, uintptr(unsafe.Pointer(dirs[i].target)), unix.MNT_DETACH, 0)
	}
	syscall.RawSyscall(unix.SYS_UMOUNT2, uintptr(unsafe.Pointer(&ptsDir)), unix.MNT_DETACH, 0)
	e.joinUser(room)
}

// make makes inits until sbxrun closes its end of the socket or dies.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (e *entry) make() {
	m := e.maker
	e.must(stepName, unix.SYS_PRCTL, unix.PR_SET_NAME, uintptr(unsafe.Pointer(&makerName)), 0, 0, 0)
	// This includes the keeper's socket.
	e.must(stepFiles, unix.SYS_CLOSE_RANGE, entryReady, proc.MaxFD, 0, 0, 0)
	e.gainNothing()
	if m.filter != nil {
		e.must(stepFilter, unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(m.filter)), 0, 0)
	}
	for {
		m.order.arm()
		n, _, errno := syscall.RawSyscall(unix.SYS_RECVMSG, entrySocket, uintptr(unsafe.Pointer(&m.order.msg)), unix.MSG_CMSG_CLOEXEC)
		if errno == unix.EINTR {
			continue
		}
		if errno != 0 || n == 0 {
			proc.Exit(0) // sbxrun is dead or has closed the socket
		}
		if !m.order.complete() {
			e.fail(stepInit, unix.EMFILE)
		}
		next := m.places[0]
		if m.data[0] != 0 {
			next = m.places[1]
		}
		next.ahead.files = m.order.control.fds
		_, errno = proc.Clone(unix.CLONE_PARENT|next.spaces, next.initStack, initCode, unsafe.Pointer(next))
		if errno != 0 {
			e.fail(stepInit, errno)
		}
		e.must(stepFiles, unix.SYS_CLOSE_RANGE, entryReady, proc.MaxFD, 0, 0, 0)
	}
}

// takeAhead moves the descriptors of an init made ahead to their numbers.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (e *entry) takeAhead() {
	if e.ahead == nil {
		return
	}
	files := &e.ahead.files
	// The maker received them in this order, above its own, so no dup3 overwrites one that is still needed.
	for i := range files {
		to := uintptr(entrySocket + i)
		if to > entryGate {
			to = entryTimer
		}
		if uintptr(files[i]) != to {
			syscall.RawSyscall(unix.SYS_DUP3, uintptr(files[i]), to, unix.O_CLOEXEC)
		}
	}
	syscall.RawSyscall(unix.SYS_CLOSE_RANGE, entryFiles, proc.MaxFD, 0)
	to := &e.payload.letter.iov // the previous payload has advanced it
	to.place, to.left = e.ahead.place, e.ahead.size
}

// Requests for [entry.openOwn] (linux/pidfd.h).
const (
	pidfdMounts = 0xff03 // PIDFD_GET_MNT_NAMESPACE
	pidfdPIDs   = 0xff05 // PIDFD_GET_PID_NAMESPACE
)

// openOwn opens a namespace of init by an ioctl of init's pidfd. Before Linux 6.11 it opens the path in /proc, for
// which the kernel has to make four inodes.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (e *entry) openOwn(pidfd, request, path uintptr) uintptr {
	fd, _, errno := syscall.RawSyscall(unix.SYS_IOCTL, pidfd, request, 0)
	if errno == 0 {
		return fd
	}
	return e.must(stepIntroduce, unix.SYS_OPENAT, uintptr(proc.AtCWD), path, unix.O_RDONLY|unix.O_CLOEXEC, 0, 0)
}

// introduce reports that init is ready and sends descriptors that identify it beyond doubt.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (e *entry) introduce(pidfd uintptr) {
	h := &e.ahead.hello
	fds := &h.control.fds
	fds[helloPidfd] = int32(pidfd)
	fds[helloMounts] = int32(e.openOwn(pidfd, pidfdMounts, uintptr(unsafe.Pointer(&ownMounts))))
	// The policy's working directory may not exist; the command's chdir reports that.
	dir, _, errno := syscall.RawSyscall6(unix.SYS_OPENAT, uintptr(proc.AtCWD), uintptr(unsafe.Pointer(e.ahead.workdir)), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0, 0, 0)
	fds[helloWorkdir] = int32(dir)
	if errno != 0 {
		fds[helloWorkdir] = fds[helloPidfd]
	}
	h.iov.place, h.iov.left = uintptr(unsafe.Pointer(&e.msg)), unsafe.Sizeof(e.msg)
	c := &h.control.header
	c.Level, c.Type = unix.SOL_SOCKET, unix.SCM_RIGHTS
	c.Len = uint64(unsafe.Sizeof(*c) + unsafe.Sizeof(h.control.fds))
	h.arm()
	e.must(stepIntroduce, unix.SYS_SENDMSG, entrySocket, uintptr(unsafe.Pointer(&h.msg)), 0, 0, 0)
	// These were opened last, after the descriptors that init needs.
	syscall.RawSyscall(unix.SYS_CLOSE_RANGE, uintptr(fds[helloPidfd]), proc.MaxFD, 0)
}

// receive waits for the command and takes its descriptors 0, 1 and 2.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (e *payload) receive() {
	l := e.letter
	got := uintptr(0)
	for got < unsafe.Sizeof(e.command.size) || got < e.command.size {
		l.arm() // the descriptors come with the first part
		n, _, errno := syscall.RawSyscall(unix.SYS_RECVMSG, entryGate, uintptr(unsafe.Pointer(&l.msg)), unix.MSG_CMSG_CLOEXEC)
		if errno == unix.EINTR {
			continue
		}
		if errno != 0 || n == 0 {
			proc.Exit(0) // sbxrun died or gave up before Release
		}
		if got == 0 && !l.complete() {
			e.fail(stepFiles, unix.EMFILE)
		}
		if got == 0 {
			fds := &l.control.fds // become 0, 1 and 2
			for i := range fds {
				e.must(stepFiles, unix.SYS_DUP3, uintptr(fds[i]), uintptr(i), 0, 0, 0)
				syscall.RawSyscall(unix.SYS_CLOSE, uintptr(fds[i]), 0, 0)
			}
		}
		got += n
		l.iov.place += n
		l.iov.left -= n
	}
}
