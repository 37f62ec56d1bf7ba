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

// A lasting group runs one command after another. It is made in advance, with limits that no command can
// reach, and gets the limits of each command just before that starts, because making cgroups takes half
// a millisecond. Counts of earlier commands are subtracted.

// widest returns the limits of a lasting group between two commands.
func widest() Request {
	return Request{Memory: 1 << 50, Pids: maxPids, CPUs: float64(runtime.NumCPU()), CPUTime: math.MaxInt64}
}

// Lasting makes a lasting group. Renew rejects limits that cannot be enforced here.
func Lasting(id string) (*Group, error) {
	plan, err := For(widest(), false, nil, Request{})
	if err != nil {
		return nil, err
	}
	if plan.Moves() {
		return Without(), nil // the caller itself would have to move
	}
	g, err := plan.Make(id, false)
	if err != nil {
		return nil, err
	}
	return g.last(), nil
}

// Without returns a lasting group without cgroups: its commands can only have limits of single processes.
func Without() *Group {
	plan, _ := (&Machine{}).Plan(widest(), false) // no error, because nothing is required
	return (&Group{plan: plan, read: map[string]string{}}).last()
}

// last makes a group lasting.
func (g *Group) last() *Group {
	g.lasting = &lasting{plan: g.plan, written: map[string]string{}, memory: g.plan.request.Memory, files: &openFiles{named: map[string]*os.File{}}}
	for _, s := range g.settings() {
		g.lasting.written[s.path] = s.value
	}
	return g
}

// lasting is the state of a lasting group.
type lasting struct {
	plan    *Plan
	written map[string]string // current settings by path
	memory  int64             // current memory limit
	before  map[counter]int64
	after   map[counter]int64 // counts at the end of the last command
	cpu     time.Duration     // CPU time used before
	files   *openFiles
}

// openFiles are the files of a lasting group that are used for each command. They stay open until the
// group is removed, because opening a file takes ten times as long as reading it.
type openFiles struct {
	mu    sync.Mutex
	named map[string]*os.File // by path; nil after close
}

// open returns a file, opened for writing too if possible. The set keeps it.
func (o *openFiles) open(path string) (*os.File, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.named == nil {
		return nil, os.ErrClosed
	}
	if f := o.named[path]; f != nil {
		return f, nil
	}
	// os.OpenFile would add the file to the runtime's poller, which would then be notified of every change.
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

// use calls a function with a file and keeps the file open during the call.
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

// read reads a file again: at offset 0 the kernel generates the text again (seq_file.rst). It returns all of it at
// once, so one call is enough.
func (o *openFiles) read(path string) ([]byte, error) {
	data := make([]byte, 1024) // more than any of the files contain
	n := 0
	err := o.use(path, func(fd int) (err error) {
		n, err = unix.Pread(fd, data, 0)
		return err
	})
	return data[:max(n, 0)], err
}

// write is [write] for a file that stays open.
func (o *openFiles) write(path, value string) error {
	return o.use(path, func(fd int) error {
		_, err := unix.Pwrite(fd, []byte(value), 0)
		return err
	})
}

// close closes the files, and ends reads of a watcher of the last command.
func (o *openFiles) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, f := range o.named {
		f.Close()
	}
	o.named = nil
}

// Spare is the number of tasks in a lasting group besides the command's: the parent of its init, and the
// next init with its command.
const Spare = 3

// ErrRenew means that a lasting group cannot have these limits; a group for this command might.
var ErrRenew = &result.Error{Code: "limit", Message: "a warm sandbox cannot have these limits"}

// afterwards is the negligible amount of memory left by earlier commands.
const afterwards = 4 << 20

// Takes reports whether a lasting group can have these limits now. The page cache of the last command is
// freed some time after its end, and no limit can be set below the current usage (memory.rst; v2 would
// kill processes).
func (g *Group) Takes(r Request) bool {
	if r.Memory > 0 && g.number("memory", "memory.current", "", "memory.usage_in_bytes", "") > max(r.Memory/2, afterwards) {
		return false
	}
	_, err := g.lasting.renewed(r)
	return err == nil
}

// Renew sets the limits of the next command.
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
		g.Unthrottle(false) // remove the last command's quota
	}
	g.plan = p
	g.rebase()
	return nil
}

// Idle removes the limit on tasks after a command: a limit reserves tasks (package admission), and between
// commands none are needed.
func (g *Group) Idle() error {
	return g.write(Request{Memory: g.lasting.memory})
}

// renewed returns the plan with other limits for the same cgroups.
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
			return nil, ErrRenew // planning a new group gives the reason
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
		slices.Reverse(list) // in v1 the limit with swap must not be lower
	}
	if err := next.apply(list); err != nil {
		return err
	}
	g.lasting.memory = p.request.Memory
	return nil
}

// rebase makes the current counts the new base. Nothing runs between two commands, so the counts at the end of
// one hold for the next.
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
				_ = l.files.write(dir+"/memory.max_usage_in_bytes", "0") // resets the peak; does not fail
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

// counter is a count of events since the cgroup was made.
type counter struct{ controller, v2file, v2key, v1file, v1key string }

var (
	killed       = counter{"memory", "memory.events", "oom_kill", "memory.oom_control", "oom_kill"}
	memoryEvents = counter{"memory", "memory.events", "oom", "", ""} // v2 only
	pidsEvents   = counter{"pids", "pids.events", "max", "pids.events", "max"}
	throttled    = counter{"cpu", "cpu.stat", "nr_throttled", "cpu.stat", "nr_throttled"}
)

func (g *Group) counted(c counter) int64 {
	return g.number(c.controller, c.v2file, c.v2key, c.v1file, c.v1key)
}

// count returns a count without earlier commands.
func (g *Group) count(c counter) int64 {
	n := g.counted(c)
	if l := g.lasting; l != nil {
		l.after[c] = n
		n -= l.before[c]
	}
	return n
}
