package serve

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// status returns the status of a call or process.
func (s *server) status(method, path string, body any, want int, headers ...string) api.CallStatus {
	s.t.Helper()
	return decoded[api.CallStatus](s, want, method, path, body, headers...)
}

// A call's output can be read from any offset, repeatedly, while the command runs and after it.
func testCallOutput(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	c := s.status(http.MethodPost, "/v1/calls", sh("echo one; echo err >&2; sleep 2347; echo two"), http.StatusAccepted)
	path := "/v1/calls/" + c.ID
	harness.Until(t, harness.Bound, "the first line", func() bool { return s.status(http.MethodGet, path, nil, 200).StdoutBytes == 4 })
	_, b := s.ask(http.MethodGet, path+"/output?from=1", nil)
	check.That(t, string(b) == "ne\n", "%q", b)
	// Two clients follow it, one from the middle, and get everything that is still to come.
	var all, follow sync.WaitGroup
	for from, want := range map[int]string{0: "one\ntwo\n", 2: "e\ntwo\n"} {
		follow.Add(1)
		all.Go(func() {
			r, err := s.client.Get(fmt.Sprintf("http://sbxrun%s/output?follow=1&from=%d", path, from))
			follow.Done() // the answer has begun
			if err != nil {
				t.Error(err)
				return
			}
			defer r.Body.Close()
			b, err := io.ReadAll(r.Body)
			check.That(t, r.StatusCode == 200 && string(b) == want && err == nil, "from %d: %d %q %v", from, r.StatusCode, b, err)
		})
	}
	follow.Wait()
	s.release("sleep 2347")
	all.Wait()
	c = s.status(http.MethodGet, path+"?wait_ms=60000", nil, 200)
	check.That(t, c.State == api.Over && c.Report != nil && c.Report.Cause == "exited" && *c.Report.StdoutBytes == 8 && c.Report.Stdout == nil, "%+v", c)
	_, b = s.ask(http.MethodGet, path+"/output?stream=stderr", nil)
	check.That(t, string(b) == "err\n", "%q", b)
	_, b = s.ask(http.MethodGet, path+"/output?from=100", nil)
	check.That(t, string(b) == "", "%q", b)
	s.status(http.MethodDelete, path, nil, 200)
	for _, gone := range []string{path, path + "/output", "/v1/calls/nonsense"} {
		s.refuses(api.NoSuchCall, http.MethodGet, gone, nil)
	}
}

func TestCallEnded(t *testing.T) {
	t.Parallel()
	s := serve(t, "places = 1\n")
	first := s.status(http.MethodPost, "/v1/calls", sh("trap '' TERM; setsid sleep 2345 & sleep 2345"), http.StatusAccepted)
	s.busy(2, "sleep 2345")
	second := s.status(http.MethodPost, "/v1/calls", sh("echo never"), http.StatusAccepted)
	c := s.status(http.MethodDelete, "/v1/calls/"+second.ID, nil, 200)
	check.That(t, c.State == api.Over && c.Failure != nil, "one that waited: %+v", c)
	list := decoded[struct{ Calls []api.CallStatus }](s, 200, http.MethodGet, "/v1/calls", nil)
	check.That(t, len(list.Calls) == 1 && list.Calls[0].State == api.Running, "%+v", list)
	c = s.status(http.MethodDelete, "/v1/calls/"+first.ID, nil, 200)
	check.That(t, c.Report != nil && c.Report.Cause == "canceled" && c.Report.Teardown.Verdict == "proven", "%+v", c)
	s.idle()
}

// A repeated request is executed once.
func TestIdempotency(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	key := []string{"Idempotency-Key", "k1"}
	call := sh("cat /proc/sys/kernel/random/uuid; sleep 0.5")
	var all sync.WaitGroup
	answers := make([]string, 3)
	for i := range answers {
		all.Go(func() {
			_, b, _, err := s.try(t.Context(), http.MethodPost, "/v1/run", call, key...)
			check.OK(t, err)
			answers[i] = string(b)
		})
	}
	all.Wait()
	check.That(t, answers[0] == answers[1] && answers[1] == answers[2] && strings.Contains(answers[0], `"cause":"exited"`), "%q", answers)
	s.refuses(api.Idempotency, http.MethodPost, "/v1/run", sh("true"), key...)
	// A call is counted before it is answered.
	_, b := s.ask(http.MethodGet, "/metrics", nil)
	n := regexp.MustCompile(`(?m)^sbxrun_calls_total\{.*\} 1$`).FindAll(b, -1)
	check.That(t, len(n) == 1 && strings.Count(string(b), "\nsbxrun_calls_total{") == 1, "%s", b)
	// A call that failed to start can be retried with the same key.
	wrong := api.Call{Argv: []string{"true"}, Workdir: "/no/such"}
	for range 2 {
		s.refused(http.MethodPost, "/v1/run", wrong, "Idempotency-Key", "k2")
	}
	one := s.status(http.MethodPost, "/v1/calls", call, http.StatusAccepted, "Idempotency-Key", "k3")
	two := s.status(http.MethodPost, "/v1/calls", call, http.StatusAccepted, "Idempotency-Key", "k3")
	check.Equal(t, one.ID, two.ID)
	s.refuses(api.Usage, http.MethodPost, "/v1/run?stream=1", call, "Idempotency-Key", "k4")
	s.refuses(api.Usage, http.MethodPost, "/v1/sessions", api.NewSession{}, "Idempotency-Key", "k5")
}

