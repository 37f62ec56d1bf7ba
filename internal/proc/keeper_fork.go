package proc

import (
	"strconv"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// This file is the keeper as it runs: after the fork, with the rules of
// [bareFork]. All its memory is a [Block].

// record is a message of the keeper's: one when a step failed, one when all is
// reaped. A SOCK_SEQPACKET keeps each whole (unix(7)).
type record struct {
	kind  int64 // recordFailed, recordEmpty, recordReaped
	step  int64 // recordFailed
	errno int64 // recordFailed
	// recordEmpty: 1 if the keeper has ended everything at the deadline that sbxrun
	// gave it, because sbxrun did not.
	late int64
	// recordEmpty: 1 if there was a program, and its wait status.
	program, status int64
	// recordEmpty: what was reaped. A keeper has the few children that its two
	// commands leave it; of more than fit only the number is known.
	count int64
	ended [maxEnded]ended
}

// ended is one process that the keeper has reaped.
type ended struct {
	pid, status  int64
	user, system int64 // µs, of it and of what it had reaped itself
	maxrss       int64 // KiB
}

const maxEnded = 8

const (
	recordFailed = 1
	recordEmpty  = 2
	recordReaped = 3 // the first of ended
)

// keeperState is the keeper's memory, and everything it needs, laid out before
// the fork.
type keeperState struct {
	words unsafe.Pointer // arguments and environment of sbxrun, to be wiped
	size  uintptr
	pidfd int32 // of the keeper, for the parent
	pid   uintptr
	teller
	// The keeper's descriptors, all that it keeps next to the socket.
	list      int // /proc/thread-self/children
	signals   int // signalfd for SIGCHLD
	terminals [MaxTerminals]terminal
	hold      []int // what sbxrun wants kept open
	exec      *child
	enter     *child
	later     *child  // what enters, if sbxrun lays it out after the fork
	entering  bool    // what enters is known: before that terminal and remove mean nothing
	monitor   uintptr // pid of exec: when it ends, so does everything
	lasting   bool    // each end is told at once
	ending    bool    // sbxrun has said that it is over, or is dead
	orphaned  bool    // sbxrun has closed its end, or is dead
	unread    bool    // list could not be read
	deadline  int64   // CLOCK_MONOTONIC, ns: when all is ended without a word; 0 for never
	usage     unix.Rusage
	status    int32
	poll      [2]unix.PollFd
	sigs      uint64
	now       unix.Timespec
	buf       [512]byte
	orders    orders
	noAction  [4]uintptr // struct kernel_sigaction: SIG_DFL
	name      [16]byte
	children  [32]byte
	remove    []*byte
	pause     unix.Timespec
}

// terminal is a [Terminal].
type terminal struct {
	fd    int // -1 for none
	state unix.Termios
}

// startKeeper is the life of the keeper; p is a *keeperState.
//
//go:nosplit
//go:norace
//go:nocheckptr
func startKeeper(p unsafe.Pointer) {
	k := (*keeperState)(p)
	k.setUp()
	adjustOOM()
	if k.exec != nil {
		k.monitor = k.spawn(k.exec, execCode)
	}
	if k.enter != nil {
		k.letIn(k.enter)
	}
	k.dropFiles()
	for {
		k.reap()
		if k.ending {
			k.killChildren()
		}
		k.wait()
	}
}

// expendable is the oom_score_adj of keepers and all that they start, as text; empty for that of this process.
var expendable struct {
	text [4]byte
	size int
}

// Expend has the kernel choose keepers and what they start before this process when memory runs out: a server
// would otherwise be chosen if commands fill file systems in memory and are small themselves. It is called
// before the first keeper is started.
func Expend() {
	const adjustment, highest = 500, 1000
	own, err := ReadFile("/proc/self/oom_score_adj")
	if err != nil {
		return // the kernel chooses as it does by default
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(own)))
	if err != nil {
		return // likewise
	}
	expendable.size = copy(expendable.text[:], strconv.Itoa(min(highest, max(0, n)+adjustment)))
}

// adjustOOM is a keeper's part of [Expend].
//
//go:nosplit
//go:norace
//go:nocheckptr
func adjustOOM() {
	if expendable.size == 0 {
		return
	}
	fd, _, errno := syscall.RawSyscall6(unix.SYS_OPENAT, uintptr(AtCWD), uintptr(unsafe.Pointer(&oomFile)), unix.O_WRONLY|unix.O_CLOEXEC, 0, 0, 0)
	if errno != 0 {
		return
	}
	syscall.RawSyscall(unix.SYS_WRITE, fd, uintptr(unsafe.Pointer(&expendable.text)), uintptr(expendable.size))
	syscall.RawSyscall(unix.SYS_CLOSE, fd, 0, 0)
}

