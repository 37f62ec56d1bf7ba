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
	"github.com/sbxrun/sbxrun/internal/sessions"
	"github.com/sbxrun/sbxrun/internal/tenants"
)

func init() {
	huma.ValidateStrictCasing = true // or Argv would be taken for a member that was checked as argv
	// Numbers in full: 1048576, and not 1.048576e+06.
	validation.MsgExpectedMinimumNumber, validation.MsgExpectedMaximumNumber = "expected number >= %.16g", "expected number <= %.16g"
	// huma's own errors, of requests that are not as the document says, are ours.
	huma.NewError = func(status int, message string, errs ...error) huma.StatusError {
		if e, ok := errors.AsType[*api.Error](errors.Join(errs...)); ok { // from heldBody
			return e
		}
		e := api.NewError(api.Usage, message, "")
		if message == "request body is required" {
			e.Failure.Hint = "send {} if there is nothing to say"
		}
		switch status {
		case http.StatusRequestEntityTooLarge:
			e = api.NewError(api.TooLarge, "the request is too large", "")
		case http.StatusUnsupportedMediaType:
			e = api.NewError(api.MediaType, "the request is not of a media type that is taken here", "send application/json")
		}
		// The text of a request can be in these, such as the name of a member. All of it in an answer would be
		// several times the memory that was reserved for the request.
		const most, longest = 16, 200
		var words []string
		for _, err := range errs {
			var detail *huma.ErrorDetail
			if !errors.As(err, &detail) { // never the value: it may be code, or a secret
				continue
			}
			if len(words) == most {
				words = append(words, "and more")
				break
			}
			words = append(words, strings.TrimSpace(fmt.Sprintf("%.*s: %.*s", longest, detail.Location, longest, strings.ReplaceAll(detail.Message, "\n", " "))))
		}
		if len(words) > 0 {
			e.Failure.Message += ": " + strings.Join(words, "; ")
		}
		return e
	}
}

// Request is what every handler has of its request.
type Request struct {
	w http.ResponseWriter
	r *http.Request
}

// Resolve is called by huma when it has read the request.
func (q *Request) Resolve(ctx huma.Context) []error {
	q.r, q.w = humago.Unwrap(ctx)
	return nil
}

// held reserves memory for the request body as it is read.
func (s *Server) held(ctx huma.Context, next func(huma.Context)) {
	r, w := humago.Unwrap(ctx)
	s.holdBody(w, r)
	next(ctx)
}

// holding is the memory that a request has taken, until it is over.
type holding struct {
	mu    sync.Mutex
	lease *tenants.Lease // nil for none
	over  bool           // the request has ended
}

func (h *holding) free() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.over = true
	h.lease.Free()
}

// Hold takes memory for a request, until it is over: a tool of MCP may still run then, as the SDK does not
// wait for it when the client leaves. One that does not come over HTTP has a client of its own, and takes
// what it likes.
func (s *Middleware) Hold(ctx context.Context, n int64) error {
	h, ok := ctx.Value(holdingKey).(*holding)
	if !ok {
		return nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.over {
		return api.NewError(api.Ended, "the client has left", "")
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
		b.w.Header().Set("Connection", "close") // or net/http would read the rest before it answers
		return 0, b.err
	}
	return n, err
}

func (b *heldBody) Close() error {
	if b.err != nil {
		return nil // as above
	}
	return b.ReadCloser.Close()
}

// modest refuses JSON of so many values that they would take many times the memory of the text: an
// empty object of two bytes takes fifty. The interface has no use for as many.
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

// Strict refuses JSON that others may read in another way (RFC 7493): package json puts U+FFFD in the place of
// what is not Unicode, takes the last of several members of one name, and merges objects of one name, of
// which only the last was checked.
func Strict(text []byte) error {
	err := jsontext.NewDecoder(bytes.NewBuffer(text)).SkipValue()
	if at := (*jsontext.SyntacticError)(nil); errors.As(err, &at) { // whose own words may be code, or a secret
		what := "invalid Unicode"
		if errors.Is(err, jsontext.ErrDuplicateName) {
			what = "a second member of one name"
		}
		return fmt.Errorf("%s, at byte %d, %.100q", what, at.ByteOffset, at.JSONPointer)
	}
	return err
}

// Handler is the whole interface; of it, what is not HTTP's own is mcp.
func (s *Server) Handler(mcp http.Handler) http.Handler {
	mux := s.Mux(s.metrics.registry, func() *api.Error {
		if s.Ready() {
			return nil
		}
		return draining()
	})
	s.define(mux)
	mux.Handle("/mcp", mcp)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) { // all that the others are not for
		if methods := methodsOf(mux, r); len(methods) > 0 {
			w.Header().Set("Allow", strings.Join(methods, ", "))
			api.NewError(api.NoSuchMethod, fmt.Sprintf("%.200s takes %s, not %s", r.URL.Path, strings.Join(methods, ", "), r.Method), "").Write(w)
			return
		}
		api.NewError(api.NoSuchPath, fmt.Sprintf("there is no %s %.200s", r.Method, r.URL.Path), "GET /openapi.json lists all").Write(w)
	})
	return s.Middleware.Handler(mux)
}

