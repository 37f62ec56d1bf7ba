package server

import (
	"cmp"
	"context"
	"errors"
	"io"
	"io/fs"
	"mime"
	"net/http"
	"path"
	"strings"
	"syscall"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/admission"
	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/job"
	"github.com/sbxrun/sbxrun/internal/slot"
	"github.com/sbxrun/sbxrun/internal/tenants"
	"github.com/sbxrun/sbxrun/internal/workspace"
)

// sink is where a call's output goes.
type sink interface {
	// Writers are what the command writes to. Both take more than maxOutput.
	Writers() (stdout, stderr io.Writer)
	// Started says that the command runs, and how it is signalled.
	Started(signal func(syscall.Signal) error)
	// Output adds to the report what was kept of the streams.
	Output(r *result.Report)
}

// enter waits for a call's turn, and asks whether the machine has tasks left for it. The caller ends
// what was admitted.
func (s *Server) enter(ctx context.Context, turn *tenants.Ticket, ex *execution) (err error) {
	came := time.Now()
	if err := turn.Wait(ctx); err != nil {
		return err
	}
	ex.queued = time.Since(came)
	if ex.buffers, err = s.memory.Take(ex.caller.Tenant, ex.memory, int64(ex.ceilings.Buffers)); err != nil {
		return err
	}
	ex.admitted, err = s.admit(ctx, ex.limits.Pids)
	return err
}

// carryOut carries a call out that has joined, in its session or in a place of its own. When it returns
// nothing of the call is left.
func (s *Server) executeJoined(ctx context.Context, turn *tenants.Ticket, ex *execution, out sink) (a *api.Answer, err error) {
	how := s.fresh
	if ex.session != nil {
		how = s.inSession
		if err := ex.withoutParts(); err != nil {
			return nil, err
		}
	}
	if ex.admitted == nil {
		if err := s.enter(ctx, turn, ex); err != nil {
			return nil, s.callError(ctx, err)
		}
	}
	defer ex.admitted.End()
	if a, err = how(ctx, ex, out); a == nil {
		return nil, err
	}
	a.QueueMS = result.Milliseconds(ex.queued)
	ex.buffers.Shrink(answerSize(a))
	s.record(ex, a)
	return a, proven(a)
}

// fresh carries a call out in a place of its own. The answer is nil if it came to nothing.
func (s *Server) fresh(ctx context.Context, ex *execution, out sink) (*api.Answer, error) {
	set := s.settings.Load()
	policy := set.policy
	policy.Commands, policy.Program = ex.limits, ex.ahead()
	if ex.parts != nil {
		if err := s.addParts(ctx, set, ex.ceilings, ex.parts, &policy); err != nil {
			return nil, s.callError(ctx, err)
		}
	}
	at, err := s.source.Take(ctx, ex.caller.Tenant, policy)
	if err != nil {
		return nil, s.callError(ctx, explain(ex.admitted, err))
	}
	var res *result.Result
	a, err := func() (*api.Answer, error) {
		// Also after a panic, which ends this request alone.
		defer func() { res, _ = at.Give() }() // the result's verdict says more
		return s.in(ctx, at, ex, out)
	}()
	if a == nil {
		return nil, s.callError(ctx, err)
	}
	if policy.Parts != nil { // it has ended with the place
		used, lost := policy.Parts.End()
		if a.Network = used; lost != nil && a.Error == nil {
			a.Error, a.ExitCode = lost.Report(), cmp.Or(a.ExitCode, lost.ExitCode)
		}
	}
	ex.keep(res)
	if res != nil && res.Verdict == result.Unproven && a.Teardown.Verdict == result.Proven {
		// Nothing of the command is seen to be left, and all the same its room is.
		a.Teardown.Verdict, a.Teardown.Survivors = result.Unproven, res.Survivors
		a.ExitCode = result.ExitUnproven
	}
	return a, nil
}

// inSession carries a call out in its session. The answer is nil if it came to nothing.
func (s *Server) inSession(ctx context.Context, ex *execution, out sink) (*api.Answer, error) {
	a, err := s.in(ctx, ex.session.Place, ex, out)
	if a == nil {
		return nil, s.startError(ctx, ex.session, err)
	}
	if a.Teardown.Verdict == result.Unproven {
		s.lost(ex.session)
	}
	return a, nil
}

