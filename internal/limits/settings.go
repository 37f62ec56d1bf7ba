package limits

import (
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/proc"
)

// setting is a value to write to a file.
type setting struct {
	limit, path, value string
	optional           bool // missing without swap accounting, and not needed without swap
}

// settings returns the settings in their order: memory first on v1, since memory.memsw must not be
// lower; swap first on v2, so that memory is never limited alone.
func (g *Group) settings() (list []setting) {
	r := g.plan.request
	swap := "memory-swap"
	if r.MemorySwap == 0 {
		swap = "memory"
	}
	if dir := g.read["memory"]; dir != "" && r.Memory > 0 {
		memory, extra, total := strconv.FormatInt(r.Memory, 10), max(r.MemorySwap-r.Memory, 0), max(r.MemorySwap, r.Memory)
		if dir == g.v2 {
			value := strconv.FormatInt(extra, 10)
			if r.MemorySwap < 0 {
				value = "max"
			}
			list = append(list, setting{swap, dir + "/memory.swap.max", value, swap == "memory"}, setting{"memory", dir + "/memory.max", memory, false})
		} else {
			value := strconv.FormatInt(total, 10)
			if r.MemorySwap < 0 {
				value = "-1"
			}
			list = append(list, setting{"memory", dir + "/memory.limit_in_bytes", memory, false}, setting{swap, dir + "/memory.memsw.limit_in_bytes", value, swap == "memory"})
			// Socket buffers count separately (memory.rst, "TCP memory"), and only with a limit.
			if tcp := dir + "/memory.kmem.tcp.limit_in_bytes"; g.exists(tcp) {
				list = append(list, setting{"memory", tcp, memory, false})
			}
		}
	}
	if dir := g.read["pids"]; dir != "" && r.Pids > 0 {
		list = append(list, setting{"pids", dir + "/pids.max", strconv.FormatInt(r.Pids, 10), false})
	}
	return list
}

// exists reports whether the cgroup has a file. A lasting group looks only once.
func (g *Group) exists(path string) bool {
	if l := g.lasting; l != nil && len(l.written) > 0 {
		_, ok := l.written[path]
		return ok
	}
	return exists(path)
}

// throttle returns the settings of the CPU quota.
func (g *Group) throttle() (list []setting) {
	r := g.plan.request
	if dir := g.read["cpu"]; dir != "" && r.CPUs > 0 {
		q, period := quota(r.CPUs)
		if dir == g.v2 {
			list = append(list, setting{"cpus", dir + "/cpu.max", fmt.Sprint(q, " ", period), false})
		} else {
			if period != cpuPeriod || g.lasting != nil { // the previous command may have had another period
				list = append(list, setting{"cpus", dir + "/cpu.cfs_period_us", fmt.Sprint(period), false})
			}
			list = append(list, setting{"cpus", dir + "/cpu.cfs_quota_us", fmt.Sprint(q), false})
		}
	}
	return list
}

// apply writes the settings of enforced limits. In a lasting group it skips unchanged ones.
func (g *Group) apply(settings []setting) error {
	p, l := g.plan, g.lasting
	write := write
	if l != nil {
		write = l.files.write
	}
	for _, s := range settings {
		if !p.enforced(s.limit) || l != nil && l.written[s.path] == s.value {
			continue
		}
		if err := write(s.path, s.value); err != nil && !(s.optional && err == unix.ENOENT && noSwap(p.machine.root)) {
			if err := p.fail(s.limit, fmt.Errorf("write %s to %s: %w", s.value, s.path, err), hintFor(err)); err != nil {
				return err
			}
		}
		if l != nil {
			l.written[s.path] = s.value
		}
	}
	return nil
}

// noSwap reports whether the machine has no swap now.
func noSwap(root string) bool {
	swaps, err := proc.ReadFile(root + "/proc/swaps")
	return err == nil && strings.Count(strings.TrimSpace(string(swaps)), "\n") == 0
}