// methodsOf are those that the path of a request can be called with.
func methodsOf(mux *http.ServeMux, r *http.Request) (list []string) {
	other := *r
	for _, other.Method = range []string{http.MethodGet, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete} {
		if _, pattern := mux.Handler(&other); pattern != "/" {
			list = append(list, other.Method)
		}
	}
	return list
}

// define adds the operations of the document.
func (s *Server) define(mux *http.ServeMux) huma.API {
	c := huma.DefaultConfig("sbxrun", s.version)
	c.Info.Description = "Runs what agents write, ends what it has started, and proves it. An error says whether anything has begun; only what says started:false may be tried again."
	c.DocsPath, c.SchemasPath = "", ""
	c.CreateHooks = nil // no links to schemas in answers
	c.OpenAPIPath = "/openapi"
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
	s.defineStatus(a)
	// The mux's own words for the rest of a path are none of OpenAPI's.
	for path, item := range a.OpenAPI().Paths {
		if plain := strings.ReplaceAll(path, "...}", "}"); plain != path {
			delete(a.OpenAPI().Paths, path)
			a.OpenAPI().Paths[plain] = item
		}
	}
	return a
}

// register is huma's, for handlers with any error, which becomes one of the interface here.
func register[I, O any](a huma.API, o huma.Operation, handle func(context.Context, *I) (*O, error)) {
	huma.Register(a, o, func(ctx context.Context, in *I) (*O, error) {
		out, err := handle(ctx, in)
		if err != nil {
			return nil, api.AsError(err)
		}
		return out, nil
	})
}

// answer is a document.
type answer[T any] struct{ Body T }

func with[T any](v T, err error) (*answer[T], error) {
	if err != nil {
		return nil, err
	}
	return &answer[T]{v}, nil
}

// operation has what all of them have: how much may be sent, and every error there is.
func (s *Server) operation(a huma.API, o huma.Operation, codes ...api.Code) huma.Operation {
	if o.RequestBody == nil { // else it is bytes, which are not held
		o.Middlewares = huma.Middlewares{s.held}
	}
	o.MaxBodyBytes = int64(s.settings.Load().MaxBody)
	o.BodyReadTimeout = pieceBound // for the first piece, see patient
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

// starting are the codes of all that starts something.
var startCodes = []api.Code{api.TooLarge, api.MediaType, api.Policy, api.NoSuchFile, api.Quota, api.QuotaKept, api.Busy, api.Draining, api.Limit, api.Unproven, api.QuotaDisk}

// content is an answer of several media types.
func content(a huma.API, description string, types map[string]reflect.Type) *huma.Response {
	r := &huma.Response{Description: description, Content: map[string]*huma.MediaType{}}
	for name, t := range types {
		r.Content[name] = &huma.MediaType{Schema: a.OpenAPI().Components.Schemas.Schema(t, true, t.Name())}
	}
	return r
}

// streamed is an answer that the handler writes.
type streamed struct{ Body func(huma.Context) }

// writes is an answer that the handler writes, or the error in its place.
func (q Request) writes(answer func() error) (*streamed, error) {
	return &streamed{func(huma.Context) {
		if err := answer(); err != nil {
			api.AsError(err).Write(q.w)
		}
	}}, nil
}

// answers are those of a call that its client waits for.
func answers(a huma.API) map[string]*huma.Response {
	return map[string]*huma.Response{"200": content(a, "It has ended, however: the report says how. Or a stream of events, the last of which is the report.", map[string]reflect.Type{
		"application/json": reflect.TypeFor[api.Answer](), "application/x-ndjson": reflect.TypeFor[api.Event](), "text/event-stream": reflect.TypeFor[api.Event](),
	})}
}

func (s *Server) defineRun(a huma.API) {
	type request struct {
		Request
		Stream  string `query:"stream" enum:"0,1" doc:"1 streams JSON lines, as Accept: application/x-ndjson does; Accept: text/event-stream gives the same as server-sent events"`
		Key     string `header:"Idempotency-Key" maxLength:"256" doc:"A second request with the same key and body gets the answer to the first, while that runs and for ten minutes after its end. Not for streams."`
		RawBody []byte
		Body    api.Call
	}
	register(a, s.operation(a, huma.Operation{
		OperationID: "run", Method: http.MethodPost, Path: "/v1/run", Summary: "Run one command or program in a fresh sandbox",
		Description: "Answers when nothing of it is left. A client that disconnects ends the call.", Responses: answers(a),
	}, append(startCodes, api.Idempotency)...), func(ctx context.Context, q *request) (*streamed, error) {
		return s.answered(q.Request, q.Stream, q.Key, q.RawBody, &q.Body, nil, nil)
	})
}

// answered answers a call that its client waits for, in a session unless that is nil: see order.
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
		return nil, api.NewError(api.Usage, "an idempotency key does not go with a stream", "POST /v1/calls has output by offset")
	}
	return q.writes(func() error {
		if streams {
			out := newEvents(q.w, sse, ex, s.spawn)
			out.alive()
			out.finish(s.execute(q.r.Context(), ex, out))
			return nil
		}
		defer func() { ex.buffers.Free() }()
		a, err := idempotent(s, q, key, body, ex, func(ctx context.Context) (*api.Answer, bool, error) {
			a, err := s.execute(ctx, ex, newBuffered(ex))
			return a, a != nil && a.Started, err
		})
		if err == nil {
			writeAnswer(q.w, a)
		}
		return err
	})
}

