package proc

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/helper"
)

// This file starts keepers and lays out the scripts of their children. The keeper's own code is in internal/helper/src.

// order is what sbxrun sends to a keeper, before the paths of cgroups to remove. struct order of keeper.c has the same
// layout.
type order struct {
	Kind       uint32
	Child      uint32 // 1: there is a child
	Deadline   int64  // orderDeadline: CLOCK_MONOTONIC in ns
	Files      uint32 // number of the child's descriptors
	Program    uint32 // 1: the child executes a program, at whose end the keeper kills all children
	Cgroup     int32  // number of the file that is the child's cgroup, or -1
	Terminals  uint32 // number
	Held       uint32 // number
	Lasting    uint32 // 1: report each end at once
	RemoveSize uint32 // size of the paths after the order
	OOM        [8]byte
	States     [MaxTerminals]unix.Termios
}

const (
	orderChild = iota + 1
	orderDeadline
	orderLeaveTerminals
	orderFiles // descriptors of the next orderChild
)

// record is a keeper's report of anything but a failure. struct record of keeper.c has the same layout.
type record struct {
	Kind            int64
	Late            int64 // 1 if the keeper killed all processes at its deadline because sbxrun had not
	Program, Status int64 // 1 if there was a program, and its wait status
	Count           int64 // of reaped processes. A keeper has few children; beyond maxEnded it only counts them.
	Ended           [maxEnded]ended
}

// ended is one process that the keeper has reaped.
type ended struct {
	PID, Status  int64
	User, System int64 // µs, with the children that it had reaped
	MaxRSS       int64 // KiB
}

const maxEnded = 8

const (
	recordEmpty  = iota + 10
	recordReaped // the first of Ended
)

// maxRemove is the maximum size of the paths of cgroups to remove.
const maxRemove = 8192

// Keep starts a keeper, which starts c, and returns at once. The program itself shows the caller that it was executed;
// otherwise [Keeper.StartError] returns the reason. The caller owns the Keeper and must [Keeper.Reap] it.
func Keep(c Command) (*Keeper, error) {
	if c.Cred != nil && !Capable(unix.CAP_KILL) { // sbxrun could not kill it (kill(2))
		return nil, &StartError{Step: "kill processes with another user ID (CAP_KILL)", Err: unix.EPERM}
	}
	// First the program, so that it runs while the Way starts.
	var orders []*laidOut
	defer func() {
		for _, o := range orders {
			o.close()
		}
	}()
	if c.Program != nil {
		o, err := c.layProgram()
		if err != nil {
			return nil, err
		}
		orders = append(orders, o)
	}
	if c.Program == nil || c.Way != nil {
		o, err := c.layWay()
		if err != nil {
			return nil, err
		}
		orders = append(orders, o)
	}
	orders[0].OOM = expendable
	k, err := startKeeper()
	if err != nil {
		return nil, err
	}
	for i, o := range orders {
		if err == nil {
			err = k.send(&o.order, o.files, o.remove)
		}
		if i > 0 && (errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET)) {
			err = nil // the program has ended already; the keeper's records tell why
		}
	}
	if err != nil {
		k.discard()
		return nil, cmp.Or(k.args.failure(), err)
	}
	k.terminals = c.Terminals
	return k, nil
}

// discard ends a keeper that could not get its orders, with its children. It waits a few seconds at most: the keeper may be
// stopped (SIGSTOP), and its child may wait for a file system.
func (k *Keeper) discard() {
	_, _ = (&Kept{Keeper: k}).Abandon(time.Now().Add(instead)) // the caller has a more important error
	k.Close()
}

