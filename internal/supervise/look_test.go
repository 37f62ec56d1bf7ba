package supervise

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/tests/check"
)

// An endless look does not delay the kill.
func TestKillWaitsForNoLook(t *testing.T) {
	block := make(chan struct{})
	real := usedBy
	usedBy = func(*proc.Kept) proc.Usage {
		<-block
		return proc.Usage{}
	}
	var looks []*look
	t.Cleanup(func() {
		close(block)
		for _, l := range looks {
			<-l.done
		}
		usedBy = real
	})
	for _, test := range []struct {
		name           string
		timeout, grace time.Duration
		request        result.Cause
		want           result.Cause
	}{
		{"deadline", 200 * time.Millisecond, 0, "", result.Timeout},
		{"deadline with a grace period", 200 * time.Millisecond, time.Millisecond, "", result.Timeout},
		{"deadline of a context", 0, 0, result.Timeout, result.Timeout},
		{"kill", 0, 0, result.Killed, result.Killed},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := begin(t, Options{Timeout: test.timeout, Grace: test.grace}, "trap '' TERM; while :; do sleep 600; done")
			if test.request != "" {
				c.cancel(Request{Cause: test.request, Signal: unix.SIGKILL})
			}
			ended := make(chan *result.Result, 1)
			go func() {
				r, _ := c.Wait()
				ended <- r
			}()
			select {
			case r := <-ended:
				check.That(t, r.Cause == test.want && r.Verdict == result.Proven, "%+v", r)
			case <-time.After(30 * time.Second):
				t.Error("it waits for the look")
				_ = c.kept.Init.Signal(unix.SIGKILL)
			}
			looks = append(looks, c.looks...)
		})
	}
}
