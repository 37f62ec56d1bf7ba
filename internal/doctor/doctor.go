// Package doctor checks whether this machine can run sandboxes, and suggests a remedy for each failure.
//
// Checks draw no conclusions from versions or settings: each one performs the operation itself. Sandbox features are
// tried with bwrap, under the uid of a run, because a security module may treat bwrap and sbxrun differently. Each
// check adds one feature and is skipped if a check that it builds on has failed, so the first failure is the cause.
// The last checks are real runs. Settings are read only after a failure, to find its cause: see the table in
// remedies.go.
//
// Every trial has a time limit and leaves nothing behind. A trial with bwrap is a process group that is ended and
// reaped before the next one begins. For that, the calling process becomes a child subreaper (prctl(2)), as in a run.
package doctor

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/devices"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/room"
)

// Verdict is the outcome of a check.
type Verdict string

const (
	OK      Verdict = "ok"
	Failed  Verdict = "failed"  // a run cannot work
	Warning Verdict = "warning" // a run works, but a feature is missing
	Skipped Verdict = "skipped" // an earlier check that this one needs has failed
)

// Finding is the result of one check.
type Finding struct {
	Name    string  `json:"name"`
	Verdict Verdict `json:"verdict"`
	// Detail describes the observation, for people.
	Detail string `json:"detail,omitempty"`
	// Cause explains a verdict other than OK.
	Cause string `json:"cause,omitempty"`
	// Fix is the smallest change that helps: the first line is a command or a setting, and each further line
	// an alternative or a second step.
	Fix string `json:"fix,omitempty"`
}

// ReportVersion changes only with incompatible changes; new members and new checks are compatible.
const ReportVersion = 1

// Report contains all findings. `sbxrun doctor --json` prints it. docs/reference/doctor.md explains every member.
type Report struct {
	Version int       `json:"version"`
	OK      bool      `json:"ok"` // a run works
	Checks  []Finding `json:"checks"`
	// Start shows how to start this container so that all checks pass, if the container is the cause. Each further
	// line is another form.
	Start     string              `json:"start,omitempty"`
	RoundTrip *float64            `json:"round_trip_ms,omitempty"`
	Bwrap     *result.ReportBwrap `json:"bwrap,omitempty"`
	Kernel    string              `json:"kernel"`
}

// Failed returns the first check that failed, nil if a run works.
func (r Report) Failed() *Finding {
	for i := range r.Checks {
		if r.Checks[i].Verdict == Failed {
			return &r.Checks[i]
		}
	}
	return nil
}

// Examine performs all checks. It takes about 0.1 s if all pass; if something hangs, the checks' own time limits apply.
func Examine(ctx context.Context, caller room.Caller) Report {
	e := newExam(ctx, caller)
	e.setup()
	e.runs()
	e.OK = e.Failed() == nil && ctx.Err() == nil
	return e.Report
}

// diagnoseBound limits the search for the cause of a failed run.
const diagnoseBound = 2 * probeBound

// Diagnose is called after a failed run. It returns the first failing check as an error, with the fix as its hint, or
// nil if all checks pass, so that the failure is specific to the run. It takes some tens of milliseconds, and at most
// 10 s if something hangs.
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
	if !e.unknown { // otherwise the name of the check would be misleading
		message += bad.Name + ": "
	}
	return &result.Error{Code: "setup", Message: message + bad.Cause, Hint: hint}
}

// exam is an unfinished report, with the state that the checks share.
type exam struct {
	Report
	ctx       context.Context
	caller    room.Caller
	uid, gid  int           // of a run, outside the sandbox
	program   room.Program  // after check bwrap
	bound     time.Duration // time limit of one trial with bwrap
	firstOnly bool          // stop after the first failure
	writable  bool          // cgroups are read-only in this container
	unknown   bool          // the last failure has no known cause
	needs     string        // a failed check that all further checks need
}

func newExam(ctx context.Context, caller room.Caller) *exam {
	e := &exam{Report: Report{Version: ReportVersion, Kernel: kernelRelease()}, ctx: ctx, caller: caller, uid: caller.UID, gid: caller.GID, bound: probeBound}
	if caller.UID == 0 {
		e.uid, e.gid = room.Nobody, room.Nobody
	}
	return e
}

// setup checks the parts of a sandbox in the order in which a run needs them. The names of checks are stable, because
// programs read them.
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

// runs performs the checks that are complete runs.
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
	e.check("images", e.checkImages)
	// Only limits with requirements; the others work everywhere.
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
	e.devices()
	e.server()
}

// devices checks the devices with a CDI specification, if there are any.
func (e *exam) devices() {
	names, broken := devices.Known()
	if len(names) == 0 && broken == nil {
		return
	}
	e.warn("devices", func() (string, error) {
		errs := []error{broken}
		for _, name := range names {
			plan, err := e.plan(room.Policy{Command: []string{"true"}, Cwd: room.CwdNone, Devices: []string{name}})
			if err != nil {
				errs = append(errs, err)
				break // others probably have the same cause
			}
			plan.Close()
		}
		return devices.Listed(names), result.All(errs...)
	})
}

// check performs a check, unless one that it needs has failed. do returns the observation or an error.
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
		return // the check failed because of the interruption
	}
	e.Checks = append(e.Checks, f)
}

// warn performs a check of an optional feature.
func (e *exam) warn(name string, do func() (detail string, err error)) {
	e.check(name, func() (string, error) {
		detail, err := do()
		if err != nil && !errors.As(err, new(warning)) {
			err = warning{error: err}
		}
		return detail, err
	})
}

// ground makes all further checks depend on the previous ones.
func (e *exam) ground() {
	if bad := e.Failed(); bad != nil {
		e.needs = bad.Name
	}
}

// warning is the error of an optional feature.
type warning struct {
	error
	without string // the missing feature, if the error does not name it
}

func (w warning) Unwrap() error { return w.error }

// finding converts the result of a check.
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

// explain looks a failure up in the table of remedies.
func (e *exam) explain(f *Finding, seen failure) {
	f.Detail = seen.text
	m := machine{read: readSmall, sameRoot: sameRootAsInit, full: fullCgroup, root: e.caller.UID == 0, uid: e.uid, gid: e.gid, bwrap: e.program.Path}
	// An AppArmor profile is attached to the program's real path; with a merged /usr, /bin/bwrap is not one.
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

// ownStep returns the failed step of sbxrun on the way into a sandbox: a seccomp filter may refuse a system call that
// bwrap does not use.
func ownStep(err error) (f failure, ok bool) {
	var step *proc.StartError
	if !errors.As(err, &step) || !errors.As(step, &f.errno) {
		return f, false
	}
	f.step, f.text = stepCall, step.Error()
	return f, true
}
