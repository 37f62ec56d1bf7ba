// Package admission decides whether a command may be started at all: whether there are
// enough tasks left on the machine, and places beside others; and holds what it was given.
package admission

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup"
	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/state"
	"github.com/sbxrun/sbxrun/internal/values"
)

// tasksToStart is how many tasks a command needs besides sbxrun's own threads until its
// payload runs: keeper, monitor, room, init and payload; and four for what is not exact about
// the threads, of which a busy machine makes Go have more.
const tasksToStart = 5 + 4

// ownThreads is how many threads sbxrun comes to have at most where they are scarce: a
// run was seen to have 5 or 6, a supervisor some more. The Go runtime makes them as it
// needs them, and where it is refused one for a fifth of a second it gives up, and we with
// it.
const ownThreads = 9

// Needs is how many tasks have to fit for a command to be started.
const Needs = tasksToStart + ownThreads

// scarce is the room that a payload could take all of in a moment, as a container has
// it, or a user with a limit (RLIMIT_NPROC), of which no file tells what is left. There the threads
// are made beforehand: to end a sandbox no new task is needed.
const (
	scarce     = 1000
	scarceUser = 8000 // of a limit
)

// limited reports whether the kernel counts this process against a low RLIMIT_NPROC, as it does not
// for root (setrlimit(2)).
func limited() bool {
	var l unix.Rlimit
	return unix.Geteuid() != 0 && unix.Getrlimit(unix.RLIMIT_NPROC, &l) == nil && l.Cur < scarceUser
}

// lockPatience is how long the admission lock is waited for: its holders give it up
// within milliseconds, one after the other. Who gets it not by then, because one was
// stopped, does without: the look itself decides.
const lockPatience = 2 * time.Second

// OnPressure is what to do if there are too many tasks.
type OnPressure string

// What to do if there are too many tasks.
const (
	Refuse OnPressure = "refuse"
	Wait   OnPressure = "wait"
	Ignore OnPressure = "ignore"
)

// Terms are what a command may be started on.
type Terms struct {
	OnPressure  OnPressure
	WaitTimeout time.Duration
	MaxParallel int     // run beside at most so many less one that were given this; 0 is no bound
	Warn, Alert float64 // percentages of a bound of tasks
	// Promised is the command's own limit on its tasks, 0 for none. Where tasks are scarce
	// it has to fit as a whole, beside what others were promised: who is let in gets what
	// his limit says.
	Promised int64
	Note     func(text string) // is told if a bound is near
	// Lasting says that this process does other things beside, and after: it has its threads,
	// and they are left alone.
	Lasting bool
}

// Permit is the leave to start a command, and what is held for it. All of it is given up by
// the kernel when the process ends. A nil one holds nothing.
type Permit struct {
	Terms
	ctx context.Context
	// need is how many tasks have to fit, our threads that are still to come included.
	need int64
	by   time.Time // until when is waited

	scarce  bool
	refused int64  // forks by the caller's cgroups, before anything was started
	slot    func() // gives it up
	lock    func() // likewise, nil if it is not held
}

// Ask looks, before anything is started, whether there is room for a command, waits for it
// if that is asked for, and takes a slot. An error is a *[result.Error]; or the cause of
// ctx, if that was done first.
func Ask(ctx context.Context, t Terms) (*Permit, error) {
	if err := state.CheckVisible(); err != nil {
		return nil, err
	}
	processors := runtime.GOMAXPROCS(0)
	a := &Permit{Terms: t, ctx: ctx, need: tasksToStart, by: time.Now()}
	if !t.Lasting {
		threads, _ := runtime.ThreadCreateProfile(nil) // they stay
		a.need += int64(max(0, ownThreads-threads))
	}
	if t.OnPressure == Wait {
		a.by = a.by.Add(t.WaitTimeout)
	}
	if err := a.takeSlot(); err != nil {
		return nil, err
	}
	if err := a.findRoom(); err != nil {
		a.End()
		return nil, err
	}
	if t.Lasting {
		return a, nil
	}
	if a.scarce {
		proc.MakeThreads(ownThreads) // and not beside: a payload may be quicker
	} else if runtime.GOMAXPROCS(0) < processors {
		runtime.GOMAXPROCS(processors)
	}
	return a, nil
}

