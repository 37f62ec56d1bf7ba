package supervise

import (
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// rings waits for an alarm and returns the elapsed time.
func rings(t *testing.T, begin time.Time, rung <-chan struct{}) time.Duration {
	t.Helper()
	select {
	case <-rung:
	case <-time.After(10 * time.Second):
		t.Fatal("it does not ring")
	}
	return time.Since(begin)
}

func TestAlarm(t *testing.T) {
	for _, d := range []time.Duration{-time.Second, 0, 1500 * time.Microsecond, 20 * time.Millisecond} {
		begin := time.Now()
		rung, stop := alarm(d)
		took := rings(t, begin, rung)
		check.That(t, took >= d, "%v after %v", took, d)
		stop() // after the alarm has rung
	}
}

func TestAlarmStopped(t *testing.T) {
	for d := 10 * time.Millisecond; ; d *= 4 { // on a busy machine it may ring before its stop
		rung, stop := alarm(d)
		stop()
		later, stopLater := alarm(3 * d)
		rings(t, time.Now(), later)
		stopLater()
		select {
		case <-rung:
			check.Require(t, d < time.Second, "it rings after its stop")
		default:
			return
		}
	}
}

// An alarm rings even if the process is out of descriptors.
func TestAlarmWithoutDescriptor(t *testing.T) {
	restore := harness.LimitDescriptors(t, 0)
	begin := time.Now()
	rung, stop := alarm(5 * time.Millisecond)
	restore()
	took := rings(t, begin, rung)
	check.That(t, took >= 5*time.Millisecond, "%v", took)
	stop()
}
