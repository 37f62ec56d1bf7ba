package cells

import (
	"slices"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/check"
)

// p50 reports the median duration of a round, at one call per 60 ms.
func p50(b *testing.B, round func() time.Duration) {
	var took []time.Duration
	for b.Loop() {
		next := time.Now().Add(60 * time.Millisecond)
		took = append(took, round())
		time.Sleep(time.Until(next)) // a fixed rate of calls
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, "p50-ms")
	b.ReportMetric(float64(took[len(took)*9/10].Microseconds())/1000, "p90-ms")
	b.ReportMetric(0, "ns/op")
}

func benchmark(b *testing.B, round func(b *testing.B, spec Spec) func() time.Duration) {
	room := newRoom(b)
	for _, language := range installed(b, room) {
		b.Run(language, func(b *testing.B) { p50(b, round(b, Spec{Room: In(room), Language: Languages()[language]})) })
	}
}

var prints = map[string]string{"python": "print(1)", "node": "console.log(1)"}

// one runs a cell that prints 1.
func one(b *testing.B, k *Kernel) {
	code := prints[k.spec.Language.Driver]
	a, err := k.Run(b.Context(), Cell{Code: code, Timeout: bound})
	check.Require(b, err == nil && a.Stdout.Text == "1\n", "%+v, %v", a, err)
}

// A cell in a running interpreter.
func BenchmarkCell(b *testing.B) {
	benchmark(b, func(b *testing.B, spec Spec) func() time.Duration {
		k := open(b, spec)
		return func() time.Duration {
			begin := time.Now()
			one(b, k)
			return time.Since(begin)
		}
	})
}

// A cell including the start of its interpreter.
func BenchmarkFresh(b *testing.B) {
	benchmark(b, func(b *testing.B, spec Spec) func() time.Duration {
		return func() time.Duration {
			begin := time.Now()
			k := New(spec)
			one(b, k)
			took := time.Since(begin)
			check.Must(b, k.Close())
			return took
		}
	})
}
