package state

import (
	"os"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/tests/check"
)

// handClock is a clock that only the test moves.
type handClock struct{ atomic.Int64 }

func (c *handClock) now() time.Duration    { return time.Duration(c.Load()) }
func (c *handClock) pass(d time.Duration)  { c.Add(int64(d)) }
func (c *handClock) set(age time.Duration) { c.Store(int64(age)) }
func byHand(d *Dir, age time.Duration) *handClock {
	c := new(handClock)
	c.set(age)
	d.clock = c.now
	return c
}

// wantWait checks the result of EndIfIdle.
func wantWait(t *testing.T, what string, o *Claim, timeout, want time.Duration) {
	t.Helper()
	got, err := o.EndIfIdle(timeout)
	check.That(t, err == nil && got == want, "%s: %v, %v; want %v", what, got, err, want)
}

// Idleness does not depend on the time since boot, at which the clock starts.
func TestEndIfIdle(t *testing.T) {
	for _, age := range []time.Duration{0, 1, time.Minute, 1000 * time.Hour} {
		t.Run(age.String(), func(t *testing.T) {
			t.Parallel()
			endIfIdle(t, age)
		})
	}
}

func endIfIdle(t *testing.T, age time.Duration) {
	d := opened(t)
	c := byHand(d, age)
	o := written(t, d, 1, "")
	e := found(t, d, testID(1))

	// Killed at the very instant at which it was seen.
	fd, err := o.folder.Open(activityName, os.O_RDONLY)
	must(t, err)
	must(t, proc.TryLock(fd, unix.F_RDLCK))
	wantWait(t, "used at once", o, time.Hour, time.Hour)
	unix.Close(fd)
	c.pass(2 * time.Hour)
	wantWait(t, "user was killed at once", o, time.Hour, time.Hour)
	c.pass(20 * time.Minute)
	wantWait(t, "unused for a while", o, time.Hour, 40*time.Minute)

	c.pass(2 * time.Hour)
	first, err := e.HoldActivity()
	must(t, err)
	second, err := e.HoldActivity()
	must(t, err)
	wantWait(t, "used twice", o, time.Hour, time.Hour)
	first()
	c.pass(2 * time.Hour)
	wantWait(t, "used once", o, time.Hour, time.Hour)
	c.pass(2 * time.Hour)
	second()
	wantWait(t, "use has ended", o, time.Hour, time.Hour)
	c.pass(2 * time.Hour)
	for range 2 {
		release, err := e.HoldActivity()
		must(t, err)
		release()
	}
	wantWait(t, "came and went", o, time.Hour, time.Hour)

	// A user that is killed does not record the end of its use.
	fd, err = o.folder.Open(activityName, os.O_RDONLY)
	must(t, err)
	must(t, proc.TryLock(fd, unix.F_RDLCK))
	c.pass(2 * time.Hour)
	wantWait(t, "used", o, time.Hour, time.Hour)
	unix.Close(fd)
	c.pass(time.Minute)
	wantWait(t, "user was killed", o, time.Hour, time.Hour)
	c.pass(30 * time.Minute)
	wantWait(t, "and nobody came", o, time.Hour, 30*time.Minute)

	c.pass(30 * time.Minute)
	wantWait(t, "time is up", o, time.Hour, 0)
	wantWait(t, "asked again", o, time.Hour, 0)
	_, err = e.HoldActivity()
	wantCode(t, "too late", err, "ending")
	must(t, e.Refresh())
	check.That(t, e.Alive, "dead before its end")
	must(t, o.Close())
}

// The default clock is CLOCK_MONOTONIC, not the time of day.
func TestClock(t *testing.T) {
	d := opened(t)
	o := written(t, d, 1, "")
	defer o.Close()
	before := monotonic()
	release, err := found(t, d, testID(1)).HoldActivity()
	must(t, err)
	release()
	at, err := touched(o.activity)
	check.That(t, err == nil && at >= before && at <= monotonic(), "used at %v, %v; want a time from %v on", at, err, before)
}

// Either a use begins or the sandbox ends, never both, and no use fails before the timeout.
func TestEndIfIdleRace(t *testing.T) {
	d := opened(t)
	o := written(t, d, 1, "")
	done := make(chan bool)
	go func() {
		defer close(done)
		e, err := d.Find(testID(1))
		for range 300 {
			var release func()
			if err == nil {
				release, err = e.HoldActivity()
			}
			if err != nil {
				t.Errorf("refused: %v", err)
				return
			}
			release()
		}
	}()
	for asking := true; asking; {
		select {
		case <-done:
			asking = false
		default:
		}
		wait, err := o.EndIfIdle(time.Hour)
		check.Require(t, err == nil && wait > 0, "%v, %v", wait, err)
	}
}

func TestEndIfIdleOrUse(t *testing.T) {
	for range 10 {
		endIfIdleOrUse(t)
	}
}

func endIfIdleOrUse(t *testing.T) {
	d := opened(t)
	c := byHand(d, time.Minute)
	o := written(t, d, 1, "")
	e := found(t, d, o.ID)
	c.pass(time.Hour)
	used := make(chan bool)
	go func() {
		// Held until EndIfIdle was called.
		_, err := e.HoldActivity()
		check.That(t, err == nil || result.CodeOf(err) == "ending", "%v", err)
		used <- err == nil
	}()
	wait, err := o.EndIfIdle(time.Minute)
	must(t, err)
	ended := wait == 0
	check.That(t, ended != <-used, "ended: %v, and used as well or not at all", ended)
	must(t, o.Close())
}

// EndUse succeeds only while nothing uses the sandbox, and prevents later uses.
func TestEndUse(t *testing.T) {
	d := opened(t)
	o, err := d.Create(testID(1), "")
	must(t, err)
	defer o.Close()
	e := &Entry{ID: o.ID, dir: d}
	release, err := e.HoldActivity()
	must(t, err)
	check.That(t, !o.EndUse(), "ended while in use")
	release()
	check.That(t, o.EndUse(), "EndUse failed without a use")
	_, err = e.HoldActivity()
	wantCode(t, "used after the end", err, "ending")
}

// Leave passes the last record to processes that hold the entry, and to no others.
func TestLeave(t *testing.T) {
	d := opened(t)
	o := written(t, d, 1, "web")
	held, other := found(t, d, "web"), found(t, d, "web")
	must(t, held.Hold())
	must(t, held.Refresh())
	check.That(t, held.Alive, "it is alive")
	last := record("2026", Ended)
	last.Report = &result.Report{Status: result.StatusFailed, ExitCode: 5}
	must(t, o.Leave(last))
	wantFiles(t, d, "lock", "names")
	must(t, held.Refresh())
	check.That(t, !held.Alive && held.Status() == "failed" && held.Record.Report.ExitCode == 5 && held.Title() == "web", "%+v", held)
	wantCode(t, "not held", other.Refresh(), "no-such-sandbox")
	// An entry removed by another process has no last record.
	must(t, written(t, d, 2, "").Close())
	held = found(t, d, testID(2))
	must(t, held.Hold())
	must(t, found(t, d, testID(2)).Remove())
	wantCode(t, "cleaned up", held.Refresh(), "no-such-sandbox")
}
