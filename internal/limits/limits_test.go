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
	"github.com/sbxrun/sbxrun/tests/check"
)

func TestFakeMeminfo(t *testing.T) {
	in := "MemTotal:       24683520 kB\nMemFree:          100 kB\nMemAvailable:   22000000 kB\nBuffers:           12 kB\nCached:           1200 kB\n" +
		"SwapTotal:       1000000 kB\nSwapFree:       1000000 kB\nHugePages_Total:       0\nMemTotal: junk\nDirectMap1G:    20971520 kB"
	want := "MemTotal:          65536 kB\nMemFree:             100 kB\nMemAvailable:      65536 kB\nBuffers:               0 kB\nCached:                0 kB\n" +
		"SwapTotal:             0 kB\nSwapFree:              0 kB\nHugePages_Total:       0\nMemTotal: junk\nDirectMap1G:    20971520 kB"
	check.NoDiff(t, cmp.Diff(want, string(FakeMeminfo([]byte(in), 64<<20, 0))), "(-want +got)")
	real, err := proc.ReadFile("/proc/meminfo")
	check.Must(t, err)
	got := FakeMeminfo(real, math.MaxInt64, math.MaxInt64)
	check.That(t, strings.Count(string(got), "\n") == strings.Count(string(real), "\n") && len(got) == len(real), "the layout differs:\n%s", got)
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
		got := choose(own, tt.cpus, tt.seed)
		check.That(t, slices.Equal(got, tt.want), "%v from %d: %v, want %v", tt.cpus, tt.seed, got, tt.want)
	}
	got := CPUSet(0.1, 1)
	check.That(t, len(got) == 1, "%v", got)
}

func TestEnvironment(t *testing.T) {
	own := len(ownCPUs())
	env, want := Environment(1.5), strconv.Itoa(min(2, own))
	check.That(t, slices.Contains(env, "OMP_NUM_THREADS="+want) && slices.Contains(env, "OPENBLAS_NUM_THREADS="+want) && slices.Contains(Environment(1000), "GOMAXPROCS="+strconv.Itoa(own)) && Environment(0) == nil && Environment(math.NaN()) == nil,
		"%q", env)
}

func TestQuota(t *testing.T) {
	for cpus, want := range map[float64][2]int64{0.5: {50_000, 100_000}, 0.01: {1000, 100_000}, 0.001: {1000, 1_000_000}, 0.0099: {9900, 1_000_000}, 64: {6_400_000, 100_000}} {
		q, p := quota(cpus)
		check.That(t, q == want[0] && p == want[1], "%v: %d of %d, want %v", cpus, q, p, want)
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
		_, err := (&Machine{}).Plan(r, false)
		check.That(t, err != nil && strings.HasPrefix(err.Error(), want), "%+v: %v, want %s", r, err, want)
	}
	p, err := (&Machine{}).Plan(Request{}, true)
	check.That(t, err == nil && len(p.Limits) == 0, "%+v, %v", p, err)
}

// If a mechanism fails, so do its limits, and everything if they are required.
func TestFailAll(t *testing.T) {
	for _, required := range []bool{true, false} {
		g := &Group{plan: &Plan{required: required, Limits: []result.Limit{
			{Name: "memory", Enforced: true, Mechanism: "cgroup v2 memory.max"},
			{Name: "cpus", Enforced: false, Mechanism: "cgroup v2 cpu.max"},
			{Name: "pids", Enforced: true, Mechanism: "cgroup v1 pids.max"},
		}}}
		check.OK(t, g.failAll("none", unix.EAGAIN), "required: %v, nothing fails", required)
		err := g.failAll("cgroup v2", unix.EAGAIN)
		check.That(t, (err != nil) == required && (!required || errors.Is(err, unix.EAGAIN)), "required: %v, %v", required, err)
		p := g.plan
		check.That(t, !p.enforced("memory") && !p.enforced("cpus") && p.enforced("pids"), "required: %v, %+v", required, p.Limits)
	}
}

// A lasting group rejects limits that it was not made with.
func TestRenewWithout(t *testing.T) {
	l := &lasting{plan: &Plan{Limits: []result.Limit{{Name: "memory", Enforced: true}, {Name: "pids"}}}}
	for r, want := range map[Request]error{{Memory: 1 << 20}: nil, {Pids: 5}: ErrRenew, {Memory: 1 << 20, MemorySwap: 1}: ErrRenew} {
		p, err := l.renewed(r)
		check.That(t, err == want && (err != nil || len(p.Limits) == 1 && p.enforced("memory") && p.required), "%+v: %+v, %v", r, p, err)
	}
}
