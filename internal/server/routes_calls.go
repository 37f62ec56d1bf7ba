package server

import (
	"context"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/calls"
	"github.com/sbxrun/sbxrun/internal/tenants"
)

// launch executes a call in the background until base is done or the server stops, and then calls release.
func (s *Server) launch(base context.Context, book *calls.Store, ex *execution, release func()) (*calls.Call, error) {
	d, err := s.detach(base, book, ex, ex.ceilings.Ceilings(), release)
	if err != nil {
		return nil, err
	}
	return d.Start(), nil
}

// Detached is a background call before it begins. It must be started or given up.
type Detached struct {
	*calls.Call
	s      *Server
	ex     *execution
	jobs   *calls.Store
	ticket *tenants.Ticket
	ctx    context.Context
	cancel func()
}

// detach creates a background call and joins the scheduler. It takes over release.
func (s *Server) detach(base context.Context, book *calls.Store, ex *execution, c tenants.Ceilings, release func()) (_ *Detached, err error) {
	if err := s.begin(); err != nil {
		release()
		return nil, err
	}
	ctx, end := s.Until(base)
	d := &Detached{s: s, ex: ex, jobs: book, cancel: func() {
		end()
		release()
		s.running.Done()
	}}
	defer func() {
		if err != nil {
			d.cancel()
			s.count(ex, nil, err)
		}
	}()
	share := calls.Limits{Calls: int64(s.settings.Load().Calls.Most), Output: int64(ex.ceilings.Output)}
	memory, err := s.memory.Take(ex.caller.Tenant, ex.size(), int64(ex.ceilings.Buffers))
	if err != nil {
		return nil, err
	}
	if d.ctx, d.Call, err = book.Add(ctx, ex.id, ex.caller.Tenant, ex.input, ex.maxOutput, share, memory); err != nil {
		return nil, err
	}
	join := s.join
	if ex.process {
		join = s.joinProcess
	}
	if d.ticket, err = join(ctx, ex.caller.Tenant, c); err != nil {
		book.Drop(d.Call)
		return nil, err
	}
	return d, nil
}

// joinProcess admits a background process.
func (s *Server) joinProcess(_ context.Context, tenant string, c tenants.Ceilings) (*tenants.Ticket, error) {
	turn, err := s.processes.Join(tenant, tenants.Ceilings{Concurrency: s.settings.Load().Of(tenant).Processes, Rate: c.Rate})
	if err != nil {
		e := api.AsError(err)
		return nil, api.NewError(e.Failure.Code, "cannot start a background process: "+e.Failure.Message, e.Failure.Hint)
	}
	return turn, nil
}

// Start begins the call.
func (d *Detached) Start() *calls.Call {
	go d.run()
	return d.Call
}

func (d *Detached) run() {
	defer d.cancel()
	a, err := d.s.executeTicket(d.ctx, d.ticket, d.ex, d.Call)
	d.s.count(d.ex, a, err)
	size := int64(answerRest)
	if a != nil {
		size = answerSize(a)
	}
	d.End(a, size, err)
}

// GiveUp discards the call.
func (d *Detached) GiveUp() {
	d.ex.admitted.End() // nil until admitted
	d.ticket.Leave()
	d.jobs.Drop(d.Call)
	d.cancel()
}

// CallPath identifies a call. It is exported because huma ignores unexported embedded structs.
type CallPath struct {
	ID string `path:"id" maxLength:"64"`
}

func noSuchCall() error {
	return api.NewError(api.NoSuchCall, "no such call", "GET /v1/calls lists them")
}

