package supervise

import (
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/tests/check"
)

// The result is right if a payload ends just before the deadline but init reports this just after it, when Watch has
// already decided on a timeout.
func TestHeardLate(t *testing.T) {
	early, late := time.Hour, time.Nanosecond // deadlines after the start
	tests := []struct {
		name, script string
		deadline     time.Duration
		grace        time.Duration
		want         result.Cause
		code, strays int
	}{
		{"in time", "exit 3", early, 0, result.Exited, 3, 0},
		{"in time, with a grace period", "exit 3", early, time.Minute, result.Exited, 3, 0},
		{"in time, by a signal", "kill -KILL $$", early, 0, result.Signaled, 137, 0},
		{"in time, with strays", "sleep 600 >/dev/null & sleep 600 >/dev/null & exit 3", early, 0, result.Exited, 3, 1},
		{"too late", "exit 3", late, 0, result.Timeout, 124, 0},
		{"too late, with a grace period", "exit 3", late, time.Minute, result.Timeout, 124, 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := begin(t, Options{Grace: tt.grace}, tt.script)
			<-c.exec.Exited()
			c.deadline = c.Begin.Add(tt.deadline)
			c.cause = result.Timeout // as Watch decides without a report of the end
			r, _ := c.Wait()
			check.That(t, c.Left == nil, "%v", c.Left)
			check.That(t, r.Cause == tt.want && r.ExitCode() == tt.code && r.Strays == tt.strays && r.Verdict == result.Proven && r.Err == nil && r.Payload != nil,
				"want %s, %d, strays %d: %+v, %d", tt.want, tt.code, tt.strays, r, r.ExitCode())
		})
	}
}

// begin starts a shell script.
func begin(t *testing.T, o Options, script string) *Command {
	t.Helper()
	c, stdout := command(t, o, "sh", "-c", script)
	stdout.Close()
	check.Must(t, c.Start(t.Context()))
	return c
}