// carry carries a call out for as long as its client is there.
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
	if ex.session != nil { // which ends it
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

// guardCall carries a call out that has joined.
func (s *Server) executeTicket(ctx context.Context, turn *tenants.Ticket, ex *execution, out sink) (a *api.Answer, err error) {
	err = s.Recover(context.WithValue(ctx, whoKey, ex.caller), func() (err error) {
		defer func() { s.release(turn.Leave, ex.left...) }()
		a, err = s.executeJoined(ctx, turn, ex, out)
		return err
	})
	return a, err
}

// count counts a call that came to nothing.
func (s *Server) count(ex *execution, a *api.Answer, err error) {
	var e *api.Error
	if a == nil && errors.As(err, &e) && !e.Started {
		s.metrics.refused.WithLabelValues(ex.caller.Tenant, string(e.Failure.Code)).Inc()
	}
}

// replayed is the header of an answer that was another request's.
const replayed = "Idempotency-Replayed"

// kept is the answer of a request that had an idempotency key.
type storedAnswer[T any] struct {
	answer *T
	err    error
}

// once carries a request out, unless there was one with this key: then it has that one's answer. The
// context of what is carried out ends when all clients that asked for it have left.
func idempotent[T any](s *Server, q Request, key string, body []byte, ex *execution, carry func(context.Context) (a *T, started bool, err error)) (*T, error) {
	if key == "" {
		a, _, err := carry(q.r.Context())
		return a, err
	}
	name := q.r.URL.Path + "\n" + key
	k, first, err := s.keys.Begin(q.r.Context(), ex.caller.Tenant, name, body)
	if err != nil {
		return nil, err
	}
	if !first {
		select {
		case <-k.Done():
		case <-q.r.Context().Done():
			return nil, api.NewError(api.Ended, "the client has left", "")
		}
		q.w.Header().Set(replayed, "true")
		v := k.Value.(storedAnswer[T])
		return v.answer, v.err
	}
	v := storedAnswer[T]{}
	keep := false // what never began may be tried again
	defer func() {
		var lease *tenants.Lease
		if keep { // and with it its memory
			lease, ex.buffers = ex.buffers, nil
		}
		s.keys.Settle(ex.caller.Tenant, name, k, v, keep, lease)
	}()
	v.err = draining() // should carry not come back
	var e *api.Error
	if v.answer, keep, v.err = carry(k.Context()); v.answer == nil {
		ex.buffers.Shrink(answerRest)
		keep = errors.As(v.err, &e) && e.Started
	}
	return v.answer, v.err
}

func (s *Server) defineLanguages(a huma.API) {
	register(a, s.operation(a, huma.Operation{
		OperationID: "languages", Method: http.MethodGet, Path: "/v1/languages", Summary: "List the languages that code may be in",
	}), func(context.Context, *struct{}) (*answer[api.Languages], error) {
		return with(api.Languages{Languages: s.Languages()}, nil)
	})
}

// Languages are those that code may be in.
func (s *Server) Languages() (all []api.Language) {
	languages := s.settings.Load().languages
	for _, name := range slices.Sorted(maps.Keys(languages)) {
		l := languages[name]
		all = append(all, api.Language{Name: name, Command: l.Command, File: l.File, Cells: len(l.Kept) > 0})
	}
	return all
}