// startKeeper executes the helper as a keeper without an order.
func startKeeper() (*Keeper, error) {
	program, err := helper.File()
	if err != nil {
		return nil, err
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("socketpair: %w", err)
	}
	defer unix.Close(pair[1])
	// sbxrun becomes a subreaper, too, so that the children of a killed keeper are reparented to sbxrun, and not to a PID 1
	// that may not reap.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		unix.Close(pair[0])
		return nil, fmt.Errorf("become a subreaper (Linux 3.4): %w", err)
	}
	// The child's socket must not be 0, which it becomes.
	theirs, err := unix.FcntlInt(uintptr(pair[1]), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		unix.Close(pair[0])
		return nil, fmt.Errorf("duplicate a descriptor: %w", err)
	}
	defer unix.Close(theirs)
	// In its own session, the caller's Ctrl-C and kill(0, …) do not reach the keeper, and the keeper's kill never
	// reaches the caller's group.
	args, pid, err := spawnKeeper(program, theirs)
	if err != nil {
		unix.Close(pair[0])
		return nil, &StartError{Step: "fork the keeper", Err: err}
	}
	_ = unix.SetNonblock(pair[0], true) // for the poller
	return &Keeper{Process: polled(pid, int(args.fd)), socket: os.NewFile(uintptr(pair[0]), "keeper"), args: args}, nil
}

// send sends an order with its descriptors. It does not block.
func (k *Keeper) send(o *order, files []*os.File, remove []string) error {
	var paths strings.Builder
	for _, path := range remove {
		paths.WriteString(path + "\x00")
	}
	if o.RemoveSize = uint32(paths.Len()); o.RemoveSize > maxRemove {
		return &StartError{Step: stepCgroup, Err: unix.ENAMETOOLONG}
	}
	if len(files) > maxFiles {
		return &StartError{Step: stepFiles, Err: unix.E2BIG}
	}
	for ; len(files) > maxRights; files = files[maxRights:] {
		if err := k.sendMessage(&order{Kind: orderFiles}, files[:maxRights], ""); err != nil {
			return err
		}
	}
	return k.sendMessage(o, files, paths.String())
}

func (k *Keeper) sendMessage(o *order, files []*os.File, paths string) error {
	var rights []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			fds[i] = Descriptor(f)
		}
		rights = unix.UnixRights(fds...)
	}
	text := append((*[unsafe.Sizeof(*o)]byte)(unsafe.Pointer(o))[:], paths...)
	if err := unix.Sendmsg(Descriptor(k.socket), text, rights, nil, unix.MSG_NOSIGNAL); err != nil {
		return fmt.Errorf("send to the keeper: %w", err)
	}
	return nil
}

const (
	maxRights = 253  // descriptors in one message (unix(7), SCM_MAX_FD)
	maxFiles  = 4096 // descriptors of an order; keeper.c has the same number
)

// laidOut is an order with its descriptors.
type laidOut struct {
	order
	files  []*os.File
	own    []*os.File // the files that close closes
	remove []string
}

func (o *laidOut) close() {
	for _, f := range o.own {
		f.Close()
	}
}

// child sets the script of the order's child.
func (o *laidOut) child(s *helper.Script) error {
	sealed, err := s.Seal()
	if err != nil {
		return err
	}
	o.own = append(o.own, sealed)
	o.Child, o.Files = 1, uint32(len(o.files))
	o.files = append([]*os.File{sealed}, o.files...)
	return nil
}

// hold makes the keeper keep the files open.
func (o *laidOut) hold(files []*os.File) {
	o.Held, o.files = uint32(len(files)), append(o.files, files...)
}

// Steps that sbxrun or its tests know by name.
const (
	stepCgroup = "join the cgroup"
	stepFiles  = "hand over descriptors"
	stepStage  = "bind root's own paths"

	stepNice   = "set the niceness"
	stepOOM    = "set oom_score_adj"
	stepGroups = "set supplementary groups"
	stepGID    = "change group id"
	stepUID    = "change user id"
	stepParent = "tie it to the keeper"
)

// Outside reports whether a process failed before it entered a room, so that the error says nothing about the room.
func (e *StartError) Outside() bool {
	return slices.Contains([]string{stepCgroup, stepFiles, stepNice, stepOOM, stepGroups, stepGID, stepUID, stepParent}, e.Step)
}