// Check finds what is wrong with the terms for everybody.
func (t Terms) Check() error {
	if t.OnPressure == Ignore && t.MaxParallel > 0 {
		return errors.New("--max-parallel cannot be combined with --on-pressure ignore")
	}
	return nil
}

// takeSlot takes one of --max-parallel.
func (a *Permit) takeSlot() error {
	n := a.MaxParallel
	if n == 0 {
		return nil
	}
	dir, err := state.Open(state.Mine())
	if err != nil {
		return err
	}
	defer dir.Close()
	if a.OnPressure == Wait {
		a.spareThreads()
		ctx, cancel := context.WithDeadline(a.ctx, a.by)
		defer cancel()
		a.slot, err = dir.WaitSlot(ctx, n)
	} else {
		a.slot, err = dir.TakeSlot(n)
	}
	switch {
	case err == nil:
		return nil
	case a.ctx.Err() != nil:
		return context.Cause(a.ctx)
	case errors.Is(err, state.ErrFull), errors.Is(err, context.DeadlineExceeded):
		if n == 1 {
			return a.busy("--max-parallel 1: another command is running", err)
		}
		return a.busy(fmt.Sprintf("all %d places of --max-parallel are taken", n), err)
	}
	return err
}

// findRoom looks at the tasks that are in use.
func (a *Permit) findRoom() error {
	if l := ample.Load(); a.Lasting && l != nil && l.warn == a.Warn && time.Since(l.at) < ampleFor {
		a.refused, a.Promised = l.refused, 0 // it need not be kept
		return nil
	}
	r, err := Look()
	if err != nil {
		return &result.Error{Code: "pressure", Message: err.Error(), Err: err}
	}
	a.refused = r.Refused
	_, few := r.Lacking(scarce)
	if a.scarce = few || limited(); a.scarce {
		a.spareThreads()
	}
	if !few || slices.ContainsFunc(r.Bounds, func(b Bound) bool { return b.Max <= a.Promised }) {
		a.Promised = 0 // it need not be kept, or cannot
	}
	switch {
	case a.OnPressure == Ignore:
		a.note(r)
		return nil
	case a.Promised == 0 && a.level(r) == OK && a.tooMuch(r) == "":
		if a.Lasting && !a.scarce {
			ample.Store(&lately{time.Now(), a.Warn, r.Refused})
		}
		return nil
	}
	// From here on one at a time, each with what the one before has started in view.
	for swept, pause := false, 10*time.Millisecond; ; pause = min(2*pause, 250*time.Millisecond) {
		if err := a.takeLock(); err != nil {
			return err
		}
		if r, err = Look(); err == nil && a.tooMuch(r) != "" && !swept {
			swept = true
			// What crashes have left running; records are not what is scarce. Whether it has helped the look tells.
			_, _ = cleanup.Sweep(cleanup.Options{KeepRecords: true})
			r, err = Look()
		}
		if err != nil {
			a.started()
			return &result.Error{Code: "pressure", Message: err.Error(), Err: err}
		}
		reason := a.tooMuch(r)
		if reason == "" {
			a.note(r)
			return nil
		}
		a.started() // not to keep others, who may need less
		left := time.Until(a.by)
		if left <= 0 {
			return a.busy(reason, nil)
		}
		select {
		case <-time.After(min(pause, left)):
		case <-a.ctx.Done():
			return context.Cause(a.ctx)
		}
	}
}

// ample is when a process that starts one command after the other has found room for many.
var ample atomic.Pointer[lately]

type lately struct {
	at      time.Time
	warn    float64
	refused int64
}

// ampleFor is how long that holds: fewer than there was room for come to be within it.
const ampleFor = 10 * time.Millisecond

func (a *Permit) spareThreads() {
	if !a.Lasting {
		proc.SpareThreads()
	}
}

func (a *Permit) level(r Reading) Level {
	return Thresholds{Warn: a.Warn / 100, Alert: a.Alert / 100}.Level(r.Tightest().Ratio())
}

// tooMuch says why nothing may be started; "" if it may.
func (a *Permit) tooMuch(r Reading) string {
	if a.level(r) == Alert {
		return inUse(r.Tightest()) + fmt.Sprintf(", and from %v %% on nothing is started", a.Alert)
	}
	if _, lacks := r.Lacking(scarce); lacks {
		r.AddPromises()
	}
	if b, lacks := r.Lacking(a.need + a.Promised); lacks {
		reason := inUse(b)
		if b.Promised > 0 {
			reason += fmt.Sprintf(", %d are promised to sandboxes with --pids", b.Promised)
		}
		return reason + fmt.Sprintf(", and this needs %d more", a.need+a.Promised)
	}
	return ""
}

