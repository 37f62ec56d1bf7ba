package server

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"
	"github.com/danielgtaylor/huma/v2/validation"
	"github.com/go-json-experiment/json/jsontext"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/calls"
	"github.com/sbxrun/sbxrun/internal/sessions"
	"github.com/sbxrun/sbxrun/internal/tenants"
)

// usual has hints for members that clients of other services often name or fill in differently.
var usual = map[string]string{
	"argv": argvHint, "command": argvHint, "cmd": argvHint,
	"timeout": "use timeout_ms, in milliseconds",
	"content": "use text or base64",
	"memory":  "limits.memory is a number of bytes",
	"stdin":   "stdin is text; encode JSON as a string",
}

const argvHint = `use argv, a list of strings: ["sh", "-c", "COMMAND"]`

func init() {
	huma.ValidateStrictCasing = true // otherwise Argv would be accepted for argv without its checks
	// Numbers without an exponent: 1048576, not 1.048576e+06.
	validation.MsgExpectedMinimumNumber, validation.MsgExpectedMaximumNumber = "expected number >= %.16g", "expected number <= %.16g"
	// Replace huma's own error type for requests that do not match the document.
	huma.NewError = func(status int, message string, errs ...error) huma.StatusError {
		if e, ok := errors.AsType[*api.Error](errors.Join(errs...)); ok { // set by heldBody
			return e
		}
		e := api.NewError(api.Usage, message, "")
		if message == "request body is required" {
			e.Failure.Hint = "send {} for an empty request"
		}
		switch status {
		case http.StatusRequestEntityTooLarge:
			e = api.NewError(api.TooLarge, "the request is too large", "")
		case http.StatusUnsupportedMediaType:
			e = api.NewError(api.MediaType, "unsupported media type", "send application/json")
		}
		// The messages can contain text of the request, such as a member's name. Without a limit, the answer
		// could take several times the memory reserved for the request.
		const most, longest = 16, 200
		var words []string
		for _, err := range errs {
			var detail *huma.ErrorDetail
			if !errors.As(err, &detail) { // never the value, which may be code or a secret
				continue
			}
			if len(words) == most {
				words = append(words, "and more")
				break
			}
			if hint := usual[detail.Location[strings.LastIndexByte(detail.Location, '.')+1:]]; hint != "" {
				e.Failure.Hint = hint
			}
			words = append(words, strings.TrimSpace(fmt.Sprintf("%.*s: %.*s", longest, detail.Location, longest, strings.ReplaceAll(detail.Message, "\n", " "))))
		}
		if len(words) > 0 {
			e.Failure.Message += ": " + strings.Join(words, "; ")
		}
		return e
	}
}

// Request gives a handler access to its HTTP request and response.
type Request struct {
	w http.ResponseWriter
	r *http.Request
}

// Resolve is called by huma after it has read the request.
func (q *Request) Resolve(ctx huma.Context) []error {
	q.r, q.w = humago.Unwrap(ctx)
	return nil
}

// held is a middleware that reserves memory for the request body as it is read.
func (s *Server) held(ctx huma.Context, next func(huma.Context)) {
	r, w := humago.Unwrap(ctx)
	s.holdBody(w, r)
	next(ctx)
}

// holding is the memory reserved for a request until it ends.
type holding struct {
	mu    sync.Mutex
	lease *tenants.Lease // nil if none
	over  bool
}

func (h *holding) free() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.over = true
	h.lease.Free()
}

