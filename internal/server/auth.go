package server

import (
	"context"
	"crypto/rand"
	"fmt"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/config"
	"github.com/sbxrun/sbxrun/internal/page"
)

// Identity is the caller of a request.
type Identity struct {
	Tenant    string
	RequestID string
	Local     bool // root or the server's own user, over a Unix socket without a token
}

type key int

const (
	whoKey key = iota
	peerKey
	connKey
	holdingKey
	passedKey
)

// Headers with which a gateway describes a forwarded request to a node. They are accepted only on connections
// marked by [Passed].
const (
	TenantHeader = "Sbxrun-Tenant"
	LocalHeader  = "Sbxrun-Local" // set for the gateway's own user and root
	CheckHeader  = "Sbxrun-Check" // set if the call is only to be checked
)

// Passed is for http.Server.ConnContext of connections that only gateways can open.
func Passed(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(context.WithValue(ctx, connKey, c), passedKey, true)
}

func passed(ctx context.Context) bool {
	is, _ := ctx.Value(passedKey).(bool)
	return is
}

// IdentityOf returns the caller of the request.
func IdentityOf(ctx context.Context) Identity {
	w, _ := ctx.Value(whoKey).(Identity)
	return w
}

// tenant returns the tenant of the token, if there is one, or of the process at the other end of a Unix
// socket.
func (s *Middleware) tenant(r *http.Request) (tenant string, local bool, err error) {
	if passed(r.Context()) {
		tenant := r.Header.Get(TenantHeader)
		if !config.ValidTenant(tenant) { // it names directories
			return "", false, api.NewError(api.Auth, "invalid tenant", "")
		}
		return tenant, r.Header.Get(LocalHeader) != "", nil
	}
	if header := r.Header.Get("Authorization"); header != "" {
		scheme, token, _ := strings.Cut(header, " ")
		if strings.EqualFold(scheme, "Bearer") {
			if tenant, ok := s.settings.Load().tokens.Tenant(strings.TrimSpace(token)); ok {
				return tenant, false, nil
			}
		}
		return "", false, api.NewError(api.Auth, "unknown token", "")
	}
	if tenant, ok := r.Context().Value(peerKey).(string); ok {
		return tenant, tenant == uidTenant(0) || tenant == uidTenant(os.Geteuid()), s.settings.Load().ownPage(r)
	}
	return "", false, api.NewError(api.Auth, "authentication required", "send Authorization: Bearer TOKEN")
}

// ownPage rejects requests that other sites' pages make a browser send. The client of a Unix socket may be a
// forwarder such as `ssh -L`: it is authorized, and so is every page that its user's browser shows, because
// without a token nothing distinguishes them.
func (set *settings) ownPage(r *http.Request) error {
	if !set.ownHost(r.Host) {
		return api.NewError(api.Policy, fmt.Sprintf("unknown Host %.64q", r.Host), "use localhost, send a token, or add the name to hosts in the configuration")
	}
	if new(http.CrossOriginProtection).Check(r) != nil {
		return api.NewError(api.Policy, "cross-site request rejected", "send a token")
	}
	return nil
}

// ownHost reports whether a Host header can mean this server. The owner of a domain can point it to any
// address, which makes their page same-origin with the server (DNS rebinding). A name without a dot belongs
// to no domain.
func (set *settings) ownHost(host string) bool {
	if !strings.Contains(host, ".") {
		return true
	}
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	return net.ParseIP(strings.Trim(host, "[]")) != nil ||
		slices.ContainsFunc(set.Hosts, func(own string) bool { return strings.EqualFold(own, host) })
}

// open lists the paths that need no authentication.
var open = map[string]bool{"/healthz": true, "/readyz": true}

// authenticated passes authenticated requests on to next.
func (s *Middleware) authenticated(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		id := r.Header.Get("X-Request-Id")
		if !validID(id) {
			id = rand.Text()
		}
		w.Header().Set("X-Request-Id", id)
		w.Header().Set("X-Content-Type-Options", "nosniff")
		w.Header().Set("Cache-Control", "no-store")
		r = r.WithContext(r.Context()) // net/http keeps using the body of its own request
		slow := newTimeoutWriter(w, r)
		defer slow.expect()
		s.authenticate(next, slow, r, id)
		slow.linger(r)
	})
}

func (s *Middleware) authenticate(next http.Handler, w http.ResponseWriter, r *http.Request, id string) {
	var tenant string
	var local bool
	if open[r.URL.Path] {
		w.Header().Set("Connection", "close") // idle connections are reserved for authenticated clients
	} else {
		var err error
		if tenant, local, err = s.tenant(r); err != nil {
			known(r.Context(), false)
			w.Header().Set("Connection", "close")
			e := api.AsError(err)
			s.log.Warn("refused", "request", id, "remote", r.RemoteAddr, "code", e.Failure.Code)
			if r.URL.Path == "/" && r.Method == http.MethodGet && e.Failure.Code == api.Auth {
				page.Write(w, e.GetStatus()) // a browser needs the page to ask for a token
				return
			}
			e.Write(w)
			return
		}
	}
	held := &holding{}
	defer held.free()
	ctx := context.WithValue(context.WithValue(r.Context(), whoKey, Identity{tenant, id, local}), holdingKey, held)
	next.ServeHTTP(w, r.WithContext(ctx))
}

// limited limits concurrent requests per tenant: behind a proxy, all tenants share the connections of one
// address.
func (s *Middleware) limited(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !open[r.URL.Path] {
			tenant := IdentityOf(r.Context()).Tenant
			one, err := s.begun.Take(tenant, 1, int64(s.settings.Load().Of(tenant).Requests))
			known(r.Context(), err == nil)
			if err != nil {
				w.Header().Set("Connection", "close")
				api.AsError(err).Write(w)
				return
			}
			defer one.Free()
		}
		next.ServeHTTP(w, r)
	})
}

// validID reports whether a client's request ID may be logged and returned.
func validID(id string) bool {
	const most = 128
	return id != "" && len(id) <= most && strings.Trim(id, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") == ""
}
