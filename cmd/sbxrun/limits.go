package main

import (
	"fmt"
	"os"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/proc"
)

// requestOf turns the flags that say how much a command may use into a request.
// required says that what cannot be enforced is refused.
func requestOf(f *cli.Limits) (r limits.Request, required bool) {
	r = limits.Request{
		Memory:     int64(f.Memory),
		MemorySwap: int64(f.MemorySwap),
		Pids:       int64(f.Pids),
		CPUs:       float64(f.Cpus),
		CPUTime:    time.Duration(f.CPUTime),
		FSize:      int64(f.Fsize),
		NoFile:     int64(f.Nofile),
		Stack:      int64(f.Stack),
	}
	if f.Nice.Given {
		r.Nice = &f.Nice.Value
	}
	if f.OomScoreAdj.Given {
		r.OOMScoreAdj = &f.OomScoreAdj.Value
	}
	return r, f.Limits == "required"
}

// planLimits says how what the flags ask for is enforced here, for a sandbox or, if
// within has cgroups, for an exec in the sandbox that these are of. nil if there is
// nothing to be done.
func planLimits(f *cli.Limits, within []string) (*limits.Plan, error) {
	request, required := requestOf(f)
	if request == (limits.Request{}) && len(within) == 0 {
		return nil, nil
	}
	machine, err := limits.Detect()
	if err != nil {
		return nil, &result.Error{Code: "limit", Message: "cannot tell which limits can be enforced here: " + err.Error(), Err: err}
	}
	if len(within) > 0 {
		machine = machine.Within(within)
	}
	return machine.Plan(request, required)
}

// makeGroup makes the cgroups of a plan; none of none.
func makeGroup(p *limits.Plan, id string, nest bool) (*limits.Group, error) {
	if p == nil {
		return nil, nil
	}
	return p.Make(id, nest)
}

// boundsWithin has a command of the supervisor's own be in the sandbox's cgroups, if it
// has some.
func (s *supervisor) boundsWithin() (b proc.Bounds, err error) {
	if s.group == nil {
		return b, nil
	}
	plan, err := planLimits(&cli.Limits{Limits: "required"}, s.group.Dirs())
	if plan == nil || err != nil {
		return b, err
	}
	group, err := plan.Make("", false) // it makes none
	if err != nil {
		return b, err
	}
	return group.Bounds(), nil
}

// removeBound is how long a cgroup may stay busy that holds nothing any more.
const removeBound = time.Second

// removeGroup removes the cgroups that the keeper has not removed already.
func removeGroup(g *limits.Group) {
	if g == nil {
		return
	}
	if err := g.Remove(time.Now().Add(removeBound)); err != nil && caller == nil {
		warn(fmt.Errorf("%w; sbxrun cleanup removes it when it is empty", err))
	}
}

// fakeMeminfo is the text that a sandbox is shown as /proc/meminfo; nil for the
// host's.
func fakeMeminfo(fake bool, f *cli.Limits) ([]byte, error) {
	if !fake {
		return nil, nil
	}
	if f.Memory == 0 {
		return nil, usageError(fmt.Errorf("--fake-meminfo: shows the limit on memory; give --memory"))
	}
	text, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return nil, err
	}
	swap := int64(f.MemorySwap) - int64(f.Memory)
	if f.MemorySwap < 0 {
		swap = 1 << 62 // the host's
	}
	return limits.FakeMeminfo(text, int64(f.Memory), swap), nil
}
