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

// enough is the number of repetitions in check.sh, above which a test fails if it never hits.
const enough = 50

// hunt calls strike until it has hit n times. On a busy machine a moment of microseconds may be
// missed many times, so hunt limits the total time and not the number of tries. With few
// repetitions it only logs a moment that was always missed.
func hunt(t *testing.T, n int, what string, strike func(try int) (hit bool)) {
	t.Helper()
	end := time.Now().Add(harness.Scaled(30 * time.Second))
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

// scaled returns the number of tries of a slow test: n for SBXRUN_SOAK=100, and at least one.
func scaled(t testing.TB, n int) int { return max(1, n*soak(t)/100) }
