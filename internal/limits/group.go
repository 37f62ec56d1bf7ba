package limits

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
)

// leaf holds the processes of a v2 cgroup that others can be made in.
const leaf = "main"

// Group is the cgroups of one sandbox or exec, one for each hierarchy in use; there may be none.
type Group struct {
	plan    *Plan
	nodes   []node
	join    []string          // directories that a command is born in, or goes to
	read    map[string]string // by controller, the directory to read
	v2      string            // the v2 cgroup, if there is one
	nested  bool              // it has a leaf for its own processes
	above   string            // the sandbox's memory cgroup, if an exec is in it
	before  int64             // how many processes had been killed there
	lasting *lasting          // nil for a group of one command
}

type node struct {
	dir  string
	lock int // a descriptor of dir that holds a shared lock: its owner lives
}

// Make makes the cgroups, named sbxrun-ID, and sets their limits; nothing is in
// them. With nest, execs can have cgroups within ([Machine.Within]). If a required limit cannot be set,
// nothing is left and the error is a [*result.Error]. Of a plan that is not required,
// the limit is marked. The caller owns the group and removes it.
func (p *Plan) Make(id string, nest bool) (*Group, error) {
	g := &Group{plan: p, read: map[string]string{}}
	g.inherit()
	if err := g.joinScope(id); err != nil {
		return nil, err
	}
	if err := g.make(id, nest); err != nil {
		return nil, result.All(err, g.Remove(time.Now().Add(time.Second)))
	}
	return g, nil
}

// inherit has the command of an exec join the sandbox's cgroups, unless it gets one below.
func (g *Group) inherit() {
	for _, dir := range g.plan.machine.base {
		if n, ok := oomKills(dir); ok {
			g.above, g.before = dir, n
		}
		if !exists(dir + "/cgroup.controllers") { // v1
			g.join = append(g.join, dir)
		} else if exists(dir + "/" + leaf) {
			g.join = append(g.join, dir+"/"+leaf)
		} else {
			g.join = append(g.join, dir)
		}
	}
}

// joinScope has systemd move the caller of an exec to a scope from which it may move a
// command to the sandbox's cgroups.
func (g *Group) joinScope(id string) error {
	m := g.plan.machine
	if m.manager == nil || !slices.ContainsFunc(m.base, func(dir string) bool { return exists(dir+"/cgroup.controllers") && !m.mayMove(dir) }) {
		return nil
	}
	given, err := m.manager()
	if err == nil {
		_, err = given.Enter(fmt.Sprintf("%s%s-%d.scope", Prefix, id, os.Getpid())) // an id is of one sandbox
	}
	if err != nil { // an exec may not run outside of its sandbox's limits
		return &result.Error{Code: "limit", Message: "the sandbox's cgroup cannot be joined from here: asked systemd for a scope: " + err.Error(), Hint: hintFor(err), Err: err}
	}
	return nil
}

// enter has the caller moved to a scope of its own, and goes to a leaf there, since
// a cgroup that holds processes cannot give controllers.
func (g *Group) enter(id string) error {
	p := g.plan
	m := p.machine
	path, err := p.v2.manager.Enter(Prefix + id + ".scope")
	if err != nil {
		return fmt.Errorf("asked systemd for a scope: %w", err)
	}
	c := candidate{}
	for _, mt := range m.mount {
		if dir, ok := mt.Own(path); ok && mt.V2 {
			c.dir = dir
		}
	}
	available, err := proc.ReadFile(c.dir + "/cgroup.controllers")
	if err != nil {
		return err
	}
	c.more = strings.Fields(string(available))
	m.own = c.dir + "/" + leaf
	if err := unix.Mkdir(m.own, 0o755); err != nil {
		return fmt.Errorf("make %s: %w", m.own, err)
	}
	if err := write(m.own+"/cgroup.procs", "0"); err != nil {
		return fmt.Errorf("go to %s: %w", m.own, err)
	}
	p.v2 = c
	var all refusals
	for _, l := range slices.Clone(p.Limits) {
		name := controllerOf(l.Name)
		if l.Enforced && strings.HasPrefix(l.Mechanism, "cgroup v2 ") && !c.has(name) {
			p.refuse(&all, l.Name, fmt.Sprintf("systemd has made %s without the controller %s", c.dir, name), enableHint(os.Geteuid(), ""))
		}
	}
	if p.required && len(all) > 0 {
		return all.err()
	}
	return nil
}

