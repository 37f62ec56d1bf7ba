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

// leaf is the child that holds the processes of a v2 cgroup with other children.
const leaf = "main"

// Group holds the cgroups of a sandbox or exec, at most one per hierarchy.
type Group struct {
	plan    *Plan
	nodes   []node
	join    []string          // directories that the command starts in or moves to
	read    map[string]string // by controller: the directory to read
	v2      string            // the v2 cgroup, or ""
	nested  bool              // the v2 cgroup has a leaf
	above   string            // memory cgroup of the exec's sandbox, or ""
	before  int64             // processes killed there before
	lasting *lasting          // nil for a group for one command
}

type node struct {
	dir  string
	lock int // descriptor of dir with a shared lock: its owner is alive
}

// Make creates the cgroups, named sbxrun-ID, empty and with their limits set. With nest, execs can have
// cgroups in them ([Machine.Within]). If a required limit cannot be set, nothing is left and the error
// is a [*result.Error]; if limits are not required, the limit is marked. The caller must call
// Remove.
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

// inherit makes an exec's command join the sandbox's cgroups, where it gets none below them.
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

// joinScope makes systemd move the caller of an exec to a scope from which it may move a command to the
// sandbox's cgroups.
func (g *Group) joinScope(id string) error {
	m := g.plan.machine
	if m.manager == nil || !slices.ContainsFunc(m.base, func(dir string) bool { return exists(dir+"/cgroup.controllers") && !m.mayMove(dir) }) {
		return nil
	}
	given, err := m.manager()
	if err == nil {
		_, err = given.Enter(fmt.Sprintf("%s%s-%d.scope", Prefix, id, os.Getpid())) // the ID alone may be in use by the sandbox
	}
	if err != nil { // an exec must not run outside its sandbox's limits
		return &result.Error{Code: "limit", Message: "cannot join the sandbox's cgroup from here: asked systemd for a scope: " + err.Error(), Hint: hintFor(err), Err: err}
	}
	return nil
}

// enter moves the caller to a new scope, and to a leaf in it, because a cgroup with processes
// cannot enable controllers.
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
		return fmt.Errorf("create %s: %w", m.own, err)
	}
	if err := write(m.own+"/cgroup.procs", "0"); err != nil {
		return fmt.Errorf("move to %s: %w", m.own, err)
	}
	p.v2 = c
	var all refusals
	for _, l := range slices.Clone(p.Limits) {
		name := controllerOf(l.Name)
		if l.Enforced && strings.HasPrefix(l.Mechanism, "cgroup v2 ") && !c.has(name) {
			p.refuse(&all, l.Name, fmt.Sprintf("systemd created %s without the controller %s", c.dir, name), enableHint(os.Geteuid(), ""))
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
		for c, d := range p.machine.v1 { // cpu and cpuacct often share a hierarchy
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
	g.Unthrottle(false) // only tested; see Throttle
	return nil
}

// killing makes the kernel kill processes when a v1 cgroup runs out of memory, rather than pause them forever,
// a setting inherited from the parent (memory.rst, "OOM Control").
func killing(dir string) error {
	control := dir + "/memory.oom_control"
	data, _ := proc.ReadFile(control) // enabled if unreadable
	if disabled, _ := Row(data, "oom_kill_disable"); disabled == 0 {
		return nil
	}
	return write(control, "0")
}

// probe returns a file that exists only in v1 cgroups with the controller.
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

// mkdir creates a cgroup, which init joins instead of another one.
func (g *Group) mkdir(parent, id, instead string) (string, error) {
	dir := parent + "/" + Prefix + id
	if err := unix.Mkdir(dir, 0o755); err != nil {
		return "", fmt.Errorf("create %s: %w", dir, err)
	}
	// Between mkdir and flock, [Machine.Leftovers] may remove the directory; then setting its limits
	// fails, and so does the run.
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
		return "use at most the limit of the caller's own cgroup"
	case errors.Is(err, unix.EAGAIN):
		return "raise cgroup.max.descendants above, or run sbxrun cleanup"
	}
	return ""
}

func (p *Plan) enforced(name string) bool {
	return slices.ContainsFunc(p.Limits, func(l result.Limit) bool { return l.Name == name && l.Enforced })
}

// failAll marks all limits whose mechanism has this prefix as not enforced.
func (g *Group) failAll(mechanism string, err error) error {
	if refusal, ok := err.(*result.Error); ok {
		return refusal // about some of them already
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

// Bounds returns the initial settings of a sandbox or exec.
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

// spread counts the started commands, so that a server's commands do not all get the same CPUs.
var spread atomic.Int32

// Own returns the Bounds that do not concern cgroups.
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

// Throttle sets the CPU quota when the command runs, because setting up a sandbox would take minutes
// with a small one. [Plan.Make] has tested that it can be set. If a required quota fails nevertheless,
// the error is a [*result.Error].
func (g *Group) Throttle() error { return g.apply(g.throttle()) }

// controllerOf returns the controller for a limit by cgroups.
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

// Dirs returns the cgroups' directories, for [Machine.Within] and [RemoveDirs].
func (g *Group) Dirs() (dirs []string) {
	for _, n := range g.nodes {
		dirs = append(dirs, n.dir)
	}
	return dirs
}

func exists(path string) bool { return unix.Access(path, unix.F_OK) == nil }
