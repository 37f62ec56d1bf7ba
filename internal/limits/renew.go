package limits

import (
	"math"
	"os"
	"runtime"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

// A lasting group has one command after the other. It is made before there is any, with
// bounds that no command meets, and is given those of each just before that is released:
// to make cgroups takes half a millisecond. What was counted for commands before does not count.

// widest are the limits of a lasting group between two commands.
func widest() Request {
	return Request{Memory: 1 << 50, Pids: maxPids, CPUs: float64(runtime.NumCPU()), CPUTime: math.MaxInt64}
}

// Lasting makes a lasting group. What cannot be enforced here is refused by Renew.
func Lasting(id string) (*Group, error) {
	plan, err := For(widest(), false, nil, Request{})
	if err != nil {
		return nil, err
	}
	if plan.Moves() {
		return Without(), nil // the caller itself would have to be moved
	}
	g, err := plan.Make(id, false)
	if err != nil {
		return nil, err
	}
	return g.last(), nil
}

// Without returns a lasting group that has no cgroups: its commands can have the limits of processes alone.
func Without() *Group {
	plan, _ := (&Machine{}).Plan(widest(), false) // an error is only about limits that are required
	return (&Group{plan: plan, read: map[string]string{}}).last()
}

// last makes a group a lasting one.
func (g *Group) last() *Group {
	g.lasting = &lasting{plan: g.plan, written: map[string]string{}, memory: g.plan.request.Memory, files: &openFiles{named: map[string]*os.File{}}}
	for _, s := range g.settings() {
		g.lasting.written[s.path] = s.value
	}
	return g
}

// lasting is what a lasting group knows beside.
type lasting struct {
	plan    *Plan
	written map[string]string // the settings, by their paths
	memory  int64             // the last limit
	before  map[counter]int64
	after   map[counter]int64 // as they were read last, when a command had ended
	cpu     time.Duration     // used
	files   *openFiles
}

// openFiles are those of a lasting group that are read or written at each command. They stay open until
// the group is removed: to open one takes ten times as long as to read it.
type openFiles struct {
	mu    sync.Mutex
	named map[string]*os.File // by their paths; nil when the group is removed
}

// open returns a file, open for writing too if that is allowed. It stays the set's.
func (o *openFiles) open(path string) (*os.File, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.named == nil {
		return nil, os.ErrClosed
	}
	if f := o.named[path]; f != nil {
		return f, nil
	}
	// Not by package os, whose poller would be told of every change.
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		fd, err = unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	}
	if err != nil {
		return nil, err
	}
	o.named[path] = os.NewFile(uintptr(fd), path)
	return o.named[path], nil
}

// use does something with a file that is not closed meanwhile.
func (o *openFiles) use(path string, call func(fd int) error) error {
	f, err := o.open(path)
	if err != nil {
		return err
	}
	conn, err := f.SyscallConn()
	if err != nil {
		return err
	}
	closed := conn.Control(func(fd uintptr) {
		for err = unix.EINTR; err == unix.EINTR; {
			err = call(int(fd))
		}
	})
	if closed != nil {
		return closed
	}
	return err
}

// read reads a file anew: at its beginning the kernel writes the text again (seq_file.rst). All of it
// comes at once, so that no second call has to find the end.
func (o *openFiles) read(path string) ([]byte, error) {
	data := make([]byte, 1024) // more than the events and times of one cgroup
	n := 0
	err := o.use(path, func(fd int) (err error) {
		n, err = unix.Pread(fd, data, 0)
		return err
	})
	return data[:max(n, 0)], err
}

// write is [write] of a file that stays open.
func (o *openFiles) write(path, value string) error {
	return o.use(path, func(fd int) error {
		_, err := unix.Pwrite(fd, []byte(value), 0)
		return err
	})
}

// close ends the reading, also that of who still watches the command before.
func (o *openFiles) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, f := range o.named {
		f.Close()
	}
	o.named = nil
}

// Spare is how many tasks of a lasting group are not the command's: what makes its init, and
// the next init with its payload.
const Spare = 3

// ErrRenew says that a lasting group cannot have these limits, and that a command of its own can
// be tried.
var ErrRenew = &result.Error{Code: "limit", Message: "a warm room cannot have these limits"}

// afterwards is how much memory of a command before does not matter.
const afterwards = 4 << 20

