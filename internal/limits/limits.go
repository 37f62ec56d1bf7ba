// Package limits turns requested limits into kernel settings, reads the usage, and removes the
// cgroups it made. A limit is enforced or rejected, never accepted and ignored.
//
// [Detect] examines the rights of the caller, and changes nothing. [Machine.Plan] decides for each
// limit how it will be enforced, or why it cannot be. [Plan.Make] creates the cgroups, empty and
// with their limits set. The keeper starts the command with [Group.Bounds], so that
// everything in a sandbox is born inside the cgroups. [Group.Throttle] is called last, when the
// command runs. [Group.Watch] reports limits that end the run, [Group.Loosen] and [Group.Kill]
// help to end it, and [Group.Remove] removes the cgroups.
//
// cgroup v2: a cgroup with processes cannot enable controllers for its children (cgroups(7), the
// no internal processes rule). A sandbox's cgroup is therefore a sibling of the caller's, below the
// nearest writable ancestor that has the controllers or can enable them. It shares the limits of that
// ancestor, but not of the caller's own leaf. If none exists, as in an ordinary user's
// login session, systemd can create a delegated scope. Plan only asks whether it can; Make enters
// the scope, which moves the caller, so processes that belong in the sandbox's cgroups must be
// started after Make. In the scope the caller goes to a leaf, next to the sandbox's cgroup.
//
// cgroup v1: below the caller's own cgroup in each hierarchy needed. On a hybrid machine the v2
// hierarchy has no controllers, but still kills, freezes and counts CPU time.
//
// Resource limits (prlimit(2)), niceness, oom_score_adj and affinity are inherited, and set on the
// process that starts the command. RLIMIT_NPROC counts all processes of a user and does not
// bind root, RLIMIT_CPU is per process, and RLIMIT_AS breaks node and the JVM, so none of them
// serves as --pids, --cpu-time or --memory.
//
// The package accesses cgroup files without a library to save startup time: a program takes 2.2 ms
// to start with opencontainers/cgroups v0.1.0, 2.5 ms with containerd/cgroups v3.1.3, and 1.3 ms with
// golang.org/x/sys alone.
package limits

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
)

// Request has the requested limits; zero means no limit.
type Request struct {
	Memory int64 // bytes of all processes, with their page cache
	// MemorySwap is memory and swap together, as in Docker; -1 is unlimited. If it is 0, a
	// sandbox with a memory limit gets no swap.
	MemorySwap  int64
	Pids        int64 // tasks, including threads and init
	CPUs        float64
	CPUTime     time.Duration // of all processes together
	FSize       int64         // bytes per file
	NoFile      int64         // descriptors per process
	Stack       int64         // bytes per thread
	Nice        *int
	OOMScoreAdj *int
}

// OfProcesses returns the limits of single processes, and CPUs for the number of CPUs they see.
func (r Request) OfProcesses() Request {
	return Request{CPUs: r.CPUs, FSize: r.FSize, NoFile: r.NoFile, Stack: r.Stack, Nice: r.Nice, OOMScoreAdj: r.OOMScoreAdj}
}

// within returns the request of an exec in a sandbox whose processes have these limits, which its own limits must not
// exceed. It leaves out limits that the caller's own limits already imply, because the caller could not set them.
func (r Request) within(sandbox Request) Request {
	narrower := func(own *int64, other int64, resource int) {
		var caller unix.Rlimit
		if unix.Getrlimit(resource, &caller) == nil && uint64(other) > caller.Max && !proc.Capable(unix.CAP_SYS_RESOURCE) {
			return
		}
		if other > 0 && (*own == 0 || *own > other) {
			*own = other
		}
	}
	narrower(&r.FSize, sandbox.FSize, unix.RLIMIT_FSIZE)
	narrower(&r.NoFile, sandbox.NoFile, unix.RLIMIT_NOFILE)
	narrower(&r.Stack, sandbox.Stack, unix.RLIMIT_STACK)
	if n := sandbox.Nice; n != nil && (r.Nice == nil || *r.Nice < *n) && (*n >= niceness() || proc.Capable(unix.CAP_SYS_NICE)) {
		r.Nice = n
	}
	if n := sandbox.OOMScoreAdj; n != nil && (r.OOMScoreAdj == nil || *r.OOMScoreAdj < *n) && (*n >= oomScoreAdj() || proc.Capable(unix.CAP_SYS_RESOURCE)) {
		r.OOMScoreAdj = n
	}
	return r
}

