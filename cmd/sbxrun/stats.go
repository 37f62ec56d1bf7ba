package main

import (
	"io"
	"os"
	"slices"
	"time"

	"golang.org/x/term"

	"github.com/sbxrun/sbxrun/cleanup"
	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/admission"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/output"
	"github.com/sbxrun/sbxrun/internal/state"
)

func statsCommand(flags *cli.Stats) (output.Result, error) {
	look := func() (statistics, error) {
		return gather(admission.Thresholds{Warn: float64(flags.Warn) / 100, Alert: float64(flags.Alert) / 100})
	}
	once := func() (r output.Result, err error) {
		s, err := look()
		if err != nil {
			return r, err
		}
		return output.Result{Value: s, Text: func(w io.Writer) error {
			if flags.Prometheus {
				return printPrometheus(w, s)
			}
			return printStatistics(w, s)
		}}, nil
	}
	if !flags.Watch {
		return once()
	}
	// A screen on a terminal; elsewhere blocks with an empty line after each.
	interval := time.Duration(flags.Interval)
	if out := int(os.Stdout.Fd()); term.IsTerminal(out) && !flags.JSON && !flags.Prometheus {
		return watchOnScreen(out, interval, look)
	}
	for {
		r, err := once()
		if err != nil {
			return r, err
		}
		if code := output.Finish(flags.JSON, r, nil); code != 0 {
			return output.Result{Code: code}, nil
		}
		if !flags.JSON {
			_, _ = io.WriteString(output.Stdout, "\n") // the next block reports a failure
		}
		time.Sleep(interval)
	}
}

// statistics is the JSON of stats.
type statistics struct {
	At        string          `json:"at"`
	Level     admission.Level `json:"level"`
	Tightest  boundUse        `json:"tightest"`
	Bounds    []boundUse      `json:"bounds"`
	Sandboxes []sandboxUse    `json:"sandboxes"`
	Zombies   int             `json:"zombies"`
	Orphans   int             `json:"orphans"`
}

// boundUse is one bound of the number of tasks.
type boundUse struct {
	Path    string          `json:"path"`
	Tasks   int64           `json:"tasks"`
	Max     int64           `json:"max"`
	Percent float64         `json:"percent"`
	Level   admission.Level `json:"level"`
}

type sandboxUse struct {
	ID           string  `json:"id"`
	Name         string  `json:"name,omitempty"`
	Status       string  `json:"status"`
	Tasks        int     `json:"tasks"`
	Zombies      int     `json:"zombies"`
	Memory       int64   `json:"memory_bytes"`
	MemorySource string  `json:"memory_source"`
	Uptime       float64 `json:"uptime_ms"`
}

func gather(at admission.Thresholds) (statistics, error) {
	now := time.Now()
	s := statistics{At: now.UTC().Format(result.TimeFormat), Sandboxes: []sandboxUse{}}
	dir, err := state.Look(state.Mine()) // first, because it checks /proc
	if err != nil {
		return s, err
	}
	defer dir.Close()
	r, err := admission.Look()
	if err != nil {
		return s, err
	}
	use := func(b admission.Bound) boundUse {
		ratio := b.Ratio()
		percent := float64(int64(ratio*10000+0.5)) / 100
		return boundUse{Path: b.Path, Tasks: b.Current, Max: b.Max, Percent: percent, Level: at.Level(ratio)}
	}
	s.Tightest = use(r.Tightest())
	s.Level = s.Tightest.Level
	for _, b := range r.Bounds {
		s.Bounds = append(s.Bounds, use(b))
	}
	slices.SortStableFunc(s.Bounds, func(a, b boundUse) int { return int(b.Percent*100) - int(a.Percent*100) })

	entries, warnings := dir.List()
	for _, w := range warnings {
		warn(w)
	}
	entries = slices.DeleteFunc(entries, func(e *state.Entry) bool { return !e.Lives() })
	if len(entries) > 0 {
		all, err := admission.TakeCensus()
		if err != nil {
			return s, err
		}
		for _, e := range entries {
			s.Sandboxes = append(s.Sandboxes, useOf(dir, e, all, now))
		}
	}
	left, err := cleanup.Sweep(cleanup.Options{DryRun: true, KeepRecords: true})
	if err != nil {
		return s, err
	}
	for _, f := range left {
		switch f.Kind {
		case "zombie":
			s.Zombies++
		case "init", "held-init":
			s.Orphans++
		}
	}
	return s, nil
}

func useOf(dir *state.Dir, e *state.Entry, all *admission.Census, now time.Time) sandboxUse {
	u := sandboxUse{ID: e.ID, Name: e.Record.Name, Status: e.Status(), MemorySource: "rss"}
	if at, err := time.Parse(result.TimeFormat, e.Record.CreatedAt); err == nil {
		u.Uptime = result.Milliseconds(max(0, now.Sub(at)))
	}
	if e.Record.Init == nil {
		return u // still being set up
	}
	n := all.Sandbox(*e.Record.Init)
	u.Tasks, u.Zombies, u.Memory = n.Tasks, n.Zombies, n.RSS
	// PID 1 of the sandbox is in none of its cgroups.
	_, access, _ := dir.Access(e.ID)
	if bytes, ok := limits.MemoryOf(access.Room.Cgroups); ok && n.Tasks > 0 {
		u.Memory, u.MemorySource = bytes, "cgroup"
	}
	return u
}