// letIn forks what enters.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (k *keeperState) letIn(c *child) {
	k.spawn(c, enterCode)
	// What the payload is to find may be secret (ptrace(2)). Not before: what is
	// undumpable may not write to its own /proc/self/oom_score_adj.
	k.must(stepHide, unix.SYS_PRCTL, unix.PR_SET_DUMPABLE, 0, 0, 0, 0)
}

// letInLater forks what sbxrun has laid out after the fork, and has sent the descriptors of.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (k *keeperState) letInLater() {
	c := k.later
	slots := c.slots
	o := &k.orders
	if uint64(o.control.header.Len) != uint64(unsafe.Sizeof(o.control.header))+uint64(len(slots))*4 || o.msg.Flags&unix.MSG_CTRUNC != 0 {
		k.fail(stepFiles, unix.EMFILE)
	}
	fd := unsafe.Pointer(&o.control.fds)
	for i := range slots {
		*slots[i] = int(*(*int32)(fd))
		fd = unsafe.Add(fd, 4)
	}
	k.entering = true
	k.letIn(c)
	k.dropFiles()
}

// maxOrdered is how many descriptors can come in one message (unix(7), SCM_MAX_FD).
const maxOrdered = 253

// orders are what sbxrun says to the keeper, as recvmsg(2) takes it: a time, or one byte and
// the descriptors of what enters.
type orders struct {
	msg     unix.Msghdr
	iov     unix.Iovec
	data    int64
	control struct {
		header unix.Cmsghdr
		fds    [maxOrdered + 1]int32
	}
}

func (o *orders) lay() {
	o.iov.Base = (*byte)(unsafe.Pointer(&o.data))
	o.iov.SetLen(int(unsafe.Sizeof(o.data)))
	o.msg.Iov = &o.iov
	o.msg.SetIovlen(1)
	o.msg.Control = (*byte)(unsafe.Pointer(&o.control))
}

// setUp makes the bare fork what a keeper is.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (k *keeperState) setUp() {
	k.pid, _, _ = syscall.RawSyscall(unix.SYS_GETPID, 0, 0, 0)
	// Every signal is blocked for good: nobody but SIGKILL can end the keeper
	// before its work is done.
	k.sigs = ^uint64(0)
	k.must(stepSignals, unix.SYS_RT_SIGPROCMASK, SigSetmask, uintptr(unsafe.Pointer(&k.sigs)), 0, 8, 0)
	// For the children: exec resets handlers to the default but lets SIG_IGN through,
	// and a bwrap that ignores SIGCHLD hangs for ever (bubblewrap before 0.11.1).
	for sig := uintptr(1); sig <= 64; sig++ {
		if sig != uintptr(unix.SIGKILL) && sig != uintptr(unix.SIGSTOP) {
			syscall.RawSyscall6(unix.SYS_RT_SIGACTION, sig, uintptr(unsafe.Pointer(&k.noAction)), 0, 8, 0, 0)
		}
	}
	k.must(stepSubreaper, unix.SYS_PRCTL, unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
	// A session of its own: neither the caller's Ctrl-C nor its kill(0, …)
	// reaches the keeper, and its kill never reaches the caller's group.
	k.must(stepSession, unix.SYS_SETSID, 0, 0, 0, 0, 0)
	// What sbxrun was called with may be secret, and everybody may read
	// /proc/PID/cmdline.
	for i := uintptr(0); i < k.size; i++ {
		*(*byte)(unsafe.Add(k.words, i)) = 0
	}
	// What it needs open. Before it has children: a keeper that failed later, for want of descriptors,
	// would take a command with it that has begun. First the thread's own list of children.
	k.list = int(k.must(stepChildren, unix.SYS_OPENAT, uintptr(AtCWD), uintptr(unsafe.Pointer(&k.children)), unix.O_RDONLY, 0, 0))
	k.sigs = 1 << (unix.SIGCHLD - 1)
	k.signals = int(k.must(stepSignals, unix.SYS_SIGNALFD4, ^uintptr(0), uintptr(unsafe.Pointer(&k.sigs)), 8, unix.SFD_NONBLOCK, 0))
}

