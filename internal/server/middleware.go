package server

import (
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/cells"
	"github.com/sbxrun/sbxrun/internal/config"
	"github.com/sbxrun/sbxrun/internal/page"
	"github.com/sbxrun/sbxrun/internal/slot"
	"github.com/sbxrun/sbxrun/internal/tenants"
)

// Middleware handles the tasks common to all requests: authentication, limits per tenant, timeouts, and memory. A
// [Server] embeds one; a gateway puts one in front of the nodes.
type Middleware struct {
	settings atomic.Pointer[settings]
	memory   *tenants.Budget // bytes of requests and answers
	begun    *tenants.Budget // requests in progress
	log      *slog.Logger
	works    func(slot.Policy, cells.Language) bool // see working
	// open opens an image, by its key; nil at a gateway, which has none.
	open func(c *config.Config, key string) (*image, error)
}

// settings can change while the server runs.
type settings struct {
	config.Config
	tokens    config.Tokens
	languages map[string]cells.Language // those that work in a sandbox
	policy    slot.Policy
	images    map[string]*image
}

// NewMiddleware creates the middleware from a checked configuration.
func NewMiddleware(c config.Config, tokens config.Tokens, log *slog.Logger) (*Middleware, error) {
	s := &Middleware{}
	return s, s.init(c, tokens, log)
}

func (s *Middleware) init(c config.Config, tokens config.Tokens, log *slog.Logger) error {
	s.log = log
	s.begun = tenants.NewBudget("concurrent requests", 0)
	s.memory = tenants.NewBudget("bytes of requests and answers", int64(c.Buffers))
	s.memory.Shared = true
	return s.apply(c, tokens)
}

// Handler passes authenticated requests on to next.
func (s *Middleware) Handler(next http.Handler) http.Handler {
	return s.authenticated(s.limited(s.recovered(rejectUncleanPaths(next))))
}

// Parts passes on what nodes request. The requests are parts of those that a gateway has already admitted, so
// the tenant's request limit does not apply.
func (s *Middleware) Parts(next http.Handler) http.Handler {
	return s.authenticated(s.recovered(rejectUncleanPaths(next)))
}

// Mux has the paths that concern the server, not a tenant. unready returns why it accepts no calls, or nil.
func (s *Middleware) Mux(metrics *prometheus.Registry, unready func() *api.Error) *http.ServeMux {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) { page.Write(w, http.StatusOK) })
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, map[string]bool{"ok": true}) })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if err := unready(); err != nil {
			err.Write(w)
			return
		}
		writeJSON(w, map[string]bool{"ready": true})
	})
	all := promhttp.HandlerFor(metrics, promhttp.HandlerOpts{})
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, r *http.Request) {
		if !s.SeesAll(IdentityOf(r.Context())) {
			api.NewError(api.Policy, "this tenant may not read the metrics", "add it to metrics_tenants in the server's configuration").Write(w)
			return
		}
		all.ServeHTTP(w, r)
	})
	return mux
}

// rejectUncleanPaths rejects paths that [http.ServeMux] would redirect: a client that deletes the file ".."
// of a session and follows the redirect would end the session.
func rejectUncleanPaths(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p := r.URL.EscapedPath()
		if strings.Contains(p, "//") || strings.Contains(p+"/", "/./") || strings.Contains(p+"/", "/../") {
			api.NewError(api.Usage, "the path has an empty, . or .. element", "").Write(w)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// Settings returns the current configuration.
func (s *Middleware) Settings() *config.Config { return &s.settings.Load().Config }

// Reload applies tokens, images, languages and tenants' ceilings, and resolves the names of images again. If it returns an
// error, nothing has changed. All other settings need a restart, because they determine the size or location of things that
// already exist.
func (s *Middleware) Reload(c config.Config, tokens config.Tokens) error {
	was := s.settings.Load().Config
	next := was
	next.Images, next.Languages, next.Tenant, next.Tenants = c.Images, c.Languages, c.Tenant, c.Tenants
	if err := next.Check(); err != nil { // a tenant may refer to something that only the new file has
		return fmt.Errorf("%w; restart the server to apply the whole file", err)
	}
	if err := s.apply(next, tokens); err != nil {
		return err
	}
	secure := (c.TLSCert == "") != (was.TLSCert == "") // listeners are not replaced
	for _, one := range []*config.Config{&c, &was} {
		one.Images, one.Languages, one.Tenant, one.Tenants, one.TokenFile, one.TLSCert, one.TLSKey = nil, nil, config.Tenant{}, nil, "", "", ""
	}
	if secure || !reflect.DeepEqual(c, was) {
		s.log.Warn("reload", "note", "only tokens, certificates, images, languages and tenants were reloaded; other changes need a restart")
	}
	return nil
}

// apply makes a checked configuration current.
func (s *Middleware) apply(c config.Config, tokens config.Tokens) error {
	policy, err := c.Policy()
	if err != nil {
		return err
	}
	next := &settings{Config: c, tokens: tokens, policy: slot.Policy{Policy: policy, ProofTimeout: time.Duration(c.ProofTimeout)}, images: map[string]*image{}}
	if s.open != nil {
		for _, key := range slices.Sorted(maps.Keys(c.Images)) {
			if next.images[key], err = s.open(&c, key); err != nil {
				delete(next.images, key)
				next.release()
				return fmt.Errorf("images.%s: %w", key, err)
			}
		}
	}
	next.languages = s.working(next)
	s.settings.Swap(next).release()
	return nil
}