// Hold reserves memory for a request until it ends. It fails after that, because an MCP tool may still run:
// the SDK does not wait for tools when the client disconnects. Requests that do not come over HTTP are not
// limited.
func (s *Middleware) Hold(ctx context.Context, n int64) error {
	h, ok := ctx.Value(holdingKey).(*holding)
	if !ok {
		return nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.over {
		return api.NewError(api.Ended, "the client has disconnected", "")
	}
	tenant := IdentityOf(ctx).Tenant
	own := int64(s.settings.Load().Of(tenant).Buffers)
	if h.lease != nil {
		return h.lease.Grow(n, own)
	}
	var err error
	h.lease, err = s.memory.Take(tenant, n, own)
	return err
}

// holdBody reserves memory for the request body, and for the values decoded from it, as it is read.
func (s *Middleware) holdBody(w http.ResponseWriter, r *http.Request) {
	if r.Body != nil {
		r.Body = &heldBody{r.Body, s, w, r.Context(), nil}
	}
}

type heldBody struct {
	io.ReadCloser
	s   *Middleware
	w   http.ResponseWriter
	ctx context.Context
	err error // of the reservation
}

func (b *heldBody) Read(p []byte) (int, error) {
	const copies = 3 // text, values, and the types of package api
	if b.err != nil {
		return 0, b.err
	}
	n, err := b.ReadCloser.Read(p)
	if n == 0 {
		return n, err
	}
	if b.err = b.s.Hold(b.ctx, copies*int64(n)); b.err != nil {
		b.w.Header().Set("Connection", "close") // otherwise net/http reads the rest before it answers
		return 0, b.err
	}
	return n, err
}

func (b *heldBody) Close() error {
	if b.err != nil {
		return nil // see above
	}
	return b.ReadCloser.Close()
}

// checkValueCount rejects JSON with so many values that decoding it would take many times the memory of the
// text: an empty object takes two bytes of text and fifty of memory.
func checkValueCount(text []byte) error {
	const most = 1 << 16
	n, quoted := 0, false
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case !quoted && (c == ',' || c == '[' || c == '{'):
			n++
		}
	}
	if n > most {
		return fmt.Errorf("the document has more than %d values", most)
	}
	return nil
}

// Strict rejects JSON that parsers interpret differently (RFC 7493). Package json replaces invalid Unicode
// with U+FFFD, uses the last of several members with one name, and merges objects of one name although only
// the last has been checked.
func Strict(text []byte) error {
	err := jsontext.NewDecoder(bytes.NewBuffer(text)).SkipValue()
	if at := (*jsontext.SyntacticError)(nil); errors.As(err, &at) { // its own message may quote code or a secret
		what := "invalid Unicode"
		if errors.Is(err, jsontext.ErrDuplicateName) {
			what = "duplicate member"
		}
		return fmt.Errorf("%s, at byte %d, %.100q", what, at.ByteOffset, at.JSONPointer)
	}
	return err
}

// Handler returns the handler of the whole interface; mcp handles /mcp.
func (s *Server) Handler(mcp http.Handler) http.Handler {
	mux := s.Mux(s.metrics.registry, func() *api.Error {
		if s.Ready() {
			return nil
		}
		return draining()
	})
	s.define(mux)
	mux.Handle("/mcp", mcp)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) { // everything else
		if methods := methodsOf(mux, r); len(methods) > 0 {
			w.Header().Set("Allow", strings.Join(methods, ", "))
			api.NewError(api.NoSuchMethod, fmt.Sprintf("%.200s supports %s, not %s", r.URL.Path, strings.Join(methods, ", "), r.Method), "").Write(w)
			return
		}
		api.NewError(api.NoSuchPath, fmt.Sprintf("no such operation: %s %.200s", r.Method, r.URL.Path), "GET /openapi.json lists all operations").Write(w)
	})
	return s.Middleware.Handler(mux)
}

// methodsOf returns the methods that the path of a request supports.
func methodsOf(mux *http.ServeMux, r *http.Request) (list []string) {
	other := *r
	for _, other.Method = range []string{http.MethodGet, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete} {
		if _, pattern := mux.Handler(&other); pattern != "/" {
			list = append(list, other.Method)
		}
	}
	return list
}