// dropFiles closes all other descriptors, those between the keeper's own: it would hold
// the caller's pipes open. Nothing here can fail.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (k *keeperState) dropFiles() {
	k.must(stepName, unix.SYS_PRCTL, unix.PR_SET_NAME, uintptr(unsafe.Pointer(&k.name)), 0, 0, 0) // for ps(1)
	for from := 0; from <= MaxFD; {
		own := MaxFD + 1 // the first one from there
		own = nextFile(own, k.socket, from)
		own = nextFile(own, k.list, from)
		own = nextFile(own, k.signals, from)
		hold := k.hold
		for i := range hold {
			own = nextFile(own, hold[i], from)
		}
		if k.entering {
			for i := range k.terminals {
				own = nextFile(own, k.terminals[i].fd, from)
			}
		}
		if own > from {
			syscall.RawSyscall(unix.SYS_CLOSE_RANGE, uintptr(from), uintptr(own-1), 0)
		}
		from = own + 1
	}
}

// nextFile is the smaller one of own and fd, if fd is not below from.
//
//go:nosplit
//go:norace
//go:nocheckptr
func nextFile(own, fd, from int) int {
	if fd >= from && fd < own {
		return fd
	}
	return own
}

// reap collects whatever has ended; with nothing left at all it reports so and
// ends the keeper. In a loop, because SIGCHLD coalesces (signal(7)).
//
//go:nosplit
//go:norace
//go:nocheckptr
func (k *keeperState) reap() {
	for {
		pid, _, e := syscall.RawSyscall6(unix.SYS_WAIT4, ^uintptr(0), uintptr(unsafe.Pointer(&k.status)), unix.WNOHANG, uintptr(unsafe.Pointer(&k.usage)), 0, 0)
		if e == unix.EINTR {
			continue
		}
		if e == unix.ECHILD {
			k.rec.kind = recordEmpty
			k.say()
			k.keepOn()
			if !k.orphaned { // or they were restored then, and may be somebody else's by now
				k.restoreTerminals()
			}
			k.removeCgroups()
			Exit(0)
		}
		if e != 0 || pid == 0 {
			return
		}
		if pid == k.monitor {
			// bwrap's monitor ends when the room does, or was killed; then its child may
			// not yet have asked to die with it (bubblewrap #633), or wait for the monitor
			// to write its uid map, for ever.
			k.ending = true
			k.rec.program, k.rec.status = 1, int64(k.status)
		}
		if k.lasting {
			k.rec.count, k.rec.kind = 0, recordReaped
		}
		if n := uint64(k.rec.count); n < maxEnded {
			k.rec.ended[n] = ended{
				pid: int64(pid), status: int64(k.status),
				user:   k.usage.Utime.Sec*1e6 + int64(k.usage.Utime.Usec),
				system: k.usage.Stime.Sec*1e6 + int64(k.usage.Stime.Usec),
				maxrss: k.usage.Maxrss,
			}
		}
		k.rec.count++
		if k.lasting {
			k.say()
		}
	}
}

// wait blocks until a child has ended, sbxrun has said something or is dead, or the
// deadline is over.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (k *keeperState) wait() {
	k.poll[0] = unix.PollFd{Fd: int32(k.signals), Events: unix.POLLIN}
	k.poll[1] = unix.PollFd{Fd: int32(k.socket), Events: unix.POLLIN}
	n, timeout := uintptr(2), uintptr(0)
	if k.ending {
		k.poll[1].Events = 0 // it stays readable; POLLHUP needs no asking
	} else if k.deadline != 0 {
		syscall.RawSyscall(unix.SYS_CLOCK_GETTIME, unix.CLOCK_MONOTONIC, uintptr(unsafe.Pointer(&k.now)), 0)
		left := k.deadline - k.now.Sec*1e9 - k.now.Nsec
		if left <= 0 {
			k.ending, k.rec.late = true, 1
			return
		}
		k.now.Sec, k.now.Nsec = left/1e9, left%1e9
		timeout = uintptr(unsafe.Pointer(&k.now))
	}
	if k.orphaned {
		n = 1
	}
	if k.unread { // nobody may end until somebody is killed
		k.now = k.pause
		timeout = uintptr(unsafe.Pointer(&k.now))
	}
	syscall.RawSyscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(&k.poll)), n, timeout, 0, 0, 0)
	syscall.RawSyscall(unix.SYS_READ, uintptr(k.signals), uintptr(unsafe.Pointer(&k.buf)), uintptr(len(k.buf)))
	if n < 2 || k.poll[1].Revents == 0 {
		return
	}
	if !k.ending {
		o := &k.orders
		o.msg.Controllen = uint64(unsafe.Sizeof(o.control))
		got, _, errno := syscall.RawSyscall(unix.SYS_RECVMSG, uintptr(k.socket), uintptr(unsafe.Pointer(&o.msg)), unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
		switch {
		case errno == unix.EAGAIN || errno == unix.EINTR:
			return
		case errno == 0 && got == unsafe.Sizeof(o.data):
			k.deadline = o.data
			return
		case errno == 0 && got == 1:
			k.letInLater()
			return
		case errno == 0 && got == 2: // sbxrun is in the background
			for i := range k.terminals {
				k.terminals[i].fd = -1
			}
			return
		}
		k.ending = true
	}
	// Shut down is not yet closed: then the sandbox still has something to say.
	k.orphaned = k.poll[1].Revents&unix.POLLHUP != 0
	if k.orphaned {
		k.restoreTerminals()
	}
}

