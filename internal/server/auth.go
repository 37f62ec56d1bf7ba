package server

import (
	"context"
	"crypto/rand"
	"fmt"
	"net"
	"net/http"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/api"
)

// who is whose request it is.
type who struct {
	tenant    string
	requestID string
	local     bool // the user at the other end of a unix socket, without a token
}

type key int

const (
	whoKey key = iota
	peerKey
)

func whose(ctx context.Context) who {
	w, _ := ctx.Value(whoKey).(who)
	return w
}

// Peer is for http.Server.ConnContext: it keeps who is at the other end of a unix socket, as
// the kernel says (SO_PEERCRED, unix(7)).
func Peer(ctx context.Context, c net.Conn) context.Context {
	u, ok := c.(*net.UnixConn)
	if !ok {
		return ctx
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return ctx
	}
	var cred *unix.Ucred
	if raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }) != nil || err != nil {
		return ctx
	}
	return context.WithValue(ctx, peerKey, fmt.Sprintf("uid-%d", cred.Uid))
}

// tenant says whose request this is: that of a token, if one is given; else that of the
// process at the other end of a unix socket.
func (s *Server) tenant(r *http.Request) (tenant string, local bool, err error) {
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
		return tenant, true, nil
	}
	return "", false, api.NewError(api.Auth, "a token is needed", "send Authorization: Bearer TOKEN")
}

// open are the paths that ask for nothing.
var open = map[string]bool{"/healthz": true, "/readyz": true}

// identified passes on requests of which is known whose they are.
func (s *Server) identified(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		id := r.Header.Get("X-Request-Id")
		if !validID(id) {
			id = rand.Text()
		}
		w.Header().Set("X-Request-Id", id)
		w.Header().Set("X-Content-Type-Options", "nosniff")
		w.Header().Set("Cache-Control", "no-store")
		// Of the request before on this connection.
		_ = http.NewResponseController(w).SetWriteDeadline(time.Time{})
		r = r.WithContext(r.Context()) // net/http looks at the body of its own
		withBound(w, r)
		var tenant string
		var local bool
		if !open[r.URL.Path] {
			var err error
			if tenant, local, err = s.tenant(r); err != nil {
				s.log.Warn("refused", "request", id, "remote", r.RemoteAddr, "code", api.Auth)
				patience(w)
				api.AsError(err).Write(w)
				return
			}
		}
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), whoKey, who{tenant, id, local})))
	})
}

// validID reports whether a client's request id may go to the log and back.
func validID(id string) bool {
	const most = 128
	return id != "" && len(id) <= most && strings.Trim(id, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") == ""
}