// A call in a session is answered by its key even after the session has ended, so that the client
// does not take it for one that never started.
func TestIdempotencySessionEnded(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	path := s.session(`{}`)
	key := []string{"Idempotency-Key", "k"}
	status, first := s.ask(http.MethodPost, path+"/exec", sh("echo once"), key...)
	check.Require(t, status == http.StatusOK, "%d %s", status, first)
	process := s.status(http.MethodPost, path+"/processes", sh("sleep 60"), http.StatusAccepted, key...)
	harness.Until(t, harness.Bound, "the process to run", func() bool {
		return s.status(http.MethodGet, path+"/processes/"+process.ID, nil, 200).Started
	})
	s.answers(http.StatusOK, "", http.MethodDelete, path, nil)
	same := s.status(http.MethodPost, path+"/processes", sh("sleep 60"), http.StatusAccepted, key...)
	check.That(t, same.ID == process.ID && same.Started, "%+v, and it was %+v", same, process)
	status, again := s.ask(http.MethodPost, path+"/exec", sh("echo once"), key...)
	check.That(t, status == http.StatusOK && string(again) == string(first), "%d %s, and it was %s", status, again, first)
	for _, way := range []string{"/exec", "/processes"} {
		s.refuses(api.Ended, http.MethodPost, path+way, sh("echo once"), "Idempotency-Key", "another")
	}
}

// The list of collected files in a status is limited like any answer, and a list of calls omits it.
func TestCollectedNames(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	call := sh(`d=$(printf '\001%.0s' $(seq 250)); mkdir -p $d/$d/$d && cd $d/$d/$d && touch $(seq 256)`)
	call.Collect = []string{"*/*/*/*"}
	c := s.statusOf(call)
	r := c.Report
	check.Require(t, r != nil && len(r.Files) >= 80 && len(r.Files) <= 90 && strings.Contains(r.Files[len(r.Files)-1].Error, "names"), "%+v", c)
	many := sh("touch $(seq 257)")
	many.Collect = []string{"*"}
	r = s.statusOf(many).Report
	check.That(t, r != nil && len(r.Files) == 257 && r.Files[255].Error == "" && strings.Contains(r.Files[256].Error, "more than 256 files"), "%+v", r)
	_, b := s.ask(http.MethodGet, "/v1/calls", nil)
	check.That(t, len(b) <= 8<<10 && strings.Contains(string(b), c.ID), "%d bytes: %.1000s", len(b), b)
}

// statusOf queues a call and waits until it ends.
func (s *server) statusOf(call api.Call) (c api.CallStatus) {
	s.t.Helper()
	for c = s.status(http.MethodPost, "/v1/calls", call, http.StatusAccepted); c.State != api.Over; {
		c = s.status(http.MethodGet, "/v1/calls/"+c.ID+"?wait_ms=5000", nil, http.StatusOK)
	}
	return c
}

// The content store keeps uploads of any size up to the tenant's quota.
func TestContentStore(t *testing.T) {
	t.Parallel()
	s := serve(t, "[tenant]\nfiles = \"1M\"\n")
	f := decoded[api.Stored](s, http.StatusCreated, http.MethodPost, "/v1/files", strings.NewReader("hello"), "Content-Type", "application/octet-stream")
	check.Require(t, f.Size == 5 && f.ID == "sha256:2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824", "%+v", f)
	s.answers(http.StatusOK, "hello", http.MethodGet, "/v1/files/"+f.ID, nil)
	call := sh("cat in")
	call.Files = []api.FileIn{{Path: "in", ID: f.ID}}
	s.prints("/v1/run", call, "hello")
	for _, id := range []string{"sha256:00", "nonsense", "sha256:" + strings.Repeat("0", 64), "sha256:..%2f..%2fsecret"} {
		s.refuses(api.NoSuchFile, http.MethodGet, "/v1/files/"+id, nil)
	}
	s.refuses(api.QuotaDisk, http.MethodPost, "/v1/files", io.LimitReader(zeros{}, 2<<20), "Content-Type", "application/octet-stream")
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) {
	clear(b)
	return len(b), nil
}

