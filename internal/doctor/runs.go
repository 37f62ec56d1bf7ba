package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/supervise"
)

// plan is the product's own for a command that needs nothing.
func (e *env) plan(command ...string) (*room.Plan, error) {
	return room.Prepare(room.Policy{Command: command, Workdir: "/"}, e.caller)
}

// runBound is how long a whole run may take.
const runBound = 10 * time.Second

// run carries a plan out as the run command does. words is what bwrap said.
func (e *env) run(plan *room.Plan, begin time.Time, timeout, grace time.Duration) (res result.Result, words string, err error) {
	return e.runWith(plan, supervise.Terms{Timeout: timeout, Grace: grace, Begin: begin})
}

func (e *env) runWith(plan *room.Plan, terms supervise.Terms) (res result.Result, words string, err error) {
	stderr, err := memoryFile()
	if err != nil {
		return res, "", err
	}
	defer stderr.Close()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return res, "", err
	}
	defer null.Close()
	ctx, cancel := context.WithTimeout(e.ctx, runBound)
	defer cancel()
	terms.ProofTimeout = probeBound
	res = supervise.Run(ctx, supervise.Place{Plan: plan}, [3]*os.File{null, null, stderr}, terms)
	return res, readFrom(stderr), nil
}

// judge says whether a run ended as it had to; nil if so.
func (e *env) judge(res result.Result, words string, want result.Cause) *Finding {
	switch {
	case res.Verdict == result.Unproven:
		f := Finding{Verdict: Failed, Cause: "the sandbox was not gone in time"}
		if res.Err != nil {
			f.Detail = res.Err.Message
		}
		return &f
	case res.Cause == want && res.Verdict == result.Proven:
		return nil
	case res.Cause == result.Canceled:
		return &Finding{Verdict: Failed, Cause: fmt.Sprintf("the run did not come to an end within %v", runBound)}
	}
	if f := understand(words); f.step != stepOther && f.step != stepPayload || f.errno == unix.EAGAIN {
		finding := e.failed(f)
		return &finding
	}
	f := Finding{Verdict: Failed, Cause: fmt.Sprintf("the run ended with cause %s in place of %s", res.Cause, want)}
	if res.Err != nil {
		f = errorFinding(res.Err)
	}
	if f.Detail = lastLine(words); f.Detail != "" {
		f.Cause += ": " + f.Detail
	}
	return &f
}

// tryRun makes a run that has to end in a certain way. bad is nil if it did.
func (e *env) tryRun(want result.Cause, timeout, grace time.Duration, command ...string) (res result.Result, bad *Finding) {
	begin := time.Now()
	plan, err := e.plan(command...)
	if err != nil {
		f := errorFinding(err)
		return res, &f
	}
	defer plan.Close()
	res, words, err := e.run(plan, begin, timeout, grace)
	if err != nil {
		f := errorFinding(err)
		return res, &f
	}
	return res, e.judge(res, words, want)
}

// checkRun is the round trip.
func checkRun(e *env) Finding {
	res, bad := e.tryRun(result.Exited, probeBound, 0, "true")
	if bad != nil {
		return *bad
	}
	if code := res.Payload.Code(); code != 0 {
		return Finding{Verdict: Failed, Cause: fmt.Sprintf("`true` exited with %d in the sandbox", code)}
	}
	e.roundTrip = res.Duration
	return ok("`true` from start to %s end in %.1f ms", res.Verdict, float64(res.Duration.Microseconds())/1000)
}

// trialTimeout is the deadline of the runs that have to miss it.
const trialTimeout = 20 * time.Millisecond

func checkDeadline(e *env) Finding {
	res, bad := e.tryRun(result.Timeout, trialTimeout, 0, "sleep", "60")
	if bad != nil {
		return *bad
	}
	return ok("killed after %v; %.1f ms later all was gone, %s", trialTimeout, float64(res.Teardown.Microseconds())/1000, res.Verdict)
}

