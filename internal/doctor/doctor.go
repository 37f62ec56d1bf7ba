// Package doctor tries what a run needs on this machine, and words the remedy
// for what fails.
//
// Nothing is concluded from a version or a setting: every check does the thing
// itself. What concerns the sandbox is tried with bwrap, under the uid that a
// run would have, because a security module may allow to bwrap what it forbids
// to us, and the other way round. One feature is added at a time, and a check
// whose ground has failed is skipped, so the first failure is the cause. Last
// come real runs, on the product's own way. Settings are read only after a
// failure, to tell which of them it was (explain, in remedy.go).
//
// Every trial has a bound and leaves nothing behind. Trials with bwrap are
// process groups of their own, ended and reaped as a whole before the next one;
// for that, and because a run does so too, the calling process becomes a child
// subreaper (prctl(2)).
package doctor

import (
	"context"
	"slices"
	"strings"

	"github.com/sbxrun/sbxrun/cleanup/result"
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

// Report is all findings: what `sbxrun doctor --json` prints. docs/doctor.md
// explains every member.
type Report struct {
	Version   int                 `json:"version"`
	OK        bool                `json:"ok"` // a run works
	Checks    []Finding           `json:"checks"`
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
	e := newEnv(ctx, caller)
	r := Report{Version: ReportVersion, Checks: examine(e, checks(caller.UID == 0)), Kernel: kernelRelease()}
	r.OK = r.Failed() == nil && ctx.Err() == nil
	if e.program.Path != "" {
		r.Bwrap = &result.ReportBwrap{Path: e.program.Path, Version: e.program.Version}
	}
	if e.roundTrip > 0 {
		ms := float64(e.roundTrip.Microseconds()) / 1000
		r.RoundTrip = &ms
	}
	return r
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
	list := slices.DeleteFunc(checks(caller.UID == 0), func(c check) bool { return c.whole })
	e := newEnv(ctx, caller)
	e.firstOnly = true
	for _, f := range examine(e, list) {
		if f.Verdict != Failed {
			continue
		}
		hint, _, _ := strings.Cut(f.Fix, "\n")
		return &result.Error{Code: "setup", Message: "no sandbox can be set up on this machine: " + f.Name + ": " + f.Cause, Hint: hint}
	}
	return nil
}

// examine makes the checks in order.
func examine(e *env, list []check) (findings []Finding) {
	culprit := map[string]string{} // by check: what failed, it or something it needs
	for _, c := range list {
		var f Finding
		if i := slices.IndexFunc(c.needs, func(name string) bool { return culprit[name] != "" }); i >= 0 {
			culprit[c.name] = culprit[c.needs[i]]
			f = Finding{Verdict: Skipped, Cause: "needs: " + culprit[c.name]}
		} else if f = c.run(e); f.Verdict == Failed {
			culprit[c.name] = c.name
		}
		if e.ctx.Err() != nil {
			break // whatever this check says is about the interruption
		}
		f.Name = c.name
		findings = append(findings, f)
		if e.firstOnly && f.Verdict == Failed {
			break
		}
	}
	return findings
}
