package limits

import (
	"context"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"golang.org/x/sys/unix"
)

// Usage is the resource usage of a group; 0 means unknown.
type Usage struct {
	PidsPeak   int64 // maximum number of tasks (v2: Linux 6.1)
	MemoryPeak int64 // bytes (v2: Linux 5.19)
}

// number reads a number of a cgroup; 0 if it is missing.
func (g *Group) number(controller, v2file, v2key, v1file, v1key string) int64 {
	dir := g.read[controller]
	if dir == "" {
		return 0
	}
	file, key := v1file, v1key
	if dir == g.v2 {
		file, key = v2file, v2key
	}
	read := proc.ReadFile
	if g.lasting != nil {
		read = g.lasting.files.read
	}
	data, err := read(dir + "/" + file)
	if err != nil {
		return 0
	}
	n, _ := Row(data, key)
	return n
}

// Usage returns the usage. Call it before Remove.
func (g *Group) Usage() Usage {
	if g.lasting != nil { // only v1's peak can be reset
		if !g.plan.enforced("memory") {
			return Usage{}
		}
		return Usage{MemoryPeak: g.number("memory", "", "", "memory.max_usage_in_bytes", "")}
	}
	return Usage{
		PidsPeak:   g.number("pids", "pids.peak", "", "pids.peak", ""),
		MemoryPeak: g.number("memory", "memory.peak", "", "memory.max_usage_in_bytes", ""),
	}
}

func (g *Group) cpu() (used time.Duration) {
	if g.lasting != nil {
		defer func() { used -= g.lasting.cpu }()
	}
	n := g.number("cpuacct", "cpu.stat", "usage_usec", "cpuacct.usage", "")
	if g.read["cpuacct"] == g.v2 {
		return time.Duration(min(n, 1<<52)) * time.Microsecond
	}
	return time.Duration(n)
}

// OOMKilled reports whether the kernel has killed a process of the group because it ran out of memory. The
// kernel counts before it kills, so the answer is certain once the command is dead.
func (g *Group) OOMKilled() bool {
	if g.lasting != nil && !g.plan.enforced("memory") {
		return false // limits of parents do not matter
	}
	return g.count(killed) > 0
}

// OOMKilledAround reports, for an exec without its own memory cgroup, whether the kernel has OOM-killed a
// process of its sandbox since the exec began. That may have been another exec's process, so it only
// explains the death of a command that was killed.
func (g *Group) OOMKilledAround() bool {
	if g.read["memory"] != "" {
		return false
	}
	n, _ := oomKills(g.above)
	return n > g.before
}

// oomKills returns the number of OOM kills in a memory cgroup; ok is false if dir is not one.
func oomKills(dir string) (n int64, ok bool) {
	if dir == "" {
		return 0, false
	}
	data, err := proc.ReadFile(dir + "/memory.oom_control")
	if err != nil { // not v1
		data, err = proc.ReadFile(dir + "/memory.events")
	}
	if err != nil {
		return 0, false
	}
	return Row(data, "oom_kill")
}

// Limits returns the plan's limits with the current Hit. Call it before Remove. A memory limit is hit if a
// process was killed, not if caches were dropped; a CPU limit if it made anything wait. died is the signal
// that killed the command, 0 if none: of the limits of single processes, only fsize has one.
func (g *Group) Limits(died unix.Signal) []result.Limit {
	list := append([]result.Limit{}, g.plan.Limits...)
	for i := range list {
		l := &list[i]
		switch {
		case !l.Enforced:
		case l.Name == "memory" || l.Name == "memory-swap" && g.plan.request.MemorySwap > 0:
			l.Hit = g.OOMKilled() && g.memoryFull()
		case l.Name == "pids":
			// Before Linux 6.11 v2 counts in the cgroup of the fork, not in the limited one.
			l.Hit = g.count(pidsEvents) > 0 ||
				g.nested && g.number("pids", leaf+"/pids.events", "max", "pids.events", "max") > 0
		case l.Name == "cpus":
			l.Hit = g.count(throttled) > 0
		case l.Name == "cpu-time":
			l.Hit = g.cpu() >= g.plan.request.CPUTime
		case l.Name == "fsize":
			l.Hit = died == unix.SIGXFSZ
		}
	}
	return list
}

// memoryFull reports whether our own limit was reached: a process may also be killed because of a parent's.
// v1 does not count failures at memory.memsw, but then the peak is close to the limit.
func (g *Group) memoryFull() bool {
	if g.read["memory"] == g.v2 {
		return g.count(memoryEvents) > 0
	}
	return g.Usage().MemoryPeak+1<<20 >= g.plan.request.Memory
}