// define registers all operations.
func (s *Server) define(mux *http.ServeMux) huma.API {
	c := huma.DefaultConfig("sbxrun", s.version)
	c.Info.Description = "Runs untrusted code in sandboxes, ends everything it started, and proves that. An error reports whether anything has started; retry a request only if it has not."
	c.DocsPath, c.SchemasPath = "", ""
	c.CreateHooks = nil // no schema links in answers
	c.OpenAPIPath = ""  // see documents
	c.Info.License = &huma.License{Name: "MIT", URL: "https://opensource.org/license/mit"}
	c.Servers = []*huma.Server{{URL: "/", Description: "This server"}}
	read := huma.DefaultJSONFormat
	read.Unmarshal = func(text []byte, v any) error {
		if err := checkValueCount(text); err != nil {
			return err
		}
		if err := json.Unmarshal(text, v); err != nil {
			return err
		}
		return Strict(text)
	}
	c.Formats = map[string]huma.Format{"application/json": read, "json": read}
	c.Components.SecuritySchemes = map[string]*huma.SecurityScheme{"token": {Type: "http", Scheme: "bearer", Description: "Not needed on a Unix socket"}}
	c.Security = []map[string][]string{{"token": {}}, {}}
	a := humago.New(mux, c)
	s.defineRun(a)
	s.defineCalls(a)
	s.defineSessions(a)
	s.defineCells(a)
	s.defineProcesses(a)
	s.defineWorkspace(a)
	s.defineFiles(a)
	s.defineParts(a)
	s.defineLanguages(a)
	s.defineImages(a)
	s.defineStatus(a)
	// "..." is the mux's syntax, not OpenAPI's.
	for path, item := range a.OpenAPI().Paths {
		if plain := strings.ReplaceAll(path, "...}", "}"); plain != path {
			delete(a.OpenAPI().Paths, path)
			a.OpenAPI().Paths[plain] = item
		}
	}
	for _, name := range []string{"calls", "sessions", "workspace", "processes", "content store", "snapshots", "volumes", "server"} {
		a.OpenAPI().Tags = append(a.OpenAPI().Tags, &huma.Tag{Name: name})
	}
	documents(mux, a.OpenAPI())
	return a
}

// register is huma.Register for handlers that return any error; it converts that with [api.AsError].
func register[I, O any](a huma.API, o huma.Operation, handle func(context.Context, *I) (*O, error)) {
	huma.Register(a, o, func(ctx context.Context, in *I) (*O, error) {
		out, err := handle(ctx, in)
		if err != nil {
			return nil, api.AsError(err)
		}
		return out, nil
	})
}

// answer is a JSON response.
type answer[T any] struct{ Body T }

func with[T any](v T, err error) (*answer[T], error) {
	if err != nil {
		return nil, err
	}
	return &answer[T]{v}, nil
}

// operation adds what all operations have in common: the body limit and the error responses.
func (s *Server) operation(a huma.API, o huma.Operation, codes ...api.Code) huma.Operation {
	o.Tags = []string{tagOf(o.Path)}
	if o.Description == "" {
		o.Description = o.Summary + "."
	}
	if o.RequestBody == nil { // otherwise it is a byte stream, which is not held in memory
		o.Middlewares = huma.Middlewares{s.held}
	}
	o.MaxBodyBytes = int64(s.settings.Load().MaxBody)
	o.BodyReadTimeout = pieceBound // for the first piece; see timeoutWriter
	if o.Responses == nil {
		o.Responses = map[string]*huma.Response{}
	}
	schema := a.OpenAPI().Components.Schemas.Schema(reflect.TypeFor[api.Error](), true, "Error")
	said := map[int][]string{}
	for _, code := range append(codes, api.Usage, api.Auth, api.Setup, api.Internal) {
		status := api.Codes()[code]
		said[status] = append(said[status], string(code))
	}
	for _, status := range slices.Sorted(maps.Keys(said)) {
		o.Responses[strconv.Itoa(status)] = &huma.Response{
			Description: "error.code " + strings.Join(said[status], ", "),
			Content:     map[string]*huma.MediaType{"application/json": {Schema: schema}},
		}
	}
	return o
}

// startCodes are the error codes of all operations that start something.
var startCodes = []api.Code{api.TooLarge, api.MediaType, api.Policy, api.NoSuchFile, api.Quota, api.QuotaKept, api.Busy, api.Draining, api.Limit, api.Unproven, api.QuotaDisk}

// content describes a response with several media types.
func content(a huma.API, description string, types map[string]reflect.Type) *huma.Response {
	r := &huma.Response{Description: description, Content: map[string]*huma.MediaType{}}
	for name, t := range types {
		r.Content[name] = &huma.MediaType{Schema: a.OpenAPI().Components.Schemas.Schema(t, true, t.Name())}
	}
	return r
}

// streamed is a response that the handler writes itself.
type streamed struct{ Body func(huma.Context) }