func (s *Server) defineCalls(a huma.API) {
	type newCall struct {
		Request
		Key     string `header:"Idempotency-Key" maxLength:"256" doc:"A second request with the same key and body gets the same call, for ten minutes."`
		RawBody []byte
		Body    api.Call
	}
	type begun struct {
		Status int
		Body   api.CallStatus
	}
	register(a, s.operation(a, huma.Operation{
		OperationID: "call", Method: http.MethodPost, Path: "/v1/calls", Summary: "Start a command or program in a new sandbox", DefaultStatus: http.StatusAccepted,
		Description: "The call runs in the background, independently of connections.",
	}, append(startCodes, api.Idempotency)...), func(ctx context.Context, q *newCall) (*begun, error) {
		ex, err := s.check(IdentityOf(ctx), &q.Body)
		if err != nil {
			return nil, err
		}
		if passed(ctx) && q.r.Header.Get(CheckHeader) != "" {
			return &begun{Status: http.StatusOK}, nil // distinguishes the check from a call, for the gateway
		}
		c, err := s.startOnce(q.Request, q.Key, q.RawBody, func() (*calls.Call, error) {
			return s.launch(context.Background(), s.jobs, ex, func() {})
		})
		if err != nil {
			return nil, err
		}
		return &begun{http.StatusAccepted, brief(c)}, nil
	})

	register(a, s.operation(a, huma.Operation{
		OperationID: "listCalls", Method: http.MethodGet, Path: "/v1/calls", Summary: "List running and recently finished calls",
	}), func(ctx context.Context, _ *struct{}) (*answer[api.Calls], error) {
		return s.listOf(ctx, s.jobs.List(IdentityOf(ctx).Tenant))
	})

	type getCall struct {
		CallPath
		WaitMS float64 `query:"wait_ms" minimum:"0" maximum:"60000" doc:"Time to wait for the end"`
	}
	register(a, s.operation(a, huma.Operation{
		OperationID: "getCall", Method: http.MethodGet, Path: "/v1/calls/{id}", Summary: "Get the status of a call",
	}, api.NoSuchCall), func(ctx context.Context, q *getCall) (*answer[api.CallStatus], error) {
		c := s.jobs.Get(IdentityOf(ctx).Tenant, q.ID)
		if c == nil {
			return nil, noSuchCall()
		}
		awaitCall(ctx, c, milliseconds(q.WaitMS))
		return s.statusOf(ctx, c)
	})

	register(a, s.operation(a, huma.Operation{
		OperationID: "deleteCall", Method: http.MethodDelete, Path: "/v1/calls/{id}", Summary: "End a call, or discard a finished one",
	}, api.NoSuchCall), func(ctx context.Context, q *struct{ CallPath }) (*answer[api.CallStatus], error) {
		c := s.jobs.Get(IdentityOf(ctx).Tenant, q.ID)
		if c == nil {
			return nil, noSuchCall()
		}
		return with(s.remove(ctx, s.jobs, c), nil)
	})

	type output struct {
		Request
		CallPath
		OutputQuery
	}
	register(a, s.operation(a, huma.Operation{
		OperationID: "callOutput", Method: http.MethodGet, Path: "/v1/calls/{id}/output", Summary: "Read the output of a call", Responses: octets("The output from the offset on"),
	}, api.NoSuchCall), func(ctx context.Context, q *output) (*streamed, error) {
		c := s.jobs.Get(IdentityOf(ctx).Tenant, q.ID)
		if c == nil {
			return nil, noSuchCall()
		}
		return s.output(q.Request, c, q.OutputQuery), nil
	})
}

// remove ends a call, waits for it, and discards it, even if there is no memory for the answer.
func (s *Server) remove(ctx context.Context, book *calls.Store, c *calls.Call) api.CallStatus {
	c.Cancel()
	<-c.Ended()
	a, err := s.statusOf(ctx, c)
	book.Drop(c)
	if err != nil {
		status := c.Status()
		status.Shorten()
		return status
	}
	return a.Body
}

// huma builds the whole answer in memory before it sends any of it, and the client may read slowly.
const escaped = 6 // bytes of JSON for one control character