// Event is a limit that ends the run.
type Event string

const (
	OOM     Event = "oom"
	CPUTime Event = "cpu-time"
)

// Watch sends each event at most once, until ctx is done. It returns nil if there is nothing to watch. A
// command that was itself OOM-killed may be reaped before the event: call [Group.OOMKilled].
func (g *Group) Watch(ctx context.Context) <-chan Event {
	memory, cpu := g.plan.enforced("memory"), g.plan.enforced("cpu-time")
	if !memory && !cpu {
		return nil
	}
	if g.lasting != nil {
		// Copy it, because the next command may get the group while this one is still watched.
		one, of := *g, *g.lasting
		of.after = map[counter]int64{}
		one.lasting = &of
		g = &one
	}
	events := make(chan Event, 2)
	if cpu {
		go g.watchCPU(ctx, events)
	}
	if memory {
		go g.watchOOM(ctx, events)
	}
	return events
}

// watchCPU sleeps as long as all CPUs together need to use up the remaining time. The limit is exceeded by
// at most their usage in the shortest interval.
func (g *Group) watchCPU(ctx context.Context, events chan<- Event) {
	const shortest, longest = 5 * time.Millisecond, 250 * time.Millisecond
	cpus := mostCPUs()
	for {
		left := g.plan.request.CPUTime - g.cpu()
		if left <= 0 {
			events <- CPUTime
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(min(max(left/time.Duration(cpus), shortest), longest)):
		}
	}
}

// mostCPUs returns the number of CPUs for a program that has reset its affinity, which it inherits from the
// caller. It counts offline CPUs, too, which only makes the checks more frequent.
func mostCPUs() int {
	all, _ := filepath.Glob("/sys/devices/system/cpu/cpu[0-9]*") // the pattern is valid
	return max(len(all), runtime.NumCPU())
}

func (g *Group) watchOOM(ctx context.Context, events chan<- Event) {
	// Most commands end before a notification could be set up.
	const soon = 10 * time.Millisecond
	select {
	case <-ctx.Done():
		return
	case <-time.After(soon):
	}
	notice, err := g.oomNotice()
	if err == nil {
		defer notice.Close()
		// A file without deadlines makes Read fail below rather than block.
		defer context.AfterFunc(ctx, func() { _ = notice.SetReadDeadline(time.Unix(1, 0)) })()
	}
	const slow = 100 * time.Millisecond
	for ctx.Err() == nil {
		if g.OOMKilled() {
			events <- OOM
			return
		}
		if err != nil { // no notifications: poll
			time.Sleep(slow)
			continue
		}
		var buf [4096]byte
		if _, err = notice.Read(buf[:]); err != nil {
			continue
		}
		if g.read["memory"] != g.v2 {
			g.awaitKill(ctx, slow)
		}
	}
}

// awaitKill waits until the kill that v1 has announced is counted: v1 notifies before it kills, and not
// when it counts. v2 notifies for every count.
func (g *Group) awaitKill(ctx context.Context, most time.Duration) {
	for end := time.Now().Add(most); !g.OOMKilled() && time.Now().Before(end) && ctx.Err() == nil; {
		time.Sleep(time.Millisecond)
	}
}

// oomNotice returns a file that is readable when the group may have run out of memory: inotify(7) on
// memory.events, or an eventfd in cgroup.event_control (memory.rst).
func (g *Group) oomNotice() (*os.File, error) {
	dir := g.read["memory"]
	if dir == g.v2 {
		fd, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
		if err != nil {
			return nil, err
		}
		if _, err = unix.InotifyAddWatch(fd, dir+"/memory.events", unix.IN_MODIFY); err != nil {
			unix.Close(fd)
			return nil, err
		}
		return os.NewFile(uintptr(fd), "inotify"), nil
	}
	control, err := unix.Open(dir+"/memory.oom_control", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(control)
	fd, err := unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	if err = write(dir+"/cgroup.event_control", strconv.Itoa(fd)+" "+strconv.Itoa(control)); err != nil {
		unix.Close(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), "eventfd"), nil
}

// MemoryOf returns the memory usage of a sandbox's cgroups, by their [Group.Dirs]; ok is false if none
// counts memory.
func MemoryOf(dirs []string) (bytes int64, ok bool) {
	for _, dir := range dirs {
		for _, file := range []string{"/memory.current", "/memory.usage_in_bytes"} {
			if data, err := proc.ReadFile(dir + file); err == nil {
				return Row(data, "")
			}
		}
	}
	return 0, false
}