// noFileDefault is the limit on descriptors of a command with a memory limit. The kernel hardly counts the
// memory behind sockets and file locks towards a cgroup, so their number must be limited: an AF_NETLINK
// socket holds 0.2 MiB that is not counted. Most systems have this soft limit.
const noFileDefault = 1024

// withDefault limits the descriptors of a request that limits memory but not descriptors.
func (r Request) withDefault() Request {
	if r.Memory > 0 && r.NoFile == 0 {
		r.NoFile = Files(noFileDefault)
	}
	return r
}

// Files returns n, or the caller's hard limit on descriptors if that is lower.
func Files(n int64) int64 {
	var own unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &own) == nil && own.Max < uint64(n) {
		return int64(own.Max)
	}
	return n
}

// OfProcesses returns the process limits of the plan's request; none for a nil plan.
func (p *Plan) OfProcesses() Request {
	if p == nil {
		return Request{}
	}
	return p.request.OfProcesses()
}

// Plan is a request with the way to enforce it.
type Plan struct {
	Limits   []result.Limit // in a fixed order
	request  Request
	required bool
	machine  *Machine
	seen     float64   // CPUs that processes of the exec's sandbox see; 0 means all
	v2       candidate // where the v2 cgroup will be made; dir is "" if nowhere
	v1       []string  // controllers that need a v1 cgroup
}

// Moves reports whether Make will move the caller to another cgroup. Processes started before that would
// stay behind, outside the limits.
func (p *Plan) Moves() bool { return p != nil && p.v2.manager != nil }

const (
	cpuPeriod  = 100_000   // µs, the kernel's default
	longPeriod = 1_000_000 // µs, the maximum, for small quotas: a quota is at least 1 ms
	minCPUs    = 0.001
	maxCPUs    = 1 << 16
	minPids    = 4
	maxPids    = 1<<22 - Spare // PID_MAX_LIMIT
	minMemory  = 1 << 20
)

// rlimits returns the resource limits in the order of [Request].
func (r Request) rlimits() []rlimit {
	return []rlimit{
		{"fsize", "RLIMIT_FSIZE", unix.RLIMIT_FSIZE, r.FSize},
		{"nofile", "RLIMIT_NOFILE", unix.RLIMIT_NOFILE, r.NoFile},
		{"stack", "RLIMIT_STACK", unix.RLIMIT_STACK, r.Stack},
	}
}

type rlimit struct {
	name, mechanism string
	resource        int
	value           int64
}

// Check returns an error for values that no machine can enforce.
func (r Request) Check() *result.Error {
	wrong := func(name, text, hint string) *result.Error {
		return &result.Error{Code: "limit", Message: "limit " + name + ": " + text, Hint: hint}
	}
	for _, l := range append(r.rlimits(), rlimit{name: "memory", value: r.Memory}, rlimit{name: "pids", value: r.Pids}, rlimit{name: "cpu-time", value: int64(r.CPUTime)}) {
		if l.value < 0 {
			return wrong(l.name, "negative value", "use a positive value")
		}
	}
	switch {
	case math.IsNaN(r.CPUs) || r.CPUs != 0 && (r.CPUs < minCPUs || r.CPUs > maxCPUs):
		return wrong("cpus", fmt.Sprintf("%v is out of range", r.CPUs), fmt.Sprintf("use %v to %v", minCPUs, maxCPUs))
	case r.Pids != 0 && r.Pids < minPids:
		return wrong("pids", fmt.Sprintf("%d is too low", r.Pids), fmt.Sprintf("use at least %d: two tasks for init and the command, and two to enter the sandbox", minPids))
	case r.Pids > maxPids:
		return wrong("pids", fmt.Sprintf("%d is more than the kernel's maximum", r.Pids), fmt.Sprintf("use at most %d", maxPids))
	case r.Memory != 0 && r.Memory < minMemory:
		return wrong("memory", fmt.Sprintf("%d bytes is too low", r.Memory), "use at least 1M, which the sandbox itself needs")
	case r.MemorySwap < -1:
		return wrong("memory-swap", "negative value", "use a size, or -1 for no limit")
	case r.MemorySwap != 0 && r.Memory == 0:
		return wrong("memory-swap", "needs a memory limit", "add --memory")
	case r.MemorySwap > 0 && r.MemorySwap < r.Memory:
		return wrong("memory-swap", "lower than the memory limit, which it includes", "use at least the value of --memory")
	case r.Nice != nil && (*r.Nice < -20 || *r.Nice > 19):
		return wrong("nice", strconv.Itoa(*r.Nice)+" is out of range", "use -20 to 19")
	case r.OOMScoreAdj != nil && (*r.OOMScoreAdj < -1000 || *r.OOMScoreAdj > 1000):
		return wrong("oom-score-adj", strconv.Itoa(*r.OOMScoreAdj)+" is out of range", "use -1000 to 1000")
	}
	return nil
}

