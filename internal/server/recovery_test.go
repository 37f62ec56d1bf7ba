package server

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/config"
	"github.com/sbxrun/sbxrun/internal/slot"
	"github.com/sbxrun/sbxrun/internal/tenants"
	"github.com/sbxrun/sbxrun/internal/workspace"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// broken is a source whose slots panic. It counts the slots taken.
type broken struct {
	taken  atomic.Int64
	output bool // panic while writing output, instead of in Start
}

func (b *broken) Take(context.Context, string, slot.Policy) (slot.Slot, error) {
	b.taken.Add(1)
	return brokenPlace{b}, nil
}
func (*broken) Rooms() (idle, all, left int) { return 0, 0, 0 }

type brokenPlace struct{ *broken }

func (brokenPlace) Kind() slot.Kind                { return slot.Cold }
func (brokenPlace) Files() (*workspace.Dir, error) { panic("a mistake with files") }
func (brokenPlace) Ended() <-chan struct{}         { return nil }
func (b brokenPlace) Give() (*result.Result, error) {
	b.taken.Add(-1)
	return nil, nil
}
func (b brokenPlace) Start(ctx context.Context, c slot.Command) (slot.Running, error) {
	if !b.output {
		panic("a mistake at the start")
	}
	ended := make(chan struct{})
	go func() { // as in the engine
		defer close(ended)
		_, _ = c.Stdout.Write([]byte("x"))
		<-ctx.Done()
	}()
	return brokenRun{ended}, nil
}

type brokenRun struct{ ended chan struct{} }

func (w brokenRun) Wait() (*result.Result, error) {
	<-w.ended
	return &result.Result{Cause: result.Canceled, Verdict: result.Proven, Started: true}, nil
}
func (brokenRun) Signal(syscall.Signal) error      { return nil }
func (brokenRun) SignalAlone(syscall.Signal) error { return nil }

// doubtful is a source with unproven teardowns, of the command or only of the slot.
type doubtful struct {
	broken
	command, place result.Verdict
	gone           chan struct{} // closed when the survivors have exited
}

func (*doubtful) Rooms() (idle, all, left int) { return 0, 0, doubtfulRooms }

const doubtfulRooms = 2

func (d *doubtful) Take(context.Context, string, slot.Policy) (slot.Slot, error) {
	d.taken.Add(1)
	return doubtfulPlace{brokenPlace{&d.broken}, d}, nil
}

type doubtfulPlace struct {
	brokenPlace
	of *doubtful
}

func (p doubtfulPlace) result(v result.Verdict) *result.Result {
	res := &result.Result{Cause: result.Timeout, Verdict: v, Started: true}
	if v == result.Unproven {
		res.Survivors, res.Gone = []result.Survivor{{PID: 4711, Comm: "left", State: "D"}}, p.of.gone
	}
	return res
}

func (p doubtfulPlace) Start(context.Context, slot.Command) (slot.Running, error) { return p, nil }
func (p doubtfulPlace) Wait() (*result.Result, error) {
	res := p.result(p.of.command)
	if p.of.command == result.Unproven {
		res.Err = &result.Error{Code: "unproven", Message: "left"}
		return res, res.Err
	}
	return res, nil
}
func (doubtfulPlace) Signal(syscall.Signal) error      { return nil }
func (doubtfulPlace) SignalAlone(syscall.Signal) error { return nil }
func (p doubtfulPlace) Give() (*result.Result, error)  { return p.result(p.of.place), nil }

// The slot of a call, and the lease of a session, are kept until the survivors of an unproven teardown have exited.
func TestSurvivorsKeepPlace(t *testing.T) {
	place := func(join func(string, tenants.Ceilings) (*tenants.Ticket, error)) error {
		turn, err := join("uid-2", tenants.Ceilings{})
		if err == nil {
			turn.Leave()
		}
		return err
	}
	call := func(s *Server) error { return place(s.scheduler.Join) }
	for _, test := range []struct {
		what, path string // below the session if it has no version
		free       func(*Server) error
	}{
		{"call", "/v1/run", call},
		{"detached call", "/v1/calls", call},
		{"exec", "/exec", call},
		{"process", "/processes", func(s *Server) error { return place(s.processes.Join) }},
		{"session", "", func(s *Server) error {
			lease, err := s.sessions.Reserve("uid-1", 1)
			lease.Free()
			return err
		}},
	} {
		t.Run(test.what, func(t *testing.T) {
			source := &doubtful{command: result.Unproven, place: result.Proven, gone: make(chan struct{})}
			s := newServer(t, source, func(c *config.Config) { c.Places, c.Processes = 1, 1 })
			h := as("uid-1", s.Handler(http.NotFoundHandler()))
			path := test.path
			if !strings.HasPrefix(path, "/v1/") {
				var session api.Session
				check.Must(t, json.Unmarshal(ask(h, http.MethodPost, "/v1/sessions", "{}").Body.Bytes(), &session))
				path = "/v1/sessions/" + session.ID + path
			}
			if test.what == "session" {
				source.place = result.Unproven
				ask(h, http.MethodDelete, path, "")
			} else {
				ask(h, http.MethodPost, path, `{"argv":["true"]}`)
			}
			harness.Until(t, harness.Bound, "the unproven end", func() bool { return s.kept.Load() > 0 })
			check.That(t, test.free(s) != nil, "it is free while something survives")
			close(source.gone)
			harness.Until(t, harness.Bound, "the end of what has survived", func() bool { return s.kept.Load() == 0 && test.free(s) == nil })
		})
	}
}

