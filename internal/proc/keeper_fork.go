package proc

import (
	"strconv"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// This file runs in the keeper, after the fork and by the rules of [bareFork]. All its memory is a [Block].

// record is a message of the keeper, which reports a failed step or reaped children. A SOCK_SEQPACKET keeps messages whole
// (unix(7)).
type record struct {
	kind  int64 // recordFailed, recordEmpty, recordReaped
	step  int64 // recordFailed
	errno int64 // recordFailed
	// recordEmpty: 1 if the keeper killed all processes at its deadline because sbxrun had not.
	late int64
	// recordEmpty: 1 if there was a program, and its wait status.
	program, status int64
	// recordEmpty: the reaped processes. A keeper has few children; beyond maxEnded it only counts them.
	count int64
	ended [maxEnded]ended
}

// ended is one process that the keeper has reaped.
type ended struct {
	pid, status  int64
	user, system int64 // µs, with the children that it had reaped
	maxrss       int64 // KiB
}

const maxEnded = 8

const (
	recordFailed = 1
	recordEmpty  = 2
	recordReaped = 3 // the first of ended
)

// keeperState is the keeper's state, laid out before the fork.
type keeperState struct {
	words unsafe.Pointer // sbxrun's arguments and environment, which the keeper wipes
	size  uintptr
	pidfd int32 // of the keeper, for the parent
	pid   uintptr
	teller
	// Descriptors that the keeper keeps open, besides the socket.
	list      int // /proc/thread-self/children
	signals   int // signalfd for SIGCHLD
	terminals [MaxTerminals]terminal
	hold      []int // files that sbxrun wants kept open
	exec      *child
	enter     *child
	later     *child  // replaces enter if sbxrun lays it out after the fork
	entering  bool    // enter or later is set; until then terminals and remove are invalid
	monitor   uintptr // PID of exec: the keeper kills all children at its end
	lasting   bool    // report each end at once
	ending    bool    // sbxrun has asked for the end or is dead
	orphaned  bool    // sbxrun has closed its end or is dead
	unread    bool    // list could not be read
	deadline  int64   // CLOCK_MONOTONIC in ns: time to kill all children; 0 for never
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

// startKeeper is the keeper's main function; p is a *keeperState.
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

// expendable is the oom_score_adj of keepers and their children, as text. If it is empty, they keep this process's.
var expendable struct {
	text [4]byte
	size int
}

// Expend makes the OOM killer choose keepers and their children before this process. Otherwise it would choose a server if
// commands fill file systems in memory and are small themselves. Call it before starting the first keeper.
func Expend() {
	const adjustment, highest = 500, 1000
	own, err := ReadFile("/proc/self/oom_score_adj")
	if err != nil {
		return // keep the kernel's default
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(own)))
	if err != nil {
		return // keep the kernel's default
	}
	expendable.size = copy(expendable.text[:], strconv.Itoa(min(highest, max(0, n)+adjustment)))
}

// adjustOOM sets the keeper's oom_score_adj, see [Expend].
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

// letIn forks the entering process.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (k *keeperState) letIn(c *child) {
	k.spawn(c, enterCode)
	// The payload's environment may be secret (ptrace(2)). This must not come earlier, because an undumpable process may not
	// write to its own /proc/self/oom_score_adj.
	k.must(stepHide, unix.SYS_PRCTL, unix.PR_SET_DUMPABLE, 0, 0, 0, 0)
}

// letInLater forks the entering process that sbxrun has laid out after the fork, with the descriptors that sbxrun has sent.
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

// maxOrdered is the maximum number of descriptors in one message (unix(7), SCM_MAX_FD).
const maxOrdered = 253

// orders receives messages of sbxrun: a deadline (8 bytes), descriptors of the entering process (1 byte), or that the
// terminals must not be restored (2 bytes).
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

// setUp makes the bare fork a keeper.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (k *keeperState) setUp() {
	k.pid, _, _ = syscall.RawSyscall(unix.SYS_GETPID, 0, 0, 0)
	// All signals stay blocked: only SIGKILL can end the keeper before its work is done.
	k.sigs = ^uint64(0)
	k.must(stepSignals, unix.SYS_RT_SIGPROCMASK, SigSetmask, uintptr(unsafe.Pointer(&k.sigs)), 0, 8, 0)
	// Reset all actions for the children: exec resets handlers but keeps SIG_IGN, and a bwrap before 0.11.1 that ignores
	// SIGCHLD hangs forever.
	for sig := uintptr(1); sig <= 64; sig++ {
		if sig != uintptr(unix.SIGKILL) && sig != uintptr(unix.SIGSTOP) {
			syscall.RawSyscall6(unix.SYS_RT_SIGACTION, sig, uintptr(unsafe.Pointer(&k.noAction)), 0, 8, 0, 0)
		}
	}
	k.must(stepSubreaper, unix.SYS_PRCTL, unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
	// In a new session the caller's Ctrl-C and kill(0, …) do not reach the keeper, and the keeper's kill never reaches the
	// caller's group.
	k.must(stepSession, unix.SYS_SETSID, 0, 0, 0, 0, 0)
	// sbxrun's arguments may be secret, and every user may read /proc/PID/cmdline.
	for i := uintptr(0); i < k.size; i++ {
		*(*byte)(unsafe.Add(k.words, i)) = 0
	}
	// Open the keeper's files before it has children: if it ran out of descriptors later, it would end a running command.
	// First open the thread's list of children.
	k.list = int(k.must(stepChildren, unix.SYS_OPENAT, uintptr(AtCWD), uintptr(unsafe.Pointer(&k.children)), unix.O_RDONLY, 0, 0))
	k.sigs = 1 << (unix.SIGCHLD - 1)
	k.signals = int(k.must(stepSignals, unix.SYS_SIGNALFD4, ^uintptr(0), uintptr(unsafe.Pointer(&k.sigs)), 8, unix.SFD_NONBLOCK, 0))
}

