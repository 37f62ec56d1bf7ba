package limits

import (
	"errors"
	"math"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/tests/harness"
)

func TestFakeMeminfo(t *testing.T) {
	in := "MemTotal:       24683520 kB\nMemFree:          100 kB\nMemAvailable:   22000000 kB\nBuffers:           12 kB\nCached:           1200 kB\n" +
		"SwapTotal:       1000000 kB\nSwapFree:       1000000 kB\nHugePages_Total:       0\nMemTotal: junk\nDirectMap1G:    20971520 kB"
	want := "MemTotal:          65536 kB\nMemFree:             100 kB\nMemAvailable:      65536 kB\nBuffers:               0 kB\nCached:                0 kB\n" +
		"SwapTotal:             0 kB\nSwapFree:              0 kB\nHugePages_Total:       0\nMemTotal: junk\nDirectMap1G:    20971520 kB"
	if diff := cmp.Diff(want, string(FakeMeminfo([]byte(in), 64<<20, 0))); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	real, err := proc.ReadFile("/proc/meminfo")
	harness.Must(t, err)
	if got := FakeMeminfo(real, math.MaxInt64, math.MaxInt64); strings.Count(string(got), "\n") != strings.Count(string(real), "\n") || len(got) != len(real) {
		t.Errorf("the layout differs:\n%s", got)
	}
}

func TestChoose(t *testing.T) {
	own := []int{1, 3, 5, 7}
	tests := []struct {
		cpus float64
		seed int
		want []int
	}{
		{0.5, 0, []int{1}},
		{1, 5, []int{3}},
		{1.1, 7, []int{7, 1}},
		{4, 2, []int{5, 7, 1, 3}},
		{1e300, 0, own},
		{0, 0, nil},
		{math.NaN(), 0, nil},
		{1, -3, []int{1}},
	}
	for _, tt := range tests {
		if got := choose(own, tt.cpus, tt.seed); !slices.Equal(got, tt.want) {
			t.Errorf("%v from %d: %v, want %v", tt.cpus, tt.seed, got, tt.want)
		}
	}
	if got := CPUSet(0.1, 1); len(got) != 1 {
		t.Errorf("%v", got)
	}
}

func TestEnvironment(t *testing.T) {
	own := len(ownCPUs())
	env, want := Environment(1.5), strconv.Itoa(min(2, own))
	if !slices.Contains(env, "OMP_NUM_THREADS="+want) || !slices.Contains(env, "OPENBLAS_NUM_THREADS="+want) || !slices.Contains(Environment(1000), "GOMAXPROCS="+strconv.Itoa(own)) || Environment(0) != nil || Environment(math.NaN()) != nil {
		t.Errorf("%q", env)
	}
}

func TestQuota(t *testing.T) {
	for cpus, want := range map[float64][2]int64{0.5: {50_000, 100_000}, 0.01: {1000, 100_000}, 0.001: {1000, 1_000_000}, 0.0099: {9900, 1_000_000}, 64: {6_400_000, 100_000}} {
		if q, p := quota(cpus); q != want[0] || p != want[1] {
			t.Errorf("%v: %d of %d, want %v", cpus, q, p, want)
		}
	}
}

func TestRequestRefused(t *testing.T) {
	n := func(i int) *int { return &i }
	for want, r := range map[string]Request{
		"limit memory:":               {Memory: -1},
		"limit pids:":                 {Pids: -1},
		"limit cpu-time:":             {CPUTime: -time.Second},
		"limit fsize:":                {FSize: -1},
		"limit cpus: NaN":             {CPUs: math.NaN()},
		"limit cpus: 0.0001":          {CPUs: 0.0001},
		"limit cpus: +Inf":            {CPUs: math.Inf(1)},
		"limit memory-swap: needs a":  {MemorySwap: 1},
		"limit memory-swap: lower":    {Memory: 2 << 20, MemorySwap: 1 << 20},
		"limit memory-swap: negative": {Memory: 2 << 20, MemorySwap: -2},
		"limit nice: 20":              {Nice: n(20)},
		"limit oom-score-adj: 1001":   {OOMScoreAdj: n(1001)},
	} {
		if _, err := (&Machine{}).Plan(r, false); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%+v: %v, want %s", r, err, want)
		}
	}
	if p, err := (&Machine{}).Plan(Request{}, true); err != nil || len(p.Limits) != 0 {
		t.Errorf("%+v, %v", p, err)
	}
}

// If a mechanism fails, so do its limits, and everything if they are required.
func TestFailAll(t *testing.T) {
	for _, required := range []bool{true, false} {
		g := &Group{plan: &Plan{required: required, Limits: []result.Limit{
			{Name: "memory", Enforced: true, Mechanism: "cgroup v2 memory.max"},
			{Name: "cpus", Enforced: false, Mechanism: "cgroup v2 cpu.max"},
			{Name: "pids", Enforced: true, Mechanism: "cgroup v1 pids.max"},
		}}}
		if err := g.failAll("none", unix.EAGAIN); err != nil {
			t.Errorf("required: %v, nothing fails: %v", required, err)
		}
		err := g.failAll("cgroup v2", unix.EAGAIN)
		if (err != nil) != required || required && !errors.Is(err, unix.EAGAIN) {
			t.Errorf("required: %v, %v", required, err)
		}
		if p := g.plan; p.enforced("memory") || p.enforced("cpus") || !p.enforced("pids") {
			t.Errorf("required: %v, %+v", required, p.Limits)
		}
	}
}

// A lasting group rejects limits that it was not made with.
func TestRenewWithout(t *testing.T) {
	l := &lasting{plan: &Plan{Limits: []result.Limit{{Name: "memory", Enforced: true}, {Name: "pids"}}}}
	for r, want := range map[Request]error{{Memory: 1 << 20}: nil, {Pids: 5}: ErrRenew, {Memory: 1 << 20, MemorySwap: 1}: ErrRenew} {
		if p, err := l.renewed(r); err != want || err == nil && (len(p.Limits) != 1 || !p.enforced("memory") || !p.required) {
			t.Errorf("%+v: %+v, %v", r, p, err)
		}
	}
}
