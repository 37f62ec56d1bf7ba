// Package admission decides whether a command may start: whether enough tasks (processes and threads) are left on the
// machine, and whether --max-parallel allows one more. A [Permit] holds the granted resources.
//
// [Look] compares the tasks in use with every limit that makes a fork of the caller fail with EAGAIN
// (fork(2)):
//
//   - pids.max of the caller's cgroup and of its ancestors, as far as they are visible, in cgroup v2 or the
//     v1 controller pids (cgroup-v2.rst, pids.rst);
//   - threads-max and pid_max, which count all tasks of the machine (proc_sys_kernel(5)). Since Linux 6.14 a
//     PID namespace may have its own pid_max; comparing that with the machine's tasks errs on the safe side.
//
// RLIMIT_NPROC is missing, because no file has the number that it counts, the tasks of a user on the whole
// machine. A [Census] counts the tasks of each sandbox.
package admission

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
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

// tasksToStart is the number of tasks, besides sbxrun's threads, until the payload runs: keeper, monitor,
// room, init and payload. Four more allow for extra threads, which Go creates on a busy machine.
const tasksToStart = 5 + 4

// ownThreads is the maximum number of sbxrun's threads where tasks are scarce: 5 or 6 were observed in a
// run, a few more in a supervisor. The Go runtime creates threads on demand, and crashes if the kernel
// refuses to create one for 200 ms.
const ownThreads = 7

// Needs is the number of free tasks that a command needs to start.
const Needs = tasksToStart + ownThreads

// scarce is a number of free tasks that a payload could use up in a moment, as in a container or for a user
// with RLIMIT_NPROC, whose use is unknown. Then sbxrun creates its threads in advance, so that it needs no
// new task to end a sandbox.
const (
	scarce     = 1000
	scarceUser = 8000 // for RLIMIT_NPROC
)

// limited reports whether a low RLIMIT_NPROC applies to this process. It does not apply to root
// (setrlimit(2)).
func limited() bool {
	var l unix.Rlimit
	return unix.Geteuid() != 0 && unix.Getrlimit(unix.RLIMIT_NPROC, &l) == nil && l.Cur < scarceUser
}

// lockTimeout bounds the wait for the admission lock. Holders release it within milliseconds. If one of
// them was stopped, the others continue without the lock: it only narrows a race.
const lockTimeout = 2 * time.Second

// OnPressure is the reaction to too many tasks.
type OnPressure string

// Reactions to too many tasks.
const (
	Refuse OnPressure = "refuse"
	Wait   OnPressure = "wait"
	Ignore OnPressure = "ignore"
)

// Terms are the conditions for starting a command.
type Terms struct {
	OnPressure  OnPressure
	WaitTimeout time.Duration // with Wait; 0 means no limit
	MaxParallel int           // maximum number of commands with this flag at a time; 0 is no limit
	Warn, Alert float64       // percentages of a task limit
	// Promised is the command's own task limit, 0 for none. Where tasks are scarce, the whole limit must fit next to
	// the limits of other sandboxes, so that every admitted command can use its own.
	Promised int64
	Note     func(text string) // called with a warning if a limit is near
	// Lasting means that this process also does other work, and keeps its threads.
	Lasting bool
}

// Permit is the permission to start a command, with a slot of --max-parallel and the admission lock. The
// kernel releases both when the process ends. A nil Permit holds nothing.
type Permit struct {
	Terms
	ctx  context.Context
	need int64     // free tasks to require, including those for threads that do not exist yet
	by   time.Time // deadline for waiting

	scarce  bool
	refused int64  // forks that the caller's cgroups had refused before the start
	slot    func() // releases the slot
	lock    func() // releases the lock; nil if it is not held
}

// Ask checks whether a command may start, waits if Terms say so, and takes a slot. The error is a
// *[result.Error], or the cause of ctx if that was done first.
func Ask(ctx context.Context, t Terms) (*Permit, error) {
	if err := state.CheckVisible(); err != nil {
		return nil, err
	}
	processors := runtime.GOMAXPROCS(0)
	a := &Permit{Terms: t, ctx: ctx, need: tasksToStart, by: time.Now()}
	if !t.Lasting {
		threads, _ := runtime.ThreadCreateProfile(nil) // threads that exist
		a.need += int64(max(0, ownThreads-threads))
	}
	if t.OnPressure == Wait {
		a.by = a.by.Add(cmp.Or(t.WaitTimeout, math.MaxInt64)) // centuries without a limit
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
		proc.MakeThreads(ownThreads) // now, because a payload could use up the tasks first
	} else if runtime.GOMAXPROCS(0) < processors {
		runtime.GOMAXPROCS(processors)
	}
	return a, nil
}

// Check returns an error for contradictory terms.
func (t Terms) Check() error {
	if t.OnPressure == Ignore && t.MaxParallel > 0 {
		return errors.New("--max-parallel cannot be combined with --on-pressure ignore")
	}
	return nil
}

// takeSlot takes a slot of --max-parallel.
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
		a.slot, err = waitSlot(ctx, dir.Folder(), n)
	} else {
		a.slot, err = takeSlot(dir.Folder(), n)
	}
	switch {
	case err == nil:
		return nil
	case a.ctx.Err() != nil:
		return context.Cause(a.ctx)
	case errors.Is(err, errFull), errors.Is(err, context.DeadlineExceeded):
		if n == 1 {
			return a.busy("--max-parallel 1: another command is running", err)
		}
		return a.busy(fmt.Sprintf("all %d slots of --max-parallel are in use", n), err)
	}
	return state.Failed(err)
}