// If a teardown is unproven, every waiting client gets the error with the survivors, and the session is not used again.
func TestUnproven(t *testing.T) {
	source := &doubtful{}
	h := as("uid-1", newServer(t, source).Handler(http.NotFoundHandler()))
	told := func(what string, e *api.Error) {
		t.Helper()
		check.That(t, e != nil && e.Failure.Code == api.Unproven && e.Started && e.Report != nil && e.Report.ExitCode == result.ExitUnproven && e.Report.Cause == result.Timeout && e.Report.Teardown.Verdict == result.Unproven && len(e.Report.Teardown.Survivors) == 1 && e.Report.Teardown.Survivors[0].Comm == "left",
			"%s: %+v", what, e)
	}
	answered := func(what string, w *httptest.ResponseRecorder) {
		t.Helper()
		var e api.Error
		err := json.Unmarshal(w.Body.Bytes(), &e)
		check.That(t, err == nil && w.Code == http.StatusInternalServerError, "%s: %d %s", what, w.Code, w.Body)
		told(what, &e)
	}
	const run = `{"argv":["true"]}`
	calls := 0
	for _, verdicts := range [][2]result.Verdict{{result.Unproven, result.Unproven}, {result.Proven, result.Unproven}} {
		source.command, source.place = verdicts[0], verdicts[1]
		name := string(verdicts[0])
		answered(name, ask(h, http.MethodPost, "/v1/run", run))
		for range 2 { // the second answer is a replay
			answered("with a key", ask(h, http.MethodPost, "/v1/run", run, "Idempotency-Key", name))
		}
		w := ask(h, http.MethodPost, "/v1/run?stream=1", run)
		lines := strings.Split(strings.TrimSpace(w.Body.String()), "\n")
		var last api.Event
		err := json.Unmarshal([]byte(lines[len(lines)-1]), &last)
		check.That(t, err == nil && w.Code == http.StatusOK && last.Event == "error", "%d %s", w.Code, w.Body)
		told("a stream", last.Error)
		var status api.CallStatus
		check.Must(t, json.Unmarshal(ask(h, http.MethodPost, "/v1/calls", run).Body.Bytes(), &status))
		w = ask(h, http.MethodGet, "/v1/calls/"+status.ID+"?wait_ms=60000", "")
		err = json.Unmarshal(w.Body.Bytes(), &status)
		check.Require(t, err == nil && status.State == api.Over && status.Failure != nil, "%d %s", w.Code, w.Body)
		told("detached", &api.Error{Failure: *status.Failure, Started: status.Started, Report: status.Report})
		calls += 4
	}
	check.Equal(t, int(source.taken.Load()), calls)

	source.command = result.Unproven
	var session api.Session
	for path, body := range map[string]string{"/exec": run, "/code": `{"language":"python","code":"1"}`} {
		check.Must(t, json.Unmarshal(ask(h, http.MethodPost, "/v1/sessions", "{}").Body.Bytes(), &session))
		path = "/v1/sessions/" + session.ID + path
		for begun, end := false, time.Now().Add(harness.Scaled(20*time.Second)); ; time.Sleep(time.Millisecond) {
			w := ask(h, http.MethodPost, path, body)
			if w.Code == http.StatusGone && begun && strings.Contains(w.Body.String(), "lost") {
				break
			}
			check.Require(t, w.Code == http.StatusInternalServerError && strings.Contains(w.Body.String(), `"started":true`) && !time.Now().After(end), "%s: %d %s", path, w.Code, w.Body)
			if begun = true; body == run { // a cell's interpreter did not start
				answered("in a session", w)
				calls++
			}
		}
	}
	check.Must(t, json.Unmarshal(ask(h, http.MethodPost, "/v1/sessions", "{}").Body.Bytes(), &session))
	w := ask(h, http.MethodDelete, "/v1/sessions/"+session.ID, "")
	check.That(t, w.Code == http.StatusInternalServerError && strings.Contains(w.Body.String(), `"unproven"`) && strings.Contains(w.Body.String(), `"started":true`),
		"%d %s", w.Code, w.Body)
	const sessions = 3
	want := fmt.Sprintf("\nsbxrun_unproven_total %d\n", calls+sessions+doubtfulRooms)
	// Lost sessions are counted after the first rejected request.
	harness.Until(t, harness.Bound, want, func() bool { return strings.Contains(ask(h, http.MethodGet, "/metrics", "").Body.String(), want) })
}

