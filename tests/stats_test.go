package tests

import (
	stdjson "encoding/json"
	"strings"
	"syscall"
	"testing"

	"github.com/creack/pty"

	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/tests/budget"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// stats is the output of stats --json.
type stats struct {
	Level    string `json:"level"`
	Tightest struct {
		Path  string `json:"path"`
		Tasks int    `json:"tasks"`
		Max   int    `json:"max"`
	} `json:"tightest"`
	Sandboxes []struct {
		ID      string  `json:"id"`
		Name    string  `json:"name"`
		Status  string  `json:"status"`
		Tasks   int     `json:"tasks"`
		Zombies int     `json:"zombies"`
		Memory  int64   `json:"memory_bytes"`
		Source  string  `json:"memory_source"`
		Uptime  float64 `json:"uptime_ms"`
	} `json:"sandboxes"`
	Orphans int `json:"orphans"`
}

func statsOf(t *testing.T, s *harness.State, o harness.Options, flags ...string) (got stats) {
	t.Helper()
	r := s.Start(o, append([]string{"stats", "--json"}, flags...)...).Wait()
	err := stdjson.Unmarshal(r.Stdout, &got)
	check.Require(t, err == nil && r.ExitCode == 0, "exit code %d, %v: %s%s", r.ExitCode, err, r.Stdout, r.Stderr)
	return got
}

// stats counts the processes of commands and execs. Levels follow the thresholds, and no level is a failure.
func TestStats(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	got := statsOf(t, s, harness.Options{})
	check.That(t, len(got.Sandboxes) == 0 && got.Tightest.Tasks >= 1 && got.Tightest.Max >= got.Tightest.Tasks, "with no sandbox: %+v", got)
	box := s.Sandbox(harness.Options{}, "--name", "box")
	web := s.Sandbox(harness.Options{}, "python3", "-c", "import os,time\nif os.fork() == 0: os._exit(0)\ntime.sleep(600)")
	want := func(tasks ...int) {
		t.Helper()
		var got stats
		harness.Until(t, harness.Bound, "the tasks of the sandboxes", func() bool {
			got = statsOf(t, s, harness.Options{})
			if len(got.Sandboxes) != len(tasks) {
				return false
			}
			for i, n := range tasks {
				if b := got.Sandboxes[i]; b.Tasks != n || b.Zombies != i || i > 0 && b.Memory <= 0 {
					return false
				}
			}
			return true
		})
		for _, b := range got.Sandboxes {
			check.That(t, b.Status == "running" && b.Uptime > 0, "%+v", b)
		}
		check.That(t, got.Sandboxes[0].ID == box.ID && got.Sandboxes[0].Name == "box" && got.Sandboxes[1].ID == web.ID, "%+v", got)
	}
	want(1, 4)
	x := box.StartExec(harness.Options{}, nil, "sh", "-c", "sleep 600 & echo up; wait")
	x.WaitOutput("up\n")
	want(4, 4) // init, shell and sleep
	x.Signal(syscall.SIGTERM)
	x.Wait().Expect(t, 143, "canceled")
	want(1, 4)

	for level, flags := range map[string][]string{"ok": {"--warn", "100", "--alert", "100"}, "warn": {"--warn", "0", "--alert", "100"}, "alert": {"--alert", "0"}} {
		check.Equal(t, statsOf(t, s, harness.Options{}, flags...).Level, level, "%q: level", flags)
		s.Run(append([]string{"stats"}, flags...)...).Exits(t, 0).OutHas(t, "\n"+level+" ").OutHas(t, " box ")
	}
	s.Run("stats", "--prometheus").OutHas(t, "\nsbxrun_sandbox_tasks{id=\""+box.ID+"\",name=\"box\"} 1\n")
	for _, args := range [][]string{{"x"}, {"--json", "--prometheus"}, {"--interval", "0"}, {"--warn", "120"}} {
		check.Equal(t, s.Run(append([]string{"stats"}, args...)...).ExitCode, 125, "%q: exit code", args)
	}
	if b := budget.New(t, 50); b != nil {
		b.Fill(30)
		got := statsOf(t, s, harness.Options{Wrap: b.Wrap()})
		check.That(t, got.Tightest.Path == b.Dir+"/pids.max" && got.Tightest.Max == 50 && got.Tightest.Tasks > 30 && got.Level != "ok", "in a cgroup of 50: %+v", got)
	}
}

// The memory of a sandbox with a cgroup is the cgroup's count, which includes files in memory.
func TestStatsMemory(t *testing.T) {
	t.Parallel()
	if !enforced(t, limits.Request{Memory: 128 << 20}, "--memory", "128M") {
		return
	}
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{}, "--memory", "128M")
	x := b.StartExec(harness.Options{}, []string{"--timeout", "600"}, "sh", "-c", "head -c 40M /dev/zero >/tmp/x; echo up; sleep 600")
	x.WaitOutput("up")
	got := statsOf(t, s, harness.Options{})
	check.That(t, len(got.Sandboxes) == 1 && got.Sandboxes[0].Source == "cgroup" && got.Sandboxes[0].Memory >= 40<<20 && got.Sandboxes[0].Memory <= 128<<20, "%+v", got.Sandboxes)
	x.Signal(syscall.SIGTERM)
	x.Wait()
}

// A sandbox that has died with its supervisor is not listed, and leaves no orphan.
func TestStatsAfterCrash(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{})
	b.KillSupervisor()
	got := statsOf(t, s, harness.Options{})
	check.That(t, len(got.Sandboxes) == 0, "%+v", got)
	// Orphans of other tests may be visible for a moment.
	harness.Until(t, harness.Bound, "no orphan", func() bool { return statsOf(t, s, harness.Options{}).Orphans == 0 })
}

// stats --watch into a pipe prints one block per interval.
func TestStatsWatchPipe(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	p := s.Start(harness.Options{}, "stats", "--watch", "--json", "--interval", "0.05")
	harness.Until(t, harness.Bound, "three looks", func() bool { return strings.Count(p.Output(), "\n") >= 3 })
	p.Signal(syscall.SIGTERM)
	p.Wait()
	for line := range strings.Lines(p.Output()) {
		check.That(t, stdjson.Valid([]byte(line)) && !strings.Contains(line, "\x1b"), "%q", line)
	}
}

// On a terminal it uses the alternate screen at full size, and Ctrl-C restores the old one.
func TestStatsWatchScreen(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	screen := screenOf(t, &pty.Winsize{Rows: 20, Cols: 100}, func(o harness.Options) *harness.Process {
		return s.Start(o, "stats", "--watch", "--interval", "0.05")
	})
	frames := func() int {
		return strings.Count(screen.shows(), "\x1b[Hsbxrun stats") + strings.Count(screen.shows(), "\x1b[H\x1b[Ksbxrun stats")
	}
	harness.Until(t, harness.Bound, "two frames", func() bool { return frames() >= 2 })
	check.That(t, strings.HasPrefix(screen.shows(), "\x1b[?1049h\x1b[?25l") && strings.Contains(screen.shows(), "0 sandboxes, "), "%q", screen.shows())
	// A smaller terminal cuts it.
	check.Must(t, pty.Setsize(screen.ptmx, &pty.Winsize{Rows: 4, Cols: 30}))
	screen.waitFor(" more\x1b[J")
	screen.typeIn("\x03") // Ctrl-C
	screen.p.Wait().Exits(t, 130)
	screen.waitFor("\x1b[?25h\x1b[?1049l")
	screen.restored()
}