// writes returns a response written by answer, or the error that it returns.
func (q Request) writes(answer func() error) (*streamed, error) {
	return &streamed{func(huma.Context) {
		if err := answer(); err != nil {
			api.AsError(err).Write(q.w)
		}
	}}, nil
}

// answers describes the responses of a call that the client waits for.
func answers(a huma.API) map[string]*huma.Response {
	return map[string]*huma.Response{"200": content(a, "The report of the call, whatever its outcome; or a stream of events, the last of which is the report.", map[string]reflect.Type{
		"application/json": reflect.TypeFor[api.Answer](), "application/x-ndjson": reflect.TypeFor[api.Event](), "text/event-stream": reflect.TypeFor[api.Event](),
	})}
}

func (s *Server) defineRun(a huma.API) {
	type request struct {
		Request
		Stream  string `query:"stream" enum:"0,1" doc:"1 streams JSON lines, like Accept: application/x-ndjson; Accept: text/event-stream streams server-sent events"`
		Key     string `header:"Idempotency-Key" maxLength:"256" doc:"A second request with the same key and body gets the answer to the first, while that runs and for ten minutes after its end. Not for streams."`
		RawBody []byte
		Body    api.Call
	}
	register(a, s.operation(a, huma.Operation{
		OperationID: "run", Method: http.MethodPost, Path: "/v1/run", Summary: "Run a command or program in a new sandbox",
		Description: "Responds when all processes have exited. If the client disconnects, the call ends.", Responses: answers(a),
	}, append(startCodes, api.Idempotency)...), func(ctx context.Context, q *request) (*streamed, error) {
		return s.answered(q.Request, q.Stream, q.Key, q.RawBody, &q.Body, nil, nil)
	})
}

// answered executes a call that the client waits for, in a session unless x is nil. ended is the error of a
// session that has ended: only a stored answer is returned then.
func (s *Server) answered(q Request, stream, key string, body []byte, c *api.Call, x *sessions.Session, ended error) (*streamed, error) {
	ex, err := s.check(IdentityOf(q.r.Context()), c)
	if err != nil {
		return nil, err
	}
	ex.session, ex.ended = x, ended
	accept := q.r.Header.Get("Accept")
	sse := strings.Contains(accept, "text/event-stream")
	streams := sse || stream == "1" || strings.Contains(accept, "application/x-ndjson")
	if streams && key != "" {
		return nil, api.NewError(api.Usage, "streams do not support idempotency keys", "use POST /v1/calls and read the output by offset")
	}
	return q.writes(func() error {
		defer func() { ex.buffers.Free() }()
		if streams {
			out := newEvents(q.w, sse, ex, s.spawn)
			out.alive()
			out.finish(s.execute(q.r.Context(), ex, out))
			return nil
		}
		return s.respond(q, key, body, ex, func(ctx context.Context) (func(http.ResponseWriter), bool, error) {
			a, err := s.execute(ctx, ex, newBuffered(ex))
			return func(w http.ResponseWriter) { writeAnswer(w, a) }, a != nil && a.Started, err
		})
	})
}

// execute executes a call for as long as its client is connected.
func (s *Server) execute(ctx context.Context, ex *execution, out sink) (a *api.Answer, err error) {
	defer func() { s.count(ex, a, err) }()
	if err := s.begin(); err != nil {
		return nil, err
	}
	defer s.running.Done()
	ctx, cancel := s.Until(ctx)
	defer cancel()
	if ex.ended != nil {
		return nil, ex.ended
	}
	if ex.session != nil { // the session's end cancels the call
		its, release, err := ex.session.Use()
		if err != nil {
			return nil, err
		}
		defer release()
		ctx, cancel = Merge(ctx, its)
		defer cancel()
	}
	turn, err := s.join(ctx, ex.caller.Tenant, ex.ceilings.Ceilings())
	if err != nil {
		return nil, err
	}
	return s.executeTicket(ctx, turn, ex, out)
}

// executeTicket executes a call that holds a ticket.
func (s *Server) executeTicket(ctx context.Context, turn *tenants.Ticket, ex *execution, out sink) (a *api.Answer, err error) {
	err = s.Recover(context.WithValue(ctx, whoKey, ex.caller), func() (err error) {
		defer func() { s.release(turn.Leave, ex.left...) }()
		a, err = s.executeJoined(ctx, turn, ex, out)
		return err
	})
	return a, err
}

