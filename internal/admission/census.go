package admission

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/proc"
)

// Count counts the processes of one sandbox, including its execs.
type Count struct {
	Tasks   int   // threads of all processes, zombies included, as a pids cgroup counts them
	Zombies int   // not yet reaped
	RSS     int64 // bytes; shared memory counts for each process
}

// Census counts the processes of many sandboxes in one pass through /proc.
//
// All processes of a command are descendants of its init, because orphans in a PID namespace are reparented to its
// init (pid_namespaces(7)), including those in nested namespaces. The init of an exec is a child of a keeper outside
// the sandbox. Its PID namespace shows which sandbox it belongs to: the parent namespace is the one of the sandbox's
// room (ioctl_nsfs(2), NS_GET_PARENT, Linux 4.9).
//
// A census may miss processes that fork or exit in the meantime.
type Census struct {
	stats    map[int]proc.Stat
	children map[int][]int
	parentNS func(pid int) (inode uint64, ok bool)

	execs map[uint64][]int // inits of execs, by the sandbox's PID namespace
}

// TakeCensus reads all processes.
func TakeCensus() (*Census, error) {
	pids, err := proc.All()
	if err != nil {
		return nil, fmt.Errorf("count processes: %w", err)
	}
	var stats []proc.Stat
	for _, pid := range pids {
		if st, err := proc.ReadStat(pid); err == nil {
			stats = append(stats, st)
		}
	}
	return newCensus(stats, parentNS), nil
}

func newCensus(stats []proc.Stat, parentNS func(int) (uint64, bool)) *Census {
	c := &Census{stats: map[int]proc.Stat{}, children: map[int][]int{}, parentNS: parentNS}
	for _, st := range stats {
		c.stats[st.PID] = st
		c.children[st.Parent] = append(c.children[st.Parent], st.PID)
	}
	return c
}

// Sandbox counts the processes of the sandbox whose PID 1 is init. It returns zero if that has exited; the
// start time reveals a reused PID.
func (c *Census) Sandbox(init proc.Identity) (n Count) {
	if st, ok := c.stats[init.PID]; !ok || st.Start != init.Start {
		return Count{}
	}
	c.findExecs()
	// The children of a nested sandbox's keeper are found twice: as descendants and as execs.
	seen := map[int]bool{}
	for queue := append([]int{init.PID}, c.execs[init.PIDNS]...); len(queue) > 0; queue = queue[1:] {
		if seen[queue[0]] {
			continue
		}
		seen[queue[0]] = true
		st := c.stats[queue[0]]
		n.Tasks += st.Threads
		n.RSS += st.Pages * int64(os.Getpagesize())
		if st.Ended() {
			n.Zombies++
		}
		queue = append(queue, c.children[st.PID]...)
	}
	return n
}

// findExecs finds the inits of execs among the children of keepers. Any process may have a keeper's name,
// but only the namespace of the child counts.
func (c *Census) findExecs() {
	if c.execs != nil {
		return
	}
	c.execs = map[uint64][]int{}
	for pid, st := range c.stats {
		if st.Comm != proc.KeeperName {
			continue
		}
		for _, child := range c.children[pid] {
			ns, ok := c.parentNS(child)
			if !ok {
				// Only root may inspect the init of an exec, but everybody may inspect its children.
				for _, payload := range c.children[child] {
					if ns, ok = c.parentNS(payload); ok {
						break
					}
				}
			}
			if ok {
				c.execs[ns] = append(c.execs[ns], child)
			}
		}
	}
}

// parentNS returns the parent of a process's PID namespace. The kernel does not show the parent of our own
// namespace (EPERM).
func parentNS(pid int) (inode uint64, ok bool) {
	fd, err := proc.OpenNamespace(pid, "pid")
	if err != nil {
		return 0, false
	}
	defer unix.Close(fd)
	parent, err := unix.IoctlRetInt(fd, unix.NS_GET_PARENT)
	if err != nil {
		return 0, false
	}
	defer unix.Close(parent)
	var st unix.Stat_t
	if err := unix.Fstat(parent, &st); err != nil {
		return 0, false
	}
	return st.Ino, true
}
