// Package doctor tries what a run needs on this machine, and words the remedy
// for what fails.
//
// Nothing is concluded from a version or a setting: every check does the thing
// itself. What concerns the sandbox is tried with bwrap, under the uid that a
// run would have, because a security module may allow to bwrap what it forbids
// to us, and the other way round. One feature is added at a time, and a check
// whose ground has failed is skipped, so the first failure is the cause. Last
// come real runs, on the product's own way. Settings are read only after a
// failure, to tell which of them it was: remedies.go has a table of that.
//
// Every trial has a bound and leaves nothing behind. Trials with bwrap are
// process groups of their own, ended and reaped as a whole before the next one;
// for that, and because a run does so too, the calling process becomes a child
// subreaper (prctl(2)).
package doctor

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/room"
)

// Verdict is what came of a check.
type Verdict string

const (
	OK      Verdict = "ok"
	Failed  Verdict = "failed"  // a run cannot work
	Warning Verdict = "warning" // a run works, with less than it could have
	Skipped Verdict = "skipped" // a check that this one builds on has failed
)

// Finding is the outcome of one check.
type Finding struct {
	Name    string  `json:"name"`
	Verdict Verdict `json:"verdict"`
	// Detail is what was seen, for people.
	Detail string `json:"detail,omitempty"`
	// Cause is why it is not OK.
	Cause string `json:"cause,omitempty"`
	// Fix is the smallest change that helps: a command or a setting in the
	// first line, and in each further line an alternative or a second step.
	Fix string `json:"fix,omitempty"`
}

// ReportVersion changes only when a reader of the report would go wrong; new
// members and new checks do not change it.
const ReportVersion = 1

// Report is all findings: what `sbxrun doctor --json` prints. docs/reference/doctor.md
// explains every member.
type Report struct {
	Version int       `json:"version"`
	OK      bool      `json:"ok"` // a run works
	Checks  []Finding `json:"checks"`
	// Start is how to start the container we are in so that nothing of this is missing, if
	// that is what is wrong; in each further line in another form.
	Start     string              `json:"start,omitempty"`
	RoundTrip *float64            `json:"round_trip_ms,omitempty"`
	Bwrap     *result.ReportBwrap `json:"bwrap,omitempty"`
	Kernel    string              `json:"kernel"`
}

// Failed is the first check that failed, nil if a run works.
func (r Report) Failed() *Finding {
	for i := range r.Checks {
		if r.Checks[i].Verdict == Failed {
			return &r.Checks[i]
		}
	}
	return nil
}

// Examine makes every check. It takes about a tenth of a second where all is
// well, and is bounded by the checks' own bounds where something hangs.
func Examine(ctx context.Context, caller room.Caller) Report {
	e := newExam(ctx, caller)
	e.setup()
	e.runs()
	e.OK = e.Failed() == nil && ctx.Err() == nil
	return e.Report
}

// diagnoseBound is how long a user waits for the cause of a failed run.
const diagnoseBound = 2 * probeBound

// Diagnose says in one line why no sandbox can be set up on this machine, and
// what to type against it: the first check that fails. nil if none does, and
// the failure must have been about the particular run. It is for after a
// failure: it takes some tens of milliseconds, and 10 s at the most
// should something hang.
func Diagnose(ctx context.Context, caller room.Caller) *result.Error {
	ctx, cancel := context.WithTimeout(ctx, diagnoseBound)
	defer cancel()
	e := newExam(ctx, caller)
	e.firstOnly = true
	e.setup()
	bad := e.Failed()
	if bad == nil {
		return nil
	}
	hint, _, _ := strings.Cut(bad.Fix, "\n")
	if e.Start != "" {
		hint, _, _ = strings.Cut("start this container like this: "+e.Start, "\n")
	}
	message := "no sandbox can be set up on this machine: "
	if !e.unknown { // the name of the check would say more than is known
		message += bad.Name + ": "
	}
	return &result.Error{Code: "setup", Message: message + bad.Cause, Hint: hint}
}

// exam is a report that is being made, and what the checks share.
type exam struct {
	Report
	ctx       context.Context
	caller    room.Caller
	uid, gid  int           // of a run, outside of the sandbox
	program   room.Program  // after check bwrap
	bound     time.Duration // of one trial with bwrap
	firstOnly bool          // no check after the first that fails
	writable  bool          // cgroups are read-only in this container
	unknown   bool          // the last failure is one that nothing explains
	needs     string        // a check that has failed, and that those to come build on
}

func newExam(ctx context.Context, caller room.Caller) *exam {
	e := &exam{Report: Report{Version: ReportVersion, Kernel: kernelRelease()}, ctx: ctx, caller: caller, uid: caller.UID, gid: caller.GID, bound: probeBound}
	if caller.UID == 0 {
		e.uid, e.gid = room.Nobody, room.Nobody
	}
	return e
}

