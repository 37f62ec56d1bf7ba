package main

import (
	"os"
	"time"

	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/state"
)

// requestOf turns the limit flags into a request. required means that a limit that cannot be enforced is an error.
func requestOf(f *cli.LimitFlags) (r limits.Request, required bool) {
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

// planLimits returns how to enforce the limits of a new sandbox or, if in describes an existing one, of an exec in
// that. It returns nil if there are none.
func planLimits(f *cli.LimitFlags, in state.Room) (*limits.Plan, error) {
	request, required := requestOf(f)
	return limits.For(request, required, in.Cgroups, in.Limits)
}

// fakeMeminfo returns the text of /proc/meminfo in the sandbox.
func fakeMeminfo(f *cli.LimitFlags) ([]byte, error) {
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
