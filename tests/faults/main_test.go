package faults

import (
	"os"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/harness"
)

func TestMain(m *testing.M) {
	if os.Getenv(tracerEnv) != "" {
		os.Exit(tracerMain())
	}
	if what := os.Getenv(actEnv); what != "" {
		act(what)
		return
	}
	harness.Main(m)
}

func soak(t testing.TB) int { return harness.Soak(t) }

// enough is what check.sh asks for: with so many tries one that meets nothing tests nothing.
const enough = 50

// hunt calls strike until it has hit n times. A moment of microseconds may be missed
// many times over on a machine that is busy, so what is bounded is how long all of it
// takes, and not the number of tries. Where few repetitions are asked for, a moment
// that was always missed is told, and fails nothing: the scheduler is not under test.
func hunt(t *testing.T, n int, what string, strike func(try int) (hit bool)) {
	t.Helper()
	end := time.Now().Add(30 * time.Second)
	missed := t.Errorf
	if soak(t) < enough {
		end, missed = time.Now().Add(5*time.Second), t.Logf
	}
	for try := 0; n > 0 && !t.Failed(); try++ {
		if strike(try) {
			n--
		} else if time.Now().After(end) {
			missed("%s was met alive in none of %d tries, or too seldom by %d", what, try+1, n)
			return
		}
	}
}

// scaled is a number of tries of a run that takes longer than others: n when 100
// are asked for, and at least one.
func scaled(t testing.TB, n int) int { return max(1, n*soak(t)/100) }
