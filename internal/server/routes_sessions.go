package server

import (
	"context"
	"net/http"
	"path/filepath"
	"syscall"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/calls"
	"github.com/sbxrun/sbxrun/internal/sessions"
	"github.com/sbxrun/sbxrun/internal/values"
)

// recordEnd logs the end of a session, counts unproven ones, and frees the session's lease.
func (s *Server) recordEnd(x *sessions.Session, res *result.Result) {
	verdict := result.NotApplicable
	if res != nil {
		verdict = res.Verdict
	}
	if verdict == result.Unproven {
		s.metrics.unproven.Add(1)
	}
	if verdict == result.Unproven {
		s.release(x.Lease.Free, res)
	} else {
		x.Lease.Free()
	}
	s.log.Info("session ended", "tenant", x.Tenant, "session", x.ID, "verdict", verdict)
}

// CreateSession creates a session.
func (s *Server) CreateSession(ctx context.Context, n *api.NewSession) (*api.Session, error) {
	w := IdentityOf(ctx)
	set := s.settings.Load()
	ex := &execution{id: s.newID(), caller: w, ceilings: set.Of(w.Tenant)}
	for _, f := range n.Files {
		in, err := checkFile(f)
		if err != nil {
			return nil, err
		}
		ex.files = append(ex.files, in)
	}
	idle := ex.clamp("idle_timeout_ms", n.IdleTimeoutMS, time.Duration(set.Sessions.IdleTimeout), time.Duration(set.Sessions.IdleTimeout))
	life := ex.clamp("lifetime_ms", n.LifetimeMS, time.Duration(set.Sessions.Lifetime), time.Duration(set.Sessions.Lifetime))
	if n.Limits.MaxOutput != 0 || n.Limits.Output != "" {
		return nil, usage("max_output and output are limits of a command, not of a session")
	}
	var err error
	if ex.limits, err = boundLimits(set, ex.ceilings, n.Limits); err != nil {
		return nil, err
	}
	if ex.parts, err = checkParts(set, w.Tenant, ex.ceilings, n.Parts); err != nil {
		return nil, err
	}
	if err := set.allows(ex.ceilings, n.Image); err != nil {
		return nil, err
	}
	lease, err := s.sessions.Reserve(w.Tenant, ex.ceilings.Sessions)
	if err != nil {
		return nil, err
	}
	kept := false
	defer func() {
		if !kept {
			lease.Free()
		}
	}()
	if err := s.begin(); err != nil {
		return nil, err
	}
	defer s.running.Done()
	ctx, cancel := s.Until(ctx)
	defer cancel()
	turn, err := s.join(ctx, w.Tenant, ex.ceilings.Ceilings())
	if err != nil {
		return nil, err
	}
	defer turn.Leave()
	if err := s.enter(ctx, turn, ex); err != nil {
		return nil, s.callError(ctx, err)
	}
	defer ex.admitted.End()
	// The sandbox also ends by itself, in case this process is stopped.
	const later = 10 * time.Second
	m, err := s.useImage(ex.ceilings, n.Image)
	if err != nil {
		return nil, err
	}
	policy := set.policyOf(m)
	policy.Limits, policy.Lifetime = ex.limits, life+later
	// Files that the server writes to the workspace are not charged to the sandbox.
	if most := ex.limits.Memory; most > 0 {
		policy.TmpSize = min(policy.TmpSize, most)
	}
	if ex.parts != nil {
		if err := s.addParts(ctx, set, ex.ceilings, ex.parts, &policy); err != nil {
			m.release()
			return nil, s.callError(ctx, err)
		}
	}
	at, err := s.take(ctx, w.Tenant, m, policy)
	if err != nil {
		return nil, s.callError(ctx, explain(ex.admitted, err))
	}
	defer func() {
		if !kept {
			_, _ = at.Give() // nothing has run in it
		}
	}()
	if err := s.writeFiles(ctx, at, ex); err != nil {
		return nil, s.callError(ctx, err)
	}
	ex.admitted.Running()
	now := time.Now()
	x := &sessions.Session{
		ID: ex.id, Tenant: w.Tenant, Place: at, Made: now.UTC(), Expires: now.Add(life).UTC(), Idle: idle, Limits: n.Limits, Lease: lease,
		Processes: calls.NewStore(filepath.Join(set.StateDir, "output"), time.Duration(set.Calls.Keep), s.quota),
	}
	if ex.parts != nil {
		x.Parts, x.Asked = policy.Parts, ex.parts.Parts
	}
	x.Asked.Image = n.Image
	s.sessions.Add(x)
	kept = true
	s.log.Info("session", "request", w.RequestID, "tenant", w.Tenant, "session", x.ID, "room", at.Kind())
	out := describe(x)
	out.Clamped = ex.clamped
	return &out, nil
}

