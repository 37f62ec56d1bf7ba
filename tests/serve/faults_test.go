package serve

import (
	"net/http"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// Problems that users of other services have reported, by project and number. E2B 1128, a client
// without a time limit of its own, is among the behaviours of clients.
func TestFaults(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]func(*testing.T){
		"codex 4337 and 7852, sandbox-sdk 438": testDeadlineEndsTree,
		"E2B 1881, smolagents 2464":            testDeadlineInTime,
		"LibreChat agents 251":                 testSessionAfterTimeout,
		"E2B 500":                              testClientLeaves,
		"E2B 1352 and 1074":                    testCallOutput,
		"smolagents 2050":                      testServerKilled,
		"OpenSandbox 1206":                     testIdleInterpreter,
		"dify-sandbox 99":                      testManyAtOnce,
		"piston 535, dify 15817":               testKilledSaysWhy,
		"sandbox-sdk 891":                      testOthersLive,
	} {
		t.Run(name, test)
	}
}

// A deadline ends the whole tree, a pipe that a child holds delays nothing, and the next call
// works like the first.
func testDeadlineEndsTree(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	began := time.Now()
	call := sh("trap '' TERM; setsid sh -c 'sleep 1000' & (sleep 1000 &) ; echo begun; sleep 1000")
	deadline := harness.Deadline(time.Second)
	call.TimeoutMS = result.Milliseconds(deadline)
	a := s.run(call)
	if took := time.Since(began); a.Cause != "timeout" || a.ExitCode != 124 || text(a.Stdout) != "begun\n" || took > deadline+harness.Slack {
		t.Errorf("%s %d after %v, %q", a.Cause, a.ExitCode, took, text(a.Stdout))
	}
	s.idle()
	s.want("/v1/run", "echo next", "next\n")
}

// A deadline takes effect once and in time, without waiting for what does not end by itself.
func testDeadlineInTime(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	n := harness.Deadline(time.Second)
	call := sh("trap '' TERM INT; python3 -c 'while True: pass' & while :; do sleep 1000; done")
	call.TimeoutMS = result.Milliseconds(n)
	began := time.Now()
	a := s.run(call)
	took := time.Since(began)
	check.That(t, a.Cause == "timeout" && a.Duration >= call.TimeoutMS && a.Duration < 2*call.TimeoutMS && took < 2*n, "%s after %v ms, answered after %v", a.Cause, a.Duration, took)
}

// A session works after a timeout.
func testSessionAfterTimeout(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	path := s.session(`{}`)
	call := sh("echo kept >a; sleep 1000 & sleep 1000")
	call.TimeoutMS = result.Milliseconds(harness.Deadline(time.Second))
	check.Equal(t, s.call(path+"/exec", call).Cause, "timeout")
	check.Equal(t, text(s.call(path+"/exec", api.Call{Language: "python", Code: "print(open('a').read())"}).Stdout), "kept\n\n")
}

// A killed call reports the cause. Where a limit cannot be enforced, nothing runs.
func testKilledSaysWhy(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	machine, err := limits.Detect()
	harness.Must(t, err)
	for _, test := range []struct {
		call   api.Call
		limits api.Limits
		cause  result.Cause
		code   int
		hit    string
	}{
		{sh("yes"), api.Limits{MaxOutput: 10_000, Output: "kill"}, result.OutputLimit, result.ExitOutputLimit, ""},
		{api.Call{Argv: []string{"dd", "if=/dev/zero", "of=a", "bs=100000", "count=1"}}, api.Limits{FSize: 1000}, result.FileSize, 153, ""},
		{api.Call{Argv: []string{"python3", "-c", "x = bytearray(200 << 20)"}}, api.Limits{Memory: 64 << 20}, result.OOM, result.ExitKilled, "memory"},
		{sh("i=0; while [ $i -lt 20 ]; do sleep 1000 & i=$((i+1)); done; exit 3"), api.Limits{Pids: 8}, result.Exited, 2, "pids"},
		{sh("while :; do :; done"), api.Limits{CPUTimeMS: 200}, result.CPUTime, result.ExitCPUTime, ""},
	} {
		test.call.Limits = test.limits
		l := test.limits
		if _, err := machine.Plan(limits.Request{Memory: l.Memory, Pids: l.Pids, CPUTime: time.Duration(l.CPUTimeMS) * time.Millisecond, FSize: l.FSize}, true); err != nil {
			s.refuses(api.Limit, http.MethodPost, "/v1/run", test.call)
			continue
		}
		a := s.run(test.call)
		check.That(t, a.Cause == test.cause && a.ExitCode == test.code, "%+v: %s %d", l, a.Cause, a.ExitCode)
		for _, limit := range a.Limits {
			check.That(t, limit.Name != test.hit || limit.Hit, "%+v: %+v", l, limit)
		}
	}
}

// The end of one session does not affect another.
func testOthersLive(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	var sessions, processes []string
	for range 2 {
		path := s.session(`{}`)
		sessions = append(sessions, path)
		processes = append(processes, path+"/processes/"+s.status(http.MethodPost, path+"/processes", sh("while [ ! -e go ]; do sleep 0.01; done; echo lived"), http.StatusAccepted).ID)
	}
	s.answers(http.StatusOK, "", http.MethodDelete, sessions[0], nil)
	s.call(sessions[1]+"/exec", sh("touch go"))
	c := s.status(http.MethodGet, processes[1]+"?wait_ms=60000", nil, http.StatusOK)
	_, out := s.ask(http.MethodGet, processes[1]+"/output", nil)
	check.That(t, c.Report != nil && c.Report.Cause == result.Exited && string(out) == "lived\n", "%+v, %q", c, out)
}
