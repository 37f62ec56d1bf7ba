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
func (s *Server) enter(ctx context.Context, turn *tenants.Ticket, o *order) (err error) {
	came := time.Now()
	if err := turn.Wait(ctx); err != nil {
		return err
	}
	o.queued = time.Since(came)
	if o.buffers, err = s.memory.Take(o.who.Tenant, o.memory, int64(o.ceilings.Buffers)); err != nil {
		return err
	}
	o.admitted, err = s.admit(ctx, o.limits.Pids)
	return err
}

// carryOut carries a call out that has joined, in its session or in a place of its own. When it returns
// nothing of the call is left.
func (s *Server) carryOut(ctx context.Context, turn *tenants.Ticket, o *order, out sink) (a *api.Answer, err error) {
	how := s.fresh
	if o.session != nil {
		how = s.inSession
		if err := o.withoutParts(); err != nil {
			return nil, err
		}
	}
	if o.admitted == nil {
		if err := s.enter(ctx, turn, o); err != nil {
			return nil, s.callError(ctx, err)
		}
	}
	defer o.admitted.End()
	if a, err = how(ctx, o, out); a == nil {
		return nil, err
	}
	a.QueueMS = result.Milliseconds(o.queued)
	o.buffers.Shrink(answerSize(a))
	s.tell(o, a)
	return a, proven(a)
}