// withoutParts rejects parts in a command of a session, because they belong to the session.
func (ex *execution) withoutParts() error {
	if ex.parts != nil {
		return usage("overlay, snapshot, volumes and network belong to the session, not to a command in it")
	}
	return ex.checkImage(ex.session)
}

// lost ends a session that may have leftover processes, because it must not be used again.
func (s *Server) lost(x *sessions.Session) { s.spawn(func() { s.sessions.End(x, result.Lost) }) }

// startError returns the error of something that failed to start in a session. It ends the session if the
// teardown is unproven.
func (s *Server) startError(ctx context.Context, x *sessions.Session, err error) error {
	err = s.callError(ctx, err)
	if api.AsError(err).Failure.Code == api.Unproven {
		s.lost(x)
	}
	return err
}

// used returns a session, held until release, and a context that ends with the request or the session.
func (s *Server) used(ctx context.Context, id string) (x *sessions.Session, both context.Context, release func(), err error) {
	if x, err = s.sessions.Get(IdentityOf(ctx).Tenant, id); err != nil {
		return nil, nil, nil, err
	}
	its, free, err := x.Use()
	if err != nil {
		return nil, nil, nil, err
	}
	both, cancel := Merge(ctx, its)
	return x, both, func() {
		cancel()
		free()
	}, nil
}

// SessionPath identifies a session.
type SessionPath struct {
	ID string `path:"id" maxLength:"64" doc:"ID of the session"`
}

func describe(x *sessions.Session) api.Session {
	running := 0
	for _, c := range x.Processes.List(x.Tenant) {
		if c.Status().State != api.Over {
			running++
		}
	}
	return api.Session{ID: x.ID, Made: x.Made, Expires: x.Expires, IdleMS: result.Milliseconds(x.Idle), Limits: x.Limits, Room: string(x.Place.Kind()), Processes: running, Parts: x.Asked}
}