// keepOn waits, where there is something left to do, until sbxrun has passed on the
// last output and restored the terminals, and has read the counts of the cgroups;
// or has been killed and cannot.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (k *keeperState) keepOn() {
	if !k.entering || k.terminals[0].fd < 0 && len(k.remove) == 0 {
		return
	}
	k.poll[1] = unix.PollFd{Fd: int32(k.socket)} // POLLHUP needs no asking
	for !k.orphaned && k.poll[1].Revents == 0 {
		syscall.RawSyscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(&k.poll[1])), 1, 0, 0, 0, 0)
	}
}

// restoreTerminals restores the caller's terminals. sbxrun does so itself if it can; twice does no
// harm. TCSETS from outside the terminal's session is not stopped by job control: the keeper has no
// controlling terminal (tty_ioctl(4)).
//
//go:nosplit
//go:norace
//go:nocheckptr
func (k *keeperState) restoreTerminals() {
	if !k.entering {
		return
	}
	// The keeper reads no messages when it is ending: one of them may be that the terminals belong to another job now.
	for {
		o := &k.orders
		o.msg.Controllen = uint64(unsafe.Sizeof(o.control))
		got, _, errno := syscall.RawSyscall(unix.SYS_RECVMSG, uintptr(k.socket), uintptr(unsafe.Pointer(&o.msg)), unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
		if got == 2 && errno == 0 {
			return
		}
		if errno != unix.EINTR && (errno != 0 || got == 0) {
			break
		}
	}
	for i := range k.terminals {
		if t := &k.terminals[i]; t.fd >= 0 {
			syscall.RawSyscall(unix.SYS_IOCTL, uintptr(t.fd), unix.TCSETS, uintptr(unsafe.Pointer(&t.state)))
		}
	}
}

// killChildren sends SIGKILL to every child there is now. Those that are
// reparented here when they die are found by the next call.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (k *keeperState) killChildren() {
	n, _, e := syscall.RawSyscall6(unix.SYS_PREAD64, uintptr(k.list), uintptr(unsafe.Pointer(&k.buf)), uintptr(len(k.buf)), 0, 0, 0)
	// The kernel needs a page for the text, and memory may be what sbxrun was killed for the
	// want of.
	k.unread = e != 0
	if k.unread {
		return
	}
	pid := uintptr(0)
	for i := uintptr(0); i < n && i < uintptr(len(k.buf)); i++ {
		if c := k.buf[i]; c >= '0' && c <= '9' {
			pid = pid*10 + uintptr(c-'0')
			continue
		}
		// Every number is followed by a blank, so one cut off by the end of
		// the buffer is never taken for a pid.
		if pid > 1 {
			syscall.RawSyscall(unix.SYS_KILL, pid, uintptr(unix.SIGKILL), 0)
		}
		pid = 0
	}
}

// removeCgroups removes the cgroups, which hold nothing any more. sbxrun is told by
// our end, or is dead.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (k *keeperState) removeCgroups() {
	if !k.entering {
		return
	}
	dirs := k.remove
	for i := range dirs {
		for range removeTries {
			_, _, errno := syscall.RawSyscall(unix.SYS_UNLINKAT, uintptr(AtCWD), uintptr(unsafe.Pointer(dirs[i])), unix.AT_REMOVEDIR)
			if errno != unix.EBUSY {
				break
			}
			syscall.RawSyscall(unix.SYS_NANOSLEEP, uintptr(unsafe.Pointer(&k.pause)), 0, 0)
		}
	}
}

// What unix does not have, for package enter as well.
const (
	SigSetmask = 2         // SIG_SETMASK of sigprocmask(2)
	MaxFD      = 1<<32 - 1 // the greatest descriptor close_range(2) accepts
)

// What a bare fork takes from here: nothing can be made there.
var (
	AtCWD = unix.AT_FDCWD // as a variable: a constant could not become a uintptr
	Root  = [...]byte{'/', 0}
	Tmpfs = [...]byte{'t', 'm', 'p', 'f', 's', 0}
)
