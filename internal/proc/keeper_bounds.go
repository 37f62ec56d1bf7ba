package proc

import (
	"fmt"
	"strconv"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// This file is what a keeper does about limits: its command takes them on, or is born
// with them; and the cgroups are removed when all is reaped.

// cloneArgs is struct clone_args (clone(2), clone3).
type cloneArgs struct {
	flags, pidfd, childTID, parentTID, exitSignal, stack, stackSize, tls, setTID, setTIDSize, cgroup uint64
}

// removeTries and removePause bound how long a keeper tries to remove a cgroup,
// which stays busy for a moment after its last process was reaped: for a second.
// sbxrun, and cleanup, can still do it.
const (
	removeTries = 500
	removePause = 2e6 // ns
)

// layBounds opens the cgroups that are to be joined, as sbxrun: that is who may.
func (k *keeperState) layBounds(c Bounds) error {
	k.nice, k.cpus = c.Nice, c.CPUs
	if c.OOMScoreAdj != nil {
		k.oom = []byte(strconv.Itoa(*c.OOMScoreAdj))
	}
	open := func(path string, flags int) (int, error) {
		fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0)
		if err != nil {
			return -1, &StartError{Step: stepNames[stepCgroup], Err: fmt.Errorf("%s: %w", path, err)}
		}
		return fd, nil
	}
	for _, path := range c.Tasks {
		fd, err := open(path, unix.O_WRONLY)
		if err != nil {
			return err
		}
		k.tasks = append(k.tasks, fd)
	}
	if c.V2 != "" {
		var err error
		if k.cgroup, err = open(c.V2, unix.O_RDONLY|unix.O_DIRECTORY); err != nil {
			return err
		}
		fd, err := open(c.V2+"/cgroup.procs", unix.O_WRONLY)
		if err != nil {
			return err
		}
		k.tasks = append(k.tasks, fd) // the last
		k.birth = cloneArgs{flags: unix.CLONE_INTO_CGROUP, exitSignal: uint64(unix.SIGCHLD), cgroup: uint64(k.cgroup)}
	}
	for _, dir := range c.Remove {
		path, err := syscall.BytePtrFromString(dir)
		if err != nil {
			return err
		}
		k.remove = append(k.remove, path)
	}
	k.pause.Nsec = removePause
	return nil
}

// closeBounds closes sbxrun's descriptors, when the keeper has its copies.
func (k *keeperState) closeBounds() {
	for _, fd := range k.tasks {
		unix.Close(fd)
	}
	if k.cgroup >= 0 {
		unix.Close(k.cgroup)
	}
}

// forkCommand forks the command: into its v2 cgroup, if it has one (clone3(2),
// CLONE_INTO_CGROUP, Linux 5.7). Where that is not known or not allowed - container
// engines filter clone3 - it goes there by itself.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (k *keeperState) forkCommand() uintptr {
	if k.cgroup >= 0 {
		pid, _, errno := syscall.RawSyscall(unix.SYS_CLONE3, uintptr(unsafe.Pointer(&k.birth)), unsafe.Sizeof(k.birth), 0)
		if errno == 0 {
			if pid == 0 {
				k.tasks = k.tasks[:len(k.tasks)-1]
			}
			return pid
		}
		if errno == unix.EAGAIN || errno == unix.ENOMEM {
			k.fail(stepFork, errno)
		}
	}
	return k.must(stepFork, unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0)
}

// takeBounds runs in the child, while it is still who sbxrun is.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (k *keeperState) takeBounds() {
	k.buf[0] = '0' // the one who writes
	for i := range k.tasks {
		k.must(stepCgroup, unix.SYS_WRITE, uintptr(k.tasks[i]), uintptr(unsafe.Pointer(&k.buf)), 1, 0, 0)
	}
	if k.nice != nil {
		k.must(stepNice, unix.SYS_SETPRIORITY, unix.PRIO_PROCESS, 0, uintptr(*k.nice), 0, 0)
	}
	if k.oom != nil {
		fd := k.must(stepOOM, unix.SYS_OPENAT, uintptr(at), uintptr(unsafe.Pointer(&oomFile)), unix.O_WRONLY|unix.O_CLOEXEC, 0, 0)
		k.must(stepOOM, unix.SYS_WRITE, fd, uintptr(unsafe.Pointer(&k.oom[0])), uintptr(len(k.oom)), 0, 0)
	}
	if k.cpus != nil {
		// So that nproc(1) fits. It is no limit, a program can undo it; the quota is.
		syscall.RawSyscall(unix.SYS_SCHED_SETAFFINITY, 0, unsafe.Sizeof(*k.cpus), uintptr(unsafe.Pointer(k.cpus)))
	}
}

// removeCgroups removes the cgroups, which hold nothing any more. sbxrun is told by
// our end, or is dead.
//
//go:nosplit
//go:norace
//go:nocheckptr
func (k *keeperState) removeCgroups() {
	for i := range k.remove {
		for range removeTries {
			_, _, errno := syscall.RawSyscall(unix.SYS_UNLINKAT, uintptr(at), uintptr(unsafe.Pointer(k.remove[i])), unix.AT_REMOVEDIR)
			if errno != unix.EBUSY {
				break
			}
			syscall.RawSyscall(unix.SYS_NANOSLEEP, uintptr(unsafe.Pointer(&k.pause)), 0, 0)
		}
	}
}

var oomFile = [...]byte{'/', 'p', 'r', 'o', 'c', '/', 's', 'e', 'l', 'f', '/', 'o', 'o', 'm', '_', 's', 'c', 'o', 'r', 'e', '_', 'a', 'd', 'j', 0}