// fresh carries a call out in a place of its own. The answer is nil if it came to nothing.
func (s *Server) fresh(ctx context.Context, o *order, out sink) (*api.Answer, error) {
	set := s.settings.Load()
	policy := set.policy
	policy.Commands, policy.Program = o.limits, o.ahead()
	if o.parts != nil {
		if err := s.part(ctx, set, o.ceilings, o.parts, &policy); err != nil {
			return nil, s.callError(ctx, err)
		}
	}
	at, err := s.source.Take(ctx, o.who.Tenant, policy)
	if err != nil {
		return nil, s.callError(ctx, explain(o.admitted, err))
	}
	var res *result.Result
	a, err := func() (*api.Answer, error) {
		// Also after a panic, which ends this request alone.
		defer func() { res, _ = at.Give() }() // the result's verdict says more
		return s.in(ctx, at, o, out)
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
	o.keep(res)
	if res != nil && res.Verdict == result.Unproven && a.Teardown.Verdict == result.Proven {
		// Nothing of the command is seen to be left, and all the same its room is.
		a.Teardown.Verdict, a.Teardown.Survivors = result.Unproven, res.Survivors
		a.ExitCode = result.ExitUnproven
	}
	return a, nil
}

// inSession carries a call out in its session. The answer is nil if it came to nothing.
func (s *Server) inSession(ctx context.Context, o *order, out sink) (*api.Answer, error) {
	a, err := s.in(ctx, o.session.Place, o, out)
	if a == nil {
		return nil, s.cameToNothing(ctx, o.session, err)
	}
	if a.Teardown.Verdict == result.Unproven {
		s.lost(o.session)
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
func (s *Server) tell(o *order, a *api.Answer) {
	s.metrics.ended(o.who.Tenant, a)
	s.recents.add(o.who.Tenant, api.Recent{
		ID: a.ID, Cause: a.Cause, ExitCode: &a.ExitCode, Verdict: a.Teardown.Verdict, Room: a.Room, Duration: a.Duration, Code: o.shown,
	})
	s.log.Info("call", "request", o.who.RequestID, "tenant", o.who.Tenant, "id", a.ID, "cause", string(a.Cause), "exit_code", a.ExitCode,
		"verdict", string(a.Teardown.Verdict), "room", a.Room, "queue_ms", a.QueueMS, "duration_ms", a.Duration)
}

// keep keeps the place of a call if the end of its command or room is unproven.
func (o *order) keep(res *result.Result) {
	if res != nil && res.Verdict == result.Unproven {
		o.left = append(o.left, res)
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
func (s *Server) in(ctx context.Context, at slot.Slot, o *order, out sink) (*api.Answer, error) {
	began := time.Now()
	if err := s.bring(ctx, at, o); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stdout, stderr, failed := s.writersOf(out, o, cancel)
	command := slot.Command{Args: o.argv, Env: o.env, Dir: o.dir, Program: o.code, Spec: job.Spec{
		Stdout: stdout, Stderr: stderr, Limits: o.limits, Timeout: o.timeout, Grace: o.grace, Attended: true, Hurry: s.base.Done(),
	}}
	switch {
	case o.input != nil:
		command.Stdin = io.MultiReader(strings.NewReader(o.stdin), o.input)
	case o.stdin != "":
		command.Stdin = strings.NewReader(o.stdin)
	}
	if o.kill {
		command.MaxOutput = o.maxOutput
	}
	run, err := at.Start(ctx, command)
	if err != nil {
		err = explain(o.admitted, err)
		if e := (*result.Error)(nil); errors.As(err, &e) && (e.Code == "not-found" || e.Code == "not-executable") {
			// As on the command line, that is how the command has ended.
			res := result.Result{Cause: result.StartFailed, Verdict: result.NotApplicable, StartedAt: began, Duration: time.Since(began), Err: e}
			return s.answer(at, o, out, &res), nil
		}
		return nil, err
	}
	o.admitted.Running()
	out.Started(run.Signal)
	res, err := run.Wait()
	if mistake := failed.Load(); mistake != nil {
		return nil, mistake
	}
	if res == nil {
		return nil, err
	}
	o.keep(res)
	a := s.answer(at, o, out, res)
	if ctx.Err() == nil && res.Verdict == result.Proven {
		a.Files = s.collect(ctx, at, o)
	}
	return a, nil
}

func (s *Server) answer(at slot.Slot, o *order, out sink, res *result.Result) *api.Answer {
	a := &api.Answer{Report: res.Report(o.id, o.argv), Room: string(at.Kind()), TimeoutMS: result.Milliseconds(o.timeout), Clamped: o.clamped, RequestID: o.who.RequestID}
	out.Output(&a.Report)
	return a
}

// bring puts the call's files into the workspace. It is opened for what is collected, too: a
// warm room has the next call's when the command has ended.
func (s *Server) bring(ctx context.Context, at slot.Slot, o *order) error {
	if len(o.files) == 0 && len(o.collect) == 0 {
		return nil
	}
	dir, err := at.Files()
	if err != nil {
		return err
	}
	for _, f := range o.files {
		if err := s.bringFile(ctx, dir, o, f); err != nil {
			return err
		}
	}
	return nil
}

func (s *Server) bringFile(ctx context.Context, dir *workspace.Dir, o *order, f fileIn) error {
	if f.id != "" {
		blob, size, err := s.files.Get(o.who.Tenant, f.id)
		if e := (*result.Error)(nil); s.elsewhere != nil && errors.As(err, &e) && e.Code == string(api.NoSuchFile) {
			if err := s.fetch(ctx, o, f.id); err != nil {
				return err
			}
			blob, size, err = s.files.Get(o.who.Tenant, f.id)
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
func (s *Server) fetch(ctx context.Context, o *order, id string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	from, err := s.elsewhere(ctx, o.who.Tenant, id)
	if err != nil {
		return err
	}
	defer from.Close()
	quota := int64(o.ceilings.Files)
	_, _, err = s.files.Put(o.who.Tenant, from, quota, quota)
	return err
}

// Bounds of what is collected of one call.
const (
	mostEntries   = 10_000 // that are looked at
	mostCollected = 256
	mostNames     = 64 << 10  // bytes of all their names
	mostMatching  = 128 << 20 // steps of matching: about a second of CPU time at most
)

// collects is how much memory what is told of collected files may take.
func (o *order) collects() int64 {
	if len(o.collect) == 0 {
		return 0
	}
	return mostNames + mostCollected*fileRest
}

// collect keeps the files that the call asks for.
func (s *Server) collect(ctx context.Context, at slot.Slot, o *order) (files []api.FileOut) {
	if len(o.collect) == 0 {
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
	deepest, left, names, match := 0, int64(o.ceilings.Files), 0, matcher{o.collect, mostMatching}
	for _, p := range o.collect {
		deepest = max(deepest, strings.Count(p, "/"))
	}
	err = dir.List(".", mostEntries, func(e workspace.Entry) error {
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
		if len(files) == mostCollected {
			return usage("more than %d files match", mostCollected)
		}
		if names += len(e.Path); names > mostNames {
			return usage("the names of the files that match have more than %d bytes", mostNames)
		}
		out := api.FileOut{Path: e.Path, Size: e.Size}
		// Files of nothing but holes cost who makes them nothing.
		if e.Size > left {
			out.Error = "with those before it, it is larger than the tenant's quota"
		} else {
			left -= e.Size
			if err := s.keep(dir, o, &out); err != nil {
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
func (s *Server) keep(dir *workspace.Dir, o *order, out *api.FileOut) error {
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
	quota := int64(o.ceilings.Files)
	out.ID, out.Size, err = s.files.Put(o.who.Tenant, io.LimitReader(f, st.Size()), quota, quota)
	return err
}
