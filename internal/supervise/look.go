package supervise

import (
	"time"

	"github.com/sbxrun/sbxrun/internal/proc"
)

// look is a look at the processes of a command. The more processes and threads the command has, the
// longer it takes, so it has its own goroutine and the kill does not wait for it.
type look struct {
	timer  *time.Timer
	done   chan struct{}
	strays int
	used   proc.Usage
}

// lookAhead is how long before the deadline Watch looks at what the command has used.
const lookAhead = 10 * time.Millisecond

// lookBound is how long a kill may wait for a look.
const lookBound = 2 * time.Millisecond

// look starts a look after a time.
func (c *Command) look(after time.Duration, at func() (strays int, used proc.Usage)) *look {
	l := &look{done: make(chan struct{})}
	l.timer = time.AfterFunc(after, func() {
		defer close(l.done)
		l.strays, l.used = at()
	})
	c.looks = append(c.looks, l)
	return l
}

// within waits for the end of the look and reports whether it came in time.
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

// seen adds up the looks that have ended, and cancels those that have not begun.
func (c *Command) seen() {
	for _, l := range c.looks {
		if l.timer.Stop() {
			close(l.done) // with nothing seen
		}
		select {
		case <-l.done:
			c.used = c.used.Larger(l.used)
			c.result.Strays = max(c.result.Strays, l.strays)
		default:
		}
	}
}

// sum is what the processes of the command have used until now.
func (c *Command) sum() (strays int, used proc.Usage) { return 0, usedBy(c.kept) }

// usedBy is a variable so that tests can slow it down.
var usedBy = (*proc.Kept).Used