// For returns the plan for a request on this machine, or nil if there is nothing to enforce. within are
// the cgroups of the exec's sandbox, none for a new sandbox, and processes the limits of its processes, from
// [Plan.OfProcesses]. See [Machine.Plan].
func For(r Request, required bool, within []string, processes Request) (*Plan, error) {
	r = r.within(processes).withDefault()
	if r == (Request{}) && len(within) == 0 {
		return nil, nil
	}
	m, err := Detect()
	if err != nil {
		return nil, &result.Error{Code: "limit", Message: "cannot find out which limits can be enforced here: " + err.Error(), Err: err}
	}
	if len(within) > 0 {
		m = m.Within(within)
	}
	p, err := m.Plan(r, required)
	if err == nil {
		p.seen = processes.CPUs
	}
	return p, err
}

// Plan returns how the request will be enforced. A required limit that cannot be enforced here is an error,
// a [*result.Error] with the code "limit"; one that no machine can enforce always is.
func (m *Machine) Plan(r Request, required bool) (*Plan, error) {
	if err := r.Check(); err != nil {
		return nil, err
	}
	p := &Plan{request: r, required: required, machine: m}
	var wanted []string
	for _, w := range []struct {
		asked      bool
		controller string
	}{{r.Memory > 0, "memory"}, {r.Pids > 0, "pids"}, {r.CPUs > 0, "cpu"}} {
		if w.asked {
			wanted = append(wanted, w.controller)
		}
	}
	var refused *reason
	if len(wanted) > 0 || r.CPUTime > 0 {
		p.v2 = m.candidate(wanted)
		if r.CPUTime > 0 {
			wanted = append(wanted, "cpuacct")
		}
		p.v2, refused = m.delegated(p.v2, wanted)
	}
	var all refusals
	cgroup := func(name string, requested float64, controller, v2, v1 string) {
		l := result.Limit{Name: name, Requested: requested}
		switch {
		case p.v2.dir != "" && p.v2.has(controller):
			l.Enforced, l.Mechanism = true, "cgroup v2 "+v2
		case m.v1[controller] != "":
			l.Enforced, l.Mechanism = true, "cgroup v1 "+v1
			if !slices.Contains(p.v1, controller) {
				p.v1 = append(p.v1, controller)
			}
		default:
			w := m.reason(controller)
			if refused != nil && !w.settled {
				w.text, w.hint = w.text+"; "+refused.text, refused.hint
			}
			l.Reason = w.text
			all.add(name, w.text, w.hint)
		}
		p.Limits = append(p.Limits, l)
	}
	if r.Memory > 0 {
		cgroup("memory", float64(r.Memory), "memory", "memory.max", "memory.limit_in_bytes")
	}
	if r.MemorySwap != 0 {
		cgroup("memory-swap", float64(r.MemorySwap), "memory", "memory.swap.max", "memory.memsw.limit_in_bytes")
	}
	if r.Pids > 0 {
		cgroup("pids", float64(r.Pids), "pids", "pids.max", "pids.max")
	}
	if r.CPUs > 0 {
		cgroup("cpus", r.CPUs, "cpu", "cpu.max", "cpu.cfs_quota_us")
	}
	if r.CPUTime > 0 {
		// cpu.stat of v2 exists without a controller (cgroup-v2.rst).
		cgroup("cpu-time", result.Milliseconds(r.CPUTime), "cpuacct", "cpu.stat, watched", "cpuacct.usage, watched")
	}
	p.addRlimits(&all)
	if r.Nice != nil {
		p.Limits = append(p.Limits, result.Limit{Name: "nice", Requested: float64(*r.Nice), Enforced: true, Mechanism: "setpriority"})
		if least := niceness(); *r.Nice < least && !proc.Capable(unix.CAP_SYS_NICE) {
			p.refuse(&all, "nice", fmt.Sprintf("the caller may not set less than %d", least), "use at least that, or run sbxrun with CAP_SYS_NICE")
		}
	}
	if r.OOMScoreAdj != nil {
		p.Limits = append(p.Limits, result.Limit{Name: "oom-score-adj", Requested: float64(*r.OOMScoreAdj), Enforced: true, Mechanism: "oom_score_adj"})
		if least := oomScoreAdj(); *r.OOMScoreAdj < least && !proc.Capable(unix.CAP_SYS_RESOURCE) {
			p.refuse(&all, "oom-score-adj", fmt.Sprintf("the caller may not set less than its own, %d", least), "use at least that, or run sbxrun with CAP_SYS_RESOURCE")
		}
	}
	if required && len(all) > 0 {
		return nil, all.err()
	}
	return p, nil
}