// A tenant's kept output and number of calls are limited over all its sessions. Calls without room
// don't start. The end of calls, and forgetting them, makes room.
func TestKeptOutput(t *testing.T) {
	t.Parallel()
	s := serve(t, "[calls]\nmost = 3\n[tenant]\noutput = \"5M\"\n")
	begin := func(path, script string, max int64) (status int, id string) {
		t.Helper()
		call := sh(script)
		call.Limits.MaxOutput = max
		status, b := s.ask(http.MethodPost, path, call)
		var c api.CallStatus
		err := json.Unmarshal(b, &c)
		check.Require(t, err == nil, "%v: %s", err, b)
		check.That(t, status == http.StatusAccepted || strings.Contains(string(b), `"started":false`), "%s", b)
		return status, c.ID
	}
	session := s.session(`{}`)
	processes := session + "/processes"
	status, first := begin("/v1/calls", "sleep 1234", 2<<20)
	check.Require(t, status == http.StatusAccepted, "%v", status)
	status, _ = begin(processes, "sleep 1234", 1<<20)
	check.That(t, status == http.StatusConflict, "more output than may be kept: %d", status)
	status, _ = begin(processes, "sleep 1234", 1000)
	check.That(t, status == http.StatusAccepted, "%v", status)
	// A call that has ended counts with the output that it has written.
	s.answers(http.StatusOK, "", http.MethodDelete, "/v1/calls/"+first, nil)
	status, first = begin("/v1/calls", "head -c 3M /dev/zero", 2<<20)
	check.That(t, status == http.StatusAccepted, "%v", status)
	s.answers(http.StatusOK, `"state":"ended"`, http.MethodGet, "/v1/calls/"+first+"?wait_ms=60000", nil)
	status, _ = begin(processes, "sleep 1234", 1<<20)
	check.That(t, status == http.StatusAccepted, "%v", status)
	status, _ = begin("/v1/calls", "true", 1000)
	check.That(t, status == http.StatusConflict, "more calls than may be kept: %d", status)
	// The session's end removes its processes.
	s.answers(http.StatusOK, "", http.MethodDelete, session, nil)
	status, _ = begin("/v1/calls", "true", 1000)
	check.That(t, status == http.StatusAccepted, "%v", status)
}

// Sparse files, which cost a program nothing, are not all read; and a list does not contain all
// command lines completely.
func TestLargeForNothing(t *testing.T) {
	t.Parallel()
	s := serve(t, "[tenant]\nfiles = \"20M\"\n")
	call := sh("for i in 1 2 3 4 5; do truncate -s 9M $i; done; truncate -s 1T huge; echo x >small")
	call.Collect = []string{"*"}
	kept, refused := "", ""
	for _, f := range s.run(call).Files {
		if f.Error == "" {
			kept += f.Path + " "
		} else {
			refused += f.Path + " "
		}
	}
	check.That(t, kept == "1 2 small " && refused == "3 4 5 huge ", "kept %q, refused %q", kept, refused)
	long := api.Call{Argv: []string{"true", strings.Repeat("x", 100_000)}}
	status, b := s.ask(http.MethodGet, "/v1/calls/"+s.statusOf(long).ID, nil)
	check.That(t, status == 200 && len(b) >= 100_000, "%d, %d bytes", status, len(b))
	status, b = s.ask(http.MethodGet, "/v1/calls", nil)
	check.That(t, status == 200 && len(b) <= 10_000 && strings.Contains(string(b), `"exit_code":0`), "%d %.300s", status, b)
}

// A process that has ended in a session is kept as long as a detached call, independently of the
// session, and counts among the tenant's calls.
func TestProcessesKept(t *testing.T) {
	t.Parallel()
	s := serve(t, "[calls]\nmost = 1\nkeep = \"1ms\"\n")
	processes := s.session(`{}`) + "/processes"
	for range 3 {
		// The previous process expires when the next one comes.
		harness.Until(t, harness.Bound, "a place", func() bool {
			status, b := s.ask(http.MethodPost, processes, sh("true"))
			check.Require(t, status == http.StatusAccepted || status == http.StatusConflict, "%d %s", status, b)
			return status == http.StatusAccepted
		})
	}
}