// dropFiles closes all descriptors but the keeper's own, so that it does not hold the caller's pipes open. It cannot fail.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (k *keeperState) dropFiles() {
	k.must(stepName, unix.SYS_PRCTL, unix.PR_SET_NAME, uintptr(unsafe.Pointer(&k.name)), 0, 0, 0) // for ps(1)
	for from := 0; from <= MaxFD; {
		own := MaxFD + 1 // the first descriptor to keep, at or above from
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

// nextFile returns the smaller of own and fd, ignoring an fd below from.
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

// reap reaps all children that have ended, in a loop because SIGCHLD coalesces (signal(7)). If no child is left, the
// keeper reports that and exits.
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
			if !k.orphaned { // otherwise they are restored already and may now belong to another job
				k.restoreTerminals()
			}
			k.removeCgroups()
			Exit(0)
		}
		if e != 0 || pid == 0 {
			return
		}
		if pid == k.monitor {
			// The monitor has ended with the room or was killed. In the latter case its child may not have set its death signal
			// yet (bubblewrap #633), or may wait forever for the monitor to write its UID map.
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

// wait blocks until a child has ended, sbxrun has sent a message or is dead, or the deadline has passed.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (k *keeperState) wait() {
	k.poll[0] = unix.PollFd{Fd: int32(k.signals), Events: unix.POLLIN}
	k.poll[1] = unix.PollFd{Fd: int32(k.socket), Events: unix.POLLIN}
	n, timeout := uintptr(2), uintptr(0)
	if k.ending {
		k.poll[1].Events = 0 // the socket stays readable; POLLHUP is always reported
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
	if k.unread { // retry, because the children may not end by themselves
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
	// sbxrun may have shut down its end without closing it: then it still reads records.
	k.orphaned = k.poll[1].Revents&unix.POLLHUP != 0
	if k.orphaned {
		k.restoreTerminals()
	}
}

// keepOn waits, if there are terminals or cgroups, until sbxrun has forwarded the last output, restored the terminals and
// read the cgroups' counters, or has died.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (k *keeperState) keepOn() {
	if !k.entering || k.terminals[0].fd < 0 && len(k.remove) == 0 {
		return
	}
	k.poll[1] = unix.PollFd{Fd: int32(k.socket)} // POLLHUP is always reported
	for !k.orphaned && k.poll[1].Revents == 0 {
		syscall.RawSyscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(&k.poll[1])), 1, 0, 0, 0, 0)
	}
}

// restoreTerminals restores the caller's terminals. If sbxrun has done so already, this has no effect. Job control does not
// stop a TCSETS of the keeper, which has no controlling terminal (tty_ioctl(4)).
//
//go:nosplit
//go:norace
//go:nocheckptr
func (k *keeperState) restoreTerminals() {
	if !k.entering {
		return
	}
	// An ending keeper has stopped reading messages. An unread one may report that the terminals now belong to another job.
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

// killChildren sends SIGKILL to all current children. The next call finds the processes that are reparented to the keeper
// when these die.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (k *keeperState) killChildren() {
	n, _, e := syscall.RawSyscall6(unix.SYS_PREAD64, uintptr(k.list), uintptr(unsafe.Pointer(&k.buf)), uintptr(len(k.buf)), 0, 0, 0)
	// The read fails if the kernel has no memory for the text, and an OOM kill may be the reason for this call.
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
		// A space follows every PID, so a PID cut off by the end of the buffer is ignored.
		if pid > 1 {
			syscall.RawSyscall(unix.SYS_KILL, pid, uintptr(unix.SIGKILL), 0)
		}
		pid = 0
	}
}

// removeCgroups removes the empty cgroups. The keeper's end then shows sbxrun, if it is alive, that this is done.
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

// Constants missing in package unix, also for package enter.
const (
	SigSetmask = 2         // SIG_SETMASK of sigprocmask(2)
	MaxFD      = 1<<32 - 1 // the greatest descriptor close_range(2) accepts
)

// Values for bare forks, which cannot allocate.
var (
	AtCWD = unix.AT_FDCWD // a variable, because a negative constant cannot become a uintptr
	Root  = [...]byte{'/', 0}
	Tmpfs = [...]byte{'t', 'm', 'p', 'f', 's', 0}
)