// refusals are the limits that cannot be enforced, with reasons, for a single message.
type refusals []refusal

type refusal struct {
	names        []string // limits with the same reason
	reason, hint string
}

func (all *refusals) add(name, reason, hint string) {
	for i := range *all {
		if r := &(*all)[i]; r.reason == reason {
			r.names = append(r.names, name)
			return
		}
	}
	*all = append(*all, refusal{[]string{name}, reason, hint})
}

func (all refusals) err() *result.Error {
	var reasons, hints []string
	for _, r := range all {
		reasons = append(reasons, strings.Join(r.names, ", ")+": "+r.reason)
		if r.hint != "" && !slices.Contains(hints, r.hint) {
			hints = append(hints, r.hint)
		}
	}
	message := "limits cannot be enforced here: " + strings.Join(reasons, "; ")
	if len(all) == 1 && len(all[0].names) == 1 {
		message = "limit " + all[0].names[0] + " cannot be enforced here: " + all[0].reason
	}
	return &result.Error{Code: "limit", Message: message, Hint: strings.Join(append(hints, OrWithout), "; ")}
}

// addRlimits adds the resource limits, and rejects those above init's hard limit.
func (p *Plan) addRlimits(all *refusals) {
	for _, l := range p.request.rlimits() {
		if l.value <= 0 {
			continue
		}
		p.Limits = append(p.Limits, result.Limit{Name: l.name, Requested: float64(l.value), Enforced: true, Mechanism: l.mechanism})
		var own unix.Rlimit
		if err := unix.Getrlimit(l.resource, &own); err != nil || uint64(l.value) <= own.Max || proc.Capable(unix.CAP_SYS_RESOURCE) {
			continue // setting it reports an error
		}
		p.refuse(all, l.name, fmt.Sprintf("the caller's own hard limit is %d", own.Max), fmt.Sprintf("use at most %d, or raise it (ulimit -H)", own.Max))
	}
}

// refuse marks a limit as not enforced.
func (p *Plan) refuse(all *refusals, name, reason, hint string) {
	for i := range p.Limits {
		if l := &p.Limits[i]; l.Name == name {
			l.Enforced, l.Mechanism, l.Reason = false, "", reason
		}
	}
	all.add(name, reason, hint)
}

// OrWithout ends the hint for every limit that cannot be enforced.
const OrWithout = "or run without it: --limits best-effort"

// fail marks a limit as not enforced, and returns an error if it is required.
func (p *Plan) fail(name string, cause error, hint string) error {
	var all refusals
	p.refuse(&all, name, cause.Error(), hint)
	if !p.required {
		return nil
	}
	e := all.err()
	e.Err = cause
	return e
}

// quota returns the CPU limit in the kernel's form, in µs.
func quota(cpus float64) (quota, period int64) {
	period = cpuPeriod
	if cpus*cpuPeriod < 1000 {
		period = longPeriod
	}
	return int64(math.Ceil(cpus * float64(period))), period
}

// niceness returns the lowest value that the caller may set without CAP_SYS_NICE; see RLIMIT_NICE in
// setpriority(2).
func niceness() int {
	// The system call returns 20-nice, and unix.Getpriority does not convert it.
	n, err := unix.Getpriority(unix.PRIO_PROCESS, 0)
	if err != nil {
		return 19
	}
	least := 20 - n
	var own unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NICE, &own) == nil && own.Cur <= 40 {
		least = min(least, 20-int(own.Cur))
	}
	return least
}

// oomScoreAdj returns the lowest value that the caller may set without CAP_SYS_RESOURCE
// (proc_pid_oom_score_adj(5)).
func oomScoreAdj() int {
	data, err := proc.ReadFile("/proc/self/oom_score_adj")
	if err != nil {
		return 0
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil {
		return 0
	}
	return n
}