// A panic ends its request with an error. All resources are released, and the server continues.
func TestMistakes(t *testing.T) {
	c := config.Default()
	c.StateDir = filepath.Join(t.TempDir(), "state")
	c.Tenant.Sessions, c.Tenant.Concurrency, c.Tenant.Queue, c.Calls.Most = 1, 1, 0, 1
	source := &broken{}
	var log bytes.Buffer
	s, err := New(c, nil, source, slog.New(slog.NewJSONHandler(&log, nil)), "test")
	check.Must(t, err)
	h := as("uid-1", s.Handler(http.NotFoundHandler()))
	const run, files = `{"argv":["true"]}`, `{"argv":["true"],"files":[{"path":"a","text":""}]}`
	for _, test := range []struct {
		path, body string
		headers    []string
	}{
		{"/v1/run", run, nil}, {"/v1/run", files, nil}, {"/v1/run?stream=1", run, nil}, {"/v1/run", run, []string{"Idempotency-Key", "k"}}, {"/v1/run", run, []string{"Idempotency-Key", "k"}},
		{"/v1/sessions", `{"files":[{"path":"a","text":""}]}`, nil}, {"/v1/sessions", `{"files":[{"path":"a","text":""}]}`, nil},
	} {
		w := ask(h, http.MethodPost, test.path, test.body, append(test.headers, "X-Request-Id", "the-request")...)
		var e api.Error
		err := json.Unmarshal(w.Body.Bytes(), &e)
		check.That(t, err == nil && w.Code == 500 && e.Failure.Code == api.Internal && e.Started && strings.Contains(e.Failure.Message, "the-request"),
			"%s: %d %s", test.path, w.Code, w.Body)
	}
	for range 2 {
		w := ask(h, http.MethodPost, "/v1/calls", run, "X-Request-Id", "the-request")
		var status api.CallStatus
		err := json.Unmarshal(w.Body.Bytes(), &status)
		check.Require(t, err == nil && w.Code == 202, "%d %s", w.Code, w.Body)
		w = ask(h, http.MethodGet, "/v1/calls/"+status.ID+"?wait_ms=60000", "")
		check.That(t, strings.Contains(w.Body.String(), `"ended"`) && strings.Contains(w.Body.String(), `"internal"`) && strings.Contains(w.Body.String(), `"started":true`), "%s", w.Body)
		w = ask(h, http.MethodDelete, "/v1/calls/"+status.ID, "")
		check.That(t, w.Code == 200, "%d %s", w.Code, w.Body)
	}
	n, u, m := source.taken.Load(), s.scheduler.Uses()["uid-1"], s.memory.Used("uid-1")
	check.That(t, n == 0 && u.Running == 0 && u.Waiting == 0 && m <= 2*answerRest, "%d rooms, %+v calls, %d bytes stay taken", n, u, m) // the key's memory
	check.That(t, strings.Contains(log.String(), "a mistake at the start") && strings.Contains(log.String(), `"request":"the-request"`), "%v", log.String())

	// A panic in a goroutine of the engine.
	source.output = true
	ex, err := s.check(Identity{Tenant: "uid-1"}, &api.Call{Argv: []string{"true"}})
	check.Must(t, err)
	_, err = s.execute(t.Context(), ex, brokenSink{})
	e := (*api.Error)(nil)
	check.That(t, errors.As(err, &e) && e.Failure.Code == api.Internal && source.taken.Load() == 0, "%v, %d rooms", err, source.taken.Load())
	done := make(chan struct{})
	s.spawn(func() {
		defer close(done)
		panic("a mistake in the background")
	})
	<-done
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	s.Drain(ctx)
	check.That(t, ctx.Err() == nil, "the server has something running")
}

// brokenSink panics on output.
type brokenSink struct{}

func (b brokenSink) Writers() (stdout, stderr io.Writer) { return b, b }
func (brokenSink) Started(func(syscall.Signal) error)    {}
func (brokenSink) Output(*result.Report)                 {}
func (brokenSink) Write([]byte) (int, error)             { panic("a mistake with output") }