func inUse(b Bound) string {
	return fmt.Sprintf("%d of %d tasks (%s) are in use", b.Current, b.Max, b.Path)
}

// note warns if a bound is near.
func (a *Permit) note(r Reading) {
	if a.level(r) != OK {
		b := r.Tightest()
		a.Note(fmt.Sprintf("%s: %.0f %%", inUse(b), 100*b.Ratio()))
	}
}

// takeLock takes the admission lock. Where that cannot be, it is done without: the lock
// only narrows a race, and what needs no state directory is not to fail for it.
func (a *Permit) takeLock() error {
	dir, err := state.Open(state.Mine())
	if err != nil {
		return nil
	}
	defer dir.Close()
	for end := time.Now().Add(lockPatience); time.Now().Before(end); {
		release, ok, err := dir.TryAdmission()
		if err != nil {
			return nil
		}
		if ok {
			a.lock = release
			return nil
		}
		select {
		case <-time.After(time.Millisecond):
		case <-a.ctx.Done():
			return context.Cause(a.ctx)
		}
	}
	return nil
}

// Running lets others be admitted. A command that runs for longer could take all the tasks that
// there are, so the threads for its end are made before it can have done so.
func (a *Permit) Running() {
	a.started()
	if a != nil && !a.scarce && !a.Lasting {
		const longer = 20 * time.Millisecond // a fork takes some 50 µs, and there was room for as many as scarce
		time.AfterFunc(longer, func() {
			proc.SpareThreads()
			proc.MakeThreads(ownThreads)
		})
	}
}

// Idling is Running for a sandbox without a command: the threads that it has no need of are given up.
func (a *Permit) Idling() {
	a.started()
	if a != nil && !a.scarce && !a.Lasting {
		// Not at once, which would cost a short one something; and again, for on a busy machine,
		// as where many are started, Go takes whatever is late for blocked, and makes another.
		for _, while := range []time.Duration{50 * time.Millisecond, 2 * time.Second, 10 * time.Second} {
			time.AfterFunc(while, proc.ShedThreads)
		}
	}
}

// Reserved lets others be admitted, if what the command may come to have is in the
// kernel's books by now.
func (a *Permit) Reserved() {
	if a != nil && a.Promised > 0 {
		a.started()
	}
}

// started lets others be admitted: what the command needs can be seen by now.
func (a *Permit) started() {
	if a != nil && a.lock != nil {
		a.lock()
		a.lock = nil
	}
}

// End gives everything up.
func (a *Permit) End() {
	a.started()
	if a != nil && a.slot != nil {
		a.slot()
		a.slot = nil
	}
}

// busy is the error of a command that there is no room for.
func (a *Permit) busy(reason string, cause error) error {
	e := &result.Error{Code: "busy", ExitCode: result.ExitBusy, Message: "busy: " + reason, Hint: "try again later, or let it wait with --on-pressure wait", Err: cause}
	if a.OnPressure == Wait {
		e.Message += ", for longer than " + values.Duration(a.WaitTimeout).String()
		e.Hint = "try again later; sbxrun stats shows what is in use"
	}
	return e
}

// Explain makes busy of an error that comes from there having been no task left: a
// fork's EAGAIN; or, where bubblewrap did not tell us, a fork that was refused in the
// meantime. One for want of descriptors gets the remedy.
func (a *Permit) Explain(e *result.Error) *result.Error {
	switch {
	case e == nil:
		return nil
	case e.Hint == "" && proc.DescriptorsHint(e) != "":
		e.Hint = proc.DescriptorsHint(e)
		return e
	case e.Code != "setup" && e.Code != "enter" && e.Code != "detach":
		return e
	case !errors.Is(e, unix.EAGAIN) && !a.wasRefused():
		return e
	}
	return &result.Error{Code: "busy", ExitCode: result.ExitBusy, Message: "busy: no more processes can be started: " + e.Message, Hint: "try again later; sbxrun stats shows what is in use", Err: e}
}

func (a *Permit) wasRefused() bool {
	if a == nil {
		return false
	}
	r, err := Look()
	if err != nil {
		return false
	}
	_, lacks := r.Lacking(a.need)
	return lacks || r.Refused > a.refused
}