// About how much memory an answer takes beside output and command line, and a word beside its text: an
// empty one can be sent in three bytes.
const (
	answerRest = 4096
	wordRest   = 16
)

// answerSize is about how much memory an answer takes.
func answerSize(a *api.Answer) int64 {
	size := int64(answerRest)
	for _, text := range []*string{a.Stdout, a.StdoutBase64, a.Stderr, a.StderrBase64} {
		if text != nil {
			size += int64(len(*text))
		}
	}
	for _, word := range a.Argv {
		size += wordRest + int64(len(word))
	}
	return size + filesSize(a.Files)
}

// fileRest is about how much memory what is told of a file takes beside its name.
const fileRest = 256

func filesSize(files []api.FileOut) (size int64) {
	for _, f := range files {
		size += fileRest + int64(len(f.Path)+len(f.Error))
	}
	return size
}

// proven is the error of a call of which something may be left.
func proven(a *api.Answer) error {
	if a.Teardown.Verdict != result.Unproven {
		return nil
	}
	e := api.NewError(api.Unproven, "something of the command may be left", "the report names it; its room is not used again")
	e.Started, e.Report = true, a
	return e
}

// tell counts a call, and logs how a call ended: never what it was.
func (s *Server) record(ex *execution, a *api.Answer) {
	s.metrics.ended(ex.caller.Tenant, a)
	s.recents.add(ex.caller.Tenant, api.Recent{
		ID: a.ID, Cause: a.Cause, ExitCode: &a.ExitCode, Verdict: a.Teardown.Verdict, Room: a.Room, Duration: a.Duration, Code: ex.shown,
	})
	s.log.Info("call", "request", ex.caller.RequestID, "tenant", ex.caller.Tenant, "id", a.ID, "cause", string(a.Cause), "exit_code", a.ExitCode,
		"verdict", string(a.Teardown.Verdict), "room", a.Room, "queue_ms", a.QueueMS, "duration_ms", a.Duration)
}

// keep keeps the place of a call if the end of its command or room is unproven.
func (ex *execution) keep(res *result.Result) {
	if res != nil && res.Verdict == result.Unproven {
		ex.left = append(ex.left, res)
	}
}

// release frees the place of a call, or the share of a session. After unproven ends it waits until all survivors
// have exited, because they use the machine as the call did.
func (s *Server) release(free func(), ends ...*result.Result) {
	if len(ends) == 0 {
		free()
		return
	}
	s.kept.Add(1)
	s.spawn(func() {
		for _, end := range ends {
			select {
			case <-end.Gone:
			case <-s.base.Done():
			}
		}
		s.kept.Add(-1)
		free()
	})
}

// Levels of tasks, in percent of a bound: as the command line has them.
const (
	warn  = 60
	alert = 80
)

// admit asks whether the machine has tasks left for one more command, which may come to have
// so many.
func (s *Server) admit(ctx context.Context, pids int64) (*admission.Permit, error) {
	return admission.Ask(ctx, admission.Terms{
		OnPressure: admission.Refuse, Warn: warn, Alert: alert, Promised: pids, Lasting: true,
		Note: func(text string) { s.log.Warn("tasks", "note", text) },
	})
}

// explain makes busy of an error that comes from there being no task left.
func explain(leave *admission.Permit, err error) error {
	if e, ok := errors.AsType[*result.Error](err); ok {
		return leave.Explain(e)
	}
	return err
}

// callError returns what a client is told of a call that came to nothing.
func (s *Server) callError(ctx context.Context, err error) error {
	if _, ok := errors.AsType[*api.Error](err); ok {
		return err
	}
	switch e := api.AsError(err); {
	case e.Failure.Code == api.Unproven: // whoever has left
		return e
	case ctx.Err() != nil && errors.Is(context.Cause(ctx), errDraining):
		return draining()
	case ctx.Err() != nil:
		return api.NewError(api.Ended, "the call was ended before it began", "")
	default:
		return e
	}
}

