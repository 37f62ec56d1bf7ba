package server

import (
	"cmp"
	"context"
	"errors"
	"io"
	"io/fs"
	"mime"
	"net/http"
	"os"
	"path"
	"strings"
	"syscall"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/admission"
	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/network"
	"github.com/sbxrun/sbxrun/internal/slot"
	"github.com/sbxrun/sbxrun/internal/supervise"
	"github.com/sbxrun/sbxrun/internal/tenants"
	"github.com/sbxrun/sbxrun/internal/workspace"
)

// sink receives the output of a call.
type sink interface {
	// Writers returns the writers for the command. Both accept more than maxOutput.
	Writers() (stdout, stderr io.Writer)
	// Started is called when the command runs; signal sends it a signal.
	Started(signal func(syscall.Signal) error)
	// Output adds the kept output to the report.
	Output(r *result.Report)
}

// enter waits for a ticket and then asks whether the machine has enough tasks left. The caller ends the
// permit.
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

// executeJoined executes a call that holds a ticket. When it returns, all processes of the call have exited.
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
	ex.buffers.Shrink(answerSize(a) + ex.echo())
	s.record(ex, a)
	return a, proven(a)
}

// fresh executes a call in a new sandbox. The answer is nil if it fails to start.
func (s *Server) fresh(ctx context.Context, ex *execution, out sink) (*api.Answer, error) {
	set := s.settings.Load()
	m, err := s.useImage(ex.ceilings, ex.image)
	if err != nil {
		return nil, err
	}
	policy := set.policyOf(m)
	policy.Commands, policy.Program = ex.limits, ex.ahead()
	if ex.parts != nil {
		if err := s.addParts(ctx, set, ex.ceilings, ex.parts, &policy); err != nil {
			m.release()
			return nil, s.callError(ctx, err)
		}
	}
	at, err := s.take(ctx, ex.caller.Tenant, m, policy)
	if err != nil {
		return nil, s.callError(ctx, explain(ex.admitted, err))
	}
	var res *result.Result
	a, err := func() (*api.Answer, error) {
		// Give runs even after a panic, which ends only this request.
		defer func() { res, _ = at.Give() }() // the verdict says more
		return s.in(ctx, at, ex, out)
	}()
	if a == nil {
		return nil, s.callError(ctx, err)
	}
	if policy.Parts != nil { // the parts have ended with the sandbox
		used, lost := policy.Parts.End()
		if a.Network = used; lost != nil && a.Error == nil {
			a.Error, a.ExitCode = lost.Report(), cmp.Or(a.ExitCode, lost.ExitCode)
		}
	}
	ex.keep(res)
	if res != nil && res.Verdict == result.Unproven && a.Teardown.Verdict == result.Proven {
		// The command's teardown was proven, but its sandbox's was not.
		a.Teardown.Verdict, a.Teardown.Survivors = result.Unproven, res.Survivors
		a.ExitCode = result.ExitUnproven
	}
	return a, nil
}

// inSession executes a call in its session. The answer is nil if it fails to start.
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

// Approximate memory of an answer without output and command line, and of a word without its text: an empty
// word takes only three bytes of a request.
const (
	answerRest = 4096
	wordRest   = 16
)

// answerSize estimates the memory of an answer.
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
	if a.Network != nil {
		for _, h := range a.Network.Hosts {
			size += hostRest + int64(len(h.Host)+len(h.Reason))
		}
	}
	return size + filesSize(a.Files)
}

// Approximate memory of the descriptions of a collected file and of a host, without their texts.
const (
	fileRest = 256
	hostRest = 128
)

func filesSize(files []api.FileOut) (size int64) {
	for _, f := range files {
		size += fileRest + int64(len(f.Path)+len(f.Error))
	}
	return size
}