// findRoom checks whether enough tasks are free.
func (a *Permit) findRoom() error {
	if l := ample.Load(); a.Lasting && l != nil && l.warn == a.Warn && time.Since(l.at) < ampleFor {
		a.refused, a.Promised = l.refused, 0 // no promise is necessary
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
		a.Promised = 0 // a promise is unnecessary or impossible
	}
	switch {
	case a.OnPressure == Ignore:
		a.note(r)
		return nil
	case a.Promised == 0 && a.level(r) == OK && a.tooMuch(r) == "":
		if a.Lasting && !a.scarce {
			ample.Store(&reading{time.Now(), a.Warn, r.Refused})
		}
		return nil
	}
	// From here on, one process at a time, so that each sees the tasks of the previous one.
	for swept, pause := false, 10*time.Millisecond; ; pause = min(2*pause, 250*time.Millisecond) {
		if err := a.takeLock(); err != nil {
			return err
		}
		if r, err = Look(); err == nil && a.tooMuch(r) != "" && !swept {
			swept = true
			// Remove processes that crashes have left behind. Records use no tasks. The next Look shows whether it helped.
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
		a.started() // others may need less
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

// ample is the last time at which a lasting process found many free tasks.
var ample atomic.Pointer[reading]

type reading struct {
	at      time.Time
	warn    float64
	refused int64
}

// ampleFor is how long an ample reading is valid: too short a time to use up that many tasks.
const ampleFor = 10 * time.Millisecond

func (a *Permit) spareThreads() {
	if !a.Lasting {
		proc.SpareThreads()
	}
}

func (a *Permit) level(r Reading) Level {
	return Thresholds{Warn: a.Warn / 100, Alert: a.Alert / 100}.Level(r.Tightest().Ratio())
}

// tooMuch returns the reason why a command may not start, or "".
func (a *Permit) tooMuch(r Reading) string {
	if a.level(r) == Alert {
		return inUse(r.Tightest()) + fmt.Sprintf("; at %v %% or more nothing starts", a.Alert)
	}
	if _, lacks := r.Lacking(scarce); lacks {
		r.AddPromises()
	}
	if b, lacks := r.Lacking(a.need + a.Promised); lacks {
		reason := inUse(b)
		if b.Promised > 0 {
			reason += fmt.Sprintf(", %d are reserved for sandboxes with --pids", b.Promised)
		}
		return reason + fmt.Sprintf("; this command needs %d more", a.need+a.Promised)
	}
	return ""
}

func inUse(b Bound) string {
	return fmt.Sprintf("%d of %d tasks (%s) are in use", b.Current, b.Max, b.Path)
}

// note reports a limit that is near.
func (a *Permit) note(r Reading) {
	if a.level(r) != OK {
		b := r.Tightest()
		a.Note(fmt.Sprintf("%s: %.0f %%", inUse(b), 100*b.Ratio()))
	}
}

// takeLock takes the admission lock, which is held from the check of scarce resources until the command runs, so
// that two commands do not both use resources that suffice for one. It continues without the lock if there is no
// state directory: the lock only narrows a race.
func (a *Permit) takeLock() error {
	dir, err := state.Open(state.Mine())
	if err != nil {
		return nil
	}
	defer dir.Close()
	for end := time.Now().Add(lockTimeout); time.Now().Before(end); {
		release, ok, err := try(dir.Folder(), admissionName)
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

// Running records that the command is running, and lets others be admitted. It also creates the threads for the end
// of a command that runs for longer, before the command could use up all tasks.
func (a *Permit) Running() {
	a.started()
	if a != nil && !a.scarce && !a.Lasting {
		const longer = 20 * time.Millisecond // too short to use up scarce tasks with forks of 50 µs
		time.AfterFunc(longer, func() {
			proc.SpareThreads()
			proc.MakeThreads(ownThreads)
		})
	}
}

// Idling is Running for a sandbox without a command. It ends unneeded threads.
func (a *Permit) Idling() {
	a.started()
	if a != nil && !a.scarce && !a.Lasting {
		// Not at once, which would slow down a short-lived sandbox. Repeatedly, because on a busy machine Go
		// takes delayed threads for blocked and creates more.
		for _, while := range []time.Duration{50 * time.Millisecond, 2 * time.Second, 10 * time.Second} {
			time.AfterFunc(while, proc.ShedThreads)
		}
	}
}

// Reserved lets others be admitted if the cgroup of the command already has its task limit.
func (a *Permit) Reserved() {
	if a != nil && a.Promised > 0 {
		a.started()
	}
}

// started releases the lock: the tasks of the command are visible now.
func (a *Permit) started() {
	if a != nil && a.lock != nil {
		a.lock()
		a.lock = nil
	}
}

// End releases everything.
func (a *Permit) End() {
	a.started()
	if a != nil && a.slot != nil {
		a.slot()
		a.slot = nil
	}
}

// busy returns the error for a command that may not start now.
func (a *Permit) busy(reason string, cause error) error {
	e := &result.Error{Code: "busy", ExitCode: result.ExitBusy, Message: "busy: " + reason, Hint: "try again later, or wait with --on-pressure wait", Err: cause}
	if a.OnPressure == Wait {
		e.Message += ", for longer than " + values.Duration(a.WaitTimeout).String()
		e.Hint = "try again later; sbxrun stats shows the tasks in use"
	}
	return e
}

// Explain turns an error that a lack of tasks has caused into busy: EAGAIN of a fork, or, because
// bubblewrap does not report that, any failure while a fork was refused. A lack of descriptors gets a
// hint.
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
	return &result.Error{Code: "busy", ExitCode: result.ExitBusy, Message: "busy: cannot start more processes: " + e.Message, Hint: "try again later; sbxrun stats shows the tasks in use", Err: e}
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