// in carries a call out at a place. The answer is nil if it came to nothing.
func (s *Server) in(ctx context.Context, at slot.Slot, ex *execution, out sink) (*api.Answer, error) {
	began := time.Now()
	if err := s.writeFiles(ctx, at, ex); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stdout, stderr, failed := s.writersOf(out, ex, cancel)
	command := slot.Command{Args: ex.argv, Env: ex.env, Dir: ex.dir, Program: ex.code, Spec: job.Spec{
		Stdout: stdout, Stderr: stderr, Limits: ex.limits, Timeout: ex.timeout, Grace: ex.grace, Attended: true, Hurry: s.base.Done(),
	}}
	switch {
	case ex.input != nil:
		command.Stdin = io.MultiReader(strings.NewReader(ex.stdin), ex.input)
	case ex.stdin != "":
		command.Stdin = strings.NewReader(ex.stdin)
	}
	if ex.kill {
		command.MaxOutput = ex.maxOutput
	}
	run, err := at.Start(ctx, command)
	if err != nil {
		err = explain(ex.admitted, err)
		if e := (*result.Error)(nil); errors.As(err, &e) && (e.Code == "not-found" || e.Code == "not-executable") {
			// As on the command line, that is how the command has ended.
			res := result.Result{Cause: result.StartFailed, Verdict: result.NotApplicable, StartedAt: began, Duration: time.Since(began), Err: e}
			return s.answer(at, ex, out, &res), nil
		}
		return nil, err
	}
	ex.admitted.Running()
	out.Started(run.Signal)
	res, err := run.Wait()
	if mistake := failed.Load(); mistake != nil {
		return nil, mistake
	}
	if res == nil {
		return nil, err
	}
	ex.keep(res)
	a := s.answer(at, ex, out, res)
	if ctx.Err() == nil && res.Verdict == result.Proven {
		a.Files = s.collect(ctx, at, ex)
	}
	return a, nil
}

func (s *Server) answer(at slot.Slot, ex *execution, out sink, res *result.Result) *api.Answer {
	a := &api.Answer{Report: res.Report(ex.id, ex.argv), Room: string(at.Kind()), TimeoutMS: result.Milliseconds(ex.timeout), Clamped: ex.clamped, RequestID: ex.caller.RequestID}
	out.Output(&a.Report)
	return a
}

// bring puts the call's files into the workspace. It is opened for what is collected, too: a
// warm room has the next call's when the command has ended.
func (s *Server) writeFiles(ctx context.Context, at slot.Slot, ex *execution) error {
	if len(ex.files) == 0 && len(ex.collect) == 0 {
		return nil
	}
	dir, err := at.Files()
	if err != nil {
		return err
	}
	for _, f := range ex.files {
		if err := s.writeFile(ctx, dir, ex, f); err != nil {
			return err
		}
	}
	return nil
}

func (s *Server) writeFile(ctx context.Context, dir *workspace.Dir, ex *execution, f fileIn) error {
	if f.id != "" {
		blob, size, err := s.files.Get(ex.caller.Tenant, f.id)
		if e := (*result.Error)(nil); s.elsewhere != nil && errors.As(err, &e) && e.Code == string(api.NoSuchFile) {
			if err := s.fetch(ctx, ex, f.id); err != nil {
				return err
			}
			blob, size, err = s.files.Get(ex.caller.Tenant, f.id)
		}
		if err != nil {
			return err
		}
		defer blob.Close()
		f.text, f.size = blob, size
	}
	_, err := dir.Put(f.path, reading{ctx, f.text}, f.size, f.mode)
	return err
}

// fetch has the content store get a file from elsewhere. Whatever comes is stored under its own hash.
func (s *Server) fetch(ctx context.Context, ex *execution, id string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	from, err := s.elsewhere(ctx, ex.caller.Tenant, id)
	if err != nil {
		return err
	}
	defer from.Close()
	quota := int64(ex.ceilings.Files)
	_, _, err = s.files.Put(ex.caller.Tenant, from, quota, quota)
	return err
}

