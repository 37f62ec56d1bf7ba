package supervise

import (
	"time"

	"github.com/sbxrun/sbxrun/internal/proc"
)

// look is an inspection of a command's processes. It takes longer the more processes and threads there are, so it
// runs in its own goroutine and does not delay the kill.
type look struct {
	timer  *time.Timer
	done   chan struct{}
	strays int
	used   proc.Usage
}

// lookAhead is the time before the deadline at which Watch reads the command's resource usage.
const lookAhead = 10 * time.Millisecond

// lookBound limits the time that a kill waits for a look.
const lookBound = 2 * time.Millisecond

// look schedules a call of at.
func (c *Command) look(after time.Duration, at func() (strays int, used proc.Usage)) *look {
	l := &look{done: make(chan struct{})}
	l.timer = time.AfterFunc(after, func() {
		defer close(l.done)
		l.strays, l.used = at()
	})
	c.looks = append(c.looks, l)
	return l
}

// within reports whether the look ends within d.
func (l *look) within(d time.Duration) bool {
	timeout := time.NewTimer(d)
	defer timeout.Stop()
	select {
	case <-l.done:
		return true
	case <-timeout.C:
		return false
	}
}

// seen collects the results of finished looks and cancels those that have not started.
func (c *Command) seen() {
	for _, l := range c.looks {
		if l.timer.Stop() {
			close(l.done) // with an empty result
		}
		select {
		case <-l.done:
			c.used = c.used.Larger(l.used)
			c.result.Strays = max(c.result.Strays, l.strays)
		default:
		}
	}
}

// sum returns the resource usage of the command's processes until now.
func (c *Command) sum() (strays int, used proc.Usage) { return 0, usedBy(c.kept) }

// usedBy is a variable so that tests can slow it down.
var usedBy = (*proc.Kept).Used
