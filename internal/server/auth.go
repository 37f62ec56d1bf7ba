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
	"github.com/sbxrun/sbxrun/internal/page"
)

// Who is whose request it is.
type Identity struct {
	Tenant    string
	RequestID string
	Local     bool // the server's own user, or root, by a unix socket and without a token
}

type key int

const (
	whoKey key = iota
	peerKey
	connKey
	holdingKey
	passedKey
)

// A gateway tells a node in these whose a request is that it passes on, and what it is for. They count
// on connections of [Passed] alone.
const (
	TenantHeader = "Sbxrun-Tenant"
	LocalHeader  = "Sbxrun-Local" // not empty for the gateway's own user, and root
	CheckHeader  = "Sbxrun-Check" // not empty if a call is not to begin, but to be checked
)

// Passed is for http.Server.ConnContext, of connections that only gateways can make.
func Passed(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(context.WithValue(ctx, connKey, c), passedKey, true)
}

func passed(ctx context.Context) bool {
	is, _ := ctx.Value(passedKey).(bool)
	return is
}

// Whose returns whose request it is.
func IdentityOf(ctx context.Context) Identity {
	w, _ := ctx.Value(whoKey).(Identity)
	return w
}

// tenant says whose request this is: that of a token, if one is given; else that of the
// process at the other end of a unix socket.
func (s *Middleware) tenant(r *http.Request) (tenant string, local bool, err error) {
	if passed(r.Context()) {
		return r.Header.Get(TenantHeader), r.Header.Get(LocalHeader) != "", nil
	}
	if header := r.Header.Get("Authorization"); header != "" {
		scheme, token, _ := strings.Cut(header, " ")
		if strings.EqualFold(scheme, "Bearer") {
			if tenant, ok := s.settings.Load().tokens.Tenant(strings.TrimSpace(token)); ok {
				return tenant, false, nil
			}
		}
		return "", false, api.NewError(api.Auth, "the token is not known", "")
	}
	if tenant, ok := r.Context().Value(peerKey).(string); ok {
		return tenant, tenant == uidTenant(0) || tenant == uidTenant(os.Geteuid()), s.settings.Load().ownPage(r)
	}
	return "", false, api.NewError(api.Auth, "a token is needed", "send Authorization: Bearer TOKEN")
}

// ownPage refuses what pages other than ours have a browser send. At the other end of a unix socket
// may be a forwarder, such as `ssh -L`, which has the right to call, and with it every page that
// its user's browser shows: without a token nothing else tells them apart.
func (set *settings) ownPage(r *http.Request) error {
	if !set.ownHost(r.Host) {
		return api.NewError(api.Policy, fmt.Sprintf("the server is not called %.64q", r.Host), "name it in hosts, send a token, or use localhost")
	}
	if new(http.CrossOriginProtection).Check(r) != nil {
		return api.NewError(api.Policy, "the request comes from another site's page", "send a token")
	}
	return nil
}

// ownHost reports whether the server can be meant by a name. Whoever has a domain can have it lead
// to any address, and then their page is of the same origin as the server (DNS rebinding). A name
// without a dot is in nobody's domain.
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

// open are the paths that ask for nothing.
var open = map[string]bool{"/healthz": true, "/readyz": true}

// identified passes on requests of which is known whose they are.
func (s *Middleware) authenticated(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		id := r.Header.Get("X-Request-Id")
		if !validID(id) {
			id = rand.Text()
		}
		w.Header().Set("X-Request-Id", id)
		w.Header().Set("X-Content-Type-Options", "nosniff")
		w.Header().Set("Cache-Control", "no-store")
		r = r.WithContext(r.Context()) // net/http looks at the body of its own
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
		w.Header().Set("Connection", "close") // idle connections are for authenticated clients
	} else {
		var err error
		if tenant, local, err = s.tenant(r); err != nil {
			known(r.Context(), false)
			w.Header().Set("Connection", "close")
			e := api.AsError(err)
			s.log.Warn("refused", "request", id, "remote", r.RemoteAddr, "code", e.Failure.Code)
			if r.URL.Path == "/" && r.Method == http.MethodGet && e.Failure.Code == api.Auth {
				page.Write(w, e.GetStatus()) // a browser has no other way to get a token than to ask for it
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

// counted passes on no more requests of a tenant at once than it may have: behind a proxy all tenants have the
// connections of one address.
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

// validID reports whether a client's request id may go to the log and back.
func validID(id string) bool {
	const most = 128
	return id != "" && len(id) <= most && strings.Trim(id, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") == ""
}
