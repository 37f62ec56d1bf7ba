package main

import (
	"errors"
	"os"
	"time"

	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/state"
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

// planLimits says how what the flags ask for is enforced here, for a sandbox or, if there is
// access, for an exec in that one. nil if there is nothing to be done.
func planLimits(f *cli.Limits, in state.Access) (*limits.Plan, error) {
	request, required := requestOf(f)
	return limits.For(request, required, in.Cgroups, in.Limits)
}

// fakeMeminfo is the text that a sandbox is shown as /proc/meminfo; nil for the
// host's. flags is the struct of the command.
func fakeMeminfo(flags any, fake bool, f *cli.Limits) ([]byte, error) {
	if !fake {
		return nil, nil
	}
	if f.Memory == 0 {
		return nil, cli.UsageError(flags, errors.New("--fake-meminfo: shows the limit on memory; give --memory"))
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