func (g *Group) make(id string, nest bool) error {
	p := g.plan
	for _, controller := range p.v1 {
		parent := p.machine.v1[controller]
		if g.read[controller] != "" {
			continue
		}
		dir, err := g.mkdir(parent, id, parent)
		if err == nil && controller == "memory" {
			err = killing(dir)
		}
		if err != nil {
			if err := g.failAll("cgroup v1 "+controller+".", err); err != nil {
				return err
			}
			continue
		}
		for c, d := range p.machine.v1 { // cpu and cpuacct are often one hierarchy
			if c == controller || d == parent && exists(dir+"/"+probe(c)) {
				g.read[c] = dir
			}
		}
	}
	if p.v2.dir != "" {
		if err := g.makeV2(id, nest); err != nil {
			if err := g.failAll("cgroup v2 ", err); err != nil {
				return err
			}
		}
	}
	if err := g.apply(append(g.settings(), g.throttle()...)); err != nil {
		return err
	}
	g.Unthrottle(false) // that it can be set is known now
	return nil
}

// killing has the kernel kill what a v1 cgroup has no memory for, and not let it wait for ever, which
// is inherited from the cgroup above (memory.rst, "OOM Control").
func killing(dir string) error {
	control := dir + "/memory.oom_control"
	data, _ := proc.ReadFile(control) // none, if it cannot be read
	if disabled, _ := Row(data, "oom_kill_disable"); disabled == 0 {
		return nil
	}
	return write(control, "0")
}

// probe is a file that only a v1 cgroup with the controller has.
func probe(controller string) string {
	switch controller {
	case "memory":
		return "memory.limit_in_bytes"
	case "cpu":
		return "cpu.cfs_quota_us"
	case "cpuacct":
		return "cpuacct.usage"
	case "freezer":
		return "freezer.state"
	}
	return "pids.max"
}

func (g *Group) makeV2(id string, nest bool) error {
	p := g.plan
	if p.Moves() {
		if err := g.enter(id); err != nil {
			return err
		}
	}
	var on []string
	for name, asked := range map[string]bool{"memory": p.request.Memory > 0, "pids": p.request.Pids > 0, "cpu": p.request.CPUs > 0} {
		if asked && slices.Contains(p.v2.more, name) {
			on = append(on, "+"+name)
		}
	}
	if len(on) > 0 {
		if err := write(p.v2.dir+"/cgroup.subtree_control", strings.Join(on, " ")); err != nil {
			return fmt.Errorf("enable %s in %s: %w", strings.Join(on, " "), p.v2.dir, err)
		}
	}
	dir, err := g.mkdir(p.v2.dir, id, p.v2.dir)
	if err != nil {
		return err
	}
	g.v2 = dir
	for _, c := range append(slices.Clone(p.v2.enabled), p.v2.more...) {
		g.read[c] = dir
	}
	g.read["cpuacct"] = dir
	if !nest {
		return nil
	}
	controllers, err := proc.ReadFile(dir + "/cgroup.controllers")
	if err != nil {
		return err
	}
	if err := os.Mkdir(dir+"/"+leaf, 0o755); err != nil {
		return err
	}
	g.join[len(g.join)-1], g.nested = dir+"/"+leaf, true
	for _, c := range strings.Fields(string(controllers)) {
		if slices.Contains([]string{"memory", "pids", "cpu"}, c) {
			if err := write(dir+"/cgroup.subtree_control", "+"+c); err != nil {
				return fmt.Errorf("enable %s in %s: %w", c, dir, err)
			}
		}
	}
	return nil
}

// mkdir makes one cgroup, which init will join in place of what is there.
func (g *Group) mkdir(parent, id, instead string) (string, error) {
	dir := parent + "/" + Prefix + id
	if err := unix.Mkdir(dir, 0o755); err != nil {
		return "", fmt.Errorf("make %s: %w", dir, err)
	}
	// Between these two [Leftovers] might take it for one; then setting its
	// limits fails, and the run is refused.
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err == nil {
		err = unix.Flock(fd, unix.LOCK_SH|unix.LOCK_NB)
	}
	g.nodes = append(g.nodes, node{dir, fd})
	if err != nil {
		return "", fmt.Errorf("lock %s: %w", dir, err)
	}
	g.join = slices.DeleteFunc(g.join, func(d string) bool { return d == instead || d == instead+"/"+leaf })
	g.join = append(g.join, dir)
	return dir, nil
}