// Bounds of what is collected of one call.
const (
	maxEntries    = 10_000 // that are looked at
	maxCollected  = 256
	maxNameBytes  = 64 << 10  // bytes of all their names
	maxMatchSteps = 128 << 20 // steps of matching: about a second of CPU time at most
)

// collects is how much memory what is told of collected files may take.
func (ex *execution) collects() int64 {
	if len(ex.collect) == 0 {
		return 0
	}
	return maxNameBytes + maxCollected*fileRest
}

// collect keeps the files that the call asks for.
func (s *Server) collect(ctx context.Context, at slot.Slot, ex *execution) (files []api.FileOut) {
	if len(ex.collect) == 0 {
		return nil
	}
	dir, err := at.Files()
	if err != nil {
		return []api.FileOut{{Path: ".", Error: err.Error()}}
	}
	leave, err := wait(ctx, s.walking, eachTenant)
	if err != nil {
		return []api.FileOut{{Path: ".", Error: err.Error()}}
	}
	defer leave()
	deepest, left, names, match := 0, int64(ex.ceilings.Files), 0, matcher{ex.collect, maxMatchSteps}
	for _, p := range ex.collect {
		deepest = max(deepest, strings.Count(p, "/"))
	}
	err = dir.List(".", maxEntries, func(e workspace.Entry) error {
		if ctx.Err() != nil {
			return errEnded // nobody waits for the files
		}
		if e.Type == "directory" && strings.Count(e.Path, "/") >= deepest {
			return fs.SkipDir // no pattern goes further down
		}
		if e.Type != "file" {
			return nil
		}
		if ok, err := match.any(e.Path); !ok {
			return err
		}
		if len(files) == maxCollected {
			return usage("more than %d files match", maxCollected)
		}
		if names += len(e.Path); names > maxNameBytes {
			return usage("the names of the files that match have more than %d bytes", maxNameBytes)
		}
		out := api.FileOut{Path: e.Path, Size: e.Size}
		// Files of nothing but holes cost who makes them nothing.
		if e.Size > left {
			out.Error = "with those before it, it is larger than the tenant's quota"
		} else {
			left -= e.Size
			if err := s.keep(dir, ex, &out); err != nil {
				out.Error = api.AsError(err).Error()
			}
		}
		files = append(files, out)
		return nil
	})
	if err != nil {
		files = append(files, api.FileOut{Path: ".", Error: err.Error()})
	}
	return files
}

// matcher matches names against patterns, with a bounded number of steps. path.Match takes as many steps as
// the product of both lengths.
type matcher struct {
	patterns []string // valid ones
	left     int      // steps
}

// any reports whether a pattern matches. It fails when no steps are left.
func (m *matcher) any(name string) (bool, error) {
	for _, pattern := range m.patterns {
		rest := strings.IndexAny(pattern, `*?[\`)
		if rest < 0 {
			rest = len(pattern)
		}
		m.left -= 1 + rest
		if !strings.HasPrefix(name, pattern[:rest]) {
			continue
		}
		m.left -= (len(pattern) - rest) * (len(name) - rest)
		if m.left < 0 {
			return false, usage("the patterns of collect are too long for so many files, up to %.80q: give fewer, or such as out/*.png", name)
		}
		if ok, _ := path.Match(pattern, name); ok {
			return true, nil
		}
	}
	return false, nil
}

// keep puts a file of the workspace into the content store.
func (s *Server) keep(dir *workspace.Dir, ex *execution, out *api.FileOut) error {
	f, st, err := dir.Get(out.Path)
	if err != nil {
		return err
	}
	defer f.Close()
	out.ModTime = st.ModTime()
	head := make([]byte, 512) // what http.DetectContentType looks at
	n, _ := io.ReadFull(f, head)
	if out.MediaType = mime.TypeByExtension(path.Ext(out.Path)); out.MediaType == "" {
		out.MediaType = http.DetectContentType(head[:n])
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return err
	}
	quota := int64(ex.ceilings.Files)
	out.ID, out.Size, err = s.files.Put(ex.caller.Tenant, io.LimitReader(f, st.Size()), quota, quota)
	return err
}