// proven returns the error for a call whose teardown is unproven.
func proven(a *api.Answer) error {
	if a.Teardown.Verdict != result.Unproven {
		return nil
	}
	e := api.NewError(api.Unproven, "processes of the command may still be running", "the report lists them")
	e.Started, e.Report = true, a
	return e
}

// record counts a finished call and logs its cause, but not its code.
func (s *Server) record(ex *execution, a *api.Answer) {
	s.metrics.ended(ex.caller.Tenant, a)
	s.recents.add(ex.caller.Tenant, api.Recent{
		ID: a.ID, Cause: a.Cause, ExitCode: &a.ExitCode, Verdict: a.Teardown.Verdict, Room: a.Room, Duration: a.Duration, Code: ex.shown,
	})
	s.log.Info("call", "request", ex.caller.RequestID, "tenant", ex.caller.Tenant, "id", a.ID, "cause", string(a.Cause), "exit_code", a.ExitCode,
		"verdict", string(a.Teardown.Verdict), "room", a.Room, "queue_ms", a.QueueMS, "duration_ms", a.Duration)
}

// keep makes release wait for the survivors of an unproven teardown.
func (ex *execution) keep(res *result.Result) {
	if res != nil && res.Verdict == result.Unproven {
		ex.left = append(ex.left, res)
	}
}

// release frees the slot of a call, or the lease of a session. After unproven teardowns it waits until all
// survivors have exited, because they still use the machine.
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

// Admission thresholds in percent of a task limit, as on the command line.
const (
	warn  = 60
	alert = 80
)

// admit asks whether the machine has enough tasks left for a command that may use up to pids.
func (s *Server) admit(ctx context.Context, pids int64) (*admission.Permit, error) {
	return admission.Ask(ctx, admission.Terms{
		OnPressure: admission.Refuse, Warn: warn, Alert: alert, Promised: pids, Lasting: true,
		Note: func(text string) { s.log.Warn("tasks", "note", text) },
	})
}

// explain converts an error caused by a lack of tasks to busy.
func explain(leave *admission.Permit, err error) error {
	if e, ok := errors.AsType[*result.Error](err); ok {
		return leave.Explain(e)
	}
	return err
}

// callError converts the error of a call that failed to start.
func (s *Server) callError(ctx context.Context, err error) error {
	if _, ok := errors.AsType[*api.Error](err); ok {
		return err
	}
	switch e := api.AsError(err); {
	case e.Failure.Code == api.Unproven: // regardless of whether the client is still connected
		return e
	case ctx.Err() != nil && errors.Is(context.Cause(ctx), errDraining):
		return draining()
	case ctx.Err() != nil:
		return api.NewError(api.Ended, "the call was canceled before it started", "")
	default:
		return e
	}
}

// in executes a call in a slot. The answer is nil if it fails to start.
func (s *Server) in(ctx context.Context, at slot.Slot, ex *execution, out sink) (*api.Answer, error) {
	began := time.Now()
	if err := s.writeFiles(ctx, at, ex); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stdout, stderr, failed := s.writersOf(out, ex, cancel)
	command := slot.Command{Args: ex.argv, Env: ex.env, Dir: ex.dir, Program: ex.code, Options: supervise.Options{
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
			// As on the command line, this is a result and not a failure of the request.
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
	if e := res.Err; e != nil && e.Code == "workdir" && !res.Started && res.Verdict != result.Unproven {
		return nil, e // a mistake in the request, also if the command was started in a prestarted sandbox
	}
	a := s.answer(at, ex, out, res)
	if ctx.Err() == nil && res.Verdict == result.Proven {
		a.Files, a.Unmatched = s.collect(ctx, at, ex)
	}
	return a, nil
}

func (s *Server) answer(at slot.Slot, ex *execution, out sink, res *result.Result) *api.Answer {
	a := &api.Answer{Report: res.Report(ex.id, ex.argv), Room: string(at.Kind()), TimeoutMS: result.Milliseconds(ex.timeout), Clamped: ex.clamped, RequestID: ex.caller.RequestID}
	a.Image, a.Devices = imageOf(at)
	out.Output(&a.Report)
	return a
}

// writeFiles writes the call's files to the workspace. It also opens the workspace for collect, because a
// prestarted sandbox may belong to the next call once the command has ended.
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
		blob, size, err := s.stored(ctx, ex.caller.Tenant, f.id)
		if err != nil {
			return err
		}
		defer blob.Close()
		f.text, f.size = blob, size
	}
	_, err := dir.Put(f.path, reading{ctx, f.text}, f.size, f.mode)
	return err
}

