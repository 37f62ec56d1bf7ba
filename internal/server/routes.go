package server

import (
	"context"
	"errors"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"github.com/sbxrun/sbxrun/internal/api"
)

func init() {
	// huma's own errors, of requests that are not as the document says, are ours.
	huma.NewError = func(status int, message string, errs ...error) huma.StatusError {
		e := api.NewError(api.Usage, message, "GET /openapi.json says what a request has")
		switch status {
		case http.StatusRequestEntityTooLarge:
			e = api.NewError(api.TooLarge, "the request is too large", "")
		case http.StatusUnsupportedMediaType:
			e = api.NewError(api.MediaType, "the request is not of a media type that is taken here", "send application/json")
		}
		var words []string
		for _, err := range errs {
			var detail *huma.ErrorDetail
			if errors.As(err, &detail) { // never the value: it may be code, or a secret
				words = append(words, strings.TrimSpace(detail.Location+": "+strings.ReplaceAll(detail.Message, "\n", " ")))
			}
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
	// The body's deadline is over with it: a connection that is past one counts as closed, and
	// its request as canceled.
	_ = http.NewResponseController(q.w).SetReadDeadline(time.Time{}) // a writer of a test may have none
	return nil
}

// bodyBound is how long a client may take to send its request.
const bodyBound = 30 * time.Second

// Handler is the whole interface.
func (s *Server) Handler() http.Handler {
	mux := http.NewServeMux()
	s.define(mux)
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, http.StatusOK, map[string]bool{"ok": true}) })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if !s.ready() {
			draining().Write(w)
			return
		}
		writeJSON(w, http.StatusOK, map[string]bool{"ready": true})
	})
	return s.identified(s.known(mux))
}

// known answers for what the mux does not know as for all other errors.
func (s *Server) known(mux *http.ServeMux) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, pattern := mux.Handler(r); pattern == "" {
			api.NewError(api.NoSuchPath, r.Method+" is for no such path", "GET /openapi.json lists all").Write(w)
			return
		}
		mux.ServeHTTP(w, r)
	})
}

// define adds the operations of the document.
func (s *Server) define(mux *http.ServeMux) huma.API {
	c := huma.DefaultConfig("sbxrun", s.version)
	c.Info.Description = "Runs what agents write, ends what it has started, and proves it. An error says whether anything has begun; only what says started:false may be tried again."
	c.DocsPath, c.SchemasPath = "", ""
	c.CreateHooks = nil // no links to schemas in answers
	c.OpenAPIPath = "/openapi"
	c.Components.SecuritySchemes = map[string]*huma.SecurityScheme{"token": {Type: "http", Scheme: "bearer", Description: "Not needed on a unix socket"}}
	c.Security = []map[string][]string{{"token": {}}, {}}
	a := humago.New(mux, c)
	s.defineRun(a)
	s.defineLanguages(a)
	return a
}

// operation has what all of them have: how much may be sent, and every error there is.
func (s *Server) operation(a huma.API, o huma.Operation, codes ...api.Code) huma.Operation {
	o.MaxBodyBytes = int64(s.settings.Load().MaxBody)
	o.BodyReadTimeout = bodyBound
	if o.Responses == nil {
		o.Responses = map[string]*huma.Response{}
	}
	schema := a.OpenAPI().Components.Schemas.Schema(reflect.TypeFor[api.Error](), true, "Error")
	said := map[int][]string{}
	for _, code := range append(codes, api.Usage, api.Auth, api.Setup) {
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
var starting = []api.Code{api.TooLarge, api.MediaType, api.Policy, api.NoSuchFile, api.Quota, api.Busy, api.Draining, api.Unproven, api.QuotaDisk}

// content is an answer of several media types.
func content(a huma.API, description string, types map[string]reflect.Type) *huma.Response {
	r := &huma.Response{Description: description, Content: map[string]*huma.MediaType{}}
	for name, t := range types {
		r.Content[name] = &huma.MediaType{Schema: a.OpenAPI().Components.Schemas.Schema(t, true, t.Name())}
	}
	return r
}

// runRequest is POST /v1/run.
type runRequest struct {
	Request
	Stream string `query:"stream" enum:"0,1" doc:"1 streams JSON lines, as Accept: application/x-ndjson does; Accept: text/event-stream has the same as server-sent events"`
	Body   api.Call
}

// streamed is an answer that the handler writes.
type streamed struct{ Body func(huma.Context) }

func (s *Server) defineRun(a huma.API) {
	o := s.operation(a, huma.Operation{
		OperationID: "run", Method: http.MethodPost, Path: "/v1/run", Summary: "Run one command or program in a fresh sandbox",
		Description: "The answer comes when nothing of it is left. A client that leaves ends it.",
		Responses: map[string]*huma.Response{"200": content(a, "It has ended, however: the report says how. Or a stream of events, the last of which is the report.", map[string]reflect.Type{
			"application/json": reflect.TypeFor[api.Answer](), "application/x-ndjson": reflect.TypeFor[api.Event](), "text/event-stream": reflect.TypeFor[api.Event](),
		})},
	}, starting...)
	huma.Register(a, o, func(ctx context.Context, q *runRequest) (*streamed, error) {
		order, err := s.check(whose(ctx), &q.Body)
		if err != nil {
			return nil, api.AsError(err)
		}
		return &streamed{func(huma.Context) { s.run(q.w, q.r, q.Stream == "1", order) }}, nil
	})
}

// run carries a call out and answers with how it ended, or with a stream.
func (s *Server) run(w http.ResponseWriter, r *http.Request, stream bool, o *order) {
	if err := s.begin(); err != nil {
		api.AsError(err).Write(w)
		return
	}
	defer s.calls.Done()
	ctx, cancel := s.within(r.Context())
	defer cancel()
	accept := r.Header.Get("Accept")
	sse := strings.Contains(accept, "text/event-stream")
	if stream || sse || strings.Contains(accept, "application/x-ndjson") {
		out := newEvents(w, sse, o)
		out.finish(s.fresh(ctx, o, out))
		return
	}
	a, err := s.fresh(ctx, o, newBuffered(o))
	if err != nil {
		patience(w)
		api.AsError(err).Write(w)
		return
	}
	writeJSON(w, http.StatusOK, a)
}

func (s *Server) defineLanguages(a huma.API) {
	type answer struct {
		Body struct {
			Languages []api.Language `json:"languages"`
		}
	}
	huma.Register(a, s.operation(a, huma.Operation{
		OperationID: "languages", Method: http.MethodGet, Path: "/v1/languages", Summary: "List the languages that code may be in",
	}), func(context.Context, *struct{}) (*answer, error) {
		out := &answer{}
		languages := s.settings.Load().languages
		for _, name := range slices.Sorted(maps.Keys(languages)) {
			out.Body.Languages = append(out.Body.Languages, api.Language{Name: name, Command: languages[name].Command, File: languages[name].File})
		}
		return out, nil
	})
}