// layProgram lays out the order to execute the program. The caller closes it when it is sent.
func (c *Command) layProgram() (*laidOut, error) {
	p := c.Program
	o := &laidOut{order: order{Kind: orderChild, Cgroup: -1, Program: 1}, files: slices.Concat(p.Files, p.Stage)}
	var s helper.Script
	if err := p.layStage(&s); err != nil {
		return nil, err
	}
	c.layIdentity(&s)
	if os.Geteuid() != 0 { // they would otherwise survive the exec, see handDownCapabilities
		const step = "drop capabilities"
		s.Do(step, unix.SYS_PRCTL, unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
		s.Do(step, unix.SYS_CAPSET, s.Words(unix.LINUX_CAPABILITY_VERSION_3), s.Space(24))
	}
	name := path.Base(p.Args[0])
	s.Do("set up signals", unix.SYS_RT_SIGPROCMASK, SigSetmask, s.Words(0), 0, 8)
	s.Do("exec "+name[:min(len(name), 40)], unix.SYS_EXECVE, p.Path, s.Texts(p.Args), s.Texts(nil))
	if err := o.child(&s); err != nil {
		return nil, err
	}
	o.hold(c.Hold)
	return o, nil
}

// layWay lays out the order to start the Way, if there is one. The caller closes it when it is sent.
func (c *Command) layWay() (_ *laidOut, err error) {
	o := &laidOut{order: order{Kind: orderChild, Cgroup: -1, Terminals: uint32(len(c.Terminals))}, remove: c.Remove}
	defer func() {
		if err != nil {
			o.close()
		}
	}()
	if c.Lasting {
		o.Lasting = 1
	}
	if c.Way != nil {
		var s helper.Script
		o.files = c.Way.Files
		if err := o.layBounds(&s, &c.Way.Bounds); err != nil {
			return nil, err
		}
		c.layIdentity(&s)
		c.Way.Lay(&s)
		if err := o.child(&s); err != nil {
			return nil, err
		}
	}
	for i, t := range c.Terminals {
		o.States[i] = t.State
		o.files = append(o.files, t.File)
	}
	if c.Program == nil {
		o.hold(c.Hold)
	}
	return o, nil
}

// layStage attaches [Program.Stage] below StageDir. It uses move_mount(2) with descriptors because a path may lead to
// another file by now, and mount(2) rejects a descriptor that was opened in another mount namespace.
func (p *Program) layStage(s *helper.Script) error {
	if len(p.Stage) == 0 {
		return nil
	}
	s.Do(stepStage, unix.SYS_UNSHARE, unix.CLONE_NEWNS)
	// Slave: mounts made here do not propagate to the host (mount_namespaces(7)).
	s.Do(stepStage, unix.SYS_MOUNT, 0, "/", 0, unix.MS_SLAVE|unix.MS_REC, 0)
	s.Do(stepStage, unix.SYS_MOUNT, "tmpfs", StageDir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0755,size=1m")
	for i, f := range p.Stage {
		st, err := f.Stat()
		if err != nil {
			return err
		}
		target, from := StageDir+"/"+strconv.Itoa(i), len(p.Files)+i
		if st.IsDir() {
			s.Do(stepStage, unix.SYS_MKDIRAT, unix.AT_FDCWD, target, 0o755)
		} else {
			s.Do(stepStage, unix.SYS_MKNODAT, unix.AT_FDCWD, target, unix.S_IFREG|0o644, 0)
		}
		s.Do(stepStage, unix.SYS_MOVE_MOUNT, from, "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH)
		s.Do(stepStage, unix.SYS_CLOSE, from)
	}
	return nil
}

// layBounds joins the cgroups and sets the inherited limits, while the process still has sbxrun's identity. It opens the
// cgroups with sbxrun's identity, which has the permission.
func (o *laidOut) layBounds(s *helper.Script, b *Bounds) error {
	first := len(o.files)
	open := func(path string, flags int) (int, error) {
		fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0)
		if err != nil {
			return 0, &StartError{Step: stepCgroup, Err: fmt.Errorf("%s: %w", path, err)}
		}
		f := os.NewFile(uintptr(fd), path)
		o.files, o.own = append(o.files[:len(o.files):len(o.files)], f), append(o.own, f)
		return len(o.files) - 1, nil
	}
	join := func(fd int) { s.Do(stepCgroup, unix.SYS_WRITE, fd, "0", 1) } // 0 is the writing process (cgroups(7))
	for _, path := range b.Tasks {
		fd, err := open(path, unix.O_WRONLY)
		if err != nil {
			return err
		}
		join(fd)
	}
	if b.V2 != "" {
		dir, err := open(b.V2, unix.O_RDONLY|unix.O_DIRECTORY)
		if err != nil {
			return err
		}
		procs, err := open(b.V2+"/cgroup.procs", unix.O_WRONLY)
		if err != nil {
			return err
		}
		o.Cgroup = int32(dir)
		join(procs)
		s.Unborn()
	}
	if len(o.files) > first {
		s.Do(stepFiles, unix.SYS_CLOSE_RANGE, first, len(o.files)-1, 0)
	}
	if b.Nice != nil {
		s.Do(stepNice, unix.SYS_SETPRIORITY, unix.PRIO_PROCESS, 0, *b.Nice)
	}
	if b.OOMScoreAdj != nil {
		const slot helper.Slot = 1
		text := strconv.Itoa(*b.OOMScoreAdj)
		s.Add(stepOOM, slot, unix.SYS_OPENAT, unix.AT_FDCWD, "/proc/self/oom_score_adj", unix.O_WRONLY|unix.O_CLOEXEC, 0)
		s.Do(stepOOM, unix.SYS_WRITE, slot, text, len(text))
		s.Do(stepOOM, unix.SYS_CLOSE, slot)
	}
	if b.CPUs != nil {
		LayAffinity(s, b.CPUs)
	}
	return nil
}

// LayAffinity makes nproc(1) match the limit. A program can undo it, but the quota enforces the limit.
func LayAffinity(s *helper.Script, cpus *unix.CPUSet) {
	set := (*[unsafe.Sizeof(*cpus)]byte)(unsafe.Pointer(cpus))[:]
	s.Do("set the CPU affinity", unix.SYS_SCHED_SETAFFINITY, 0, len(set), s.Data(set))
	s.Allow(0, helper.AnyError)
}

// layIdentity changes to the identity of c and ties the process to the keeper's life.
func (c *Command) layIdentity(s *helper.Script) {
	// The limit is 1 and not 0: if core_pattern is a pipe, the kernel ignores every limit but 1 (core(5), fs/coredump.c). For
	// files 1 is smaller than any core. For a socket (Linux 6.16), it ignores every limit. An error means that the hard limit
	// is 0, which only CAP_SYS_RESOURCE may raise.
	s.Do("switch off core dumps", unix.SYS_PRLIMIT64, 0, unix.RLIMIT_CORE, s.Words(1, 1), 0)
	s.Allow(0, helper.AnyError)
	if c.Cred != nil {
		uid, gid, groups := c.Cred.UID, c.Cred.GID, &c.Cred.Groups
		s.Do(stepGroups, unix.SYS_SETGROUPS, groups.Len(), s.Data((*[unsafe.Sizeof(*groups)]byte)(unsafe.Pointer(groups))[:]))
		s.Do(stepGID, unix.SYS_SETRESGID, gid, gid, gid)
		s.Do(stepUID, unix.SYS_SETRESUID, uid, uid, uid)
	}
	// After the change of UID, which clears the death signal (prctl(2)). The keeper may have died before.
	s.Do(stepParent, unix.SYS_PRCTL, unix.PR_SET_PDEATHSIG, int(unix.SIGKILL), 0, 0, 0)
	s.Do(stepParent, helper.Parent)
}

// SigSetmask is SIG_SETMASK of sigprocmask(2), which package unix lacks.
const SigSetmask = 2

// MaxFD is the greatest descriptor that close_range(2) accepts.
const MaxFD = math.MaxUint32

// expendable is the oom_score_adj of keepers and their children, as text. If it is empty, they keep this process's.
var expendable [8]byte

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
	copy(expendable[:], strconv.Itoa(min(highest, max(0, n)+adjustment)))
}
