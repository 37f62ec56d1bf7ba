package limits

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// lastingGroup returns a lasting group, or nil if that is not possible here.
func lastingGroup(t *testing.T) *Group {
	t.Helper()
	g, err := Lasting(id(t))
	check.Must(t, err)
	if g == nil {
		t.Log("only systemd could make a cgroup here")
		return nil
	}
	dirs := g.Dirs()
	t.Cleanup(func() {
		empty(t, dirs)
		check.OK(t, g.Remove(soon()))
	})
	return g
}

// Each command of a lasting group gets its own CPU quota, whatever period the previous one had (a separate file on v1).
func TestRenewedQuota(t *testing.T) {
	g := lastingGroup(t)
	if g == nil {
		return
	}
	for _, cpus := range []float64{0.005, 1, 1, 0.25, 0.002, 0.003, 0.5} {
		err := g.Renew(Request{CPUs: cpus})
		if errors.Is(err, ErrRenew) && !can(here(t), "cpu") {
			t.Logf("nobody here can set one: %v", err)
			return
		}
		check.Must(t, err)
		check.Must(t, g.Throttle())
		check.Equal(t, quotaOf(t, g), cpus, "asked for")
		g.Unthrottle(cpus == 1) // as at the end of a command
	}
}

// Between two commands a lasting group reserves no tasks.
func TestIdle(t *testing.T) {
	g := lastingGroup(t)
	if g == nil {
		return
	}
	limit := func() string {
		for _, dir := range g.Dirs() {
			if text, err := os.ReadFile(filepath.Join(dir, "pids.max")); err == nil {
				return strings.TrimSpace(string(text))
			}
		}
		return ""
	}
	for range 2 {
		err := g.Renew(Request{Pids: 10})
		if errors.Is(err, ErrRenew) && !can(here(t), "pids") {
			t.Logf("nobody here can set one: %v", err)
			return
		}
		check.Must(t, err)
		check.Equal(t, limit(), strconv.Itoa(10+Spare), "pids.max")
		check.OK(t, g.Idle())
		got, want := limit(), strconv.FormatInt(widest().Pids, 10)
		check.That(t, got == want, "pids.max is %s between two commands, want %s", got, want)
	}
}

// On v1 the period is written before the quota if it is not the default, and always in a lasting group,
// because the previous command's period is unknown.
func TestThrottleV1(t *testing.T) {
	for _, c := range []struct {
		cpus    float64
		lasting bool
		want    []string
	}{
		{0, false, nil},
		{1.5, false, []string{"cpu.cfs_quota_us=150000"}},
		{1.5, true, []string{"cpu.cfs_period_us=100000", "cpu.cfs_quota_us=150000"}},
		{0.005, false, []string{"cpu.cfs_period_us=1000000", "cpu.cfs_quota_us=5000"}},
		{0.005, true, []string{"cpu.cfs_period_us=1000000", "cpu.cfs_quota_us=5000"}},
	} {
		dir := t.TempDir()
		plan := &Plan{request: Request{CPUs: c.cpus}, Limits: []result.Limit{{Name: "cpus", Enforced: true}}}
		g := &Group{plan: plan, read: map[string]string{"cpu": dir}}
		if c.lasting {
			g.lasting = &lasting{written: map[string]string{}, files: &openFiles{named: map[string]*os.File{}}}
		}
		var got []string
		for _, s := range g.throttle() {
			name, ok := strings.CutPrefix(s.path, dir+"/")
			err := os.WriteFile(s.path, nil, 0o600)
			check.That(t, ok && s.limit == "cpus" && !s.optional && err == nil, "%+v, %v", s, err)
			got = append(got, name+"="+s.value)
		}
		check.That(t, slices.Equal(got, c.want), "%v, lasting %v: %q, want %q", c.cpus, c.lasting, got, c.want)
		check.OK(t, g.Throttle())
		for _, file := range c.want {
			name, value, _ := strings.Cut(file, "=")
			b, err := os.ReadFile(dir + "/" + name)
			check.That(t, string(b) == value && err == nil, "%s: %q, %v", file, b, err)
		}
	}
}

// quotaOf returns the number of CPUs that the kernel allows the group.
func quotaOf(t *testing.T, g *Group) float64 {
	t.Helper()
	dir := g.read["cpu"]
	files := []string{"/cpu.cfs_quota_us", "/cpu.cfs_period_us"}
	if dir == g.v2 {
		files = []string{"/cpu.max"}
	}
	var numbers []float64 // quota and period
	for _, file := range files {
		text := harness.ReadFile(t, dir+file)
		for _, word := range strings.Fields(string(text)) {
			n, err := strconv.ParseFloat(word, 64)
			check.Must(t, err)
			numbers = append(numbers, n)
		}
	}
	check.Require(t, len(numbers) == 2, "%s: %v", dir, numbers)
	return numbers[0] / numbers[1]
}

// openFiles reads current values although the files stay open, and opens nothing after close.
func TestOpenFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "memory.oom_control")
	o := &openFiles{named: map[string]*os.File{}}
	for _, want := range []string{"oom_kill 0\n", "oom_kill 12\n"} {
		check.Must(t, os.WriteFile(path, []byte(want), 0o600))
		got, err := o.read(path)
		check.That(t, err == nil && string(got) == want, "read %q, %v; want %q", got, err, want)
	}
	f, err := o.open(path)
	check.Must(t, err)
	_, err = o.read(path + "none")
	check.That(t, errors.Is(err, os.ErrNotExist), "a file that is not there: %v", err)
	o.close()
	_, err = f.Stat()
	check.That(t, errors.Is(err, os.ErrClosed), "after close the file is open: %v", err)
	got, err := o.read(path)
	check.That(t, errors.Is(err, os.ErrClosed), "after close: %q, %v", got, err)
}
