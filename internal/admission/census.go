package admission

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/proc"
)

// Count is what runs in one sandbox, execs included.
type Count struct {
	Tasks   int   // threads of all processes, zombies included, as a pids cgroup counts them
	Zombies int   // that their parents have not collected
	RSS     int64 // bytes; what processes share counts for each of them
}

// Census counts the processes of many sandboxes in one pass through /proc.
//
// What a command has started is known by parentage: all of it is below the command's
// init, since a PID namespace's orphans go to its init (pid_namespaces(7)), and so are
// the namespaces that the command makes within. That init is a child of a keeper, which
// is outside. The kernel tells where it belongs: its PID namespace has that of the
// sandbox's room for its parent (ioctl_nsfs(2), NS_GET_PARENT, Linux 4.9).
//
// It is a look, not a lock: a process that forks or ends meanwhile may be missed.
type Census struct {
	stats    map[int]proc.Stat
	children map[int][]int
	parentNS func(pid int) (inode uint64, ok bool)

	execs map[uint64][]int // inits of execs, by the sandbox's PID namespace
}

// TakeCensus looks at all processes.
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

// Sandbox counts one, of which the room's PID 1 is known. None if that is not there any more: a
// process that has its number now is known by its start time.
func (c *Census) Sandbox(init proc.Identity) (n Count) {
	if st, ok := c.stats[init.PID]; !ok || st.Start != init.Start {
		return Count{}
	}
	c.findExecs()
	// A keeper within, of a sandbox in the sandbox, is met both ways.
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

// findExecs looks at the children of keepers. Anybody may call himself a keeper; that
// is not what counts, but what the kernel says of the child.
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
				// The init of an exec cannot be looked at but by root. What is below it can.
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

// parentNS is the PID namespace that the one of the process was made in. There is none
// that we could see of the namespace that we are in ourselves (EPERM).
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