func hintFor(err error) string {
	var e *result.Error
	switch {
	case errors.As(err, &e):
		return e.Hint
	case errors.Is(err, unix.ENOENT):
		return "boot a kernel that has it (for swap: swapaccount=1)"
	case errors.Is(err, unix.EINVAL):
		return "ask for no more than the caller's own cgroup has"
	case errors.Is(err, unix.EAGAIN):
		return "raise cgroup.max.descendants above, or run sbxrun cleanup"
	}
	return ""
}

func (p *Plan) enforced(name string) bool {
	return slices.ContainsFunc(p.Limits, func(l result.Limit) bool { return l.Name == name && l.Enforced })
}

// failAll fails all limits whose mechanism begins so.
func (g *Group) failAll(mechanism string, err error) error {
	if refusal, ok := err.(*result.Error); ok {
		return refusal // of some of them
	}
	var all refusals
	for _, l := range slices.Clone(g.plan.Limits) {
		if l.Enforced && strings.HasPrefix(l.Mechanism, mechanism) {
			g.plan.refuse(&all, l.Name, err.Error(), hintFor(err))
		}
	}
	if g.plan.required && len(all) > 0 {
		e := all.err()
		e.Err = err
		return e
	}
	return nil
}

// Bounds are what a sandbox or exec begins with.
func (g *Group) Bounds() (b proc.Bounds) {
	for _, dir := range g.join {
		if exists(dir + "/cgroup.controllers") {
			b.V2 = dir
		} else {
			b.Tasks = append(b.Tasks, dir+"/tasks")
		}
	}
	for _, n := range g.nodes {
		if n.dir == g.v2 && g.nested {
			b.Remove = append(b.Remove, n.dir+"/"+leaf)
		}
		b.Remove = append(b.Remove, n.dir)
	}
	own := g.Own()
	b.Rlimits, b.Nice, b.OOMScoreAdj, b.CPUs = own.Rlimits, own.Nice, own.OOMScoreAdj, own.CPUs
	return b
}

// spread counts what this process has started, so that a server's commands do not all get the same
// CPU.
var spread atomic.Int32

// Own are those of the Bounds that are none of cgroups.
func (g *Group) Own() (b proc.Bounds) {
	p := g.plan
	for _, l := range p.request.rlimits() {
		if p.enforced(l.name) {
			b.Rlimits = append(b.Rlimits, proc.Rlimit{Resource: l.resource, Value: uint64(l.value)})
		}
	}
	if p.enforced("nice") {
		b.Nice = p.request.Nice
	}
	if p.enforced("oom-score-adj") {
		b.OOMScoreAdj = p.request.OOMScoreAdj
	}
	seen := p.request.CPUs
	if p.seen > 0 && (seen == 0 || seen > p.seen) {
		seen = p.seen
	}
	if cpus := CPUSet(seen, os.Getpid()+int(spread.Add(1))); len(cpus) > 0 {
		b.CPUs = new(unix.CPUSet)
		for _, cpu := range cpus {
			b.CPUs.Set(cpu)
		}
	}
	return b
}

// Throttle sets the CPU quota. Last, when the payload runs: what sets a sandbox up would
// take minutes under a small one. That it can be set was tried by [Plan.Make]; a
// [*result.Error] if it is required and does not hold all the same.
func (g *Group) Throttle() error { return g.apply(g.throttle()) }

// controllerOf is what a limit by cgroups needs.
func controllerOf(limit string) string {
	switch limit {
	case "memory-swap":
		return "memory"
	case "cpus":
		return "cpu"
	case "cpu-time":
		return "cpuacct"
	}
	return limit
}

// Dirs are the cgroups' directories, for the record: [Machine.Within] and
// [RemoveDirs] take them.
func (g *Group) Dirs() (dirs []string) {
	for _, n := range g.nodes {
		dirs = append(dirs, n.dir)
	}
	return dirs
}

func exists(path string) bool { return unix.Access(path, unix.F_OK) == nil }