// Takes reports whether a lasting group can have limits like these now: what the command before had in
// files is given back some time after its end, and no limit can be set below what is there (memory.rst;
// v2 would have processes killed).
func (g *Group) Takes(r Request) bool {
	if r.Memory > 0 && g.number("memory", "memory.current", "", "memory.usage_in_bytes", "") > max(r.Memory/2, afterwards) {
		return false
	}
	_, err := g.lasting.renewed(r)
	return err == nil
}

// Renew gives a lasting group the limits of its next command.
func (g *Group) Renew(r Request) error {
	r = r.withDefault()
	if err := r.Check(); err != nil {
		return err
	}
	p, err := g.lasting.renewed(r)
	if err != nil {
		return err
	}
	var refused refusals
	p.addRlimits(&refused)
	if len(refused) > 0 {
		return refused.err()
	}
	if err := g.write(r); err != nil {
		return err
	}
	if r.CPUs == 0 {
		g.Unthrottle(false) // it may have the quota of the command before
	}
	g.plan = p
	g.rebase()
	return nil
}

// Idle takes back the limit of tasks, after a lasting group's command: a limit is a promise (package
// pressure), and while no command is there nobody needs it.
func (g *Group) Idle() error {
	return g.write(Request{Memory: g.lasting.memory})
}

// renewed is the plan with other limits, by the same cgroups.
func (l *lasting) renewed(r Request) (*Plan, error) {
	if r.MemorySwap != 0 || r.Nice != nil || r.OOMScoreAdj != nil {
		return nil, ErrRenew
	}
	p := *l.plan
	p.request, p.required, p.Limits = r, true, nil
	for _, limit := range l.plan.Limits {
		asked := map[string]float64{"memory": float64(r.Memory), "pids": float64(r.Pids), "cpus": r.CPUs, "cpu-time": result.Milliseconds(r.CPUTime)}[limit.Name]
		if asked == 0 {
			continue
		}
		if !limit.Enforced {
			return nil, ErrRenew // one of its own says why
		}
		limit.Requested = asked
		p.Limits = append(p.Limits, limit)
	}
	return &p, nil
}

// write sets the limits of memory and tasks.
func (g *Group) write(r Request) error {
	wide := g.lasting.plan.request
	next := *g
	p := *g.lasting.plan
	p.required = true
	p.request = Request{Memory: r.Memory, Pids: r.Pids}
	if r.Memory == 0 {
		p.request.Memory = wide.Memory
	}
	if r.Pids == 0 {
		p.request.Pids = wide.Pids
	} else {
		p.request.Pids += Spare
	}
	next.plan = &p
	list := next.settings()
	if p.request.Memory > g.lasting.memory {
		slices.Reverse(list) // of v1 the limit with swap is never the smaller one
	}
	if err := next.apply(list); err != nil {
		return err
	}
	g.lasting.memory = p.request.Memory
	return nil
}

// rebase takes what is counted now for what was before. Between two commands nothing runs that
// could be counted, so what was read at the end of one holds for the next.
func (g *Group) rebase() {
	l := g.lasting
	known := l.after
	l.before, l.after = map[counter]int64{}, map[counter]int64{}
	base := func(c counter) {
		n, ok := known[c]
		if !ok {
			n = g.counted(c)
		}
		l.before[c] = n
	}
	for _, limit := range g.plan.Limits {
		switch limit.Name {
		case "memory":
			base(killed)
			if dir := g.read["memory"]; dir == g.v2 {
				base(memoryEvents)
			} else {
				_ = l.files.write(dir+"/memory.max_usage_in_bytes", "0") // the peak; it can always be
			}
		case "pids":
			base(pidsEvents)
		case "cpu-time":
			l.cpu = 0
			l.cpu = g.cpu()
		case "cpus":
			base(throttled)
		}
	}
}

// counter is what counts events since the cgroup was made.
type counter struct{ controller, v2file, v2key, v1file, v1key string }

var (
	killed       = counter{"memory", "memory.events", "oom_kill", "memory.oom_control", "oom_kill"}
	memoryEvents = counter{"memory", "memory.events", "oom", "", ""} // of v2 alone
	pidsEvents   = counter{"pids", "pids.events", "max", "pids.events", "max"}
	throttled    = counter{"cpu", "cpu.stat", "nr_throttled", "cpu.stat", "nr_throttled"}
)

func (g *Group) counted(c counter) int64 {
	return g.number(c.controller, c.v2file, c.v2key, c.v1file, c.v1key)
}

// count is what a counter has counted since the command before.
func (g *Group) count(c counter) int64 {
	n := g.counted(c)
	if l := g.lasting; l != nil {
		l.after[c] = n
		n -= l.before[c]
	}
	return n
}
