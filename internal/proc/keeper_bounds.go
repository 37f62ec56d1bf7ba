package proc

import (
	"fmt"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"
)

// bounds is a [Bounds] in a [Block].
type bounds struct {
	tasks   []int // v1, joined by a write
	cgroup  int   // v2, for clone3; -1 for none
	procs   int   // v2, joined by a write if clone3 fails
	setNice bool
	nice    int
	oom     unsafe.Pointer // oom_score_adj as text; nil for none
	oomSize int
	setCPUs bool
	cpus    unix.CPUSet
}

// removeTries and removePause limit the keeper's attempts to remove a cgroup to a second: it stays busy briefly after its
// last process was reaped. sbxrun and sbxrun cleanup can still remove it later.
const (
	removeTries = 500
	removePause = 2e6 // ns
)

// descriptors are open in sbxrun until the keeper has its copies.
type descriptors []int

func (d *descriptors) close() {
	for _, fd := range *d {
		unix.Close(fd)
	}
}

func (d *descriptors) open(path string, flags int) (int, error) {
	fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, &StartError{Step: stepNames[stepCgroup], Err: fmt.Errorf("%s: %w", path, err)}
	}
	*d = append(*d, fd)
	return fd, nil
}

// lay opens the cgroups to join, with sbxrun's identity, which has the permission.
func (b *bounds) lay(block *Block, c Bounds, open *descriptors) error {
	b.cgroup, b.procs = -1, -1
	if c.Nice != nil {
		b.setNice, b.nice = true, *c.Nice
	}
	if c.CPUs != nil {
		b.setCPUs, b.cpus = true, *c.CPUs
	}
	if c.OOMScoreAdj != nil {
		text := strconv.Itoa(*c.OOMScoreAdj)
		b.oom, b.oomSize = unsafe.Pointer(block.Text(text)), len(text)
	}
	var tasks []int
	for _, path := range c.Tasks {
		fd, err := open.open(path, unix.O_WRONLY)
		if err != nil {
			return err
		}
		tasks = append(tasks, fd)
	}
	if c.V2 != "" {
		var err error
		if b.cgroup, err = open.open(c.V2, unix.O_RDONLY|unix.O_DIRECTORY); err != nil {
			return err
		}
		if b.procs, err = open.open(c.V2+"/cgroup.procs", unix.O_WRONLY); err != nil {
			return err
		}
	}
	b.tasks = Copy(block, tasks)
	return nil
}

// sharing returns CLONE_VM, or 0 if the OOM killer may choose the command's init: it kills every process that shares the
// victim's memory, including the keeper outside the cgroup, and counts the memory in the cgroup of its owner. Processes
// that share memory also have the same oom_score_adj. A copy costs a third of a millisecond.
func (c *Bounds) sharing() uintptr {
	if c.V2 != "" || len(c.Tasks) > 0 || c.OOMScoreAdj != nil {
		return 0
	}
	return unix.CLONE_VM
}

// birth returns the arguments of a clone into the v2 cgroup, or zero arguments if there is no such cgroup. The clone copies
// the memory, see [Bounds.sharing].
func (b *bounds) birth(stack uintptr) cloneArgs {
	if b.cgroup < 0 {
		return cloneArgs{}
	}
	const size = StackSize / 2 // any size inside the stack: clone3(2) takes its lower end
	return cloneArgs{flags: unix.CLONE_INTO_CGROUP, exitSignal: uint64(unix.SIGCHLD), stack: uint64(stack - size), stackSize: size}
}
