package doctor

import (
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/result"
	"github.com/sbxrun/sbxrun/internal/supervise"
)

// limitChecks are the limits that need something of the machine; the others are there
// everywhere.
func limitChecks() (list []check) {
	for _, l := range []struct {
		name    string
		request limits.Request
	}{
		{"limit on memory", limits.Request{Memory: 256 << 20}},
		{"limit on tasks", limits.Request{Pids: 64}},
		{"limit on CPUs", limits.Request{CPUs: 0.5}},
		{"limit on CPU time", limits.Request{CPUTime: time.Minute}},
	} {
		list = append(list, check{name: l.name, whole: true, needs: []string{runCheck}, run: checkLimit(l.request)})
	}
	return list
}

// checkLimit makes a run under one limit, which is refused where it cannot be enforced:
// then the refusal is the finding.
func checkLimit(request limits.Request) func(*env) Finding {
	return func(e *env) Finding {
		machine, err := limits.Detect()
		if err != nil {
			return Finding{Verdict: Warning, Cause: err.Error()}
		}
		plan, err := machine.Plan(request, true)
		if err != nil {
			return refusedLimit(machine, request, err)
		}
		group, err := plan.Make("doctor-"+strconv.Itoa(os.Getpid()), false)
		if err != nil {
			return refusedLimit(machine, request, err)
		}
		defer func() { _ = group.Remove(time.Now().Add(probeBound)) }() // the keeper has done it, or nothing can be done
		sandbox, err := e.plan("true")
		if err != nil {
			return errorFinding(err)
		}
		defer sandbox.Close()
		sandbox.Bounds = group.Bounds()
		res, words, err := e.runWith(sandbox, supervise.Options{Timeout: probeBound, Begin: time.Now(), Limits: group})
		if err != nil {
			return errorFinding(err)
		}
		if bad := e.judge(res, words, result.Exited); bad != nil {
			bad.Verdict, bad.Cause = Warning, "a run with it does not work: "+bad.Cause
			return *bad
		}
		return ok("%s", plan.Limits[0].Mechanism)
	}
}

// refusedLimit words why a limit is refused.
func refusedLimit(machine *limits.Machine, request limits.Request, err error) Finding {
	f := Finding{Verdict: Warning, Cause: err.Error()}
	// What best effort would say of it: the reason alone, and no flag as a remedy.
	if plan, planErr := machine.Plan(request, false); planErr == nil && plan.Limits[0].Reason != "" {
		f.Cause = fmt.Sprintf("--%s is refused: %s", plan.Limits[0].Name, plan.Limits[0].Reason)
		f.Fix = machine.Remedy(plan.Limits[0].Name)
	}
	return f
}