func (s *Server) defineSessions(a huma.API) {
	register(a, s.operation(a, huma.Operation{
		OperationID: "createSession", Method: http.MethodPost, Path: "/v1/sessions", Summary: "Create a session", DefaultStatus: http.StatusCreated,
	}, startCodes...), func(ctx context.Context, q *struct {
		Request
		Key  string `header:"Idempotency-Key" doc:"Not supported"`
		Body api.NewSession
	}) (*answer[*api.Session], error) {
		if q.Key != "" {
			return nil, api.NewError(api.Usage, "sessions do not support idempotency keys", "an unused session ends by itself")
		}
		return with(s.CreateSession(ctx, &q.Body))
	})

	register(a, s.operation(a, huma.Operation{
		OperationID: "listSessions", Method: http.MethodGet, Path: "/v1/sessions", Summary: "List the sessions",
	}), func(ctx context.Context, _ *struct{}) (*answer[api.Sessions], error) {
		out, size := api.Sessions{Sessions: []api.Session{}}, int64(0)
		for _, x := range s.sessions.List(IdentityOf(ctx).Tenant) {
			out.Sessions = append(out.Sessions, describe(x))
			size += partsSize(x.Asked)
		}
		return with(out, s.holdLong(ctx, size))
	})

	register(a, s.operation(a, huma.Operation{
		OperationID: "getSession", Method: http.MethodGet, Path: "/v1/sessions/{id}", Summary: "Get a session",
	}, api.NoSuchSession, api.Ended), func(ctx context.Context, q *struct{ SessionPath }) (*answer[api.Session], error) {
		x, err := s.sessions.Get(IdentityOf(ctx).Tenant, q.ID)
		if err != nil {
			return nil, err
		}
		return with(describe(x), s.holdLong(ctx, partsSize(x.Asked)))
	})

	register(a, s.operation(a, huma.Operation{
		OperationID: "deleteSession", Method: http.MethodDelete, Path: "/v1/sessions/{id}", Summary: "End a session and everything in it",
	}, api.NoSuchSession, api.Ended, api.Unproven), func(ctx context.Context, q *struct{ SessionPath }) (*answer[*api.SessionEnd], error) {
		return with(s.EndSession(ctx, q.ID))
	})

	type exec struct {
		Request
		SessionPath
		Stream  string `query:"stream" enum:"0,1" doc:"As for run"`
		Key     string `header:"Idempotency-Key" maxLength:"256" doc:"As for run"`
		RawBody []byte
		Body    api.Call
	}
	register(a, s.operation(a, huma.Operation{
		OperationID: "exec", Method: http.MethodPost, Path: "/v1/sessions/{id}/exec", Summary: "Run a command or program in a session",
		Description: "Its own processes end with it. Files remain, and other commands in the session keep running.", Responses: answers(a),
	}, append(startCodes, api.Idempotency, api.NoSuchSession, api.Ended)...), func(ctx context.Context, q *exec) (*streamed, error) {
		x, ended := s.sessions.Get(IdentityOf(ctx).Tenant, q.ID)
		if ended != nil && q.Key == "" {
			return nil, ended
		}
		return s.answered(q.Request, q.Stream, q.Key, q.RawBody, &q.Body, x, ended)
	})
}

// ProcessPath identifies a background process of a session.
type ProcessPath struct {
	SessionPath
	PID string `path:"pid" maxLength:"64" doc:"ID of the process"`
}

// process returns a background process of a session.
func (s *Server) process(ctx context.Context, q ProcessPath) (*sessions.Session, *calls.Call, error) {
	x, err := s.sessions.Get(IdentityOf(ctx).Tenant, q.ID)
	if err != nil {
		return nil, nil, err
	}
	if c := x.Processes.Get(x.Tenant, q.PID); c != nil {
		return x, c, nil
	}
	return nil, nil, api.NewError(api.NoSuchProcess, "no such process", "GET …/processes lists them")
}

