package doctor

import (
	"errors"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/limits"
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
			return refusedLimit(e.machine(), err)
		}
		group, err := plan.Make("doctor-"+strconv.Itoa(os.Getpid()), false)
		if err != nil {
			return refusedLimit(e.machine(), err)
		}
		defer func() { _ = group.Remove(time.Now().Add(probeBound)) }() // the keeper has done it, or nothing can be done
		sandbox, err := e.plan("true")
		if err != nil {
			return errorFinding(err)
		}
		defer sandbox.Close()
		res, words, err := e.runWith(sandbox, supervise.Terms{Timeout: probeBound, Begin: time.Now(), Limits: group})
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

// refusedLimit words why a limit is refused, without the remedy that is to do without it.
func refusedLimit(m machine, err error) Finding {
	f := Finding{Verdict: Warning, Cause: err.Error()}
	var e *result.Error
	if errors.As(err, &e) {
		f.Fix = strings.TrimSuffix(strings.TrimSuffix(e.Hint, limits.OrWithout), "; ")
	}
	if f.Fix == limits.WritableCgroups {
		f.Fix = cgroupsFix(m.engine())
	}
	return f
}