// holdLong reserves memory for a long answer. Short ones are sent even if no memory is left.
func (s *Server) holdLong(ctx context.Context, size int64) error {
	if size <= api.MaxListed {
		return nil
	}
	return s.Hold(ctx, escaped*size)
}

// statusOf returns the answer that describes a call.
func (s *Server) statusOf(ctx context.Context, c *calls.Call) (*answer[api.CallStatus], error) {
	status, size := c.Status(), int64(0)
	if status.Report != nil {
		size = answerSize(status.Report)
	}
	return with(status, s.holdLong(ctx, size))
}

// brief returns the status of a call, without the lists of its report if they are long.
func brief(c *calls.Call) api.CallStatus {
	status := c.Status()
	if r := status.Report; r != nil && answerSize(r) > api.MaxListed {
		status.Shorten()
	}
	return status
}

// listOf returns the answer that lists calls, after reserving memory for it.
func (s *Server) listOf(ctx context.Context, all []*calls.Call) (*answer[api.Calls], error) {
	out, size := api.Calls{Calls: []api.CallStatus{}}, int64(0)
	for _, c := range all {
		status := brief(c)
		size += answerRest
		if r := status.Report; r != nil {
			size += escaped * (answerSize(r) - answerRest)
		}
		out.Calls = append(out.Calls, status)
	}
	return with(out, s.Hold(ctx, size))
}

// awaitCall waits until a call has ended, the time is over, or the client has disconnected. If the server
// stops, the call ends too.
func awaitCall(ctx context.Context, c *calls.Call, most time.Duration) {
	if most == 0 {
		return
	}
	timer := time.NewTimer(most)
	defer timer.Stop()
	select {
	case <-c.Ended():
	case <-ctx.Done():
	case <-timer.C:
	}
}

// OutputQuery selects a part of a call's output.
type OutputQuery struct {
	From   int64  `query:"from" minimum:"0" doc:"Offset of the first byte"`
	Stream string `query:"stream" enum:"stdout,stderr" doc:"Default: stdout"`
	Follow string `query:"follow" enum:"0,1" doc:"1 continues until the end of the output; after a lost connection, continue from the offset after the last byte received"`
}

// octets describes a binary response.
func octets(description string) map[string]*huma.Response {
	return map[string]*huma.Response{"200": {Description: description, Content: map[string]*huma.MediaType{"application/octet-stream": {Schema: &huma.Schema{Type: "string", Format: "binary"}}}}}
}

// output sends the output of a call.
func (s *Server) output(q Request, c *calls.Call, o OutputQuery) *streamed {
	return &streamed{func(huma.Context) {
		spool := c.Stream(o.Stream)
		size, _, ended := spool.Size()
		h := q.w.Header()
		h.Set("Content-Type", "application/octet-stream")
		h.Set("X-Output-Size", strconv.FormatInt(size, 10))
		h.Set("X-Output-Ended", strconv.FormatBool(ended))
		if o.Follow != "1" {
			h.Set("Content-Length", strconv.FormatInt(max(0, size-o.From), 10))
		}
		ctx, cancel := s.Until(q.r.Context())
		defer cancel()
		q.w.WriteHeader(http.StatusOK)
		flush := http.NewResponseController(q.w).Flush
		buf := make([]byte, pieceSize)
		for at := o.From; ; {
			section := spool.Section(at, size)
			for {
				n, err := section.Read(buf)
				if n > 0 {
					if _, err := q.w.Write(buf[:n]); err != nil {
						return
					}
					at += int64(n)
				}
				if err == io.EOF {
					break
				}
				if err != nil {
					panic(http.ErrAbortHandler) // a truncated response must not look complete
				}
			}
			if o.Follow != "1" || ended && at >= size {
				return
			}
			if ctx.Err() != nil {
				panic(http.ErrAbortHandler) // see above
			}
			if flush() != nil {
				return
			}
			size, ended = spool.Wait(ctx, at)
		}
	}}
}
