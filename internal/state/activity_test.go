package state

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/result"
)

// ago sets when the sandbox was used last.
func ago(t *testing.T, o *Own, d time.Duration) {
	t.Helper()
	ts := unix.NsecToTimespec(int64(monotonic() - d))
	must(t, unix.UtimesNanoAt(o.activity, "", []unix.Timespec{ts, ts}, unix.AT_EMPTY_PATH))
}

// wantWait asks whether the sandbox is idle, and wants to be told to ask again
// after so long, or a little less.
func wantWait(t *testing.T, what string, o *Own, timeout, want time.Duration) {
	t.Helper()
	got, err := o.EndIfIdle(timeout)
	if err != nil || got > want || got < want-want/10 {
		t.Errorf("%s: %v, %v; want %v", what, got, err, want)
	}
}

func TestEndIfIdle(t *testing.T) {
	d := opened(t)
	o := written(t, d, 1, "")
	e := found(t, d, testID(1))
	wantWait(t, "just made", o, time.Hour, time.Hour)
	ago(t, o, 20*time.Minute)
	wantWait(t, "unused for a while", o, time.Hour, 40*time.Minute)

	ago(t, o, 2*time.Hour)
	first, err := e.HoldActivity()
	must(t, err)
	second, err := e.HoldActivity()
	must(t, err)
	wantWait(t, "used twice", o, time.Hour, time.Hour)
	first()
	wantWait(t, "used once", o, time.Hour, time.Hour)
	ago(t, o, 2*time.Hour)
	second()
	wantWait(t, "use has ended", o, time.Hour, time.Hour)
	ago(t, o, 2*time.Hour)
	for range 2 {
		release, err := e.HoldActivity()
		must(t, err)
		release()
	}
	wantWait(t, "came and went", o, time.Hour, time.Hour)

	// One that is killed while it uses the sandbox does not tell when that was.
	fd, err := o.folder.open(activityName, os.O_RDONLY)
	must(t, err)
	must(t, tryLock(fd, unix.F_RDLCK))
	ago(t, o, 2*time.Hour)
	wantWait(t, "used", o, time.Hour, time.Hour)
	unix.Close(fd)
	wantWait(t, "user was killed", o, time.Hour, time.Hour)
	ago(t, o, 30*time.Minute)
	wantWait(t, "and nobody came", o, time.Hour, 30*time.Minute)

	// The machine's clock does not matter; asking does not either.
	if _, err := os.Stat(filepath.Join(d.Path(), testID(1), activityName)); err != nil {
		t.Error(err)
	}
	ago(t, o, time.Hour)
	wantWait(t, "time is up", o, time.Hour, 0)
	wantWait(t, "asked again", o, time.Hour, 0)
	_, err = e.HoldActivity()
	wantCode(t, "too late", err, "ending")
	must(t, e.Refresh())
	if !e.Alive {
		t.Error("not alive, but it has not been ended yet")
	}
	must(t, o.Close())
}

// Either the use begins or the sandbox ends, never both, and no use is refused
// while there is time.
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
		if wait, err := o.EndIfIdle(time.Hour); err != nil || wait <= 0 {
			t.Fatalf("%v, %v", wait, err)
		}
	}
	for i := range 10 {
		o := written(t, d, 100+i, "")
		e := found(t, d, o.ID)
		ago(t, o, time.Hour)
		used := make(chan bool)
		go func() {
			// Held until the other has asked.
			_, err := e.HoldActivity()
			if c := (*result.Error)(nil); err != nil && (!errors.As(err, &c) || c.Code != "ending") {
				t.Error(err)
			}
			used <- err == nil
		}()
		wait, err := o.EndIfIdle(time.Minute)
		must(t, err)
		if ended := wait == 0; ended == <-used {
			t.Errorf("ended: %v, and used as well or not at all", ended)
		}
		must(t, o.Close())
	}
}

// Who is alone can stay so; who is not, not.
func TestEndUse(t *testing.T) {
	d := opened(t)
	o, err := d.Create(testID(1), "")
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	e := &Entry{ID: o.ID, dir: d}
	release, err := e.HoldActivity()
	if err != nil {
		t.Fatal(err)
	}
	if o.EndUse() {
		t.Error("ended while in use")
	}
	release()
	if !o.EndUse() {
		t.Error("in use, and nobody does")
	}
	var known *result.Error
	if _, err := e.HoldActivity(); !errors.As(err, &known) || known.Code != "ending" {
		t.Errorf("used after the end: %v", err)
	}
}