// count counts a call that failed to start.
func (s *Server) count(ex *execution, a *api.Answer, err error) {
	var e *api.Error
	if a == nil && errors.As(err, &e) && !e.Started {
		s.metrics.refused.WithLabelValues(ex.caller.Tenant, string(e.Failure.Code)).Inc()
	}
}

// replayed is the header of an answer stored by an earlier request.
const replayed = "Idempotency-Replayed"

// once executes a request, or returns the value of an earlier one with the same key. A request with a key
// outlives its connection, so that a retry gets its result. The value is kept if do says so; drop is called
// when it is forgotten. Otherwise the request may be retried.
func (s *Server) once(q Request, key string, body []byte, do func(context.Context) (value any, keep bool, drop func())) (any, error) {
	tenant := IdentityOf(q.r.Context()).Tenant
	name := q.r.URL.Path + "\n" + key
	k, first, err := s.keys.Begin(tenant, name, body)
	if err != nil {
		return nil, err
	}
	if first {
		var value any = draining() // in case do panics
		var keep bool
		var drop func()
		defer func() { s.keys.Settle(tenant, name, k, value, keep, drop) }()
		value, keep, drop = do(context.WithoutCancel(q.r.Context()))
		return value, nil
	}
	select {
	case <-k.Done():
	case <-q.r.Context().Done():
		return nil, api.NewError(api.Ended, "the client has disconnected", "")
	}
	q.w.Header().Set(replayed, "true")
	return k.Value, nil
}

// respond executes a request and sends the response, which is stored if there is a key and the request has
// started something. execute returns a function that sends the answer.
func (s *Server) respond(q Request, key string, body []byte, ex *execution, execute func(context.Context) (send func(http.ResponseWriter), started bool, err error)) error {
	if key == "" {
		send, _, err := execute(q.r.Context())
		if err == nil {
			send(q.w)
		}
		return err
	}
	value, err := s.once(q, key, body, func(ctx context.Context) (any, bool, func()) {
		send, started, err := execute(ctx)
		if err != nil {
			e := api.AsError(err)
			send, started = e.Write, e.Started
		}
		if !started {
			return send, false, nil
		}
		stored := s.answers.Put(ex.caller.Tenant, int64(ex.ceilings.Output), send)
		return stored, true, func() { s.answers.Drop(stored) }
	})
	switch value := value.(type) {
	case *calls.Answer:
		return s.answers.Write(q.w, value)
	case func(http.ResponseWriter):
		value(q.w)
	case *api.Error:
		return value
	}
	return err
}

// startOnce starts a background command, or returns the command of an earlier request with the same key.
func (s *Server) startOnce(q Request, key string, body []byte, start func() (*calls.Call, error)) (*calls.Call, error) {
	if key == "" {
		return start()
	}
	value, err := s.once(q, key, body, func(context.Context) (any, bool, func()) {
		c, err := start()
		if err != nil {
			return err, false, nil
		}
		return c, true, nil
	})
	if e, failed := value.(error); failed {
		return nil, e
	}
	if err != nil {
		return nil, err
	}
	return value.(*calls.Call), nil
}

func (s *Server) defineLanguages(a huma.API) {
	register(a, s.operation(a, huma.Operation{
		OperationID: "languages", Method: http.MethodGet, Path: "/v1/languages", Summary: "List the languages",
	}), func(ctx context.Context, _ *struct{}) (*answer[api.Languages], error) {
		return with(api.Languages{Languages: s.Languages(IdentityOf(ctx).Tenant)}, nil)
	})
}

// Languages returns the languages that a tenant may use.
func (s *Server) Languages(tenant string) []api.Language {
	all := []api.Language{}
	set := s.settings.Load()
	for _, name := range slices.Sorted(maps.Keys(set.languages)) {
		l := set.languages[name]
		if set.allows(set.Of(tenant), l.Image) == nil {
			all = append(all, api.Language{Name: name, Command: l.Command, File: l.File, Cells: len(l.Kept) > 0, Image: l.Image})
		}
	}
	return all
}
