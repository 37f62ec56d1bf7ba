package faults

import (
	"os"
	"strconv"
	"testing"

	"github.com/sbxrun/sbxrun/tests/harness"
)

func TestMain(m *testing.M) {
	if os.Getenv(tracerEnv) != "" {
		os.Exit(tracerMain())
	}
	harness.Main(m)
}

// soak is how many repetitions are asked for; 100 is the default.
func soak(t testing.TB) int {
	t.Helper()
	text := os.Getenv("SBXRUN_SOAK")
	if text == "" {
		return 100
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("SBXRUN_SOAK=%q: want a number of runs", text)
	}
	return n
}

// scaled is a number of tries of a run that takes longer than others: n when 100
// are asked for, and at least one.
func scaled(t testing.TB, n int) int { return max(1, n*soak(t)/100) }