func (s *Server) defineProcesses(a huma.API) {
	const base = "/v1/sessions/{id}/processes"
	none := []api.Code{api.NoSuchSession, api.Ended, api.NoSuchProcess}
	register(a, s.operation(a, huma.Operation{
		OperationID: "startProcess", Method: http.MethodPost, Path: base, Summary: "Start a background process in a session", DefaultStatus: http.StatusAccepted,
		Description: "The process runs until it exits, its timeout, or the end of the session. Until then the session is not idle. Without a timeout, the limit is the end of the session or the tenant's max_timeout.",
	}, append(append(startCodes, api.Idempotency), none...)...), func(ctx context.Context, q *struct {
		Request
		SessionPath
		Key     string `header:"Idempotency-Key" maxLength:"256" doc:"A second request with the same key and body gets the same process, for ten minutes."`
		RawBody []byte
		Body    api.NewProcess
	}) (*answer[api.CallStatus], error) {
		x, ended := s.sessions.Get(IdentityOf(ctx).Tenant, q.ID)
		if ended != nil && q.Key == "" {
			return nil, ended
		}
		ex, err := s.checkIn(IdentityOf(ctx), x, &q.Body.Call)
		if err == nil {
			err = ex.withoutParts()
		}
		if err != nil {
			return nil, err
		}
		if q.Body.KeepStdin {
			ex.input = calls.NewInput()
		}
		c, err := s.startOnce(q.Request, q.Key, q.RawBody, func() (*calls.Call, error) {
			if ended != nil { // otherwise a stored answer is returned, as for exec
				return nil, ended
			}
			its, release, err := x.Use()
			if err != nil {
				return nil, err
			}
			return s.launch(its, x.Processes, ex, release)
		})
		if err != nil {
			return nil, err
		}
		return with(brief(c), nil)
	})

	register(a, s.operation(a, huma.Operation{
		OperationID: "listProcesses", Method: http.MethodGet, Path: base, Summary: "List the background processes of a session",
	}, none...), func(ctx context.Context, q *struct{ SessionPath }) (*answer[api.Calls], error) {
		x, err := s.sessions.Get(IdentityOf(ctx).Tenant, q.ID)
		if err != nil {
			return nil, err
		}
		return s.listOf(ctx, x.Processes.List(x.Tenant))
	})

	register(a, s.operation(a, huma.Operation{
		OperationID: "getProcess", Method: http.MethodGet, Path: base + "/{pid}", Summary: "Get the status of a background process",
	}, none...), func(ctx context.Context, q *struct {
		ProcessPath
		WaitMS float64 `query:"wait_ms" minimum:"0" maximum:"60000" doc:"Time to wait for the end"`
	}) (*answer[api.CallStatus], error) {
		_, c, err := s.process(ctx, q.ProcessPath)
		if err != nil {
			return nil, err
		}
		awaitCall(ctx, c, milliseconds(q.WaitMS))
		return s.statusOf(ctx, c)
	})

	register(a, s.operation(a, huma.Operation{
		OperationID: "deleteProcess", Method: http.MethodDelete, Path: base + "/{pid}", Summary: "End a background process, or discard a finished one",
	}, none...), func(ctx context.Context, q *struct{ ProcessPath }) (*answer[api.CallStatus], error) {
		x, c, err := s.process(ctx, q.ProcessPath)
		if err != nil {
			return nil, err
		}
		return with(s.remove(ctx, x.Processes, c), nil)
	})

	register(a, s.operation(a, huma.Operation{
		OperationID: "signalProcess", Method: http.MethodPost, Path: base + "/{pid}/signal", Summary: "Send a signal to a background process and its descendants", DefaultStatus: http.StatusNoContent,
	}, none...), func(ctx context.Context, q *struct {
		ProcessPath
		Body api.Signal
	}) (*struct{}, error) {
		_, c, err := s.process(ctx, q.ProcessPath)
		if err != nil {
			return nil, err
		}
		var sig values.Signal
		if err := sig.UnmarshalText([]byte(q.Body.Signal)); err != nil {
			return nil, usage("signal: %v", err)
		}
		both, cancel := s.Until(ctx)
		defer cancel()
		return nil, c.Signal(both, syscall.Signal(sig))
	})

	register(a, s.operation(a, huma.Operation{
		OperationID: "processStdin", Method: http.MethodPost, Path: base + "/{pid}/stdin", Summary: "Write to the stdin of a background process",
		Description: "Requires keep_stdin. Responds when the process has read everything except what fits into a pipe. Requests for one process are handled one after another.",
		RequestBody: takes("application/octet-stream"), DefaultStatus: http.StatusNoContent,
	}, none...), func(ctx context.Context, q *struct {
		Request
		ProcessPath
		End string `query:"end" enum:"0,1" doc:"1 closes stdin afterwards"`
	}) (*struct{}, error) {
		_, c, err := s.process(ctx, q.ProcessPath)
		if err != nil {
			return nil, err
		}
		if c.Input == nil {
			return nil, usage("the process was started without keep_stdin")
		}
		there, leave := WhileConnected(ctx)
		defer leave()
		both, cancel := s.Until(there)
		defer cancel()
		if sent, err := c.Input.Send(both, body{q.Request}); err != nil {
			e := *api.AsError(s.callError(both, err))
			e.Started = sent > 0
			return nil, &e
		}
		if q.End == "1" {
			c.Input.End()
		}
		return nil, nil
	})

	register(a, s.operation(a, huma.Operation{
		OperationID: "processOutput", Method: http.MethodGet, Path: base + "/{pid}/output", Summary: "Read the output of a background process", Responses: octets("The output from the offset on"),
	}, none...), func(ctx context.Context, q *struct {
		Request
		ProcessPath
		OutputQuery
	}) (*streamed, error) {
		_, c, err := s.process(ctx, q.ProcessPath)
		if err != nil {
			return nil, err
		}
		return s.output(q.Request, c, q.OutputQuery), nil
	})
}
