package pool_test

import (
	"bytes"
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/bwrap"
	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/pool"
	"github.com/sbxrun/sbxrun/internal/slot"
	"github.com/sbxrun/sbxrun/internal/supervise"
	"github.com/sbxrun/sbxrun/tests/check"
)

// bench calls f b.N times and reports the CPU time of this process and its reaped children per call, without that
// of the rooms' processes. Run it with
//
//	go test -run - -bench . -count 10 ./internal/pool
func bench(b *testing.B, f func() error) {
	used := func() (d time.Duration) {
		for _, who := range []int{unix.RUSAGE_SELF, unix.RUSAGE_CHILDREN} {
			var r unix.Rusage
			check.Must(b, unix.Getrusage(who, &r))
			d += time.Duration(r.Utime.Nano() + r.Stime.Nano())
		}
		return d
	}
	before := used()
	for b.Loop() {
		check.Must(b, f())
	}
	b.ReportMetric(float64(used()-before)/float64(b.N), "cpu-ns/op")
}

// BenchmarkFork is the baseline.
func BenchmarkFork(b *testing.B) {
	bench(b, func() error { return exec.Command("/bin/true").Run() })
}

func BenchmarkWarm(b *testing.B) { benchWarm(b, limits.Request{}) }

func BenchmarkWarmLimits(b *testing.B) {
	benchWarm(b, limits.Request{Memory: 256 << 20, Pids: 64, CPUs: 1})
}

func benchWarm(b *testing.B, l limits.Request) {
	p := pool.New(bare, pool.Sizes{Min: 1, Max: 2}, func(err error) { b.Error(err) })
	defer p.Close()
	for r := (*pool.Room)(nil); r == nil; time.Sleep(time.Millisecond) {
		if r = p.Take("a", limits.Request{}); r != nil {
			r.Give()
		}
	}
	var out bytes.Buffer
	bench(b, func() error {
		r := p.Take("a", limits.Request{})
		for ; r == nil; r = p.Take("a", limits.Request{}) {
			time.Sleep(time.Millisecond)
		}
		defer r.Give()
		run, err := r.Start(b.Context(), slot.Command{Args: []string{"/bin/true"}, Options: supervise.Options{Stdout: &out, Stderr: &out, Timeout: time.Minute, Limits: l}})
		if err != nil {
			return err
		}
		res, err := run.Wait()
		check.That(b, err != nil || res.Verdict == result.Proven, "%+v", res)
		return err
	})
}

// BenchmarkCold builds a room for each call.
func BenchmarkCold(b *testing.B) {
	bench(b, func() error {
		_, err := (&bwrap.Command{Args: []string{"/bin/true"}, Timeout: time.Minute}).Run(b.Context())
		return err
	})
}