// setup makes the checks of what a sandbox is made of, in the order in which a run needs
// it. Names are for people and programs, and stay.
func (e *exam) setup() {
	e.check("kernel", func() (string, error) { return checkKernel(e.Kernel) })
	e.check("process table", checkProc)
	e.check("pidfd", checkPidfd)
	e.check("close_range", checkCloseRange)
	e.check("subreaper", checkSubreaper)
	e.ground()
	e.check("bwrap", e.checkBwrap)
	e.ground()
	if e.caller.UID == 0 {
		e.check("unprivileged uid", e.checkUID)
		e.ground()
	}
	e.sandbox("user namespace", "made by bwrap", "--unshare-user")
	e.ground()
	e.sandbox("PID namespace", "with an init of bwrap's", "--unshare-user", "--unshare-pid")
	e.sandbox("fresh /proc", "mounted in the PID namespace", "--unshare-user", "--unshare-pid", "--proc", "/proc")
	e.sandbox("network namespace", "with loopback up", "--unshare-user", "--unshare-net")
	e.sandbox("other namespaces", "IPC, UTS and cgroup", "--unshare-user", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup", "--hostname", "sandbox")
	e.sandbox("file tree", "read-only binds, /dev, a tmpfs", "--unshare-user", "--dev", "/dev", "--tmpfs", "/tmp", "--remount-ro", "/dev", "--remount-ro", "/")
	e.check("no nested sandboxes", e.checkNested)
	e.ground()
}

// runs makes the checks that are whole runs.
func (e *exam) runs() {
	if e.caller.UID == 0 {
		e.check("root's own paths", e.checkStaged)
	}
	e.check("tasks", checkTasks)
	e.check("run", e.checkRun)
	e.ground()
	e.check("deadline", e.checkDeadline)
	e.ground()
	e.check("grace period", e.checkGrace)
	e.check("exec", e.checkExec)
	// The limits that need something of the machine; the others are there everywhere.
	e.limit("limit on memory", limits.Request{Memory: 256 << 20})
	e.limit("limit on tasks", limits.Request{Pids: 64})
	e.limit("limit on CPUs", limits.Request{CPUs: 0.5})
	e.limit("limit on CPU time", limits.Request{CPUTime: time.Minute})
	e.warn("state directory", checkStateDir)
	e.warn("program file", func() (string, error) {
		self, err := os.Readlink("/proc/self/exe")
		if err != nil {
			return "", err
		}
		return self, checkOwner(self, e.uid, e.gid)
	})
	e.server()
}

// check makes a check, unless one that it builds on has failed. What it returns is what
// was seen, or what went wrong.
func (e *exam) check(name string, do func() (detail string, err error)) {
	f := Finding{Name: name, Verdict: Skipped, Cause: "needs: " + e.needs}
	switch {
	case e.ctx.Err() != nil || e.firstOnly && e.Failed() != nil:
		return
	case e.needs == "":
		f = e.finding(do())
		f.Name = name
	}
	if e.ctx.Err() != nil {
		return // whatever this check says is about the interruption
	}
	e.Checks = append(e.Checks, f)
}

// warn makes a check of something that a run can do without.
func (e *exam) warn(name string, do func() (detail string, err error)) {
	e.check(name, func() (string, error) {
		detail, err := do()
		if err != nil && !errors.As(err, new(warning)) {
			err = warning{error: err}
		}
		return detail, err
	})
}

// ground has the checks that follow build on all those before.
func (e *exam) ground() {
	if bad := e.Failed(); bad != nil {
		e.needs = bad.Name
	}
}

// warning is an error of something that a run can do without.
type warning struct {
	error
	without string // what it does without, if that does not go without saying
}

func (w warning) Unwrap() error { return w.error }

// finding words what a check has returned.
func (e *exam) finding(detail string, err error) Finding {
	if err == nil {
		return Finding{Verdict: OK, Detail: detail}
	}
	f := Finding{Verdict: Failed, Cause: err.Error()}
	var (
		seen  failure
		mount *proc.MountError
		own   *result.Error
		warn  warning
	)
	switch descriptors := proc.DescriptorsHint(err); {
	case descriptors != "":
		f.Fix = descriptors
	case errors.As(err, &seen):
		e.explain(&f, seen)
	case errors.As(err, &mount):
		f.Fix = mount.Remedy
	case errors.As(err, &own) && own.Hint != "" && !strings.HasPrefix(own.Hint, "sbxrun doctor"):
		f.Fix = strings.TrimSuffix(strings.TrimSuffix(strings.TrimPrefix(own.Hint, "install it: "), limits.OrWithout), "; ")
	default:
		if step, ok := ownStep(err); ok {
			e.explain(&f, step)
		}
	}
	if errors.As(err, &warn) {
		f.Verdict = Warning
		if warn.without != "" {
			f.Cause = warn.without + ": " + f.Cause
		}
	}
	return f
}

// explain words a failure by the table of remedies.
func (e *exam) explain(f *Finding, seen failure) {
	f.Detail = seen.text
	m := machine{read: readSmall, sameRoot: sameRootAsInit, full: fullCgroup, root: e.caller.UID == 0, uid: e.uid, gid: e.gid, bwrap: e.program.Path}
	// A profile of AppArmor's is of the program's file: with a merged /usr /bin/bwrap is none.
	if real, err := filepath.EvalSymlinks(m.bwrap); err == nil {
		m.bwrap = real
	}
	var confined bool
	f.Cause, f.Fix, confined = explain(seen, m)
	e.unknown = seen.step == stepOther || strings.HasPrefix(f.Cause, unknownCause)
	if confined {
		e.writable = e.writable || seen.step == stepCgroups
		e.Start = m.start(e.writable)
	}
}

// ownStep is a step of sbxrun's own on the way into a sandbox that has failed: what filters system calls
// may refuse one that bwrap has no need of.
func ownStep(err error) (f failure, ok bool) {
	var step *proc.StartError
	if !errors.As(err, &step) || !errors.As(step, &f.errno) {
		return f, false
	}
	f.step, f.text = stepCall, step.Error()
	return f, true
}