// stored opens a file of the content store. If only another node has the file, it copies it first.
func (s *Server) stored(ctx context.Context, tenant, id string) (*os.File, int64, error) {
	f, size, err := s.files.Get(tenant, id)
	if s.elsewhere == nil || result.CodeOf(err) != string(api.NoSuchFile) {
		return f, size, err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	from, err := s.elsewhere(ctx, tenant, id)
	if err != nil {
		return nil, 0, err
	}
	defer from.Close()
	quota := int64(s.settings.Load().Of(tenant).Files)
	if _, _, err := s.files.Put(tenant, from, quota, quota); err != nil { // computes the ID itself
		return nil, 0, err
	}
	return s.files.Get(tenant, id)
}

// Limits of collect for one call.
const (
	maxEntries    = 10_000 // entries visited
	maxCollected  = 256
	maxNameBytes  = 64 << 10  // total length of matching names
	maxMatchSteps = 128 << 20 // steps of matching, about one second of CPU time
)

// lists returns the approximate memory for the descriptions of collected files and hosts.
func (ex *execution) lists() (size int64) {
	if len(ex.collect) > 0 {
		size += maxNameBytes + maxCollected*fileRest
	}
	if ex.parts != nil && ex.parts.Network != nil {
		size += network.MaxLines * (hostRest + 2*network.MaxText)
	}
	return size
}

// collect stores the files that match the call's patterns.
func (s *Server) collect(ctx context.Context, at slot.Slot, ex *execution) (files []api.FileOut, unmatched []string) {
	if len(ex.collect) == 0 {
		return nil, nil
	}
	dir, err := at.Files()
	if err != nil {
		return []api.FileOut{{Path: ".", Error: err.Error()}}, nil
	}
	leave, err := wait(ctx, s.walking, eachTenant)
	if err != nil {
		return []api.FileOut{{Path: ".", Error: err.Error()}}, nil
	}
	defer leave()
	left, names, match := int64(ex.ceilings.Files), 0, newMatcher(ex.collect)
	err = dir.List(".", maxEntries, func(e workspace.Entry) error {
		if ctx.Err() != nil {
			return errEnded // the client has disconnected
		}
		matches, deeper, err := match.any(e.Path)
		switch {
		case err != nil:
			return err
		case e.Type == "directory" && !deeper:
			return fs.SkipDir
		case e.Type != "file" || !matches:
			return nil
		}
		if len(files) == maxCollected {
			return usage("more than %d files match", maxCollected)
		}
		if names += len(e.Path); names > maxNameBytes {
			return usage("the names of the matching files have more than %d bytes in total", maxNameBytes)
		}
		out := api.FileOut{Path: e.Path, PathBase64: rawPath(e.Path), Size: e.Size}
		// Sparse files cost the command nothing, but the store has to read them.
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
		return append(files, api.FileOut{Path: ".", Error: err.Error()}), nil
	}
	return files, match.unmatched()
}

// keep stores a file of the workspace in the content store.
func (s *Server) keep(dir *workspace.Dir, ex *execution, out *api.FileOut) error {
	f, st, err := dir.Get(out.Path)
	if err != nil {
		return err
	}
	defer f.Close()
	out.ModTime = st.ModTime()
	head := make([]byte, 512) // the number of bytes that http.DetectContentType examines
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