// checkGrace has init signal all of a command.
func checkGrace(e *env) Finding {
	const without = "--grace does not work"
	res, bad := e.tryRun(result.Timeout, trialTimeout, probeBound, "sleep", "60")
	switch {
	case bad != nil:
		return *bad
	case res.Err != nil:
		f := failure{step: stepCall, text: res.Err.Message}
		if res.Err.Err != nil {
			f.text = res.Err.Err.Error()
		}
		finding := e.warned(f, without)
		if finding.Fix == "" && e.caller.UID == 0 {
			finding.Fix = withoutRoot(e.machine())
		}
		return finding
	}
	return ok("SIGTERM to all of the command, by its init")
}

// checkExec runs a command in a sandbox that is there already.
func checkExec(e *env) Finding {
	const without = "sbxrun exec does not work"
	plan, err := e.plan()
	if err != nil {
		return errorFinding(err)
	}
	defer plan.Close()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return errorFinding(err)
	}
	defer null.Close()
	stdio := [3]*os.File{null, null, null}
	ctx, cancel := context.WithTimeout(e.ctx, runBound)
	defer cancel()
	terms := supervise.Terms{Timeout: probeBound, ProofTimeout: probeBound, Begin: time.Now()}
	room, err := supervise.Hold(ctx, supervise.Place{Plan: plan}, stdio, nil, terms)
	if err != nil {
		return errorFinding(err)
	}
	defer room.Close()
	room.Release(ctx)
	entry := plan.Entry()
	entry.Command = []string{"/bin/true"}
	terms.Begin = time.Now()
	inside := supervise.Run(ctx, supervise.Place{Entry: entry, Room: room.Kept().Room}, stdio, terms)
	over, end := context.WithCancelCause(ctx)
	end(supervise.Request{Cause: result.Killed, Signal: unix.SIGKILL})
	room.Watch(over)
	outside := room.End(over)
	_ = room.Collect() // what is left shows in the verdict
	text := fmt.Sprintf("`true` ended with cause %q", inside.Cause)
	switch {
	case inside.Cause == result.Exited && inside.ExitCode() == 0:
		return ok("`true` in a running sandbox, from start to %s end in %.1f ms (setns with a pidfd)", inside.Verdict, float64(inside.Duration.Microseconds())/1000)
	case inside.Err != nil:
		text = inside.Err.Message
	case outside.Err != nil:
		text = outside.Err.Message
	}
	return e.warned(failure{step: stepCall, text: text}, without)
}

// checkStaged binds something that only root can reach: by descriptor, with
// open_tree(2) and move_mount(2), in a mount namespace of bwrap's own.
func checkStaged(e *env) Finding {
	const without = "--bind of what only root can reach does not work, nor does a current directory of that kind"
	dir, err := os.MkdirTemp("", "sbxrun-doctor-")
	if err != nil {
		return Finding{Verdict: Warning, Cause: "not tried, for lack of a directory: " + err.Error()}
	}
	defer os.RemoveAll(dir) // on a failure it is an empty directory that stays
	inner := filepath.Join(dir, "bound")
	if err := os.Mkdir(inner, 0o755); err != nil {
		return Finding{Verdict: Warning, Cause: "not tried, for lack of a directory: " + err.Error()}
	}
	plan, err := room.Prepare(room.Policy{Command: []string{"true"}, Workdir: "/",
		Mounts: []room.Mount{{Kind: room.ReadOnly, Source: inner, Dest: "/mnt/bound"}}}, e.caller)
	if err != nil {
		return errorFinding(err)
	}
	defer plan.Close()
	res, words, err := e.run(plan, time.Now(), probeBound, 0)
	if err != nil {
		return errorFinding(err)
	}
	bad := e.judge(res, words, result.Exited)
	if bad == nil {
		return ok("bound by descriptor (open_tree, move_mount)")
	}
	bad.Verdict, bad.Cause = Warning, without+": "+bad.Cause
	bad.Fix = ""
	if res.Err != nil && errors.Is(res.Err, unix.EPERM) {
		bad.Fix = fixes(withoutRoot(e.machine()), "or make such paths reachable: chmod o+x on their directories")
	}
	return *bad
}

// withoutRoot: what root does beyond others needs CAP_SYS_ADMIN, which the root
// of most containers lacks.
func withoutRoot(m machine) string {
	if m.engine() == "" {
		return "run sbxrun as an ordinary user"
	}
	return fixes("run sbxrun as an ordinary user", "or give the container CAP_SYS_ADMIN: --cap-add SYS_ADMIN")
}
